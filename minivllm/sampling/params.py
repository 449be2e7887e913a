"""What a request asks of its answer: how tokens are chosen, and when to stop.

Invariant: the values are legal from the moment the object exists. Read by the
scheduler (limits and stops) and by the runners (choice of tokens).

In vLLM: vllm/sampling_params.py (SamplingParams).
Source: appendix A5, "Records".
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from minivllm.errors import RequestError

DEFAULT_MAX_TOKENS = 16  # as in vLLM


class Unset(enum.Enum):
    """The value of a parameter that was not given; None may mean something else."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET = Unset.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Args:
        temperature: 0 takes the best token, 1 draws from the model's own
            distribution, higher is more random.
        max_tokens: Tokens to generate at most; None for as many as fit. By default
            16, and in a chat as many as fit.
        stop_token_ids: Tokens that end the text, beside the model's own end tokens.
        ignore_eos: Go on after the model's own end tokens.
        seed: Makes the random choices of this request repeatable, whatever else runs.

    Raises:
        RequestError: A value is out of range.
    """

    temperature: float = 1.0
    max_tokens: int | Unset | None = UNSET
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        number = self.temperature
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not (is_number and 0 <= number <= 1e6):
            raise RequestError(
                f"temperature is {number!r}, but must be a number from 0 (greedy) to "
                "1,000,000 (blind)"
            )
        is_default = self.max_tokens is None or self.max_tokens is UNSET
        if not is_default and not _is_integer(self.max_tokens, 1):
            raise RequestError(
                f"max_tokens is {self.max_tokens!r}, but must be an integer above 0, "
                "or None for as many as fit"
            )
        if self.seed is not None and not _is_integer(self.seed, 0, 2**64 - 1):
            raise RequestError(
                f"seed is {self.seed!r}, but must be an integer from 0 to 2**64 - 1, "
                "or None"
            )
        # An iterator would be empty after this look at it.
        is_collection = isinstance(self.stop_token_ids, Collection)
        if not is_collection or not all(
            _is_integer(token_id, 0) for token_id in self.stop_token_ids
        ):
            raise RequestError(
                f"stop_token_ids is {self.stop_token_ids!r}, but must be a list of "
                "token ids, integers of at least 0"
            )
        if type(self.ignore_eos) is not bool:
            raise RequestError(
                f"ignore_eos is {self.ignore_eos!r}, but must be True or False"
            )


def _is_integer(value: object, minimum: int, maximum: int | None = None) -> bool:
    return type(value) is int and minimum <= value and (not maximum or value <= maximum)
