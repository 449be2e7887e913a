"""One request on its way through the engine, and the records of a step.

`Request` is the only record that changes. Its token ids are the prompt followed by
what was generated, and `num_computed_tokens` says how many of them, counted from the
start, have their keys and values in the cache. Nothing else tells a prompt from an
answer: a request that has computed all but its last token decodes, any other catches
up.

    token_ids   p p p p p p p p o o o
                [ computed  ][  to do  ]      num_tokens = 11, num_computed_tokens = 6

In vLLM: vllm/v1/request.py (Request), vllm/v1/core/sched/output.py (SchedulerOutput),
vllm/v1/outputs.py (ModelRunnerOutput).
Source: appendix A5, "Records"; appendix A11, "Sampling parameters"; appendix A14, "One
    prompt, many answers"; chapter 8, "Hybrid attention".
"""

import enum
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import RequestError
from minivllm.sampling.params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is in its life; the value of a final state is its reason."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, value: str) -> None:
        # Whether the request has left the engine. Asked often, so kept.
        self.is_finished = value not in ("waiting", "running", "preempted")


# Of one place of a text: token id -> its logprob and its rank, the token that was taken
# first, then the best ones.
TokenLogprobs = dict[int, tuple[float, int]]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One continuation of a prompt, and how far it has come.

    Several continuations of one prompt (n > 1) are requests of their own. The first is
    their leader; the others, its followers, wait until it has computed the prompt, and
    start from its blocks.

    Attributes:
        request_id: Its name, unique among the unfinished ones.
        token_ids: Prompt and output together.
        num_prompt_tokens: How many of them are the prompt.
        sampling_params: Filled: no value but `max_tokens` is unset.
        max_tokens: Output tokens at most, known to fit the model.
        stop_token_ids: Those that end the text, the model's own included.
        seed: Of the random choices; a different one per request unless given.
        arrival: Its place in the order of arrival.
        arrival_time: In seconds, on the engine's clock.
        priority: Lower goes first, under the policy of that name.
        cache_salt: Only requests with the same salt share blocks.
        num_cached_tokens: Of its prompt, found in the prefix cache at the start.
        error: What went wrong, if the status is FINISHED_ERROR.
        bad_words: Sequences of tokens that the output must not have.
        logits_processors: Functions of output ids and logits, for this request alone.
        index: Its number among the continuations of its prompt.
        leader: The first continuation, for the others.
        followers: The other continuations, for the first.
        logprobs: One entry per output token, if they were asked for.
        prompt_logprobs: One entry per prompt token, None until it is computed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[Callable[[list[int], Any], Any], ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)

    index: int = 0
    leader: "Request | None" = field(default=None, repr=False)
    followers: list["Request"] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens that were given."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens that were generated."""
        return self.token_ids[self.num_prompt_tokens :]


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return a prompt as a new list of Python integers.

    Raises:
        RequestError: It is empty, or holds something that is no token id.
    """
    if isinstance(token_ids, bytes | Mapping) or not isinstance(token_ids, Iterable):
        raise RequestError(
            f"the prompt is {token_ids!r}, but must be a text or a list of token ids"
        )
    checked = []
    for token_id in token_ids:
        try:
            if isinstance(token_id, bool):
                raise TypeError
            checked.append(operator.index(token_id))
        except TypeError:
            raise RequestError(
                f"the prompt holds {token_id!r}, but token ids are integers: encode "
                "the text with the model's tokenizer"
            ) from None
        if not 0 <= checked[-1] < vocab_size:
            raise RequestError(
                f"the prompt holds token id {token_id}, but the model knows 0 to "
                f"{vocab_size - 1}: encode with this model's tokenizer"
            )
    if not checked:
        raise RequestError(
            "the prompt has 0 tokens, but a decoder needs at least 1 to continue: "
            "write a word"
        )
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """What to compute in one step.

    Attributes:
        requests: Those that compute something, in the order of the batch.
        num_scheduled_tokens: For each request id, how many tokens, at least 1.
        block_ids: For each request id, its blocks in token order.
        preempted: Requests that lost their blocks to let others go on.
        failed: Requests that can never go on, with status FINISHED_ERROR.
        num_prefix_hits: For each request admitted in this step, its cached tokens.
        followers: For each request id that completes its prompt, the requests that
            start from it: each gets its first token from the same scores.
        block_copies: Pairs of a block and the one it is copied to, before all else.
        window_block_ids: As block_ids, for the layers with a window if their blocks
            are apart; -1 where a block was given back.
        window_block_copies: As block_copies, of these blocks.
        state_slots: For each request id, the slot of its recurrent state.
        state_loads: Pairs of a slot and the one it is copied to, before the step.
        state_saves: The same, after the step.
    """

    requests: list[Request]
    num_scheduled_tokens: dict[str, int]
    block_ids: dict[str, list[int]]
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    num_prefix_hits: dict[str, int] = field(default_factory=dict)

    followers: dict[str, list[Request]] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    window_block_ids: dict[str, list[int]] = field(default_factory=dict)
    window_block_copies: list[tuple[int, int]] = field(default_factory=list)
    state_slots: dict[str, int] = field(default_factory=dict)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(self.num_scheduled_tokens.values())

    def sampled(self) -> list[tuple[int, Request]]:
        """Return the requests that get a token, each with the place of its scores.

        Returns:
            Pairs of an index into `requests` and a request: the one there, if the step
            computes the last token it has, and then its followers.
        """
        pairs = []
        for index, request in enumerate(self.requests):
            num_new = self.num_scheduled_tokens[request.request_id]
            if request.num_computed_tokens + num_new == request.num_tokens:
                group = [request, *self.followers.get(request.request_id, ())]
                pairs += [(index, member) for member in group]
        return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """What a runner computed in one step.

    Attributes:
        sampled_token_ids: For each request id, the new tokens; none while the request
            is still catching up.
        token_logits: For each request id, the scores of these tokens.
        errors: For each request id whose scores are unusable, what is wrong.
        logprobs: For each request id that asks for them, one entry per new token.
        prompt_logprobs: For each request id that asks for them, by place in the prompt,
            the entries that the step has computed.
    """

    sampled_token_ids: dict[str, list[int]]
    token_logits: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
