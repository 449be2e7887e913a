import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from minivllm.errors import ConfigError, CorruptFile, MinivllmError, ModelNotFound
from minivllm.loading.gguf import (
    convert_gguf,
    hugging_face_tensor,
    model_config,
    split_halves,
)
from minivllm.loading.gguf_file import read_gguf
from minivllm.loading.gguf_names import LLAMA, hugging_face_name
from minivllm.loading.tensors import float32_to_bf16, read_header, read_safetensors
from tests.tiny_gguf import HEAD_DIM, HEADS, write_tiny_gguf

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def write_gguf(path: Path, keys: bytes = b"", num_keys: int = 0, num_tensors: int = 0):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


# Reading


def test_a_file_written_by_hand_is_read(tmp_path):
    keys = text("a") + struct.pack("<II", 4, 7)
    keys += text("b") + struct.pack("<I", 8) + text("día")
    keys += text("c") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, -1)
    keys += text("d") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("")
    keys += text("e") + struct.pack("<I?", 7, True)
    file = read_gguf(write_gguf(tmp_path / "x.gguf", keys, 5))
    assert file.metadata == {"a": 7, "b": "día", "c": [0.5, -1], "d": ["x", ""], "e": 1}
    assert file.metadata["e"] is True
    assert file.tensors == {}


