"""A small sample of many combinations in which every pair of values occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def all_combinations(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of one value per factor."""
    return [
        dict(zip(factors, values, strict=True)) for values in product(*factors.values())
    ]


def pairs_of(combination: Mapping[str, Any]) -> set[tuple]:
    """Return the pairs of values of different factors."""
    return set(combinations(combination.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few combinations that contain every pair of values.

    Two bugs in three need two values together at most (Kuhn, Wallace and Gallo 2004).
    Greedy: the combination with the most pairs that are still missing comes next.
    """
    left = all_combinations(factors)
    missing = set().union(*map(pairs_of, left))
    sample = []
    while missing:
        best = max(left, key=lambda combination: len(pairs_of(combination) & missing))
        missing -= pairs_of(best)
        sample.append(best)
    return sample
