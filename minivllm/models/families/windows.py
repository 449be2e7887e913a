"""Read which layers have a window, and how many tokens it shows.

Source: appendix A23, "Reading families".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import flag, positive
from minivllm.models.spec import check_size

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(
    config: Mapping[str, Any], known: tuple[str, str] = (FULL, SLIDING)
) -> list[str] | None:
    """Read what config.json says of each layer; None if it says nothing.

    Args:
        config: With or without `layer_types`.
        known: The types that the family may have.

    Raises:
        ConfigError: A type is unknown, or they are more or fewer than the layers.
    """
    types, num_layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        count = f"has {len(types)} entries" if isinstance(types, list) else "is no list"
        raise ConfigError(
            f"layer_types {count} in config.json, but must have one for each of the "
            f"{num_layers} layers: fetch the model's own file"
        )
    for layer_type in types:
        if layer_type not in known:
            raise ConfigError(
                f"config.json has a layer of the type {layer_type!r}, but "
                f"{' and '.join(known)} are supported: choose another model"
            )
    return types


def windows_of(types: list[str], config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer, () if no layer has one.

    Raises:
        ConfigError: A layer should have a window, but its size is not said.
    """
    if SLIDING not in types:
        return ()
    if config.get("sliding_window") is None:
        raise ConfigError(
            f"config.json has layers of the type {SLIDING}, but its sliding_window is "
            "null, or use_sliding_window is not true: fetch the model's own file"
        )
    window = positive(config, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def read_qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read the windows of Qwen2 and Qwen3: the layers from `max_window_layers` on.

    Many of their configs name a window that `use_sliding_window` then switches off.
    """
    if not flag(config, "use_sliding_window"):
        config = {**config, "sliding_window": None}
    types = read_layer_types(config)
    if types is None:
        first = config["num_hidden_layers"]
        if config.get("sliding_window") is not None:
            first = config["max_window_layers"]
            if type(first) is not int or first < 0:
                raise ConfigError(
                    f"max_window_layers is {first!r} in config.json, but must be an "
                    "integer of at least 0: fetch the model's own file"
                )
        types = [
            SLIDING if layer >= first else FULL
            for layer in range(config["num_hidden_layers"])
        ]
    return windows_of(types, config)


def read_gemma_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read the windows of Gemma 3: all layers but each sixth, if nothing else is said.

    The key is spelled `_sliding_window_pattern` in newer files, which have the
    `layer_types` as well.
    """
    types = read_layer_types(config)
    if types is None:
        period = positive(config, "sliding_window_pattern", 6)
        check_size("sliding_window_pattern", period)
        types = [
            SLIDING if (layer + 1) % period else FULL
            for layer in range(config["num_hidden_layers"])
        ]
    return windows_of(types, config)
