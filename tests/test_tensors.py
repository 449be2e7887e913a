import json
import struct

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import (
    ConfigError,
    CorruptFile,
    MinivllmError,
    ModelNotFound,
    ShapeError,
    WeightMismatch,
)
from minivllm.loading import tensors
from minivllm.loading.tensors import (
    bf16_to_float32,
    float32_to_bf16,
    read_header,
    read_safetensors,
    write_each,
    write_safetensors,
)


def bf16_of_torch(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


# bf16


def test_one_and_its_neighbours_by_hand():
    # 1.0 is 0x3f800000; a step of bf16 there is 2**-7, so that 1 + 2**-8 is a tie.
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert float32_to_bf16(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81]


def test_every_bf16_number_survives_the_way_there_and_back():
    raw = np.arange(2**16, dtype=np.uint16)
    wide = bf16_to_float32(raw)
    expected = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(wide, expected)
    is_number = ~np.isnan(wide)
    np.testing.assert_array_equal(float32_to_bf16(wide)[is_number], raw[is_number])
    assert np.isnan(bf16_to_float32(float32_to_bf16(wide[~is_number]))).all()


def test_every_upper_half_rounds_as_torch_does_near_zero_half_and_one():
    high = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | low).view(np.float32)
        x = x[~np.isnan(x)]
        np.testing.assert_array_equal(float32_to_bf16(x), bf16_of_torch(x))


@given(st.integers(0, 2**32 - 1))
def test_any_float_rounds_as_torch_does_and_nan_stays_nan(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    if np.isnan(x[0]):
        assert np.isnan(bf16_to_float32(float32_to_bf16(x)))[0]
    else:
        assert float32_to_bf16(x) == bf16_of_torch(x)


def test_the_ends_of_the_range():
    x = np.array([np.inf, -np.inf, 3.4028235e38, -0.0, 1e-45], np.float32)
    expected = [np.inf, -np.inf, np.inf, -0.0, 0.0]
    wide = bf16_to_float32(float32_to_bf16(x))
    assert wide.tolist() == expected
    assert np.signbit(wide[3])


def test_a_nan_whose_mark_is_only_in_the_lower_half_does_not_become_infinite():
    x = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_float32(float32_to_bf16(x))).all()


def test_shapes_are_kept_and_the_input_is_not_changed():
    x = np.arange(6, dtype=np.float64).reshape(2, 3).T
    before = x.copy()
    assert float32_to_bf16(x).shape == (3, 2)
    assert float32_to_bf16(np.float32(1)).shape == ()
    np.testing.assert_array_equal(x, before)


# Files


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "b": rng.standard_normal((3, 5), dtype=np.float32),
        "a": rng.standard_normal(7, dtype=np.float32),
        "scalar": np.array(2.5, np.float32),
    }


def test_bf16_files_are_what_the_safetensors_library_reads(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = some_tensors()
    write_safetensors(path, tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == torch.bfloat16
            expected = torch.from_numpy(tensor).bfloat16()
            assert torch.equal(read, expected)
    assert read_header(path)["b"] == ("BF16", (3, 5))


def test_a_file_is_the_same_bytes_as_the_library_writes(tmp_path):
    layout = {"n": ("I64", (2,)), "b": ("F32", (3, 5)), "a": ("F16", (7,))}
    tensors = {
        "a": some_tensors()["a"].astype(np.float16),
        "b": some_tensors()["b"],
        "n": np.array([1, -2]),
    }
    write_each(tmp_path / "ours", layout, tensors.__getitem__)
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_data_begins_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 9):
        write_safetensors(tmp_path / "x", {"x" * length: np.zeros(1)})
        start = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
        assert start % 8 == 0


def test_the_order_of_the_tensors_changes_nothing(tmp_path):
    tensors = some_tensors()
    write_safetensors(tmp_path / "1", tensors)
    write_safetensors(tmp_path / "2", dict(reversed(tensors.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((name, np.float32) for name in ("float64", "float32", "float16")),
        *((name, name) for name in ("int64", "int32", "int8", "uint8", "bool")),
    ],
)
def test_floats_become_float32_and_the_rest_stays(tmp_path, dtype, expected):
    tensor = np.array([[0, 1, 2]], dtype)
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": tensor}, path)
    read = read_safetensors(path)["x"]
    assert read.dtype == expected
    np.testing.assert_array_equal(read, tensor)
    read[0, 0] = 1  # ours to write in, not a view of the file


def test_only_the_named_tensors_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, some_tensors(), "F32")
    assert list(read_safetensors(path, ["a"])) == ["a"]
    with pytest.raises(WeightMismatch, match="'zz'"):
        read_safetensors(path, ["a", "zz"])


def test_empty_tensors_and_empty_files(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"e": np.zeros((0, 4), np.float32)})
    assert read_safetensors(path)["e"].shape == (0, 4)
    write_safetensors(path, {})
    assert read_safetensors(path) == {}


