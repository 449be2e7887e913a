"""A runner without a model: scripted or random tokens, and a clock that only pretends.

A step takes no time; its cost, by a formula, is added to a virtual clock. So an hour
of traffic passes in a second, with the real scheduler and the real block manager: the
laboratory for policies, and the tests that need thousands of steps.

Called by the engine. Needs neither weights nor an array library.

Source: chapter 4, "Continuous batching"; appendix A14, "One prompt, many answers";
    chapter 8, "Hybrid attention".
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minivllm.request import ModelOutput, Request, SchedulerOutput, TokenLogprobs
from minivllm.runners.base import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """How long a step takes: a straight line in what it computes.

    Attributes:
        per_step_s: Seconds for a step with next to no tokens: mostly, reading all
            weights once.
        per_token_s: Seconds more for each token of the flat batch.
        per_context_s: Seconds more for each pair of a token and a token it attends to.
    """

    per_step_s: float = 0.010
    per_token_s: float = 0.0005
    per_context_s: float = 0.0

    def __call__(self, step: SchedulerOutput) -> float:
        """Return the seconds that a step takes."""
        num_tokens, num_pairs = step_size(step)
        return (
            self.per_step_s
            + self.per_token_s * num_tokens
            + self.per_context_s * num_pairs
        )


def step_size(step: SchedulerOutput) -> tuple[int, int]:
    """Count the tokens of a step, and the pairs of a token and one it attends to."""
    num_pairs = 0
    for request in step.requests:
        num_new = step.num_scheduled_tokens[request.request_id]
        first = request.num_computed_tokens + 1
        num_pairs += num_new * (2 * first + num_new - 1) // 2
    return step.num_tokens, num_pairs


class FakeRunner:
    """Pretends to compute."""

    def __init__(
        self,
        *,
        num_blocks: int = 1024,
        block_size: int = 16,
        max_model_len: int = 4096,
        vocab_size: int = 1000,
        cost: Callable[[SchedulerOutput], float] | None = None,
        script: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Set the clock to zero.

        Args:
            num_blocks: Blocks of the KV cache that is not there.
            block_size: Token slots in a block.
            max_model_len: Tokens that a request may have.
            vocab_size: Token ids are drawn below this one.
            cost: Seconds that a step takes; by default a plain `StepCost`.
            script: For a request id, the tokens of its answer. Other requests get
                random ones, which depend on their seed and their length alone.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.cost = cost or StepCost()
        self.script = script or {}
        self.clock_s = 0.0

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Let the clock run on, and answer the requests that have caught up."""
        self.clock_s += self.cost(step)
        output = ModelOutput(sampled_token_ids={})
        for _, request in step.sampled():
            token_id = self._next_token(request)
            output.sampled_token_ids[request.request_id] = [token_id]
            output.token_logits[request.request_id] = [0.0]
            num_best = request.sampling_params.logprobs
            if num_best is not None:
                entry = self._logprobs(token_id, num_best)
                output.logprobs[request.request_id] = [entry]
        for request in step.requests:
            num_best = request.sampling_params.prompt_logprobs
            if request.prompt_logprobs is not None:
                output.prompt_logprobs[request.request_id] = {
                    place: self._logprobs(request.token_ids[place], num_best)
                    for place in range(1, request.num_prompt_tokens)
                }
        return output

    def _next_token(self, request: Request) -> int:
        index = request.num_output_tokens
        script = self.script.get(request.request_id, ())
        if index < len(script):
            return script[index]
        return random.Random(f"{request.seed} {index}").randrange(self.vocab_size)

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self.clock_s

    def advance_to(self, seconds: float) -> None:
        """Let an idle engine wait for its next request."""
        self.clock_s = max(self.clock_s, seconds)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def _logprobs(self, token_id: int, num_best: int) -> TokenLogprobs:
        """Tell that all tokens are equally probable, the first one by rank the best."""
        num_best = self.vocab_size if num_best == -1 else num_best
        logprob = -math.log(self.vocab_size)
        best = range(min(num_best, self.vocab_size))
        return {i: (logprob, 1 + i) for i in (token_id, *best)}

    layout = CacheLayout()  # set another one to try the books of a hybrid model
