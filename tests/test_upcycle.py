"""A dense checkpoint turned into experts says what it said before."""

import json

import numpy as np
import pytest
import torch

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, WeightMismatch
from minivllm.loading.loader import load_model, load_spec
from minivllm.models.families import family_of
from minivllm.models.merged import MergedDecoder
from minivllm.models.moe import upcycle
from tests.tiny_folder import CONFIG, make_tensors, write_checkpoint

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


@pytest.fixture
def dense(tmp_path):
    tensors = {
        name: tensor if tensor.ndim == 1 else tensor / tensor.shape[1] ** 0.5
        for name, tensor in make_tensors().items()
    }
    folder = write_checkpoint(tmp_path / "dense", tensors)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"no")
    return folder


def logits_of(decoder):
    with torch.inference_mode():
        hidden_states = decoder.forward(
            torch.tensor(TOKENS), torch.arange(len(TOKENS)), decoder.dense_context()
        )
        return decoder.compute_logits(hidden_states)


def merged_logits(folder):
    decoder = load_model(folder, device="cpu")
    context = decoder.dense_context()
    decoder = MergedDecoder(decoder)
    decoder.dense_context = lambda: context
    return logits_of(decoder)


def numpy_logits(folder):
    decoder = load_model(folder, backend="numpy")
    hidden_states = decoder.forward(
        np.array(TOKENS), np.arange(len(TOKENS)), decoder.dense_context()
    )
    return torch.from_numpy(decoder.compute_logits(hidden_states))


def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("num_experts", "top_k", "split"),
    [(4, 2, False), (3, 1, False), (1, 1, False), (4, 4, True), (3, 3, True)],
)
def test_experts_say_what_the_dense_model_says(
    dense, tmp_path, num_experts, top_k, split
):
    folder = upcycle(dense, num_experts, top_k, tmp_path / "moe", split=split)
    expected = logits_of(load_model(dense, device="cpu"))
    decoder = load_model(folder, device="cpu")
    moe = decoder.spec.moe
    assert (moe.num_experts, moe.top_k, moe.layers) == (num_experts, top_k, (0, 1))
    assert moe.intermediate_size == 12 // (num_experts if split else 1)
    for logits in (logits_of(decoder), merged_logits(folder), numpy_logits(folder)):
        assert relative_error(logits, expected) < 1e-5


def test_tokens_go_to_different_experts(dense, tmp_path):
    folder = upcycle(dense, 4, 1, tmp_path / "moe")
    decoder = load_model(folder, device="cpu")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for layer in decoder.layers:
        assert len(layer.mlp.gate(x).argmax(dim=1).unique()) == 4


def test_a_seed_gives_the_same_router(dense, tmp_path):
    routers = [
        load_model(upcycle(dense, 4, 2, tmp_path / name, seed=seed), device="cpu")
        .layers[1]
        .mlp.gate.weight
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    assert routers[0].equal(routers[1]) and not routers[0].equal(routers[2])


@pytest.mark.parametrize(
    ("knob", "value"), [("num_experts_per_tok", 3), ("norm_topk_prob", False)]
)
def test_slices_are_equal_only_if_all_are_chosen_and_scaled(
    dense, tmp_path, knob, value
):
    folder = upcycle(dense, 4, 4, tmp_path / "moe", split=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {knob: value}))
    expected = logits_of(load_model(dense, device="cpu"))
    error = relative_error(logits_of(load_model(folder, device="cpu")), expected)
    # Softmax over equal scores sums to one by itself: only a missing slice shows.
    assert (error > 1e-2) == (knob == "num_experts_per_tok")


