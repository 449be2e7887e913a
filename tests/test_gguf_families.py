"""GGUF files of every family: the same logits as the model that they were made of."""

import json

import numpy as np
import pytest
import torch

from minivllm.errors import ConfigError, CorruptFile, WeightMismatch
from minivllm.loading.gguf import convert_gguf, gguf_tensors, model_config
from minivllm.loading.gguf_file import read_gguf
from minivllm.loading.loader import load_model
from minivllm.loading.tensors import read_header, read_safetensors
from minivllm.models.families import family_of
from minivllm.models.spec import LinearScaling, RopeSpec, YarnScaling
from minivllm.parity import all_logits, difference
from tests.gguf_families import ARCHES, gguf_tensors_of, write_family
from tests.parity.make_tiny import SIZES

TOKENS = np.random.default_rng(1).integers(256, size=24).tolist()


def spec_of(path):
    config = model_config(read_gguf(path))
    return family_of(config).read_spec(config)


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("family", ARCHES)
def test_a_converted_file_computes_what_its_model_does(tmp_path, family, backend):
    model = write_family(tmp_path / "x.gguf", family)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    decoder = load_model(tmp_path / "out", backend=backend)
    found = difference(all_logits(decoder, TOKENS, 10), logits_of(model))
    assert found.fits and found.same_choices == len(TOKENS), found


@pytest.mark.parametrize("family", ARCHES)
def test_the_list_of_tensors_is_known_before_anything_is_converted(tmp_path, family):
    write_family(tmp_path / "x.gguf", family)
    listed = gguf_tensors(read_gguf(tmp_path / "x.gguf"))
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    written = read_header(tmp_path / "out" / "model.safetensors")
    assert {t.name: (t.dtype, list(t.shape)) for t in listed} == {
        name: (dtype, list(shape)) for name, (dtype, shape) in written.items()
    }


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "F16"), ("BF16", "BF16")])
def test_gemmas_norms_lose_their_one_in_every_type(tmp_path, kind, dtype):
    model = write_family(tmp_path / "x.gguf", "gemma3", kind=kind)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    weights = read_safetensors(tmp_path / "out" / "model.safetensors")
    norms = {n: w for n, w in model.state_dict().items() if n.endswith("norm.weight")}
    assert len(norms) == 4 * 6 + 1
    for name, expected in norms.items():
        stored = torch.float16 if dtype == "F16" else torch.bfloat16
        # One is added and taken away in float32, so the last bits may be others.
        expected = ((1 + expected) - 1).to(stored).float().numpy()
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


def test_any_type_may_be_asked_for(tmp_path):
    write_family(tmp_path / "x.gguf", "qwen3", kind="BF16")
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="F32")
    header = read_header(tmp_path / "out" / "model.safetensors")
    assert {dtype for dtype, _ in header.values()} == {"F32"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    with pytest.raises(ConfigError, match="to 'F8': use one of F32, F16, BF16"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "other", dtype="F8")
    assert not (tmp_path / "other").exists()


# What the metadata says.


def test_rope_that_is_scaled(tmp_path):
    path = tmp_path / "x.gguf"
    write_family(path, "qwen2")
    yarn = spec_of(path).rope
    assert isinstance(yarn.scaling, YarnScaling)
    assert yarn.scaling.original_max_position_embeddings == 128
    assert yarn.scaling.attention_factor == pytest.approx(1.138629, rel=1e-6)
    write_family(path, "qwen2", changed={"rope.scaling.original_context_length": None})
    assert spec_of(path).rope.scaling.original_max_position_embeddings == 512
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_family(path, "llama", changed=linear)
    expected = RopeSpec(theta=5e5, scaling=LinearScaling(factor=4.0))
    assert spec_of(path).rope == expected
    # Files from before there was a type.
    write_family(path, "llama", changed={"rope.scale_linear": 4.0})
    assert spec_of(path).rope == expected
    for none in ({"rope.scaling.type": "none"}, {"rope.scaling.factor": 1.0}, {}):
        write_family(path, "llama", changed=none)
        assert spec_of(path).rope == RopeSpec(theta=5e5)


def test_gemmas_scaling_its_windows_and_its_local_base(tmp_path):
    path = tmp_path / "x.gguf"
    write_family(path, "gemma3")
    spec = spec_of(path)
    assert spec.rope == RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert spec.local_rope == RopeSpec(theta=1e4)
    assert spec.windows == (8,) * 4
    write_family(path, "gemma3", changed={"rope.freq_base_swa": None})
    assert spec_of(path).local_rope == RopeSpec(theta=1e4)  # as older files have it
    write_family(path, "gemma3", changed={"attention.sliding_window_pattern": 2})
    assert spec_of(path).windows == (8, None, 8, None)
    write_family(path, "gemma3", changed={"attention.sliding_window": None})
    assert spec_of(path).windows == ()


def test_gemmas_largest_model_is_known_by_its_layers(tmp_path):
    path = tmp_path / "x.gguf"
    write_family(path, "gemma3")
    assert spec_of(path).query_pre_attn_scalar == SIZES["head_dim"]
    write_family(path, "gemma3", changed={"block_count": 62})
    assert spec_of(path).query_pre_attn_scalar == 48 / 4


def test_the_shares_of_experts_sum_to_one_unless_a_file_says_no(tmp_path):
    path = tmp_path / "x.gguf"
    write_family(path, "qwen3_moe")
    assert spec_of(path).moe.norm_topk_prob
    assert spec_of(path).moe.layers == (0, 1, 2, 3)
    write_family(path, "qwen3_moe", changed={"expert_weights_norm": False})
    assert not spec_of(path).moe.norm_topk_prob


def test_gate_and_up_of_experts_in_one_tensor(tmp_path):
    model = write_family(tmp_path / "two.gguf", "qwen3_moe")
    tensors = gguf_tensors_of(model, "qwen3_moe")
    fused: dict = {}
    for layer in range(4):
        names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in ("gate", "up")]
        fused |= dict.fromkeys(names)
        joined = np.concatenate([tensors[name] for name in names], axis=1)
        fused[f"blk.{layer}.ffn_gate_up_exps.weight"] = joined
    write_family(tmp_path / "one.gguf", "qwen3_moe", tensors=fused)
    for name in ("one", "two"):
        convert_gguf(tmp_path / f"{name}.gguf", tmp_path / name)
    one, two = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")
    )
    assert one == two


