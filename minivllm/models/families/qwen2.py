"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values.

Source: appendix A23, "Reading families".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.models.families.base import (
    OLD_BUFFERS,
    Family,
    read_common,
    read_hidden_act,
    with_defaults,
)
from minivllm.models.families.rope import read_rope
from minivllm.models.families.windows import read_qwen_windows
from minivllm.models.spec import ModelSpec

QWEN2_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_qwen2(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Qwen2 config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(config, QWEN2_DEFAULTS)
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        **read_common(config),
        rope=read_rope(config),
        hidden_act=read_hidden_act(config),
        qkv_bias=True,  # always, and no key says so
        windows=read_qwen_windows(config),
    )


QWEN2 = Family(
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    model_types=("qwen2",),
    read_spec=read_qwen2,
    renames=((r"^model\.", ""),),
    ignored=(OLD_BUFFERS,),
)
