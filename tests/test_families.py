"""Families: what config.json and the names of tensors say, and where they disagree."""

import json
from pathlib import Path

import numpy as np
import pytest

from minivllm.errors import ConfigError, WeightMismatch
from minivllm.loading.checkpoint import account_for, stored_tensors
from minivllm.loading.loader import load_model, load_spec
from minivllm.loading.tensors import write_safetensors
from minivllm.models.families import FAMILIES, family_of
from minivllm.models.spec import LinearScaling, MoeSpec, RopeSpec, YarnScaling

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QWEN2 = SIZES | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
MOE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GEMMA3 = SIZES | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"]}
QWEN3_5 = SIZES | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
QWEN3_5_MOE = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


def spec_of(config, **changes):
    config = config | changes
    return family_of(config).read_spec(config)


def tensors_of(config, prefix="model."):
    random = np.random.default_rng(0)
    return {
        (name if name.startswith("lm_head") else prefix + name): random.standard_normal(
            shape, dtype=np.float32
        )
        for name, shape in spec_of(config).weight_shapes().items()
    }


def write(folder: Path, config, tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    return folder


def logits(folder: Path, backend="numpy"):
    return load_model(folder, backend=backend).next_token_logits([3, 1, 4, 1, 5])


# Which family?


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.architectures[0])
def test_a_family_is_found_by_each_of_its_names(family):
    for name in family.architectures:
        assert family_of({"architectures": [name]}) is family
    for name in family.model_types:
        assert family_of({"model_type": name}) is family
        assert family_of({"architectures": [], "model_type": name}) is family


def test_an_architecture_that_is_named_counts_more_than_a_model_type():
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification, .*7.5"):
        family_of(
            {
                "architectures": ["LlamaForSequenceClassification"],
                "model_type": "llama",
            }
        )


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, MOE, GEMMA3])
@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"is_causal": False},
        {"shared_expert_intermediate_size": 512},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2]}},
        {"hidden_act": "relu", "hidden_activation": "relu"},
        {"dtype": "float8_e4m3fn"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_no_decoder_computes_is_refused_by_name(config, change):
    with pytest.raises(ConfigError) as caught:
        spec_of(config, **change)
    said = change.get("rope_scaling", {}).get("rope_type") or next(iter(change))
    assert said.removeprefix("hidden_act") in str(caught.value)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, MOE, GEMMA3])
def test_what_is_switched_off_is_not_refused(config):
    off = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "shared_expert_intermediate_size": 0,
        "quantization_config": None,
    }
    assert spec_of(config, **off) == spec_of(config)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_each_activation_has_one_name_here(name, ours):
    assert spec_of(LLAMA, hidden_act=name).hidden_act == ours
    assert spec_of(GEMMA3, hidden_activation=name).hidden_act == ours