@pytest.mark.parametrize(
    ("family", "ids"),
    [
        ("llama", [258, 259]),  # <|end_of_text|>, <|eot_id|>
        ("qwen3", [257, 259]),  # <|endoftext|>, <|im_end|>
        ("gemma3", [2, 260]),  # </s> of this tokenizer, <end_of_turn>
    ],
)
def test_tokens_that_end_a_turn_are_found_by_their_text(tmp_path, family, ids):
    write_family(tmp_path / "x.gguf", family)
    assert model_config(read_gguf(tmp_path / "x.gguf"))["eos_token_id"] == ids


# What is refused.


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        ("gemma3", {"attention.value_length": 64}, "attention.value_length = 64"),
        ("llama", {"attention.sliding_window": 8}, "attention.sliding_window = 8"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("qwen3_moe", {"expert_shared_count": 1}, "expert_shared_count = 1"),
        ("qwen3_moe", {"expert_used_count": 13}, "goes to 13 of 12"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "'longrope', factor 4"),
        ("qwen2", {"rope.scaling.factor": None}, "'yarn', factor 0"),
        ("qwen2", {"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor = 0.5"),
        ("llama", {"rope.dimension_count": 8}, "turns 8 of the 32"),
        ("llama", {"attention.causal": False}, "attention.causal = False"),
        ("qwen3", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv = 8.0"),
        ("gemma3", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias = 8.0"),
        ("qwen3_moe", {"expert_group_count": 2}, "expert_group_count = 2"),
    ],
)
def test_what_no_decoder_computes_is_refused(tmp_path, family, changed, message):
    write_family(tmp_path / "x.gguf", family, changed=changed)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ARCHES)
@pytest.mark.parametrize("factor", ["4", -2.0, float("inf")])
def test_a_scaling_by_no_number_names_the_file(tmp_path, family, factor):
    changed = {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    write_family(tmp_path / "x.gguf", family, changed=changed)
    with pytest.raises(CorruptFile, match=r"x\.gguf cannot be converted: it scales"):
        model_config(read_gguf(tmp_path / "x.gguf"))


def test_two_scalings_at_once_are_refused(tmp_path):
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    changed = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_family(tmp_path / "x.gguf", "llama", changed=changed, tensors=factors)
    with pytest.raises(ConfigError, match=r"by rope_freqs\.weight and by a factor"):
        model_config(read_gguf(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3_moe", "expert_count"),
        ("qwen3_moe", "expert_feed_forward_length"),
        ("gemma3", "rope.freq_base"),
    ],
)
def test_a_missing_key_of_a_family_is_named(tmp_path, family, key):
    write_family(tmp_path / "x.gguf", family, changed={key: None})
    with pytest.raises(CorruptFile, match=f"{key}' is missing"):
        model_config(read_gguf(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("family", "name", "note"),
    [
        ("qwen2", "blk.1.attn_q.bias", "files are incomplete"),
        ("qwen3", "blk.1.attn_k_norm.weight", "files are incomplete"),
        ("gemma3", "blk.1.post_ffw_norm.weight", "files are incomplete"),
        ("qwen3_moe", "blk.1.ffn_gate_inp.weight", "files are incomplete"),
    ],
)
def test_a_tensor_that_is_missing_is_seen_by_the_loader(tmp_path, family, name, note):
    write_family(tmp_path / "x.gguf", family, tensors={name: None})
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    with pytest.raises(WeightMismatch, match=note):
        load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "stranger"),
    [
        ("qwen3", "blk.0.ffn_gate_exps.weight"),
        ("llama", "blk.0.attn_q_norm.weight"),
        ("qwen3_moe", "blk.0.ffn_gate_shexp.weight"),
        ("gemma3", "mm.input_projection.weight"),
    ],
)
def test_tensors_of_another_family_are_refused(tmp_path, family, stranger):
    more = {stranger: np.ones((2, 4, 4), np.float32)}
    write_family(tmp_path / "x.gguf", family, tensors=more)
    with pytest.raises(ConfigError, match=f"has a tensor '{stranger}'"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
