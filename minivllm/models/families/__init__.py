"""The families: how the checkpoints of one architecture map to a `ModelSpec`.

A family is data and one small function; adding one means adding a file here and an
entry to FAMILIES.

In vLLM: vllm/model_executor/models/registry.py.
Source: appendix A3, "Loading"; appendix A23, "Reading families"; chapter 8, "Hybrid
    attention".
"""

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ConfigError
from minivllm.models.families.base import Family
from minivllm.models.families.gemma3 import GEMMA3
from minivllm.models.families.llama import LLAMA
from minivllm.models.families.qwen2 import QWEN2
from minivllm.models.families.qwen3 import QWEN3, QWEN3_MOE
from minivllm.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA3),
    *(QWEN3_5, QWEN3_5_MOE),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Find the family by the `architectures` of a config.json, else by `model_type`.

    Raises:
        ConfigError: It names an architecture that is not supported, or nothing.
    """
    named = config.get("architectures") or []
    named = [str(name) for name in (named if isinstance(named, list) else [named])]
    for family in FAMILIES:
        if set(family.architectures) & set(named):
            return family
        if not named and config.get("model_type") in family.model_types:
            return family
    supported = ", ".join(family.architectures[0] for family in FAMILIES)
    raise ConfigError(
        f"config.json names the architecture {', '.join(named) or '(none)'}, "
        f"but supported are {supported}: pick such a model, or add a family (a file in "
        "minivllm/models/families, as in exercise 7.5 of the book)"
    )
