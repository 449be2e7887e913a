"""Read and write safetensors files with NumPy alone, bf16 included.

A safetensors file is the length of a JSON header (8 bytes), the header, and the
tensors' bytes one after the other. NumPy has no bf16, but a bf16 number is the
upper half of a float32, so that a shift by 16 bits converts it.

Invariant: nothing in a file is believed before it is checked; the same tensors
give the same bytes. Called by the loader and the GGUF converter.

In vLLM: vllm/model_executor/model_loader/weight_utils.py,
safetensors_weights_iterator (with the safetensors library).
Source: appendix A1, "Files".
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import (
    ConfigError,
    CorruptFile,
    ModelNotFound,
    ShapeError,
    WeightMismatch,
)
from minivllm.loading.atomic import atomic_file

NUMPY_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # bit patterns
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
MAX_AXES = 32  # as in NumPy 1


def bf16_to_float32(raw: np.ndarray) -> np.ndarray:
    """Widen bf16 bit patterns (uint16) to float32, exactly."""
    wide = raw.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def float32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16 bit pattern (uint16); a tie goes to the even one."""
    x = np.asarray(x, dtype=np.float32, order="C")
    bits = x.view(np.uint32)
    # Adding just under half of the last place carries into it when it should; the
    # last bit itself decides a tie. A carry out of the largest number is infinity.
    rounded = bits.copy()
    rounded += 0x7FFF + ((bits >> 16) & 1)
    rounded >>= 16
    # A carry could make a NaN a number: cut it instead, and set its quiet bit.
    np.copyto(rounded, (bits >> 16) | 0x40, where=np.isnan(x))
    return rounded.astype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes, counted from the end of the header
    end: int


def _entry(path: Path, name: str, fields: Any) -> _Entry:
    try:
        begin, end = fields["data_offsets"]
        entry = _Entry(fields["dtype"], tuple(fields["shape"]), begin, end)
        numbers = (*entry.shape, begin, end)
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or begin > end:
            raise ValueError
        # Without its zeros, so that even an empty tensor has a shape NumPy can make.
        num_elements = math.prod(max(n, 1) for n in entry.shape[:MAX_AXES])
        if len(entry.shape) > MAX_AXES or num_elements >= 2**60:
            raise ValueError
        if not isinstance(entry.dtype, str):
            raise TypeError
        is_known = entry.dtype in NUMPY_DTYPES
    except (KeyError, TypeError, ValueError):
        raise _corrupt(
            path, f"tensor {name!r} is described as {fields!r:.80}"
        ) from None
    if is_known and end - begin != math.prod(entry.shape) * _item_bytes(entry.dtype):
        raise _corrupt(
            path,
            f"tensor {name!r} has {end - begin:,} bytes, which is not "
            f"{entry.dtype} {list(entry.shape)}",
        )
    return entry


def _corrupt(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(
        f"{path} is damaged or incomplete: {reason}; download or convert it again"
    )


def read_header(path: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor without reading the data.

    Raises:
        CorruptFile: the file is damaged or cut short.
        ModelNotFound: there is no such file.
    """
    entries, _ = _read_entries(Path(path))
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


def _read_entries(path: Path) -> tuple[dict[str, _Entry], int]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _corrupt(path, f"{size:,} bytes cannot hold its header")
            header = json.loads(file.read(length).decode())
    except OSError as error:
        raise ModelNotFound(
            f"{path} cannot be opened ({error.strerror}): check the path"
        ) from error
    except (ValueError, RecursionError):
        raise _corrupt(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(
        isinstance(note, str) for note in notes.values()
    ):
        raise _corrupt(path, f"its __metadata__ is {notes!r:.80}, not texts by name")
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise _corrupt(path, f"its tensors leave a gap or overlap at byte {end:,}")
        end = entry.end
    if end != size - 8 - length:
        raise _corrupt(
            path, f"it has {size - 8 - length:,} bytes of data, its header says {end:,}"
        )
    return entries, 8 + length


def read_safetensors(
    path: str | Path, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
    """Read tensors, one after the other, into new arrays.

    Args:
        path: the file.
        names: which tensors; all of them by default.

    Returns:
        Floating-point tensors as float32, integers and booleans as they are.

    Raises:
        CorruptFile: the file is damaged or cut short.
        ConfigError: a tensor has a type that NumPy cannot hold, such as 8-bit floats.
        WeightMismatch: a name is not in the file.
        ModelNotFound: there is no such file.
    """
    path = Path(path)
    entries, start = _read_entries(path)
    names = list(entries if names is None else names)
    if missing := [name for name in names if name not in entries]:
        raise WeightMismatch(
            f"{path} has no tensor {missing[0]!r} ({len(missing)} of {len(names)} are "
            "missing): see read_header for the names it has"
        )
    # The map reads only the pages we touch, so no second copy of the file is held.
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[start:]
    return {name: _read_tensor(path, data, name, entries[name]) for name in names}


def _read_tensor(path: Path, data: np.ndarray, name: str, entry: _Entry) -> np.ndarray:
    if entry.dtype not in NUMPY_DTYPES:
        raise ConfigError(
            f"tensor {name!r} in {path} has type {entry.dtype}, but we read only "
            f"{', '.join(NUMPY_DTYPES)}: use a bf16 or fp16 version of the model"
        )
    raw = data[entry.begin : entry.end].view(NUMPY_DTYPES[entry.dtype])
    raw = raw.reshape(entry.shape)
    if entry.dtype == "BF16":
        return bf16_to_float32(raw)
    return raw.astype(np.float32) if entry.dtype in FLOATS else raw.copy()


def write_safetensors(
    path: str | Path, tensors: dict[str, np.ndarray], dtype: str = "BF16"
) -> None:
    """Write tensors, all as one type; the file appears whole or not at all."""
    layout = {name: (dtype, tensor.shape) for name, tensor in tensors.items()}
    write_each(path, layout, tensors.__getitem__)


def write_each(
    path: str | Path,
    layout: dict[str, tuple[str, tuple[int, ...]]],
    make: Callable[[str], np.ndarray],
) -> None:
    """Write tensors that are made one by one, so that only one is in memory.

    Args:
        path: the file, replaced when all is written.
        layout: dtype (such as "BF16") and shape of each tensor.
        make: returns the tensor of a name.
    """
    if unknown := {dtype for dtype, _ in layout.values()} - NUMPY_DTYPES.keys():
        raise ConfigError(
            f"cannot write type {min(unknown)!r}: use one of {', '.join(NUMPY_DTYPES)}"
        )
    # Large types first, so that every tensor starts at a multiple of its own size.
    names = sorted(layout, key=lambda name: (-_item_bytes(layout[name][0]), name))
    with atomic_file(Path(path)) as file:
        file.write(_header({name: layout[name] for name in names}))
        for name in names:
            dtype, shape = layout[name]
            tensor = make(name)
            if tensor.shape != shape:
                raise ShapeError(
                    f"tensor {name!r} has shape {list(tensor.shape)}, "
                    f"but its layout says {list(shape)}: make both the same"
                )
            file.write(_encode(tensor, dtype).data)


def _item_bytes(dtype: str) -> int:
    return np.dtype(NUMPY_DTYPES[dtype]).itemsize


def _header(layout: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    # Some programs refuse a file without a format, and "pt" is what all can read.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + math.prod(shape) * _item_bytes(dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _encode(tensor: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return np.ascontiguousarray(float32_to_bf16(tensor), dtype="<u2")
    return np.ascontiguousarray(tensor, dtype=NUMPY_DTYPES[dtype])
