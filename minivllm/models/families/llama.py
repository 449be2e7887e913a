"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else copies their shape.

Source: appendix A3, "Loading"; appendix A23, "Reading families".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import (
    OLD_BUFFERS,
    Family,
    flag,
    read_common,
    read_hidden_act,
    with_defaults,
)
from minivllm.models.families.rope import read_rope
from minivllm.models.families.windows import SLIDING, read_layer_types
from minivllm.models.spec import ModelSpec

LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Llama config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(config, LLAMA_DEFAULTS)
    has_bias = flag(config, "attention_bias")
    common = read_common(config)
    if SLIDING in (read_layer_types(config) or ()):
        # Some programs would give these layers a window, transformers would not.
        raise ConfigError(
            f"config.json has layers of the type {SLIDING}, but a LlamaForCausalLM has "
            "no windows: choose another model, or remove layer_types"
        )
    if config.get("logit_scale") not in (None, 1):
        raise ConfigError(
            f"logit_scale is {config['logit_scale']!r:.40} in config.json, which vLLM "
            "obeys and transformers does not: choose another model, or remove it"
        )
    return ModelSpec(
        architecture="LlamaForCausalLM",
        **common,
        rope=read_rope(config),
        hidden_act=read_hidden_act(config),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


LLAMA = Family(
    architectures=("LlamaForCausalLM", "LlamaModel"),
    model_types=("llama",),
    read_spec=read_spec,
    renames=((r"^model\.", ""),),
    ignored=(OLD_BUFFERS,),
)