def test_empty_tensors_may_lie_before_and_behind_a_full_one(tmp_path):
    empty = {"dtype": "F32", "shape": [0, 3]}
    header = {
        "full": X,
        "before": {**empty, "data_offsets": [0, 0]},
        "behind": {**empty, "data_offsets": [8, 8]},
    }
    save(tmp_path / "x", header, np.array([1, 2], "<f4").tobytes())
    read = read_safetensors(tmp_path / "x")
    assert read["full"].tolist() == [1, 2]
    assert read["before"].shape == read["behind"].shape == (0, 3)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, some_tensors())
    before = path.read_bytes()
    with pytest.raises(ShapeError, match=r"\[1\].*\[2\]"):
        write_each(path, {"a": ("F32", (2,))}, lambda name: np.zeros(1, np.float32))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_unknown_type_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"'BF17'.*BF16"):
        write_safetensors(tmp_path / "x", some_tensors(), "BF17")


def test_a_missing_file_and_a_folder_are_not_found(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ModelNotFound, match=str(path)):
            read_safetensors(path)


def save(path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", b""),
        (b"\xff", b""),
        (b"[" * 100_000, b""),
        ([], b""),
        ({"x": 1}, b""),
        ({"x": {}}, b""),
        ({"x": {**X, "shape": 2}}, bytes(8)),
        ({"x": {**X, "shape": [-2]}}, bytes(8)),
        ({"x": {**X, "shape": [2.0]}}, bytes(8)),
        ({"x": {**X, "shape": [3]}}, bytes(8)),
        ({"x": {**X, "shape": [2**62, 2**62]}}, bytes(8)),
        ({"x": {**X, "dtype": ["F32"]}}, bytes(8)),
        ({"x": {**X, "dtype": 5}}, bytes(8)),
        ({"x": {**X, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b""),
        ({"x": {**X, "shape": [2, *[1] * 32]}}, bytes(8)),
        ({"x": X, "__metadata__": "pt"}, bytes(8)),
        ({"x": X, "__metadata__": {"format": 5}}, bytes(8)),
        ({"x": {**X, "data_offsets": [0]}}, bytes(8)),
        ({"x": {**X, "data_offsets": [8, 0]}}, bytes(8)),
        ({"x": X}, bytes(7)),
        ({"x": X}, bytes(9)),
        ({"x": X, "y": X}, bytes(8)),
        ({"x": X, "y": {**X, "data_offsets": [12, 20]}}, bytes(20)),
    ],
)
def test_a_damaged_file_is_named_with_a_way_out(tmp_path, header, data):
    path = tmp_path / "bad.safetensors"
    save(path, header, data)
    for read in (read_safetensors, read_header):
        with pytest.raises(CorruptFile, match=r"bad\.safetensors.*again"):
            read(path)


def test_a_huge_header_length_is_not_believed(tmp_path):
    path = tmp_path / "bad.safetensors"
    for length in (1, 2**40, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length))
        with pytest.raises(CorruptFile):
            read_header(path)


def test_a_header_above_the_limit_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save(path, {"x": X}, bytes(8))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(tensors, "MAX_HEADER_BYTES", length)
    assert read_header(path) == {"x": ("F32", (2,))}
    monkeypatch.setattr(tensors, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(CorruptFile, match="cannot hold its header"):
        read_header(path)


def test_a_type_that_numpy_lacks_is_listed_but_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}
    save(path, {"x": entry}, bytes(2))
    assert read_header(path) == {"x": ("F8_E4M3", (2,))}
    with pytest.raises(ConfigError, match=r"F8_E4M3.*bf16"):
        read_safetensors(path)


def test_a_file_cut_anywhere_or_with_one_wrong_byte_is_ours_to_report(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, some_tensors())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile):
            read_safetensors(path)
    header_end = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for position in range(header_end):
        for flip in (1, 0x20, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            try:
                read_safetensors(path)
            except MinivllmError:
                refused += 1
    # What is left are letters of a name or of the free text, and spaces.
    assert refused > 0.6 * 3 * header_end
