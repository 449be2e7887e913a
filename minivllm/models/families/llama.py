"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else copies their shape.

Source: chapter 1, "Naive generation".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import Family
from minivllm.models.spec import Llama3Scaling, ModelSpec, RopeFactors, RopeSpec


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rope settings in both spellings that config.json files use.

    Older files have `rope_theta` and an optional `rope_scaling`; newer ones put
    everything into `rope_parameters`.

    Raises:
        ConfigError: For a scaling that the decoder does not know.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "factors":  # ours: what convert_gguf() writes for `rope_freqs`
        return RopeSpec(theta=theta, scaling=RopeFactors(factors=(*rope["factors"],)))
    if kind == "llama3":
        names = Llama3Scaling.__dataclass_fields__
        missing = [name for name in names if name not in rope]
        if missing:
            raise ConfigError(
                f"the llama3 rope scaling lacks {', '.join(missing)}: mend config.json"
            )
        return RopeSpec(
            theta=theta, scaling=Llama3Scaling(**{name: rope[name] for name in names})
        )
    raise ConfigError(
        f"rope scaling {kind!r} is not supported, but default and llama3 are: "
        "a wrong guess would give fluent nonsense, so choose another model"
    )


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Llama config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    sizes = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    missing = [key for key in sizes.values() if key not in config]
    if missing:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}: fetch the model's own file"
        )
    hidden_act = config.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ConfigError(
            f"hidden_act is {hidden_act!r}, but only 'silu' is supported: "
            "choose another model"
        )
    heads = config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture="LlamaForCausalLM",
        **{ours: config[key] for ours, key in sizes.items()},
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        hidden_act=hidden_act,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    read_spec=read_spec,
    renames=((r"^model\.", ""),),
    ignored=(r".*\.rotary_emb\.inv_freq",),  # old files store what rope recomputes
)
