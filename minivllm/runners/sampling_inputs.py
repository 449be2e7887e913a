"""What sampling needs of the requests, and what the engine needs of the samples.

Shared by the runners that compute; they differ only in whose arrays they use.

Invariant: a row depends on its own request alone. What a request asks for all its life
is prepared once, and its tokens are counted as they come, so a step costs as much as it
has rows and new tokens.

In vLLM: vllm/v1/worker/gpu_input_batch.py (InputBatch).
Source: appendix A5, "Records"; appendix A6, "The torch runner"; appendix A12, "A
    sampler for a whole batch".
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minivllm.request import ModelOutput, Request
from minivllm.sampling.inputs import SamplingInputs
from minivllm.sampling.params import GUIDES
from minivllm.sampling.token_counts import TokenCounts
from minivllm.sampling.uniform import uniform

FORBIDDING = (
    *("allowed_token_ids", "bad_words", "min_tokens", "logits_processors"),
    *GUIDES,
)


def row_error(largest: float, largest_edited: float, request: Request) -> str | None:
    """Say what is wrong with the logits of a request, if anything is."""
    if not math.isfinite(largest):
        return (
            f"the largest logit is {largest}, but must be finite: compute in "
            "float32 or bfloat16, or fetch the weights again if they are damaged"
        )
    if largest_edited == -math.inf:
        given = request.sampling_params.given()
        names = [name for name in FORBIDDING if name in given] or FORBIDDING
        return (
            f"the parameters leave no token to choose: let {' and '.join(names)} leave "
            "at least one"
        )
    if not math.isfinite(largest_edited):
        return (
            f"the largest logit is {largest_edited} after the request's own edits, but "
            "must be finite: change its logits processors or penalties"
        )
    return None


def to_model_output(
    requests: Sequence[Request],
    token_ids: Sequence[int],
    token_logits: Sequence[float],
    largest_logits: Sequence[float],
    largest_edited: Sequence[float] | None = None,
    errors: Mapping[int, str] | None = None,
) -> ModelOutput:
    """Sort one token per request into a `ModelOutput`, unusable scores into its errors.

    Args:
        requests: Those that were sampled.
        token_ids: The token of each.
        token_logits: The score of that token, as the model gave it.
        largest_logits: The largest score that the model gave; NaN if any is.
        largest_edited: The largest score after the edits; by default, the same.
        errors: By row, from `apply_logits_processors`.
    """
    output = ModelOutput(sampled_token_ids={}, token_logits={}, errors={})
    if largest_edited is None:
        largest_edited = largest_logits
    for index, request in enumerate(requests):
        error = row_error(largest_logits[index], largest_edited[index], request)
        if math.isfinite(largest_logits[index]):
            error = (errors or {}).get(index, error)
        if error is not None:
            output.errors[request.request_id] = error
            continue
        output.sampled_token_ids[request.request_id] = [token_ids[index]]
        output.token_logits[request.request_id] = [token_logits[index]]
    return output


class RequestRow:
    """What a row of the batch needs of its request: prepared once."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.sampling_params
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.temperature = params.temperature
        self.cut = (params.min_p, top_k, params.top_p)
        self.kind = DRAWS_FROM_PART
        if self.temperature == 0:
            self.kind = TAKES_THE_BEST
        elif self.cut == (0, vocab_size, 1):
            self.kind = DRAWS_FROM_ALL
        self.penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        edits = Edits(request, vocab_size)
        self.edits = None if edits.is_empty else edits


class SamplingState:
    """What a runner remembers of the requests from step to step."""

    def __init__(self, vocab_size: int) -> None:
        """Remember nothing yet.

        Args:
            vocab_size: Tokens in a row of logits.
        """
        self.vocab_size = vocab_size
        # When the engine lets go of a request, so does this.
        self.rows: WeakKeyDictionary[Request, RequestRow] = WeakKeyDictionary()

    def inputs(self, requests: Sequence[Request]) -> SamplingInputs:
        """Return what the sampler needs to choose the next token of each request.

        Args:
            requests: One per row of logits.
        """
        rows = [self._row(request) for request in requests]
        kinds = np.array([row.kind for row in rows], dtype=np.int64)
        num_sampled = np.count_nonzero(kinds != TAKES_THE_BEST)
        sampled_rows = np.argsort(kinds)[:num_sampled]
        drawn = [(requests[i], rows[i]) for i in sampled_rows.tolist()]
        numbers = [uniform(r.seed, r.num_output_tokens) for r, _ in drawn]
        cuts = [row.cut for _, row in drawn if row.kind == DRAWS_FROM_PART]
        min_p, top_k, top_p = np.array(cuts, dtype=np.float64).reshape(-1, 3).T.copy()
        penalties = np.array([row.penalties for row in rows], dtype=np.float64)
        repetition, frequency, presence = penalties.reshape(-1, 3).T.copy()
        return SamplingInputs(
            sampled_rows=sampled_rows,
            temperatures=np.array([row.temperature for _, row in drawn], float),
            uniforms=np.array(numbers, dtype=np.float64),
            min_p=min_p,
            top_k=top_k.astype(np.int64),
            top_p=top_p,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            **self._edits(requests, rows),
        )

    def _row(self, request: Request) -> RequestRow:
        row = self.rows.get(request)
        if row is None:
            row = self.rows[request] = RequestRow(request, self.vocab_size)
        return row

    def _edits(
        self, requests: Sequence[Request], rows: Sequence[RequestRow]
    ) -> dict[str, np.ndarray]:
        """Lay the edits of all rows end to end."""
        parts = [
            row.edits.arrays(request, index)
            for index, (request, row) in enumerate(zip(requests, rows, strict=True))
            if row.edits is not None
        ]
        return {
            name: np.concatenate([nothing, *(part[name] for part in parts)])
            for name, nothing in NO_EDITS.items()
        }


