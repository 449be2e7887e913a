"""How many tokens each expert got, counted by a decoder and collected by a trace.

Invariant: nothing is counted, and nothing is fetched from a device, unless somebody
has asked for it.

In vLLM: expert_load_view, in vllm/distributed/eplb/eplb_state.py.
Source: appendix A25, "Experts in the engine".
"""

from collections.abc import Sequence
from typing import Any


class ExpertCounts:
    """Counters of all experts; a decoder adds to them in place."""

    def __init__(self, layers: Sequence[int], num_rows: Any) -> None:
        """Take zeroed counters.

        Args:
            layers: Those that have experts.
            num_rows: [len(layers), num_experts] int64, of NumPy or torch.
        """
        self.layers = tuple(layers)
        self.num_rows = num_rows

    def take(self) -> dict[int, list[int]]:
        """Return the counts of each layer since the last call, and begin anew."""
        counts = dict(zip(self.layers, self.num_rows.tolist(), strict=True))
        self.num_rows[:] = 0
        return counts