def test_gemma_does_not_read_hidden_act():
    assert spec_of(GEMMA3, hidden_act="silu").hidden_act == "gelu_tanh"


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, MOE, GEMMA3])
@pytest.mark.parametrize("layers", [4.0, 2.5, "4", 10**9])
def test_a_number_of_layers_that_cannot_be_is_refused_before_it_is_used(config, layers):
    on = {"use_sliding_window": True, "max_window_layers": 0}
    with pytest.raises(ConfigError, match=r"num_(hidden_)?layers is"):
        spec_of(config, num_hidden_layers=layers, **on)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MOE, {"num_experts": 10**9}, "num_experts is 1000000000 .* 10,000"),
        (MOE, {"num_experts": 4.0}, "num_experts is 4.0"),
        (MOE, {"decoder_sparse_step": 1.5}, "decoder_sparse_step is 1.5"),
        (GEMMA3, {"sliding_window_pattern": 2.5}, "sliding_window_pattern is 2.5"),
    ],
)
def test_counts_are_whole_and_not_without_end(config, change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(config, **change)


# Heads, biases and norms.


def test_the_width_of_a_head_is_read_before_it_is_derived():
    for config in (LLAMA, QWEN2, MOE):
        bare = {key: value for key, value in config.items() if key != "head_dim"}
        assert spec_of(bare).head_dim == spec_of(bare, head_dim=None).head_dim == 8
        assert spec_of(config, head_dim=16).head_dim == 16
    bare = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert spec_of(bare).head_dim == 128
    assert spec_of(GEMMA3, head_dim=None).head_dim == 256


def test_more_heads_than_numbers_to_share_are_refused():
    message = r"num_attention_heads is 33 in config.json, but hidden_size is 32, and"
    with pytest.raises(ConfigError, match=message):
        spec_of(LLAMA, num_attention_heads=33, num_key_value_heads=1)
    many = spec_of(LLAMA, num_attention_heads=33, num_key_value_heads=1, head_dim=8)
    assert many.num_heads == 33


def test_biases_are_qwen2s_nature_and_a_setting_elsewhere():
    def biases(spec):
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias

    assert biases(spec_of(QWEN2)) == (True, False, False)
    assert spec_of(QWEN2, attention_bias=False) == spec_of(QWEN2)
    for config in (QWEN3, MOE, GEMMA3):
        assert biases(spec_of(config)) == (False, False, False)
        assert biases(spec_of(config, attention_bias=True)) == (True, True, False)
    both = spec_of(LLAMA, attention_bias=True, mlp_bias=True)
    assert biases(both) == (True, True, True)


def test_norms_of_queries_and_keys_are_qwen3s_unless_the_config_says_no():
    assert [spec_of(c).qk_norm for c in (LLAMA, QWEN2, QWEN3, MOE, GEMMA3)] == [
        *(False, False, True, True, True)
    ]
    for config in (QWEN3, MOE):
        assert not spec_of(config, qk_norm=False).qk_norm


def test_gemma_has_knobs_of_its_own():
    spec = spec_of(GEMMA3)
    assert spec.norm_plus_one and spec.post_norms
    assert spec.embedding_scale == 32**0.5
    assert spec.attention_scale == 24**-0.5
    assert spec.tie_word_embeddings


# Rope.


def test_yarn_in_both_spellings():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16}
    old = spec_of(QWEN2, rope_theta=1_000_000, rope_scaling=yarn | {"type": "yarn"})
    new = spec_of(
        QWEN2, rope_parameters=yarn | {"rope_type": "yarn", "rope_theta": 1e6}
    )
    assert old.rope == new.rope
    scaling = old.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.138629, rel=1e-6)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32, 1, True)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 1.138629),
        ({"attention_factor": 0.9}, 0.9),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.138629 / 1.069315),
        ({"mscale": 0.5}, 1.138629),
        ({"factor": 1.0}, 1.0),
        ({"factor": None}, 1.138629),  # 64 / 16
    ],
)
def test_the_attention_factor_of_yarn(more, expected):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    scaling = spec_of(QWEN2, rope_scaling=yarn | more).rope.scaling
    assert scaling.attention_factor == pytest.approx(expected, rel=1e-6)


def test_yarn_without_a_trained_length_takes_that_of_the_config():
    rope = spec_of(QWEN2, rope_scaling={"type": "yarn", "factor": 4.0}).rope
    assert rope.scaling.original_max_position_embeddings == 64
    twice = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}
    with pytest.raises(ConfigError, match="original_max_position_embeddings twice"):
        spec_of(QWEN2, rope_scaling=twice, original_max_position_embeddings=32)


@pytest.mark.parametrize("nothing", [None, {}, {"rope_type": "default"}])
def test_three_ways_to_say_that_rope_is_not_scaled(nothing):
    for config in (QWEN3, GEMMA3):
        assert spec_of(config, rope_scaling=nothing) == spec_of(config)


