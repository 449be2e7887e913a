"""What a family of checkpoints must say about itself.

Source: appendix A3, "Loading"; appendix A23, "Reading families".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.spec import ModelSpec, check_size


def positive(
    config: Mapping[str, Any], key: str, default: float | None = None
) -> float:
    """Read a positive number; null counts as missing.

    Raises:
        ConfigError: It is missing and has no default, or is no such number.
    """
    value = config.get(key)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 2**63:
        raise ConfigError(
            f"{key} is {value!r} in config.json, but must be a positive number: fetch "
            "the model's own file"
        )
    return value


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Read true or false; null counts as missing.

    Raises:
        ConfigError: It is something else.
    """
    value = config.get(key)
    if value not in (None, False, True):
        raise ConfigError(f"{key} is {value!r} in config.json: write true or false")
    return default if value is None else bool(value)


Part = tuple[int | slice, ...]
"""Which part of a stored tensor is one of ours; () is all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: its config, its tensor names."""

    architectures: tuple[str, ...]
    """What config.json calls it; the first is that of a whole language model."""
    model_types: tuple[str, ...] = ()
    """What config.json calls it where it names no architecture."""
    read_spec: Callable[[Mapping[str, Any]], ModelSpec]
    renames: tuple[tuple[str, str], ...]
    """(regular expression, replacement) from checkpoint names to ours, in order."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that are left out on purpose."""
    overflows: tuple[str, ...] = ()
    """Types of numbers that are too small for what its layers compute."""
    unstack: Callable[[str, tuple[int, ...]], dict[str, Part]] | None = None
    """From a name of ours and a shape to the parts, if files may stack tensors."""

    def ignores(self, name: str) -> bool:
        """Tell whether a checkpoint's tensor is left out on purpose."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def rename(self, name: str) -> str | None:
        """Return our name for a checkpoint's tensor, None if it is ignored."""
        if self.ignores(name):
            return None
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return our names for what a checkpoint's tensor holds; {} if it is ignored.

        Most hold one of ours; some files have all experts of a layer in one.
        """
        ours = self.rename(name)
        if ours is None:
            return {}
        return self.unstack(ours, shape) if self.unstack else {ours: ()}


# Their name in config.json, and in a spec.
HIDDEN_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
COMPUTED_IN = ("float32", "float16", "bfloat16")
MAX_LAYERS = 10_000
# Settings that change what is computed, and that no family of ours has.
FOREIGN = {
    "quantization_config": "quantised weights",
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
    "use_bidirectional_attention": "attention to later tokens",
    "shared_expert_intermediate_size": "shared experts",
    "n_shared_experts": "shared experts",
}
# Where null is not the same as nothing.
NULLS = ("num_key_value_heads", "sliding_window")
OLD_BUFFERS = r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
"""What old files store, and rope recomputes."""


def with_defaults(
    config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill in what a config leaves out, after a look at what it must not say.

    Raises:
        ConfigError: It has a setting that no family supports.
    """
    foreign = [key for key in FOREIGN if config.get(key)]
    if config.get("is_causal") is False:
        foreign.append("is_causal")
    if foreign:
        key = foreign[0]
        means = FOREIGN.get(key, "attention to later tokens")
        raise ConfigError(
            f"config.json has {key} = {config[key]!r:.60}, but {means} are not "
            "supported: choose another model, or another version of this one"
        )
    said = {k: v for k, v in config.items() if v is not None or k in NULLS}
    return {**defaults, **said}


def read_common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what all families spell alike, as arguments of `ModelSpec`.

    Args:
        config: With the defaults of its family.

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
    missing = [key for key in needed.values() if key not in config]
    if missing:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}: fetch the model's own file"
        )
    sizes = {ours: positive(config, key) for ours, key in needed.items()}
    for name, size in sizes.items():
        check_size(name, size)
    if sizes["num_layers"] > MAX_LAYERS:  # each gets a list of names
        raise ConfigError(
            f"num_hidden_layers is {sizes['num_layers']} in config.json, but "
            f"{MAX_LAYERS:,} is the limit: fetch the model's own file"
        )
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in (None, *COMPUTED_IN):
        raise ConfigError(
            f"dtype is {dtype!r} in config.json, but must be float32, float16 or "
            "bfloat16: choose another model"
        )
    if config.get("head_dim") is None and sizes["num_heads"] > sizes["hidden_size"]:
        raise ConfigError(
            f"num_attention_heads is {sizes['num_heads']} in config.json, but "
            f"hidden_size is {sizes['hidden_size']}, and each head takes its share of "
            "that: fetch the model's own file, or say head_dim"
        )
    return {
        **sizes,
        "num_kv_heads": positive(config, "num_key_value_heads", sizes["num_heads"]),
        "head_dim": positive(
            config, "head_dim", int(sizes["hidden_size"] // sizes["num_heads"])
        ),
        "max_position_embeddings": positive(config, "max_position_embeddings"),
        "rms_norm_eps": float(positive(config, "rms_norm_eps")),
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
        "dtype": dtype,
    }


def read_hidden_act(config: Mapping[str, Any], key: str = "hidden_act") -> str:
    """Read the activation of the MLP, under our name.

    Raises:
        ConfigError: It is none that the decoders have.
    """
    name = config.get(key)
    if not isinstance(name, str) or name not in HIDDEN_ACTS:
        raise ConfigError(
            f"{key} is {name!r} in config.json, but {', '.join(HIDDEN_ACTS)} are "
            "supported: choose another model"
        )
    return HIDDEN_ACTS[name]
