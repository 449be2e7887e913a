"""How often a request has each token, kept from step to step.

Invariant: `ids` holds each token once, in the order in which the text first had it;
`output_counts` says how often the output has it. A step costs as much as it has new
tokens, however long the text is.

Used by the penalties. `minivllm.reference.sampler` counts anew each time instead.

In vLLM: vllm/v1/worker/gpu/sample/penalties.py (PenaltiesState).
Source: appendix A12, "A sampler for a whole batch".
"""

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """The tokens of one text, each with its count."""

    def __init__(self, first: int, num_prompt_tokens: int) -> None:
        """Count nothing yet.

        Args:
            first: Place in the text of the first token to count.
            num_prompt_tokens: Tokens before this place are no output.
        """
        self.num_counted = first
        self.num_prompt_tokens = num_prompt_tokens
        self.places: dict[int, int] = {}  # token id -> its place in the arrays
        self._ids = np.empty(64, dtype=np.int64)
        self._output_counts = np.empty(64, dtype=np.int64)

    @property
    def ids(self) -> np.ndarray:
        """The tokens of the text, each once, [num_distinct] int64."""
        return self._ids[: len(self.places)]

    @property
    def output_counts(self) -> np.ndarray:
        """How often the output has each; 0 if only the prompt does. [num_distinct]."""
        return self._output_counts[: len(self.places)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that the text has got since the last time.

        Args:
            token_ids: The whole text.
        """
        for position in range(self.num_counted, len(token_ids)):
            place = self.places.get(token_ids[position])
            if place is None:
                place = self._add(token_ids[position])
            if position >= self.num_prompt_tokens:
                self._output_counts[place] += 1
        self.num_counted = len(token_ids)

    def _add(self, token_id: int) -> int:
        place = self.places[token_id] = len(self.places)
        if place == len(self._ids):
            # Twice as large each time: a token is copied about once on average.
            self._ids = np.resize(self._ids, 2 * place)
            self._output_counts = np.resize(self._output_counts, 2 * place)
        self._ids[place] = token_id
        self._output_counts[place] = 0
        return place
