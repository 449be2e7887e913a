"""What a caller gets back: one `RequestOutput` per request.

In vLLM: vllm/outputs.py (RequestOutput, CompletionOutput), vllm/v1/metrics/stats.py.
Source: appendix A5, "Records"; appendix A11, "Sampling parameters"; appendix A27,
    "Thinking".
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        """TTFT: from arrival to the first output token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def time_per_output_token_s(self) -> float | None:
        """TPOT: mean time between output tokens; None before there are two."""
        if self.finished_time is None or self.num_output_tokens < 2:
            return None
        decode_s = self.finished_time - self.first_token_time
        return decode_s / (self.num_output_tokens - 1)

    @property
    def end_to_end_s(self) -> float | None:
        """E2EL: from arrival to the end."""
        if self.finished_time is None:
            return None
        return self.finished_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable a token was in its place, according to the model alone.

    Attributes:
        logprob: The logarithm of its probability, before any parameter changed it.
        rank: 1 for the best token of the place; of equally good ones, the one with
            the lower id is the better.
        decoded_token: Its text, U+FFFD for an incomplete character; None without a
            tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Its number among the continuations of the prompt.
        text: The text; of a part of the answer, the text that became certain with it.
        token_ids: The tokens, the one that stopped it included.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: The text or the token that stopped it; None for the model's own
            end.
        error: What went wrong, if the reason is "error".
        logprobs: For each token, by id, those that were asked for, the token itself
            first; None if none were.
        cumulative_logprob: The sum over the tokens; None without logprobs.
        reasoning_content: With `split_reasoning`, the thoughts, which are then not in
            the text; None if there are none.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None

    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and all of its answer so far.

    Attributes:
        request_id: The request's name.
        prompt: The text that was given; None if token ids were.
        prompt_token_ids: The tokens that the model continued.
        outputs: The continuations.
        finished: Whether nothing more will come.
        num_cached_tokens: Prompt tokens whose keys and values were found in the cache.
        metrics: When things happened; of several continuations, the first token of any
            and the end of the last.
        prompt_logprobs: As `logprobs` of a continuation, for the tokens of the prompt;
            None for the first, which nothing predicts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