def test_gemmas_scaling_is_for_the_layers_without_a_window_only():
    linear = {"rope_type": "linear", "factor": 8.0}
    spec = spec_of(GEMMA3, rope_scaling=linear)
    assert spec.rope == RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert spec.local_rope == RopeSpec(theta=1e4)
    nested = {
        "full_attention": linear | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert spec_of(GEMMA3, rope_parameters=nested) == spec
    # As files of the time between write it, with all spellings at once.
    both = {"rope_parameters": nested, "rope_scaling": linear, "rope_theta": 1e6}
    assert spec_of(GEMMA3, **both, rope_local_base_freq=10_000) == spec


def test_gemmas_old_names_of_the_two_bases():
    spec = spec_of(GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4)
    assert [rope.theta for rope in spec.ropes] == [5e5, 2e4]
    assert [spec.rope_index(layer) for layer in range(6)] == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "must be rope_type"),
        ({"rope_parameters": {"rope_type": "default"}}, "settings for full_attention"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
            },
            "two rope settings that differ",
        ),
        (
            {
                "rope_local_base_freq": 1e4,
                "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}},
            },
            r"rope_theta is both 20000\.0 and 10000\.0",
        ),
        ({"text_config": [1]}, "text_config is"),
    ],
)
def test_what_programs_read_differently_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(GEMMA3, **change)


# Windows.


def test_a_ramp_that_transformers_cuts_otherwise_is_refused_for_gemma():
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    assert spec_of(QWEN3, rope_scaling=yarn).rope.scaling.truncate is False
    for kind in ("full_attention", "sliding_attention"):
        with pytest.raises(ConfigError, match="truncate is false"):
            spec_of(GEMMA3, rope_parameters={kind: yarn})
    with pytest.raises(ConfigError, match="truncate is false"):
        spec_of(GEMMA3, rope_scaling=yarn)


@pytest.mark.parametrize("config", [QWEN2, QWEN3, MOE])
def test_a_window_that_is_switched_off_is_none(config):
    named = {"sliding_window": 8, "max_window_layers": 2}
    assert spec_of(config, **named).windows == ()
    assert spec_of(config, **named, use_sliding_window=False).windows == ()


@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_qwens_windows_begin_at_a_layer(config):
    on = {"use_sliding_window": True, "sliding_window": 8}
    spec = spec_of(config, **on, max_window_layers=4)
    assert spec.windows == (None, None, None, None, 8, 8)
    assert spec_of(config, **on).windows == ()  # they would begin at layer 28
    assert spec_of(config, **on, max_window_layers=0).windows == (8,) * 6
    types = ["sliding_attention"] + 5 * ["full_attention"]
    listed = spec_of(config, **on, max_window_layers=4, layer_types=types)
    assert listed.windows == (8, None, None, None, None, None)
    off = on | {"sliding_window": None}
    assert spec_of(config, **off, max_window_layers=0).windows == ()


def test_all_layers_of_a_qwen3_moe_have_a_window_or_none_has():
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert spec_of(MOE, **on, max_window_layers=4).windows == (8,) * 6
    full = ["full_attention"] * 6
    assert spec_of(MOE, layer_types=full).windows == ()
    with pytest.raises(ConfigError, match="not all sliding_attention"):
        spec_of(MOE, **on, layer_types=full)


def test_a_llama_with_windows_is_refused_since_programs_differ():
    full, slides = ["full_attention"] * 6, ["sliding_attention"] * 6
    assert spec_of(LLAMA, layer_types=full, sliding_window=8) == spec_of(LLAMA)
    with pytest.raises(ConfigError, match="a LlamaForCausalLM has no windows"):
        spec_of(LLAMA, layer_types=slides, sliding_window=8)
    with pytest.raises(ConfigError, match="type 'chunked_attention'"):
        spec_of(LLAMA, layer_types=["chunked_attention"] * 6)