def test_copies_are_equal_only_if_their_shares_sum_to_one(dense, tmp_path):
    folder = upcycle(dense, 4, 2, tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_topk_prob"] is True
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    expected = logits_of(load_model(dense, device="cpu"))
    assert relative_error(merged_logits(folder), expected) > 1e-2


def test_types_are_kept_and_companions_copied(tmp_path):
    dense = write_checkpoint(tmp_path / "dense", make_tensors(), dtype="BF16")
    (dense / "tokenizer.json").write_text("{}")
    (dense / "pytorch_model.bin").write_bytes(b"no")
    folder = upcycle(dense, 2, 1, tmp_path / "deep" / "moe")
    names = {path.name for path in folder.iterdir()}
    assert "tokenizer.json" in names and "pytorch_model.bin" not in names
    assert load_model(folder, device="cpu").norm.weight.dtype == torch.bfloat16


def test_a_sharded_model_is_read(dense, tmp_path):
    """What is written is in several files, and only its architecture is wrong."""
    folder = upcycle(dense, 2, 1, tmp_path / "once")
    assert (folder / "model.safetensors.index.json").is_file()
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(weight_map["weight_map"].values()) == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    names = {n.replace("experts.0.", "") for n in weight_map["weight_map"]}
    assert "model.layers.1.mlp.up_proj.weight" in names
    # The same again from shards: cut the dense model as the loader would find it.
    index = {"weight_map": {}}
    tensors = make_tensors()
    for number, name in enumerate(tensors):
        file = f"part-{number % 2}.safetensors"
        index["weight_map"][name] = file
    shards = tmp_path / "shards"
    for file in ("part-0.safetensors", "part-1.safetensors"):
        part = {n: t for n, t in tensors.items() if index["weight_map"][n] == file}
        write_checkpoint(shards, part)
        (shards / "model.safetensors").rename(shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    again = upcycle(shards, 4, 4, tmp_path / "again", split=True)
    expected = logits_of(load_model(shards, device="cpu"))
    error = relative_error(logits_of(load_model(again, device="cpu")), expected)
    assert error < 1e-5
    (shards / "part-1.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"part-1\.safetensors"):
        upcycle(shards, 2, 1, tmp_path / "third")


@pytest.mark.parametrize(
    ("config", "numbers", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, (2, 1), "Qwen2ForCausalLM"),
        ({"mlp_bias": True}, (2, 1), "no biases"),
        ({"intermediate_size": None}, (2, 1), "intermediate_size is None"),
        ({}, (2, 3), "top_k is 3"),
        ({}, (0, 1), "num_experts is 0"),
        ({}, (2, True), "top_k is True"),
    ],
)
def test_what_cannot_be_up_cycled_is_refused(tmp_path, config, numbers, message):
    dense = write_checkpoint(tmp_path / "dense", make_tensors(), CONFIG | config)
    with pytest.raises(ConfigError, match=message):
        upcycle(dense, *numbers, tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize("seed", ["a", None, 1.0, True, -1, 2**64])
def test_a_seed_that_is_none_is_refused(dense, tmp_path, seed):
    with pytest.raises(ConfigError, match=rf"seed is {seed!r}, but must be an integer"):
        upcycle(dense, 2, 1, tmp_path / "moe", seed=seed)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("numbers", "message"), [((4, 2), "set top_k to 4"), ((5, 5), "a divisor")]
)
def test_a_split_that_would_differ_is_refused(dense, tmp_path, numbers, message):
    with pytest.raises(ConfigError, match=message):
        upcycle(dense, *numbers, tmp_path / "moe", split=True)


def test_what_a_llama_leaves_out_stays_what_it_was(tmp_path):
    silent = {"max_position_embeddings": None, "num_key_value_heads": None}
    stray = {"use_sliding_window": True, "sliding_window": 2}  # no Llama reads these
    config = {**CONFIG, "num_attention_heads": 6, "head_dim": 4, **silent, **stray}
    needed = family_of(config).read_spec(config).weight_shapes()
    random = np.random.default_rng(0)
    tensors = {
        n if n.startswith("lm_head") else f"model.{n}": random.standard_normal(
            shape, dtype=np.float32
        )
        for n, shape in needed.items()
    }
    dense = write_checkpoint(tmp_path / "dense", tensors, config)
    before, after = load_spec(dense), load_spec(upcycle(dense, 2, 1, tmp_path / "moe"))
    for knob in ("max_position_embeddings", "num_kv_heads", "head_dim", "windows"):
        assert getattr(after, knob) == getattr(before, knob)
    decoders = [
        load_model(tmp_path / name, backend="numpy") for name in ("dense", "moe")
    ]
    first, second = (decoder.next_token_logits(TOKENS) for decoder in decoders)
    assert np.abs(first - second).max() < 1e-5 * np.abs(first).max()


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": None},
        {"hidden_size": "x"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
    ids=lambda config: next(iter(config)),
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, config):
    dense = write_checkpoint(tmp_path / "dense", make_tensors(), CONFIG | config)
    with pytest.raises(ConfigError, match=next(iter(config)).split("_")[0]):
        upcycle(dense, 2, 1, tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_a_folder_in_use_is_refused(dense):
    with pytest.raises(ConfigError, match="something is already"):
        upcycle(dense, 2, 1, dense)


def test_broken_checkpoints_are_refused_by_name(dense, tmp_path):
    tensors = make_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_checkpoint(dense, tensors)
    with pytest.raises(WeightMismatch, match=r"layers\.1\.mlp\.up_proj"):
        upcycle(dense, 2, 1, tmp_path / "moe")
    assert not (tmp_path / "moe").exists()
    (dense / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        upcycle(dense, 2, 1, tmp_path / "other")
    (dense / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        upcycle(dense, 2, 1, tmp_path / "third")
