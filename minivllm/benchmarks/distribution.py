"""Say how values are distributed: mean, median, percentiles.

Invariant: none of them needs an array library. Called by the reports of load tests.

In vLLM: vllm/benchmarks/serve.py (calculate_metrics), which asks NumPy.
Source: appendix A31, "Load".
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of them lies, as NumPy does.

    Between two of the sorted values it lies on the straight line that joins them.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How some values are spread."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Iterable[float]) -> "Distribution | None":
        """Sum up values; None if there are none."""
        values = list(values)
        if not values:
            return None
        shares = (percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0))
        return Distribution(statistics.fmean(values), *shares)
