"""The spec, the families, and the accounts of tensors."""

from dataclasses import replace

import pytest

from minivllm.errors import ConfigError, WeightMismatch
from minivllm.models.families import family_of
from minivllm.models.families.llama import LLAMA
from minivllm.models.spec import Llama3Scaling, RopeFactors, RopeSpec
from tests.test_generation import SPEC

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(**changes):
    return family_of(CONFIG).read_spec(CONFIG | changes)


def test_what_a_config_leaves_out_has_the_defaults_of_llama():
    spec = spec_of()
    assert (spec.head_dim, spec.num_kv_heads) == (8, 2)
    assert (spec.max_position_embeddings, spec.rms_norm_eps) == (2048, 1e-6)
    assert spec.rope == RopeSpec(theta=10_000.0)
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias)
    assert not spec.tie_word_embeddings
    config = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
    assert family_of(config).read_spec(config).num_kv_heads == 6


def test_both_spellings_of_the_rope_settings_mean_the_same():
    old = spec_of(rope_theta=5e5, rope_scaling={"type": "llama3"} | LLAMA3)
    new = spec_of(
        rope_parameters={"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3,
        rope_scaling=None,
    )
    assert old.rope == new.rope
    assert old.rope == RopeSpec(theta=5e5, scaling=Llama3Scaling(**LLAMA3))
    both = {"rope_theta": 5e5, "rope_type": "default"}
    assert spec_of(rope_parameters=both, rope_scaling=both).rope.theta == 5e5
    assert spec_of(rope_parameters=both, rope_theta=5e5).rope.theta == 5e5
    assert spec_of(rope_scaling={"rope_type": None, "type": None}).rope.theta == 1e4


def test_a_null_in_the_config_counts_as_missing():
    assert spec_of(head_dim=None, rms_norm_eps=None, attention_bias=None) == spec_of()


def test_the_factors_of_a_gguf_file_are_kept():
    spec = spec_of(rope_scaling={"rope_type": "factors", "factors": [1, 1, 2, 8]})
    assert spec.rope.scaling == RopeFactors(factors=(1.0, 1.0, 2.0, 8.0))
    assert hash(spec) == hash(replace(spec))


def test_both_spellings_of_the_dtype_are_read():
    assert spec_of(torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec_of(dtype="float16").dtype == "float16"
    assert spec_of(dtype="float16", torch_dtype="float32").dtype == "float16"
    assert spec_of().dtype is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "mystery"}}, "'mystery' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3 | {"factor": "8"}}, "is '8'"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor must be below",
        ),
        (
            {
                "rope_scaling": {"type": "llama3"} | LLAMA3,
                "original_max_position_embeddings": 4096,
            },
            "original_max_position_embeddings twice",
        ),
        (
            {
                "rope_scaling": {"type": "llama3"} | LLAMA3,
                "rope_parameters": {"rope_theta": 1e4},
            },
            "two rope settings that differ",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"partial_rotary_factor": 1},
            },
            "partial rotary",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "both 500000.0 and 10000.0",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "factors"}}, "factors is None"),
        ({"rope_scaling": {"type": "factors", "factors": [1, 1, 2]}}, "has 3 factors"),
        (
            {"rope_scaling": {"type": "factors", "factors": [1, 1, 2, 0]}},
            r"factors\[3\] is 0",
        ),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "is not supported"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 48.0}, "hidden_size is 48.0"),
        ({"num_attention_heads": "6"}, "num_attention_heads is '6'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"attention_bias": "false"}, "attention_bias is 'false'"),
        ({"dtype": "banana"}, "dtype is 'banana'"),
    ],
)
def test_an_impossible_config_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(**changes)


def test_a_missing_size_is_named():
    config = {k: v for k, v in CONFIG.items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        LLAMA.read_spec(config)


def test_an_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        family_of({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ConfigError, match=r"\(none\)"):
        family_of({})
    for odd in ([None], 3, "Mamba"):
        with pytest.raises(
            ConfigError, match=f"architecture {odd if odd != [None] else None}"
        ):
            family_of({"architectures": odd})


def test_names_lose_their_prefix_and_old_buffers_are_ignored():
    assert LLAMA.rename("model.layers.0.mlp.up_proj.weight") == (
        "layers.0.mlp.up_proj.weight"
    )
    assert LLAMA.rename("lm_head.weight") == "lm_head.weight"
    assert LLAMA.rename("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert LLAMA.rename("model.inv_freq.weight") == "inv_freq.weight"
    assert LLAMA.rename("my.rotary_emb.inv_freq.scale") is not None


def test_parameters_are_counted_as_the_shapes_say():
    # 8x4 tokens twice; q, k, v, o of 4x4; three MLP matrices of 4x4; three norms of 4.
    assert SPEC.num_parameters == 2 * 32 + 7 * 16 + 3 * 4
    tied = replace(SPEC, tie_word_embeddings=True)
    assert tied.num_parameters == SPEC.num_parameters - 32
    biased = replace(SPEC, qkv_bias=True, o_bias=True, mlp_bias=True)
    assert biased.num_parameters == SPEC.num_parameters + 7 * 4


def test_every_disagreement_about_tensors_is_in_one_message():
    found = dict(SPEC.weight_shapes())
    SPEC.check_weights(found)
    del found["norm.weight"]
    found["lm_head.weight"] = (8, 5)
    found["visual.weight"] = (1,)
    with pytest.raises(WeightMismatch) as error:
        SPEC.check_weights(found)
    message = str(error.value)
    assert "3 tensors do not fit the 12" in message
    assert message.index("missing:") < message.index("shape:") < message.index("unexp")
    assert "missing: norm.weight (4,)" in message
    assert "shape: lm_head.weight is (8, 5), needed (8, 4)" in message
    assert "unexpected: visual.weight" in message


def test_a_long_list_of_disagreements_is_cut():
    many = replace(SPEC, num_layers=9)
    with pytest.raises(WeightMismatch, match="and 64 more"):
        many.check_weights({})
