"""The families: how the checkpoints of one architecture map to a `ModelSpec`.

A family is data and one small function; adding one means adding a file here and an
entry to FAMILIES.

In vLLM: vllm/model_executor/models/registry.py.
Source: appendix A3, "Loading".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import Family
from minivllm.models.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(config: Mapping[str, Any]) -> Family:
    """Find the family by the `architectures` of a config.json.

    Raises:
        ConfigError: None of the supported architectures is named.
    """
    named = config.get("architectures") or []
    named = [str(name) for name in (named if isinstance(named, list) else [named])]
    for family in FAMILIES:
        if set(family.architectures) & set(named):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(
        f"config.json names the architecture {', '.join(named) or '(none)'}, "
        f"but supported are {supported}: pick such a model, or add a family"
    )
