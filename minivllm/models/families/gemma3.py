"""The Gemma 3 family: four norms, two rotations, windows; also inside a wrapper.

The larger models of the family see images as well. Their config.json is a wrapper, with
the language model's settings in `text_config`; of their tensors we read the language
model's.

Source: appendix A23, "Reading families".
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
from minivllm.models.families.rope import read_gemma_ropes
from minivllm.models.families.windows import read_gemma_windows
from minivllm.models.spec import ModelSpec

# Published wrappers leave out whatever is as in this list.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's settings, out of a wrapper if there is one.

    Whether the embedding is tied counts at the outer level only; the number type may
    stand at either.

    Raises:
        ConfigError: `text_config` is no object.
    """
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"text_config is {inner!r:.60} in config.json, but must be an object: "
            "fetch the model's own file"
        )
    outer = ("tie_word_embeddings", "quantization_config")
    types = {key: config.get(key) for key in ("dtype", "torch_dtype")}
    if any(inner.get(key) for key in types):
        types = {}
    return {**inner, **types, **{key: config.get(key) for key in outer}}


def read_gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Gemma 3 config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    config = with_defaults(text_settings(config), GEMMA3_DEFAULTS)
    has_bias = flag(config, "attention_bias")
    common = read_common(config)
    windows = read_gemma_windows(config)
    rope, local_rope = read_gemma_ropes(config)
    return ModelSpec(
        architecture="Gemma3ForCausalLM",
        **common,
        rope=rope,
        local_rope=local_rope if windows and local_rope != rope else None,
        windows=windows,
        hidden_act=read_hidden_act(config, "hidden_activation"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=True,
        norm_plus_one=True,
        post_norms=True,
        embedding_scale=common["hidden_size"] ** 0.5,
        query_pre_attn_scalar=float(positive(config, "query_pre_attn_scalar")),
    )


GEMMA3 = Family(
    architectures=(
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3TextModel",
        "Gemma3Model",
    ),
    model_types=("gemma3_text", "gemma3"),
    read_spec=read_gemma3,
    renames=(
        (r"^(model\.language_model|language_model\.model|language_model|model)\.", ""),
    ),
    ignored=(OLD_BUFFERS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    overflows=("float16",),  # published models reach beyond its 65,504
)