def test_a_scale_of_a_llamas_logits_is_refused_since_programs_differ():
    for neutral in (None, 1, 1.0):
        assert spec_of(LLAMA, logit_scale=neutral) == spec_of(LLAMA)
    with pytest.raises(ConfigError, match=r"logit_scale is 0\.5"):
        spec_of(LLAMA, logit_scale=0.5)


def test_a_window_that_is_switched_off_and_asked_for_names_the_switch():
    types = ["sliding_attention"] * 6
    with pytest.raises(ConfigError, match="or use_sliding_window is not true"):
        spec_of(QWEN3, layer_types=types, sliding_window=8, use_sliding_window=False)


def test_each_sixth_layer_of_gemma_sees_everything():
    assert spec_of(GEMMA3).windows == (8, 8, 8, 8, 8, None)
    assert spec_of(GEMMA3, num_hidden_layers=2).windows == (8, 8)
    assert spec_of(GEMMA3, sliding_window_pattern=2).windows == (8, None) * 3
    # A key that transformers writes and does not read.
    assert spec_of(GEMMA3, _sliding_window_pattern=2) == spec_of(GEMMA3)
    types = ["full_attention"] * 5 + ["sliding_attention"]
    listed = spec_of(GEMMA3, layer_types=types, sliding_window_pattern=2)
    assert listed.windows == (None,) * 5 + (8,)
    none = spec_of(GEMMA3, layer_types=["full_attention"] * 6)
    assert none.windows == () and none.local_rope is None


# Delta nets.


@pytest.mark.parametrize("config", [QWEN3_5, QWEN3_5_MOE])
def test_delta_nets_by_name_or_by_a_period(config):
    assert spec_of(config).delta_net.layers == (0, 1, 2, 4, 5)
    assert spec_of(config, full_attention_interval=2).delta_net.layers == (0, 2, 4)
    types = ["full_attention", "linear_attention"] * 3
    spec = spec_of(config, layer_types=types, full_attention_interval=2)
    assert (spec.delta_net.layers, spec.full_layers) == ((1, 3, 5), (0, 2, 4))
    none = spec_of(config, layer_types=["full_attention"] * 6)
    assert none.delta_net is None


def test_what_delta_nets_do_not_say_is_as_published():
    bare = {key: value for key, value in QWEN3_5.items() if "linear" not in key}
    net = spec_of(bare).delta_net
    assert (net.num_key_heads, net.num_value_heads) == (16, 32)
    assert (net.key_head_dim, net.value_head_dim, net.conv_kernel_size) == (128, 128, 4)
    moe = spec_of(QWEN3_5_MOE).moe
    assert (moe.layers, moe.shared_intermediate_size) == (tuple(range(6)), 512)
    assert moe.norm_topk_prob
    shared = spec_of(QWEN3_5_MOE, shared_expert_intermediate_size=20).moe
    assert shared.shared_intermediate_size == 20


