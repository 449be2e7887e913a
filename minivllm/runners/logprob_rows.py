"""Which rows of a step are asked for log-probabilities, and what is reported of them.

Shared by the runners that compute; they differ only in whose arrays they use.

In vLLM: vllm/v1/worker/gpu/sample/prompt_logprob.py
(compute_prompt_logprobs_with_chunking).
Source: appendix A11, "Sampling parameters".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.request import ModelOutput, Request, SchedulerOutput, TokenLogprobs

MAX_ROWS = 256  # of scores of prompt tokens that are in memory at the same time


@dataclass(slots=True)
class LogprobRows:
    """Rows of scores, and for each the token in question and how many others.

    Attributes:
        rows: Of the flat batch for prompts, of the sampled requests for answers.
        token_ids: The token of each row; of an answer it is not known in advance.
        num_best: How many of the best tokens each row is asked for.
        places: The request of each row, and the place of the token in its prompt.
    """

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_best: list[int] = field(default_factory=list)
    places: list[tuple[Request, int]] = field(default_factory=list)

    def slices(self) -> Iterator["LogprobRows"]:
        """Cut the rows into parts whose scores fit into memory."""
        for start in range(0, len(self.rows), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            yield LogprobRows(
                self.rows[part],
                self.token_ids[part],
                self.num_best[part],
                self.places[part],
            )

    @property
    def max_best(self) -> int:
        """The most that any row is asked for."""
        return max(self.num_best, default=0)


def _num_best(wanted: int, vocab_size: int) -> int:
    return vocab_size if wanted == -1 else min(wanted, vocab_size)


def answer_rows(requests: Sequence[Request], vocab_size: int) -> LogprobRows:
    """Find the sampled requests that ask for log-probabilities."""
    rows = LogprobRows()
    for row, request in enumerate(requests):
        wanted = request.sampling_params.logprobs
        if wanted is not None:
            rows.rows.append(row)
            rows.num_best.append(_num_best(wanted, vocab_size))
            rows.places.append((request, request.num_output_tokens))
    return rows


def prompt_rows(
    step: SchedulerOutput, query_start_loc: np.ndarray, vocab_size: int
) -> LogprobRows:
    """Find the rows that predict tokens of prompts which ask for log-probabilities.

    The row of a token predicts the one behind it, so the first token of a prompt has
    none, and the row of the last belongs to the answer.
    """
    found = LogprobRows()
    for request, row in zip(step.requests, query_start_loc.tolist(), strict=False):
        if request.prompt_logprobs is None:
            continue
        first = request.num_computed_tokens
        end = first + step.num_scheduled_tokens[request.request_id]
        wanted = _num_best(request.sampling_params.prompt_logprobs, vocab_size)
        for place in range(first + 1, min(end + 1, request.num_prompt_tokens)):
            if request.prompt_logprobs[place] is None:
                found.rows.append(row + place - 1 - first)
                found.token_ids.append(request.token_ids[place])
                found.num_best.append(wanted)
                found.places.append((request, place))
    return found


def entries_of(
    found: LogprobRows, ids: Any, logprobs: Any, ranks: Any
) -> list[TokenLogprobs]:
    """Turn the arrays of `logprobs_of`, as lists of rows, into one entry per row."""
    entries = []
    rows = zip(ids, logprobs, ranks, found.num_best, strict=True)
    for row_ids, row_logprobs, row_ranks, num_best in rows:
        keep = 1 + num_best
        numbers = zip(row_logprobs[:keep], row_ranks[:keep], strict=True)
        entry: TokenLogprobs = {}
        for token_id, number in zip(row_ids[:keep], numbers, strict=True):
            entry.setdefault(int(token_id), (number[0], int(number[1])))
        entries.append(entry)
    return entries


def add_answer_logprobs(
    output: ModelOutput, found: LogprobRows, entries: Sequence[TokenLogprobs]
) -> None:
    """Put the entries of the sampled tokens into what a runner returns."""
    for (request, _), entry in zip(found.places, entries, strict=True):
        if request.request_id in output.sampled_token_ids:
            output.logprobs[request.request_id] = [entry]


def add_prompt_logprobs(
    output: ModelOutput, found: LogprobRows, entries: Sequence[TokenLogprobs]
) -> None:
    """Put the entries of prompt tokens into what a runner returns."""
    for (request, place), entry in zip(found.places, entries, strict=True):
        output.prompt_logprobs.setdefault(request.request_id, {})[place] = entry
