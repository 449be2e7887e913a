"""All kinds of cases: a kernel that none of them is about is not tested."""

from itertools import chain
from typing import Any

from tests.kernels.cases import ORDERS, AttentionCase, Case, NormCase, SoftmaxCase
from tests.kernels.delta_net_cases import ChunkedCase, ConvCase, RecurrentCase
from tests.kernels.layer_cases import (
    ActivationCase,
    CacheCase,
    EmbeddingCase,
    GatedMLPCase,
    RotaryCase,
)
from tests.kernels.moe_cases import (
    CombineCase,
    GroupedCase,
    PermuteCase,
    TensorTileCase,
    TileCase,
    TopkCase,
)
from tests.kernels.prefill_cases import PrefillCase, TensorCoreCase
from tests.kernels.sampling_cases import ArgmaxCase, CutCase, DrawCase

KINDS: list[type[Case]] = [
    NormCase,
    SoftmaxCase,
    AttentionCase,
    RotaryCase,
    ActivationCase,
    GatedMLPCase,
    EmbeddingCase,
    CacheCase,
    ArgmaxCase,
    CutCase,
    DrawCase,
    PrefillCase,
    TensorCoreCase,
    TopkCase,
    PermuteCase,
    GroupedCase,
    TileCase,
    TensorTileCase,
    CombineCase,
    ConvCase,
    RecurrentCase,
    ChunkedCase,
]
RUNGS = [(kind, version) for kind in KINDS for version in kind.versions]
FILES = list(dict.fromkeys(kind.file for kind in KINDS))


def all_examples() -> list[Case]:
    """Return what the tables at the top of the kernels are about."""
    return list(chain.from_iterable(kind.examples() for kind in KINDS))


def factors_of(kind: type[Case], version: str) -> dict[str, list[Any]]:
    """Return the values that the cases of a rung, and their orders, are made of."""
    return {"order": ORDERS, "dtype": kind.dtypes} | kind.factors(version)


def make(kind: type[Case], version: str, values: dict[str, Any]) -> tuple[Case, Any]:
    """Return a case and the order of its threads."""
    values = dict(values)
    order = values.pop("order")
    return kind.of(version, **values), order
