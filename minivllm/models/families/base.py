"""What a family of checkpoints must say about itself.

Source: chapter 1, "Naive generation".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.models.spec import ModelSpec


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
