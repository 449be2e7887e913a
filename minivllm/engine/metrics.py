"""What the engine has done so far, in numbers.

Counters only grow; a histogram counts values by the bucket that they fall into, so that
whoever reads both from time to time can tell what happened in between, percentiles
included. Written by the thread that makes the steps, a few microseconds for each; read
by any thread, without a lock: a reader may miss the step that is being counted.

Invariant: every continuation that ends is counted once, whatever its end.

In vLLM: vllm/v1/metrics/loggers.py (PrometheusStatLogger), vllm/v1/metrics/stats.py
(IterationStats).
Source: chapter 9, "Serving".
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from minivllm.request import Request, SchedulerOutput

MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
SECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
# From a millisecond to eight minutes, three buckets for each power of ten.
TIME_BUCKETS = (*(ms / 1000 for ms in MILLISECONDS), *map(float, SECONDS))
TOKEN_BUCKETS = tuple(float(2**i) for i in range(18))


class Histogram:
    """How many values were how large.

    Attributes:
        buckets: Upper edges, rising; a value on an edge is below it.
        counts: Values in each bucket, and at last those above all edges.
        sum: All values together.
    """

    def __init__(self, buckets: Sequence[float] = TIME_BUCKETS) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class EngineMetrics:
    """Counters and histograms of one engine; times are in seconds on its clock.

    Attributes:
        prompt_tokens: Tokens of prompts that are computed, cached ones included.
        generation_tokens: Tokens of answers.
        preemptions: How often a request lost its blocks.
        prefix_cache_queries: Prompt tokens that were looked up in the prefix cache.
        prefix_cache_hits: Those of them that were there.
        finished: Continuations that have ended, by their reason.
        iteration_tokens: Tokens of each step.
        step_seconds: Duration of each step with something to compute.
        time_to_first_token: TTFT.
        inter_token_latency: ITL: from each token to the next one.
        time_per_output_token: TPOT: the mean of these, for each continuation.
        queue_time: From the arrival until the first token is computed.
        prefill_time: From there to the first token of the answer.
        decode_time: From the first token of the answer to its end.
        e2e_latency: E2EL: from the arrival to the end.
        request_prompt_tokens: Tokens of each prompt that has ended.
        request_generation_tokens: Tokens of each answer that has ended.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.iteration_tokens = Histogram(TOKEN_BUCKETS)
        self.step_seconds = Histogram()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.time_per_output_token = Histogram()
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.decode_time = Histogram()
        self.e2e_latency = Histogram()
        self.request_prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram(TOKEN_BUCKETS)
        # Request id -> tokens of its answer, and when the last of them came.
        self._shown: dict[str, tuple[int, float]] = {}

    def add_step(
        self, plan: SchedulerOutput, told: Iterable[Request], start: float, end: float
    ) -> None:
        """Count a step.

        Args:
            plan: What was computed.
            told: The requests for which something has changed.
            start: When the step began.
            end: When it ended.
        """
        if plan.requests:
            self.iteration_tokens.add(plan.num_tokens)
            self.step_seconds.add(end - start)
        self.preemptions += len(plan.preempted)
        for request in plan.requests:
            num_hits = plan.num_prefix_hits.get(request.request_id)
            if num_hits is not None and not request.num_preemptions:
                self.prefix_cache_queries += request.num_prompt_tokens
                self.prefix_cache_hits += num_hits
        for request in told:
            self._add_tokens(request, end)

    def _add_tokens(self, request: Request, now: float) -> None:
        """Count the tokens that an answer got since the last step."""
        shown, last = self._shown.get(request.request_id, (0, 0.0))
        num_new = request.num_output_tokens - shown
        if num_new <= 0:
            return
        self.generation_tokens += num_new
        if shown == 0:
            if request.leader is None:
                self.prompt_tokens += request.num_prompt_tokens
                self.time_to_first_token.add(now - request.arrival_time)
        else:
            self.inter_token_latency.add(now - last)
        self._shown[request.request_id] = (shown + num_new, now)

    def add_finished(self, request: Request) -> None:
        """Count the end of a continuation."""
        self._shown.pop(request.request_id, None)
        self.finished[request.status.value] += 1
        self.request_prompt_tokens.add(request.num_prompt_tokens)
        self.request_generation_tokens.add(request.num_output_tokens)
        started, first, end = (
            request.first_scheduled_time,
            request.first_token_time,
            request.finished_time,
        )
        if end is None:
            return
        self.e2e_latency.add(end - request.arrival_time)
        if started is not None:
            self.queue_time.add(started - request.arrival_time)
        if started is not None and first is not None:
            self.prefill_time.add(first - started)
            self.decode_time.add(end - first)
            if request.num_output_tokens > 1:
                num_gaps = request.num_output_tokens - 1
                self.time_per_output_token.add((end - first) / num_gaps)
