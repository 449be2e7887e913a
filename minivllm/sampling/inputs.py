"""What a batch asks of the sampler, as arrays: of NumPy first, then on the device.

Invariant: what there is to do follows from the shapes alone, which the host knows
without waiting for the device: what no request asks for has length 0.

Made by `minivllm.runners.sampling_inputs`, read by `minivllm.sampling.sampler`.

In vLLM: vllm/v1/sample/metadata.py (SamplingMetadata).
Source: appendix A6, "The torch runner"; appendix A12, "A sampler for a whole batch".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


def no_ids() -> np.ndarray:
    """Return no integers."""
    return np.empty(0, dtype=np.int64)


def no_values() -> np.ndarray:
    """Return no numbers."""
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """The parameters of all rows of a batch, side by side.

    A place is a row and a token id in one number, `row * vocab_size + token_id`.

    Attributes:
        sampled_rows: Rows that draw: those with a temperature above 0. The first
            `num_cut` of them have min_p, top_k or top_p. [num_sampled]
        temperatures: [num_sampled] float64.
        uniforms: A random number for each, 0 <= u < 1. [num_sampled] float64
        min_p: [num_cut] float64.
        top_k: At most vocab_size, which is off. [num_cut]
        top_p: [num_cut] float64.
        choosy_rows: Rows that allow some tokens only.
        allowed: Places of these tokens.
        banned: Places of tokens that may not come.
        biased: Places whose logits get a bias.
        biases: The bias of each. float64
        seen: Places of tokens that a request with penalties has in its text.
        seen_rows: The row of each.
        seen_counts: How often the output has it; 0 if only the prompt does.
        repetition: [num_rows] float64; so are the next two.
        frequency: Subtracted for each time.
        presence: Subtracted once.
    """

    sampled_rows: Any
    temperatures: Any
    uniforms: Any
    min_p: Any = field(default_factory=no_values)
    top_k: Any = field(default_factory=no_ids)
    top_p: Any = field(default_factory=no_values)
    choosy_rows: Any = field(default_factory=no_ids)
    allowed: Any = field(default_factory=no_ids)
    banned: Any = field(default_factory=no_ids)
    biased: Any = field(default_factory=no_ids)
    biases: Any = field(default_factory=no_values)
    seen: Any = field(default_factory=no_ids)
    seen_rows: Any = field(default_factory=no_ids)
    seen_counts: Any = field(default_factory=no_ids)
    repetition: Any = field(default_factory=no_values)
    frequency: Any = field(default_factory=no_values)
    presence: Any = field(default_factory=no_values)

    @property
    def num_sampled(self) -> int:
        """Rows that draw a token; the others take the best."""
        return len(self.sampled_rows)

    @property
    def num_cut(self) -> int:
        """Rows that draw from a part of the tokens."""
        return len(self.top_k)

    @property
    def has_edits(self) -> bool:
        """Whether any logit is to change."""
        edits = (self.choosy_rows, self.banned, self.biased, self.seen)
        return any(len(places) > 0 for places in edits)

    def arrays(self) -> list[np.ndarray]:
        """List all arrays, of int64 and float64, for one transfer to a device."""
        return [getattr(self, field.name) for field in fields(self)]

    def on(self, tensors: Sequence[Any]) -> "SamplingInputs":
        """Return the same inputs, made of the tensors that `arrays` have become."""
        names = [field.name for field in fields(self)]
        return SamplingInputs(**dict(zip(names, tensors, strict=True)))
