"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else copies their shape.

Source: appendix A3, "Loading".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import Family, flag, positive
from minivllm.models.spec import Llama3Scaling, ModelSpec, RopeFactors, RopeSpec

LLAMA3_KEYS = tuple(Llama3Scaling.__dataclass_fields__)
ROPE_KEYS = {"default": (), "llama3": LLAMA3_KEYS, "factors": ("factors",)}


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rope settings in both spellings that config.json files use.

    Older files have `rope_theta` and an optional `rope_scaling`; newer ones put
    everything into `rope_parameters`. The kind "factors" is ours: `convert_gguf` writes
    it. Nothing is ignored: a wrong guess would give fluent nonsense.

    Raises:
        ConfigError: A setting is unknown, missing, or said twice and differently.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    rope = config[names[0]] if names else {}
    if len(names) == 2 and config[names[1]] != rope:
        raise ConfigError("config.json has two rope settings that differ: keep one")
    if not isinstance(rope, Mapping):
        raise ConfigError(
            f"{names[0]} is {rope!r} in config.json: it must be an object"
        )
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(
            f"rope scaling {kind!r} is not supported, but default and llama3 are: "
            "choose another model"
        )
    known = {"rope_theta", "rope_type", "type", *ROPE_KEYS[kind]}
    partial = [place.get("partial_rotary_factor") for place in (rope, config)]
    unknown = sorted(rope.keys() - known - {"partial_rotary_factor"})
    if unknown or any(share not in (None, 1) for share in partial):
        raise ConfigError(
            f"rope scaling {kind!r} comes with {', '.join(unknown) or 'partial rotary'}"
            ", which is not supported: choose another model"
        )
    inner, outer = rope.get("rope_theta"), config.get("rope_theta")
    if None not in (inner, outer) and inner != outer:
        raise ConfigError(f"rope_theta is both {inner} and {outer}: keep one")
    place = config if inner is None else rope
    theta = float(positive(place, "rope_theta", 10_000.0))
    if theta < 1:
        raise ConfigError(f"rope_theta is {theta}, but must be at least 1")
    if kind == "llama3":
        values = {key: positive(rope, key) for key in LLAMA3_KEYS}
        outer = config.get("original_max_position_embeddings")
        if outer not in (None, values["original_max_position_embeddings"]):
            raise ConfigError(
                "config.json says original_max_position_embeddings twice: keep one"
            )
        if values["low_freq_factor"] >= values["high_freq_factor"]:
            raise ConfigError("low_freq_factor must be below high_freq_factor")
        return RopeSpec(theta=theta, scaling=Llama3Scaling(**values))
    if kind == "factors":
        factors = rope.get("factors")
        if not isinstance(factors, list) or not factors:
            raise ConfigError(
                f"factors is {factors!r} in config.json: it must be a list"
            )
        entries = {f"factors[{i}]": factor for i, factor in enumerate(factors)}
        values = tuple(float(positive(entries, key)) for key in entries)
        return RopeSpec(theta=theta, scaling=RopeFactors(factors=values))
    return RopeSpec(theta=theta)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Llama config.json into a `ModelSpec`.

    Raises:
        ConfigError: A size is missing or impossible, or a setting is unknown.
    """
    needed = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    missing = [key for key in needed.values() if config.get(key) is None]
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
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise ConfigError(
            f"dtype is {dtype!r} in config.json, but must be float32, float16 or "
            "bfloat16: choose another model"
        )
    sizes = {ours: positive(config, key) for ours, key in needed.items()}
    has_bias = flag(config, "attention_bias")
    return ModelSpec(
        architecture="LlamaForCausalLM",
        **sizes,
        num_kv_heads=positive(config, "num_key_value_heads", sizes["num_heads"]),
        head_dim=positive(
            config, "head_dim", int(sizes["hidden_size"] // sizes["num_heads"])
        ),
        max_position_embeddings=positive(config, "max_position_embeddings", 2048),
        rms_norm_eps=float(positive(config, "rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        hidden_act=hidden_act,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        dtype=dtype,
    )


LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    read_spec=read_spec,
    renames=((r"^model\.", ""),),
    ignored=(r".*\.rotary_emb\.inv_freq",),  # old files store what rope recomputes
)
