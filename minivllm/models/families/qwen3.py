"""The Qwen3 family: norms on queries and keys, and in one branch of it experts.

Source: appendix A23, "Reading families".
"""

import re
from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import (
    OLD_BUFFERS,
    Family,
    Part,
    flag,
    positive,
    read_common,
    read_hidden_act,
    with_defaults,
)
from minivllm.models.families.rope import read_rope
from minivllm.models.families.windows import (
    FULL,
    SLIDING,
    read_layer_types,
    read_qwen_windows,
    windows_of,
)
from minivllm.models.spec import ModelSpec, MoeSpec, check_size

MAX_EXPERTS = 10_000
BOTH_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 4096,
}
QWEN3_DEFAULTS = BOTH_DEFAULTS | {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_window_layers": 28,
}
QWEN3_MOE_DEFAULTS = BOTH_DEFAULTS | {
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def read_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what both branches share, as arguments of `ModelSpec`.

    `qk_norm` is a key of ours: a model of another family that was turned into experts
    has no such norms.
    """
    has_bias = flag(config, "attention_bias")
    return {
        **read_common(config),
        "rope": read_rope(config),
        "hidden_act": read_hidden_act(config),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "qk_norm": flag(config, "qk_norm", True),
    }


def read_qwen3(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Qwen3 config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(config, QWEN3_DEFAULTS)
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        **read_attention(config),
        windows=read_qwen_windows(config),
    )


def read_num_experts(config: Mapping[str, Any]) -> int:
    """Read the number of experts, which has two spellings."""
    keys = ("num_experts", "num_local_experts")
    said = [config[key] for key in keys if key in config]
    if len(said) == 2 and said[0] != said[1]:
        raise ConfigError(
            f"num_experts is both {said[0]} and {said[1]} (num_local_experts) in "
            "config.json: keep one"
        )
    if said[:1] == [0]:
        return 0  # a config may switch them off
    count = positive({"num_experts": said[0]} if said else {}, "num_experts", 128)
    check_size("num_experts", count)
    if count > MAX_EXPERTS:  # each gets names of its own, in every layer
        raise ConfigError(
            f"num_experts is {count} in config.json, but {MAX_EXPERTS:,} is the limit: "
            "fetch the model's own file"
        )
    return count


def read_experts(config: Mapping[str, Any]) -> MoeSpec | None:
    """Read which layers have experts, and how many; None if no layer has any.

    Raises:
        ConfigError: A size is impossible.
    """
    num_experts = read_num_experts(config)
    step, dense = positive(config, "decoder_sparse_step"), config["mlp_only_layers"]
    check_size("decoder_sparse_step", step)
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(
            f"mlp_only_layers is {dense!r:.60} in config.json, but must be a list of "
            "layer numbers: fetch the model's own file"
        )
    layers = tuple(
        layer
        for layer in range(config["num_hidden_layers"])
        if layer not in dense and (layer + 1) % step == 0
    )
    if not num_experts or not layers:
        return None
    return MoeSpec(
        layers=layers,
        num_experts=num_experts,
        top_k=positive(config, "num_experts_per_tok"),
        intermediate_size=positive(config, "moe_intermediate_size"),
        norm_topk_prob=flag(config, "norm_topk_prob"),
    )


def read_moe_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read the windows of Qwen3-MoE: all layers have one, or none has.

    Raises:
        ConfigError: config.json lists other layer types, which no program reads.
    """
    if not flag(config, "use_sliding_window"):
        config = {**config, "sliding_window": None}
    kind = FULL if config.get("sliding_window") is None else SLIDING
    types = [kind] * config["num_hidden_layers"]
    if read_layer_types(config) not in (None, types):
        raise ConfigError(
            f"config.json has a list of layer_types, but a Qwen3-MoE whose layers are "
            f"not all {kind} is not supported: choose another model"
        )
    return windows_of(types, config)


def read_qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Qwen3-MoE config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(config, QWEN3_MOE_DEFAULTS)
    return ModelSpec(
        architecture="Qwen3MoeForCausalLM",
        **read_attention(config),
        windows=read_moe_windows(config),
        moe=read_experts(config),
    )


def unstack_experts(name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """Find the matrices of each expert in a tensor that holds those of all.

    Most files have a tensor per expert and matrix. Some have gate and up of all experts
    in one, [experts, 2 * intermediate, hidden], the rows of the gate first.
    """
    pattern = r"(layers\.\d+\.mlp\.experts\.)(gate_up|gate|up|down)_proj"
    match = re.fullmatch(pattern, name)
    if not match or len(shape) != 3:
        return {name: ()}
    prefix, kind = match.groups()
    parts: dict[str, Part] = {}
    for expert in range(shape[0]):
        if kind == "gate_up":
            half = shape[1] // 2
            parts[f"{prefix}{expert}.gate_proj.weight"] = (expert, slice(0, half))
            parts[f"{prefix}{expert}.up_proj.weight"] = (expert, slice(half, None))
        else:
            parts[f"{prefix}{expert}.{kind}_proj.weight"] = (expert,)
    return parts


QWEN3 = Family(
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    model_types=("qwen3",),
    read_spec=read_qwen3,
    renames=((r"^model\.", ""),),
    ignored=(OLD_BUFFERS,),
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    model_types=("qwen3_moe",),
    read_spec=read_qwen3_moe,
    renames=((r"^model\.", ""),),
    ignored=(OLD_BUFFERS,),
    unstack=unstack_experts,
)
