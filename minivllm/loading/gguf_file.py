"""Read a GGUF file: metadata, and tensors that are still quantised.

GGUF is the file of llama.cpp: keys and values, a table of tensors, and their bytes,
most of them quantised in small blocks. The `gguf` package dequantises every type it
knows. The header we read ourselves: its reader needs seconds for a vocabulary, and
turns a damaged length into a loop without end.

Invariant: no length in the file is believed before it is checked; no weight is read
before it is used. Called by the converter.

In vLLM: a plugin, vllm-gguf-plugin (weight_utils.py, gguf_quant_weights_iterator),
with the GGUFReader of the gguf package.
Source: appendix A1, "Files".
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound

# Types of a value in the metadata; scalars with their NumPy type, little-endian.
STRING, ARRAY = 8, 9
SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file, still quantised."""

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # slowest axis first, as in NumPy
    data: np.ndarray  # uint8, [*shape[:-1], bytes per row], mapped from the file


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file holds; the tensors are read when they are used."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value after a look at its type."""
        value = self.metadata.get(key, default)
        if isinstance(value, kind) and (type(value) is not bool or kind is bool):
            return value
        found = "missing" if value is None else f"{value!r:.40}"
        raise CorruptFile(
            f"{self.path} cannot be converted: its key {key!r} is {found}, but must be "
            f"a value of type {kind.__name__}; download the file again or use another"
        )

    def dequantize(self, name: str, part: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Return a tensor as float32, or a part of it along all axes but the last."""
        tensor = self.tensors[name]
        data = tensor.data[part]
        try:
            values = gguf.dequantize(data, tensor.type)
            return values.reshape(*data.shape[:-1], tensor.shape[-1])
        except NotImplementedError:
            raise ConfigError(
                f"tensor {name!r} in {self.path} has type {tensor.type.name}, which "
                "the gguf package cannot dequantise: use a file of another type, such "
                "as Q4_K_M"
            ) from None


class _Cursor:
    """Takes bytes off the front of a file and refuses to run past its end."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def corrupt(self, reason: str) -> CorruptFile:
        return CorruptFile(
            f"{self.path} is no complete GGUF file: {reason}; download it again"
        )

    def take(self, count: int) -> np.ndarray:
        begin, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise self.corrupt(
                f"{count:,} bytes are expected at byte {begin:,} of {len(self.data):,}"
            )
        return self.data[begin : self.position]

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        begin = self.position
        try:
            return self.take(self.number("<Q")).tobytes().decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"the text at byte {begin:,} is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == ARRAY:
            kind, count = struct.unpack("<IQ", self.take(12))
            if kind == STRING:
                return [self.string() for _ in range(count)]
            return self.scalars(kind, count)
        return self.string() if kind == STRING else self.scalars(kind, 1)[0]

    def scalars(self, kind: int, count: int) -> list:
        if kind not in SCALARS:
            raise self.corrupt(f"unknown type {kind} of a value at {self.position:,}")
        dtype = np.dtype(SCALARS[kind])
        return self.take(count * dtype.itemsize).view(dtype).tolist()


def read_gguf(path: str | Path) -> GgufFile:
    """Read metadata and tensor table; map the tensors' bytes without reading them.

    Raises:
        CorruptFile: the file is damaged, cut short or no GGUF file.
        ConfigError: a version or a tensor type that is not supported.
        ModelNotFound: the file cannot be opened.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        # An empty file cannot be mapped.
        data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ModelNotFound(
            f"{str(path)!r} cannot be opened ({getattr(error, 'strerror', error)}): "
            "check the path"
        ) from error
    cursor = _Cursor(path, np.asarray(data))
    if cursor.take(4).tobytes() != b"GGUF":
        raise cursor.corrupt("it does not begin with the letters GGUF")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ConfigError(
            f"{path} has GGUF version {version}, but we read 2 and 3 (little-endian): "
            "convert it again with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"key {key!r} is there twice")
        metadata[key] = cursor.value()
    table = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise cursor.corrupt(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors or offset % alignment:
            raise cursor.corrupt(f"tensor {name!r} is there twice or out of line")
        cursor.position = start + offset
        tensors[name] = _map_tensor(cursor, name, shape, kind)
    return GgufFile(path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_axes = cursor.number("<I")
    if not 1 <= num_axes <= 4:
        raise cursor.corrupt(f"tensor {name!r} has {num_axes} axes, not 1 to 4")
    shape = struct.unpack(f"<{num_axes}Q", cursor.take(8 * num_axes))
    if 0 in shape:
        raise cursor.corrupt(f"tensor {name!r} is empty")
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _map_tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int
) -> GgufTensor:
    try:
        tensor_type = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise ConfigError(
            f"tensor {name!r} in {cursor.path} has the unknown type {kind}: "
            "update the gguf package, or use a file of another type such as Q4_K_M"
        ) from None
    numbers_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % numbers_per_block:
        raise cursor.corrupt(
            f"the rows of {name!r} have {shape[-1]} numbers, "
            f"but {tensor_type.name} packs {numbers_per_block} at a time"
        )
    row_bytes = shape[-1] // numbers_per_block * bytes_per_block
    data = cursor.take(math.prod(shape[:-1]) * row_bytes)
    return GgufTensor(tensor_type, shape, data.reshape(*shape[:-1], row_bytes))
