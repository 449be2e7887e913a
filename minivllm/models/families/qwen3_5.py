"""The Qwen3.5 family: delta nets and attention in turn, with experts or without.

Its models see images as well, so their config.json is a wrapper, with the language
model's settings in `text_config`. Positions in images have three coordinates; those of
text are equal, and the rotation is the usual one.

Source: chapter 8, "Hybrid attention".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import (
    OLD_BUFFERS,
    Family,
    flag,
    positive,
    read_common,
    read_hidden_act,
    with_defaults,
)
from minivllm.models.families.gemma3 import text_settings
from minivllm.models.families.qwen3 import unstack_experts
from minivllm.models.families.rope import read_rope
from minivllm.models.families.windows import FULL, read_layer_types
from minivllm.models.spec import DeltaNetSpec, ModelSpec, MoeSpec, check_size

LINEAR = "linear_attention"
QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
DENSE_DEFAULTS = QWEN3_5_DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS = QWEN3_5_DEFAULTS | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
# Of pictures and films, or of how a state is kept: float32, as it is here in any case.
ROPE_KEYS = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")


def read_linear_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read which layers are delta nets: of each four the first three, if not said.

    Raises:
        ConfigError: A type is unknown, or they are more or fewer than the layers.
    """
    types = read_layer_types(config, known=(FULL, LINEAR))
    if types is None:
        period = positive(config, "full_attention_interval")
        check_size("full_attention_interval", period)
        layers = range(config["num_hidden_layers"])
        types = [LINEAR if (layer + 1) % period else FULL for layer in layers]
    return tuple(i for i, kind in enumerate(types) if kind == LINEAR)


def read_delta_net(config: Mapping[str, Any]) -> DeltaNetSpec | None:
    """Read the sizes of the delta nets; None if there are none."""
    layers = read_linear_layers(config)
    if not layers:
        return None
    return DeltaNetSpec(
        layers=layers,
        num_key_heads=positive(config, "linear_num_key_heads"),
        num_value_heads=positive(config, "linear_num_value_heads"),
        key_head_dim=positive(config, "linear_key_head_dim"),
        value_head_dim=positive(config, "linear_value_head_dim"),
        conv_kernel_size=positive(config, "linear_conv_kernel_dim"),
    )


def read_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotation, and how much of a head it turns: a quarter, if not said.

    Raises:
        ConfigError: A setting is unknown, or said twice and differently.
    """
    plain = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    shares = [config.get("partial_rotary_factor")]
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            shares.append(rope.get("partial_rotary_factor"))
            plain[name] = {k: v for k, v in rope.items() if k not in ROPE_KEYS}
            kind = rope.get("rope_type", rope.get("type"))
            if kind == "mrope":  # an old name for three coordinates
                plain[name] |= {"rope_type": "default", "type": "default"}
    said = {share for share in shares if share is not None}
    if len(said) > 1:
        raise ConfigError(
            f"partial_rotary_factor is both {' and '.join(map(str, sorted(said)))} in "
            "config.json: keep one"
        )
    share = positive({"partial_rotary_factor": (said or {0.25}).pop()}, *ROPE_KEYS[2:])
    head_dim = positive(config, "head_dim")
    return {"rope": read_rope(plain), "rotary_dim": int(head_dim * share)}


def read_qwen3_5(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Qwen3.5 config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(text_settings(config), DENSE_DEFAULTS)
    return ModelSpec(architecture="Qwen3_5ForCausalLM", **read_parts(config))


def read_qwen3_5_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Qwen3.5-MoE config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = text_settings(config)
    shared = config.pop("shared_expert_intermediate_size", None)
    config = with_defaults(config, MOE_DEFAULTS)
    if config.get("mlp_only_layers") or config.get("norm_topk_prob") is False:
        raise ConfigError(
            "config.json has mlp_only_layers or norm_topk_prob = false, which no "
            "Qwen3.5 has: fetch the model's own file"
        )
    # It has no other MLP than its experts; the spec wants a size all the same.
    config.setdefault("intermediate_size", config["moe_intermediate_size"])
    parts = read_parts(config)
    moe = MoeSpec(
        layers=tuple(range(parts["num_layers"])),
        num_experts=positive(config, "num_experts"),
        top_k=positive(config, "num_experts_per_tok"),
        intermediate_size=positive(config, "moe_intermediate_size"),
        norm_topk_prob=True,
        shared_intermediate_size=positive({"shared": shared}, "shared", 512),
    )
    return ModelSpec(architecture="Qwen3_5MoeForCausalLM", **parts, moe=moe)


def read_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what both branches share, as arguments of `ModelSpec`."""
    if not flag(config, "attn_output_gate", True):
        raise ConfigError(
            "attn_output_gate is false in config.json, but Qwen3.5 without the gate is "
            "not supported: choose another model"
        )
    if read_hidden_act(config) != "silu":
        raise ConfigError(
            f"hidden_act is {config['hidden_act']!r} in config.json, but the "
            "convolution of Qwen3.5 is followed by silu: choose another model"
        )
    has_bias = flag(config, "attention_bias")
    return {
        **read_common(config),
        **read_rotary(config),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "qk_norm": True,
        "norm_plus_one": True,
        "attention_gate": True,
        "delta_net": read_delta_net(config),
    }


RENAMES = (
    (r"^(model\.language_model|language_model\.model|language_model|model)\.", ""),
)
IGNORED = (OLD_BUFFERS, r"mtp\..*", r"(model\.)?visual\..*")
QWEN3_5 = Family(
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5TextModel",
        "Qwen3_5Model",
    ),
    model_types=("qwen3_5_text", "qwen3_5"),
    read_spec=read_qwen3_5,
    renames=RENAMES,
    ignored=IGNORED,
)
QWEN3_5_MOE = Family(
    architectures=(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeTextModel",
        "Qwen3_5MoeModel",
    ),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    read_spec=read_qwen3_5_moe,
    renames=RENAMES,
    ignored=IGNORED,
    unstack=unstack_experts,
)
