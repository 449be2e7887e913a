"""Read the settings of RoPE, in both spellings that config.json files use.

Older files have `rope_theta` and an optional `rope_scaling`; newer ones put everything
into `rope_parameters`.

Invariant: nothing is ignored, for a wrong guess would give fluent nonsense.

Source: appendix A3, "Loading"; appendix A23, "Reading families".
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import flag, positive
from minivllm.models.spec import (
    LinearScaling,
    Llama3Scaling,
    RopeFactors,
    RopeSpec,
    YarnScaling,
)

Settings = Mapping[str, Any]


def original_length(rope: Settings, config: Settings, default: Any = None) -> int:
    """Return the context that the model was first trained on, said in two places."""
    key = "original_max_position_embeddings"
    inner, outer = rope.get(key), config.get(key)
    if None not in (inner, outer) and inner != outer:
        raise ConfigError(f"config.json says {key} twice: keep one")
    return positive(config if inner is None else rope, key, default)


def read_llama3(rope: Settings, config: Settings) -> Llama3Scaling:
    """Read the scaling of Llama 3.1."""
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    values = {key: positive(rope, key) for key in keys}
    if values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ConfigError("low_freq_factor must be below high_freq_factor")
    return Llama3Scaling(
        **values, original_max_position_embeddings=original_length(rope, config)
    )


def read_factors(rope: Settings, config: Settings) -> RopeFactors:
    """Read a divisor per frequency; this kind is ours, `convert_gguf` writes it."""
    factors = rope.get("factors")
    if not isinstance(factors, list) or not factors:
        raise ConfigError(f"factors is {factors!r} in config.json: it must be a list")
    entries = {f"factors[{i}]": factor for i, factor in enumerate(factors)}
    return RopeFactors(factors=tuple(float(positive(entries, key)) for key in entries))


def read_linear(rope: Settings, config: Settings) -> LinearScaling:
    """Read the scaling of all frequencies alike."""
    return LinearScaling(factor=float(positive(rope, "factor")))


def read_yarn(rope: Settings, config: Settings) -> YarnScaling:
    """Read the scaling of YaRN."""
    length = config.get("max_position_embeddings")
    original = original_length(rope, config, length)
    # A factor of null asks for one that reaches the longest text.
    derived = positive(config, "max_position_embeddings", original) / original
    factor = float(positive(rope, "factor", derived if "factor" in rope else None))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=yarn_attention_factor(rope, factor),
        beta_fast=float(positive(rope, "beta_fast", 32.0)),
        beta_slow=float(positive(rope, "beta_slow", 1.0)),
        truncate=flag(rope, "truncate", True),
    )


# Kind of scaling: the keys it has, and what reads them.
SCALINGS: dict[str, tuple[tuple[str, ...], Callable[[Settings, Settings], Any]]] = {
    "llama3": (tuple(Llama3Scaling.__dataclass_fields__), read_llama3),
    "factors": (("factors",), read_factors),
    "linear": (("factor",), read_linear),
    "yarn": (
        (*YarnScaling.__dataclass_fields__, "mscale", "mscale_all_dim"),
        read_yarn,
    ),
}


def read_one_rope(
    name: str, rope: Any, config: Settings, theta: float = 10_000.0
) -> RopeSpec:
    """Read one set of rope settings.

    Args:
        name: Its key in the config.
        rope: The settings.
        config: What is around them: `rope_theta` may stand there.
        theta: What it is if it stands nowhere.

    Raises:
        ConfigError: A setting is unknown, missing, or said twice and differently.
    """
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{name} is {rope!r} in config.json: it must be an object")
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        known = ", ".join(("default", *(k for k in SCALINGS if k != "factors")))
        raise ConfigError(
            f"rope scaling {kind!r} is not supported, but {known} are: choose another "
            "model"
        )
    keys, read_scaling = SCALINGS.get(kind, ((), None))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *keys}
    unknown = sorted(rope.keys() - known)
    partial = [place.get("partial_rotary_factor") for place in (rope, config)]
    if unknown or any(share not in (None, 1) for share in partial):
        raise ConfigError(
            f"rope scaling {kind!r} comes with {', '.join(unknown) or 'partial rotary'}"
            ", which is not supported: choose another model"
        )
    inner, outer = rope.get("rope_theta"), config.get("rope_theta")
    if None not in (inner, outer) and inner != outer:
        raise ConfigError(f"rope_theta is both {inner} and {outer}: keep one")
    theta = float(positive(config if inner is None else rope, "rope_theta", theta))
    if theta < 1:
        raise ConfigError(f"rope_theta is {theta}, but must be at least 1")
    return RopeSpec(theta=theta, scaling=read_scaling and read_scaling(rope, config))


def read_rope(config: Settings) -> RopeSpec:
    """Read the rope settings of a model whose layers all have the same.

    Raises:
        ConfigError: A setting is unknown, missing, or said twice and differently.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    ropes = [read_one_rope(name, config[name], config) for name in names]
    if len(set(ropes)) == 2:
        raise ConfigError("config.json has two rope settings that differ: keep one")
    return ropes[0] if ropes else read_one_rope("rope_parameters", {}, config)


def yarn_attention_factor(rope: Settings, factor: float) -> float:
    """Return what YaRN multiplies queries and keys with, said or derived."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        weights = positive(rope, "mscale"), positive(rope, "mscale_all_dim")
        derived = magnitude(weights[0]) / magnitude(weights[1])
    else:
        derived = magnitude(1)
    return float(positive(rope, "attention_factor", derived))


def read_gemma_ropes(config: Settings) -> tuple[RopeSpec, RopeSpec]:
    """Read the two rotations of Gemma 3: of the layers without a window, and with one.

    Older files have `rope_theta`, `rope_local_base_freq` and a `rope_scaling` that is
    for the first kind only; newer ones have `rope_parameters` for each kind.

    Raises:
        ConfigError: A setting is unknown, missing, or said twice and differently.
    """
    kinds = ("full_attention", "sliding_attention")
    both = config.get("rope_parameters") or {}
    if not isinstance(both, Mapping) or both.keys() - set(kinds):
        raise ConfigError(
            f"rope_parameters is {both!r:.80} in config.json, but must have settings "
            f"for {' and '.join(kinds)}, and no others: fetch the model's own file"
        )
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "type" in scaling.keys() - {"rope_type"}:
        # transformers does not see a `type` in this place, other programs do.
        if "rope_type" not in scaling:
            raise ConfigError(
                f"rope_scaling has the type {scaling['type']!r} in config.json, but "
                "for Gemma 3 the key must be rope_type: rename it"
            )
    local = {**config, "rope_theta": config.get("rope_local_base_freq")}
    full = [
        read_one_rope(name, rope, config, 1e6)
        for name, rope in (
            ("rope_parameters", both.get(kinds[0])),
            ("rope_scaling", scaling),
        )
        if rope
    ]
    if len(set(full)) == 2:
        raise ConfigError("config.json has two rope settings that differ: keep one")
    ropes = (
        full[0] if full else read_one_rope("rope_parameters", {}, config, 1e6),
        read_one_rope("rope_parameters", both.get(kinds[1]) or {}, local, 1e4),
    )
    for rope in ropes:
        if isinstance(rope.scaling, YarnScaling) and not rope.scaling.truncate:
            # transformers does not see this key in this place, other programs do.
            raise ConfigError(
                "truncate is false in config.json, which is not supported for Gemma 3: "
                "choose another model"
            )
    return ropes