def test_a_part_of_a_head_is_rotated_wherever_the_share_is_said():
    assert spec_of(QWEN3_5).rotary_dim == 4
    assert spec_of(QWEN3_5, partial_rotary_factor=0.5).rotary_dim == 8
    rope = {"rope_type": "mrope", "rope_theta": 7.0, "partial_rotary_factor": 0.75}
    rope |= {"mrope_section": [2, 2, 2], "mrope_interleaved": True}
    for name in ("rope_parameters", "rope_scaling"):
        spec = spec_of(QWEN3_5, **{name: rope}, rope_theta=7.0)
        assert (spec.rotary_dim, spec.rope) == (12, RopeSpec(theta=7.0))
    both = spec_of(QWEN3_5, rope_parameters=rope, partial_rotary_factor=0.75)
    assert both.rotary_dim == 12


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN3_5, {"layer_types": ["linear_attention"]}, "has 1 entries .* 6 layers"),
        (
            QWEN3_5,
            {"layer_types": ["sliding_attention"] * 6},
            "'sliding_attention', but full_attention and linear_attention are",
        ),
        (QWEN3_5, {"full_attention_interval": 2.5}, "full_attention_interval is 2.5"),
        (QWEN3_5_MOE, {"num_hidden_layers": "6"}, "num_hidden_layers is '6'"),
        (QWEN3_5_MOE, {"num_hidden_layers": 10**12}, "10,000 is the limit"),
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate is false"),
        (QWEN3_5, {"hidden_act": "gelu"}, "hidden_act is 'gelu' .* by silu"),
        (QWEN3_5_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers or norm_topk"),
        (QWEN3_5_MOE, {"norm_topk_prob": False}, "mlp_only_layers or norm_topk"),
        (
            QWEN3_5,
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"partial_rotary_factor": 0.25},
            },
            "partial_rotary_factor is both 0.25 and 0.5",
        ),
        (QWEN3_5, {"linear_num_key_heads": 3}, "4 value heads cannot share 3 key"),
        (QWEN3_5, {"linear_conv_kernel_dim": 1}, "conv_kernel_size is 1"),
        (QWEN3_5, {"linear_key_head_dim": 2.5}, "key_head_dim of the delta net is 2.5"),
    ],
)
def test_delta_nets_that_cannot_be_are_refused(config, change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(config, **change)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GEMMA3, {"layer_types": ["full_attention"]}, "has 1 entries .* 6 layers"),
        (GEMMA3, {"layer_types": "full_attention"}, "layer_types is no list"),
        (QWEN3, {"layer_types": ["linear_attention"] * 6}, "type 'linear_attention'"),
        (GEMMA3, {"sliding_window": None}, "sliding_window is null"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window is 0"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 6}, "sliding_window is null"),
        (
            QWEN3,
            {"use_sliding_window": True, "max_window_layers": "4"},
            "max_window_layers is '4'",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(config, change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(config, **change)


# Experts.


def test_which_layers_have_experts():
    def layers(**changes):
        return spec_of(MOE, **changes).moe.layers

    assert layers() == (0, 1, 2, 3, 4, 5)
    assert layers(decoder_sparse_step=2) == (1, 3, 5)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 5)
    assert layers(mlp_only_layers=None) == (0, 1, 2, 3, 4, 5)
    assert spec_of(MOE, decoder_sparse_step=7).moe is None
    assert spec_of(MOE, num_experts=0).moe is None


def test_the_sizes_of_experts_and_both_spellings_of_their_number():
    expected = MoeSpec(
        layers=tuple(range(6)),
        num_experts=12,
        top_k=3,
        intermediate_size=24,
        norm_topk_prob=False,  # the published files say true, the class does not
    )
    assert spec_of(MOE).moe == expected
    other = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert spec_of(other, num_local_experts=12).moe == expected
    assert spec_of(MOE, num_local_experts=12).moe == expected
    assert spec_of(other).moe.num_experts == 128
    assert spec_of(MOE, norm_topk_prob=True).moe.norm_topk_prob


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 8}, "both 12 and 8"),
        ({"num_experts_per_tok": 13}, "goes to 13 of 12"),
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers is"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"num_experts": "12"}, "num_experts is '12'"),
    ],
)
def test_experts_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(MOE, **change)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_experts_in_one_tensor_are_those_in_many(tmp_path, backend):
    config = MOE | {"decoder_sparse_step": 3}
    many = tensors_of(config)
    one = {name: tensor for name, tensor in many.items() if ".experts." not in name}
    for layer in (2, 5):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([many[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(12)])
            for kind in ("gate", "up", "down")
        )
        one[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        one[f"{prefix}.down_proj"] = down
    split = write(tmp_path / "many", config, many)
    stacked = write(tmp_path / "one", config, one)
    assert len(stored_tensors(stacked)) < len(stored_tensors(split))
    np.testing.assert_array_equal(logits(split, backend), logits(stacked, backend))
    last = load_model(stacked, backend="numpy").weights
    np.testing.assert_array_equal(
        last["layers.5.mlp.experts.10.up_proj.weight"],
        many["model.layers.5.mlp.experts.10.up_proj.weight"],
    )


# Wrappers.

WRAPPER = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {k: v for k, v in GEMMA3.items() if k != "architectures"},
    "vision_config": {"hidden_size": 8},
}