NO_IDS = np.empty(0, dtype=np.int64)

NO_EDITS = {
    **dict.fromkeys(("choosy_rows", "allowed", "banned", "biased"), NO_IDS),
    "biases": np.empty(0),
    **dict.fromkeys(("seen", "seen_rows", "seen_counts"), NO_IDS),
}

# What a row does, in the order in which the rows that draw are laid out.
DRAWS_FROM_PART, DRAWS_FROM_ALL, TAKES_THE_BEST = range(3)


def known_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the ids that the runner has scores for, ascending int64."""
    return np.array(sorted(i for i in token_ids if i < vocab_size), dtype=np.int64)


def bad_ids(request: Request) -> list[int]:
    """Return the tokens that would complete a bad word if they came next."""
    banned = []
    for *beginning, last in request.bad_words:
        start = request.num_tokens - len(beginning)
        is_in_output = start >= request.num_prompt_tokens
        if is_in_output and request.token_ids[start:] == beginning:
            banned.append(last)
    return banned


class Edits:
    """What one request does to its logits."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.sampling_params
        self.vocab_size = vocab_size
        self.is_choosy = params.allowed_token_ids is not None
        self.allowed = known_ids(params.allowed_token_ids or (), vocab_size)
        self.min_tokens = params.min_tokens
        self.stop_ids = known_ids(request.stop_token_ids, vocab_size)
        self.bias_ids = known_ids(params.logit_bias, vocab_size)
        biases = [params.logit_bias[i] for i in self.bias_ids.tolist()]
        self.biases = np.array(biases, dtype=np.float64)
        self.counts: TokenCounts | None = None
        repeats = params.repetition_penalty != 1
        if repeats or params.frequency_penalty or params.presence_penalty:
            # Only the repetition penalty asks for the prompt.
            first = 0 if repeats else request.num_prompt_tokens
            self.counts = TokenCounts(first, request.num_prompt_tokens)
        self.is_empty = not (
            self.is_choosy
            or request.bad_words
            or (self.min_tokens and self.stop_ids.size)
            or self.biases.size
            or self.counts
        )

    def banned(self, request: Request) -> np.ndarray:
        """Return the tokens that may not come next, int64."""
        banned = known_ids(bad_ids(request), self.vocab_size)
        if request.num_output_tokens < self.min_tokens:
            banned = np.concatenate([banned, self.stop_ids])
        return banned

    def arrays(self, request: Request, row: int) -> dict[str, np.ndarray]:
        """Return what `SamplingInputs` needs of this request, by name."""
        first = row * self.vocab_size
        arrays = {
            "choosy_rows": np.full(int(self.is_choosy), row),
            "allowed": first + self.allowed,
            "banned": first + self.banned(request),
            "biased": first + self.bias_ids,
            "biases": self.biases,
        }
        if self.counts is not None:
            self.counts.extend(request.token_ids)
            arrays["seen"] = first + self.counts.ids
            arrays["seen_rows"] = np.full(len(self.counts.ids), row)
            arrays["seen_counts"] = self.counts.output_counts
        return NO_EDITS | arrays


def apply_logits_processors(
    logits: Any, requests: Sequence[Request]
) -> tuple[Any, dict[int, str]]:
    """Let the processors of each request edit its row.

    A processor that fails, fails its own request: the row stays as it was.

    Args:
        logits: [num_rows, vocab_size], NumPy or torch; not changed.
        requests: One per row.

    Returns:
        The logits themselves if no request has processors, else an edited copy; for
        each row whose processor failed, what went wrong.
    """
    errors: dict[int, str] = {}
    if not any(request.logits_processors for request in requests):
        return logits, errors
    edited = logits + 0  # a copy, of whichever library
    for index, request in enumerate(requests):
        if not request.logits_processors:
            continue
        row = logits[index] + 0
        try:
            for process in request.logits_processors:
                row = process_row(process, request.output_token_ids, row)
            edited[index] = row
        # Foreign code may raise anything, and its neighbours must not suffer.
        except BaseException as error:
            is_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and is_main:
                raise  # Ctrl-C, which arrives in no other thread
            name = getattr(process, "__qualname__", type(process).__qualname__)
            errors[index] = (
                f"the logits processor {name} failed: {type(error).__name__}: {error}"
            )
    return edited, errors


def process_row(
    process: Callable[[list[int], Any], Any], output_token_ids: list[int], row: Any
) -> Any:
    """Return the logits after a processor, [vocab_size].

    Args:
        process: The processor.
        output_token_ids: A copy, like the row: it may change both in place.
        row: The logits before.
    """
    shape, dtype = tuple(row.shape), row.dtype
    wanted = f"{type(row).__name__} of shape {shape}"
    result = process(output_token_ids, row)
    result = row if result is None else result
    if type(result) is not type(row):
        raise TypeError(
            f"it returned {type(result).__name__}, but must return None or {wanted}"
        )
    if tuple(result.shape) != shape:
        what = "made of its row" if result is row else "returned"
        raise ValueError(
            f"it {what} shape {tuple(result.shape)}, but must return None or {wanted}"
        )
    if result is row and row.dtype != dtype:
        raise TypeError(
            f"it made of its row one of {row.dtype}, but must leave it {dtype}"
        )
    return result
