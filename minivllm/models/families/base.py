"""What a family of checkpoints must say about itself.

Source: appendix A3, "Loading".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.spec import ModelSpec


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


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Read true or false; missing counts as false.

    Raises:
        ConfigError: It is something else.
    """
    value = config.get(key)
    if value not in (None, False, True):
        raise ConfigError(f"{key} is {value!r} in config.json: write true or false")
    return bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: its config, its tensor names."""

    architectures: tuple[str, ...]
    read_spec: Callable[[Mapping[str, Any]], ModelSpec]
    renames: tuple[tuple[str, str], ...]
    """(regular expression, replacement) from checkpoint names to ours, in order."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that are left out on purpose."""

    def rename(self, name: str) -> str | None:
        """Return our name for a checkpoint's tensor, None if it is ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignored):
            return None
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name