def test_a_wrappers_text_config_is_read_and_its_own_flags_count():
    assert spec_of(WRAPPER) == spec_of(GEMMA3)
    inner = WRAPPER["text_config"] | {"tie_word_embeddings": False, "dtype": "float16"}
    assert spec_of(WRAPPER, text_config=inner).tie_word_embeddings
    assert spec_of(WRAPPER, text_config=inner).dtype == "float16"
    assert not spec_of(WRAPPER, tie_word_embeddings=False).tie_word_embeddings
    assert spec_of(WRAPPER, torch_dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="quantised weights"):
        spec_of(WRAPPER, quantization_config={"quant_method": "gptq"})


def test_what_a_wrapper_leaves_out_has_the_defaults_of_its_class():
    sizes = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    spec = spec_of(WRAPPER, text_config=sizes | {"sliding_window": 1024})
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads) == (262_208, 8, 4)
    assert (spec.head_dim, spec.query_pre_attn_scalar) == (256, 256)
    assert spec.max_position_embeddings == 131_072
    assert [rope.theta for rope in spec.ropes] == [1e6, 1e4]
    assert spec.windows.count(None) == 5 and spec.windows[-1] == 1024


@pytest.mark.parametrize(
    ("prefix", "head", "vision"),
    [
        ("language_model.model.", "language_model.lm_head.", ""),
        ("model.language_model.", "lm_head.", "model."),
        ("language_model.", "lm_head.", ""),
        ("model.", "lm_head.", ""),
        ("", "lm_head.", ""),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_spelling_of_a_wrappers_names(tmp_path, prefix, head, vision, tied):
    config = WRAPPER | {"tie_word_embeddings": tied}
    plain = write(tmp_path / "plain", config, tensors_of(config))
    named = {
        name.replace("lm_head.", head): tensor
        for name, tensor in tensors_of(config, prefix).items()
    }
    eyes = {
        f"{vision}vision_tower.embeddings.weight": np.ones((2, 2), np.float32),
        f"{vision}multi_modal_projector.norm.weight": np.ones(2, np.float32),
    }
    folder = write(tmp_path / "named", config, named | eyes)
    np.testing.assert_array_equal(logits(plain), logits(folder))
    account = account_for(load_spec(folder), family_of(config), stored_tensors(folder))
    assert sorted(account.ignored) == sorted(eyes)
    assert len(account.places) == len(named)


def test_what_a_family_does_not_ignore_is_refused(tmp_path):
    tensors = tensors_of(QWEN3)
    extra = {"model.vision_tower.embeddings.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(WeightMismatch, match=r"unexpected: vision_tower\.emb"):
        load_model(write(tmp_path, QWEN3, tensors | extra))


# Tied matrices.


def test_tied_matrices_under_either_name(tmp_path):
    config = QWEN3 | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    embedding = tensors["model.embed_tokens.weight"]
    twice = tensors | {"lm_head.weight": embedding.copy()}
    head = {k: v for k, v in twice.items() if k != "model.embed_tokens.weight"}
    folders = [
        write(tmp_path / str(number), config, kind)
        for number, kind in enumerate((tensors, twice, head))
    ]
    for folder in folders:
        np.testing.assert_array_equal(logits(folder), logits(folders[0]))
    accounts = [
        account_for(load_spec(f), family_of(config), stored_tensors(f)) for f in folders
    ]
    assert [a.repeated for a in accounts] == [[], ["lm_head.weight"], []]


# Names of tensors against the config.

NOTES = {
    "norms that the config does not ask for": (
        LLAMA | {"head_dim": 16},
        QWEN3,
        "asks for 0 norms of queries and keys, but the files hold 12: see the arch",
    ),
    "norms that the files lack": (
        QWEN3,
        LLAMA | {"head_dim": 16},
        "asks for 12 norms of queries and keys, but the files hold 0: see the arch",
    ),
    "two norms for four": (
        GEMMA3,
        QWEN3 | {"tie_word_embeddings": True},
        "asks for 12 norms before or behind an MLP, but the files hold 0",
    ),
    "biases that the files lack": (
        QWEN2,
        LLAMA,
        "asks for 18 biases, but the files hold 0",
    ),
    "biases that the config does not ask for": (
        LLAMA,
        QWEN2,
        "asks for 0 biases, but the files hold 18: see attention_bias",
    ),
    "experts in other layers": (
        MOE | {"decoder_sparse_step": 2},
        MOE,
        "asks for 111 matrices of experts, but the files hold 222: see num_experts",
    ),
    "fewer experts": (
        MOE,
        MOE | {"num_experts": 8},
        "asks for 222 matrices of experts, but the files hold 150: see num_experts",
    ),
    "heads of another width": (
        QWEN3 | {"head_dim": 8},
        QWEN3,
        "4 heads of 8, but the files make queries of 64 numbers: see head_dim",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_config_and_names_that_disagree_are_both_named(tmp_path, case):
    config, other, note = NOTES[case]
    with pytest.raises(WeightMismatch, match=note):
        load_model(write(tmp_path, config, tensors_of(other)))


@pytest.mark.parametrize(
    ("config", "pattern", "what"),
    [
        (QWEN2, ".bias", "18 biases, but the files hold 15"),
        (QWEN3, "q_norm.weight", "12 norms of queries and keys, but the files hold 11"),
        (MOE, "experts.3.", "222 matrices of experts, but the files hold 219"),
    ],
)
def test_a_layer_that_lacks_something_is_an_incomplete_file(
    tmp_path, config, pattern, what
):
    tensors = {
        name: tensor
        for name, tensor in tensors_of(config).items()
        if not (name.startswith("model.layers.4.") and pattern in name)
    }
    with pytest.raises(WeightMismatch, match=f"{what}: the files are incomplete"):
        load_model(write(tmp_path, config, tensors))


def test_a_missing_shard_is_not_an_absence_of_biases(tmp_path):
    folder = write(tmp_path, QWEN2, tensors_of(QWEN2))
    tensors = tensors_of(QWEN2)
    files = {
        "biases.safetensors": {k: v for k, v in tensors.items() if "bias" in k},
        "others.safetensors": {k: v for k, v in tensors.items() if "bias" not in k},
    }
    (folder / "model.safetensors").unlink()
    for file, part in files.items():
        write_safetensors(folder / file, part, "F32")
    names = {name: file for file, part in files.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    load_model(folder)
    (folder / "biases.safetensors").unlink()
    with pytest.raises(Exception, match=r"fetch biases\.safetensors"):
        load_model(folder)


def test_quantised_tensors_are_refused_not_ignored(tmp_path):
    tensors = tensors_of(QWEN3)
    scale = {"model.layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)}
    with pytest.raises(WeightMismatch, match=r"unexpected: .*weight_scale"):
        load_model(write(tmp_path, QWEN3, tensors | scale))


# Types.


def test_gemma_is_not_computed_in_float16(tmp_path):
    folder = write(tmp_path, GEMMA3 | {"dtype": "float16"}, tensors_of(GEMMA3))
    assert load_model(folder).embed_tokens.weight.dtype.itemsize == 2
    assert str(load_model(folder).embed_tokens.weight.dtype) == "torch.bfloat16"
    with pytest.raises(ConfigError, match=r"float16.*use bfloat16 or float32"):
        load_model(folder, dtype="float16")