def test_a_q4_1_block_by_hand(tmp_path):
    # d = 0.5, m = -1; byte j holds weight j (low half) and weight j + 16 (high half).
    block = np.array([0.5, -1], np.float16).tobytes() + bytes([0x31] + [0xF0] * 15)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    rows = np.frombuffer(block, np.uint8).reshape(1, 20)
    writer.add_tensor("w", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = read_gguf(tmp_path / "x.gguf").dequantize("w")
    assert weights.shape == (1, 32)
    assert weights[0, :3].tolist() == [-0.5, -1, -1]  # 1, 0, 0
    assert weights[0, 16:18].tolist() == [0.5, 6.5]  # 3, 15


def test_tensors_lie_at_multiples_of_the_files_own_alignment(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name, value in (("a", 1.0), ("b", 2.0)):
        writer.add_tensor(name, np.full(3, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.dequantize("a").tolist() == [1, 1, 1]
    assert file.dequantize("b").tolist() == [2, 2, 2]


@pytest.mark.parametrize("alignment", [0, 4, 12, "32"])
def test_an_impossible_alignment_is_refused(tiny_gguf, alignment):
    with pytest.raises(CorruptFile, match=r"general\.alignment is"):
        read_gguf(tiny_gguf(general__alignment=alignment))


def test_reading_agrees_with_the_gguf_package_on_the_default_model(smollm2_gguf):
    start = time.perf_counter()
    file = read_gguf(smollm2_gguf)
    ours = time.perf_counter() - start
    start = time.perf_counter()
    reader = gguf.GGUFReader(smollm2_gguf)
    theirs = time.perf_counter() - start
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert file.metadata == fields
    assert len(fields) == 33
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type == tensor.tensor_type
        np.testing.assert_array_equal(mine.data.ravel(), tensor.data.view("u1").ravel())
    assert ours < theirs / 3  # the reason why we do not use it


# Converting


def test_split_halves_by_hand():
    # One head of four rows in llama.cpp's order: 0 and 2 are turned together.
    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert split_halves(rows, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_names_are_translated_and_strangers_are_not():
    def name(gguf_name):
        return hugging_face_name(LLAMA, gguf_name)

    assert name("blk.11.attn_q.weight") == "model.layers.11.self_attn.q_proj.weight"
    assert name("blk.0.ffn_gate.bias") == "model.layers.0.mlp.gate_proj.bias"
    assert name("output.weight") == "lm_head.weight"
    for stranger in ("attn_q.weight", "blk.0.output.weight", "blk.x.attn_q.weight"):
        assert name(stranger) is None


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("F32", "F32"), ("F16", "F16"), ("BF16", "BF16")),
        *((kind, "BF16") for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K")),
    ],
)
def test_every_type_comes_out_with_its_weights_in_their_places(tmp_path, kind, dtype):
    path = tmp_path / "tiny.gguf"
    expected = write_tiny_gguf(path, kind, bias=True)
    convert_gguf(path, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    assert {stored for stored, _ in read_header(weights).values()} == {dtype}
    converted = read_safetensors(weights)
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        if dtype == "BF16":
            tensor = tensor.astype(np.float32)
            assert (float32_to_bf16(converted[name]) == float32_to_bf16(tensor)).all()
        else:
            rounded = tensor.astype("f2" if dtype == "F16" else "f4")
            np.testing.assert_array_equal(converted[name], rounded.astype("f4"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert config["dtype"] == names[dtype]


def test_the_config_says_what_the_file_says(tmp_path, tiny_gguf):
    factors = [1.0] * 20 + [8.0] * 12
    path = tiny_gguf(rope_factors=factors, bias=True)
    convert_gguf(path, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 50_000.0,
        "rope_scaling": {"rope_type": "factors", "factors": factors},
        "attention_bias": True,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


def test_a_tied_file_has_no_head(tmp_path, tiny_gguf):
    convert_gguf(tiny_gguf(tied=True), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] is None
    assert "lm_head.weight" not in read_header(tmp_path / "out" / "model.safetensors")


def test_one_half_precision_matrix_makes_the_model_half_precision(tiny_gguf):
    head = {"output.weight": np.zeros((260, 256), np.float32)}
    file = read_gguf(tiny_gguf(kind="F16", tied=True, more_tensors=head))
    assert model_config(file)["dtype"] == "float16"


def test_what_a_file_leaves_out_has_its_usual_value(tiny_gguf):
    path = tiny_gguf(
        llama__attention__head_count_kv=None,
        llama__rope__freq_base=None,
        llama__rope__dimension_count=None,
    )
    config = model_config(read_gguf(path))
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert config["rope_theta"] == 10_000.0
    assert config["head_dim"] == 64


def test_a_head_may_be_wider_than_its_share(tiny_gguf):
    path = tiny_gguf(llama__attention__key_length=32, llama__rope__dimension_count=None)
    assert model_config(read_gguf(path))["head_dim"] == 32  # and not 256 / 4


def test_without_a_number_of_kv_heads_all_heads_have_their_own(tiny_gguf):
    file = read_gguf(tiny_gguf(llama__attention__head_count_kv=None))
    name = "blk.0.attn_k.weight"
    expected = split_halves(file.dequantize(name), HEADS)
    np.testing.assert_array_equal(hugging_face_tensor(file, name), expected)


def test_every_token_that_ends_a_turn_is_an_end(tiny_gguf):
    path = tiny_gguf(tokenizer__ggml__eot_token_id=0, tokenizer__ggml__eom_token_id=2)
    assert model_config(read_gguf(path))["eos_token_id"] == [2, 0]


def test_the_same_file_gives_the_same_bytes(tmp_path, tiny_gguf):
    path = tiny_gguf(kind="Q4_1")
    for name in ("1", "2"):
        convert_gguf(path, tmp_path / name)
    for name in FILES:
        one, two = ((tmp_path / n / name).read_bytes() for n in ("1", "2"))
        assert one == two, name


def test_progress_counts_every_weight_once(tmp_path):
    expected = write_tiny_gguf(tmp_path / "x.gguf")
    total = sum(tensor.size for tensor in expected.values())
    calls = []
    convert_gguf(
        tmp_path / "x.gguf",
        tmp_path / "out",
        on_progress=lambda *numbers: calls.append(numbers),
    )
    assert len(calls) == len(expected)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_the_converter_imports_no_torch():
    code = (
        "import sys, minivllm.loading.gguf, minivllm.loading.hub; "
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


# What is refused

KEYS = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(tiny_gguf, key):
    path = tiny_gguf(**{f"llama__{key.replace('.', '__')}": None})
    with pytest.raises(CorruptFile, match=f"'llama.{key}' is missing"):
        model_config(read_gguf(path))


@pytest.mark.parametrize("value", [0, "4", [4, 4], 4.0])
def test_a_key_of_the_wrong_kind_is_named(tiny_gguf, value):
    path = tiny_gguf(llama__attention__head_count=value)
    with pytest.raises(CorruptFile, match=r"tiny\.gguf.*head_count' is"):
        model_config(read_gguf(path))


@pytest.mark.parametrize("epsilon", [0.0, float("nan"), float("inf")])
def test_an_impossible_epsilon_is_refused(tiny_gguf, epsilon):
    path = tiny_gguf(llama__attention__layer_norm_rms_epsilon=epsilon)
    with pytest.raises(CorruptFile, match="must be above 0"):
        model_config(read_gguf(path))


def test_another_architecture_is_refused_with_the_known_ones(tiny_gguf):
    known = "gemma3, llama, qwen2, qwen3, qwen3moe"
    with pytest.raises(ConfigError, match=f"'mamba', but only {known} can"):
        model_config(read_gguf(tiny_gguf(architecture="mamba")))


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": "yarn"},
        {"llama__rope__scaling__type": "longrope"},
        {"llama__final_logit_softcapping": 30.0},
        {"llama__attention__sliding_window": 4096},
        {"llama__rope__dimension_count": 32},
        {"split__count": 3},
    ],
)
def test_what_would_give_another_model_is_refused(tiny_gguf, changes):
    with pytest.raises(ConfigError, match=r"tiny\.gguf.*: (use|join)"):
        model_config(read_gguf(tiny_gguf(**changes)))


@pytest.mark.parametrize("factors", [[1.0], [0.0] * (HEAD_DIM // 2)])
def test_impossible_rope_factors_are_refused(tiny_gguf, factors):
    with pytest.raises(CorruptFile, match="must hold 32 positive factors"):
        model_config(read_gguf(tiny_gguf(rope_factors=factors)))


def test_an_unknown_tensor_is_refused(tmp_path, tiny_gguf):
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}
    path = tiny_gguf(more_tensors=extra)
    with pytest.raises(ConfigError, match=r"'blk\.0\.ffn_gate_inp\.weight'"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path, tiny_gguf):
    extra = {"output_norm.bias": np.zeros(4, np.int32)}
    with pytest.raises(ConfigError, match=r"'output_norm\.bias'.*I32"):
        convert_gguf(tiny_gguf(more_tensors=extra), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_heads_that_do_not_divide_the_rows_are_refused(tiny_gguf):
    file = read_gguf(tiny_gguf(llama__attention__head_count=5))
    with pytest.raises(CorruptFile, match=r"256 rows .* not 5 heads"):
        hugging_face_tensor(file, "blk.0.attn_q.weight")


def test_a_place_where_no_folder_can_be_made_is_refused_first(tmp_path):
    nowhere = tmp_path / "none.gguf"  # not even looked at
    (tmp_path / "file").touch()
    for place, reason in {
        tmp_path: "exists already: remove it",
        tmp_path / "file": "exists already: remove it",
        tmp_path / "file" / "out": "is no folder: make that first",
        tmp_path / "none" / "out": "is no folder: make that first",
    }.items():
        with pytest.raises(ConfigError, match=f"{place}, for .*{reason}"):
            convert_gguf(nowhere, place)


def test_a_zero_byte_in_a_path_is_not_found():
    with pytest.raises(ModelNotFound, match=r"null byte.*check the path"):
        read_gguf("a\0b")


def test_a_missing_file_is_not_found(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFound, match=str(path)):
            read_gguf(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"GGU", b"PK\3\4" + bytes(100), b"GGUF" + struct.pack("<I", 3)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1),
        b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
    ],
)
def test_what_is_no_gguf_file_is_named(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"bad\.gguf.*download"):
        read_gguf(path)


def test_another_version_and_byte_order_are_refused(tmp_path):
    path = tmp_path / "old.gguf"
    for version in (1, 4, 3 << 24):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ConfigError, match=f"version {version}"):
            read_gguf(path)


HUGE = 2**62


@pytest.mark.parametrize(
    "key",
    [
        struct.pack("<Q", HUGE),
        text("k") + struct.pack("<IQ", 8, HUGE),
        text("k") + struct.pack("<IIQ", 9, 8, HUGE),
        text("k") + struct.pack("<IIQ", 9, 4, HUGE),  # gguf's reader never returns
        text("k") + struct.pack("<IIQ", 9, 9, 1),
        text("k") + struct.pack("<I", 99),
        struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 0),
    ],
)
def test_a_damaged_length_is_refused_at_once(tmp_path, key):
    path = write_gguf(tmp_path / "bad.gguf", key + bytes(64), 1)
    with pytest.raises(CorruptFile, match=r"bad\.gguf"):
        read_gguf(path)


@pytest.mark.parametrize(
    "info",
    [
        struct.pack("<I", 5) + struct.pack("<5QIQ", 1, 1, 1, 1, 1, 0, 0),
        struct.pack("<IIQ", 0, 0, 0),
        struct.pack("<IQIQ", 1, 0, 0, 0),
        struct.pack("<IQIQ", 1, HUGE, 0, 0),
        struct.pack("<I2QIQ", 2, HUGE, HUGE, 0, 0),
        struct.pack("<IQIQ", 1, 1, 0, HUGE),
        struct.pack("<IQIQ", 1, 1, 0, 5),
        struct.pack("<IQIQ", 1, 33, 3, 0),
    ],
)
def test_a_damaged_tensor_table_is_refused(tmp_path, info):
    path = write_gguf(tmp_path / "bad.gguf", text("w") + info + bytes(256), 0, 1)
    with pytest.raises(CorruptFile, match=r"bad\.gguf"):
        read_gguf(path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a damaged scale may be NaN
def test_a_file_cut_anywhere_or_with_one_wrong_byte_is_ours_to_report(tmp_path):
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path, "Q4_0", rope_factors=[1.0] * 32)
    whole = path.read_bytes()
    header_end = len(whole) - sum(t.data.size for t in read_gguf(path).tensors.values())
    rng = np.random.default_rng(0)
    for length in rng.integers(0, len(whole) - 32, 100):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile):
            convert_gguf(path, tmp_path / "out")
    refused = 0
    for i, position in enumerate(rng.integers(0, header_end, 300)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            convert_gguf(path, tmp_path / f"out{i}")
        except MinivllmError:
            refused += 1
    assert refused > 150
    assert not list(tmp_path.glob(".*"))
