"""The engine: requests in, text out, one step at a time.

`LLMEngine.step()` is all of it: schedule, execute, update, emit. The engine owns the
requests; the scheduler decides, the runner computes, the detokenizers write.

Invariant: every request that was added ends in exactly one finished `RequestOutput`
with a reason, whatever goes wrong. Not safe to call from several threads: `LLM` is.

In vLLM: vllm/v1/engine/llm_engine.py (LLMEngine), vllm/v1/engine/core.py (EngineCore).
Source: chapter 4, "Continuous batching".
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Policy, Scheduler
from minivllm.engine.trace import begin_record, finish_record
from minivllm.errors import RequestError
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.request import (
    ModelOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    check_token_ids,
)
from minivllm.runners.base import Runner
from minivllm.sampling.params import DEFAULT_MAX_TOKENS, UNSET, SamplingParams
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOW_SHARE = 0.1  # of the blocks free: less than that is worth a warning ...
LOW_STEPS = 50  # ... when it lasts so many steps


@dataclass(slots=True)
class RequestState:
    """What the engine keeps of a request beside the scheduler's record."""

    request: Request
    prompt: str | None
    detokenizer: IncrementalDetokenizer | None
    prompt_token_ids: list[int]
    text: str = ""
    num_taken_tokens: int = 0  # of the answer, written as text already


class LLMEngine:
    """Runs any number of requests at once."""

    def __init__(
        self,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        policy: str | Policy = "mixed",
        seed: int = 0,
    ) -> None:
        """Build an engine around a runner.

        Args:
            runner: What computes; it brings the size of the cache.
            tokenizer: Turns text into tokens and back; without it, prompts are token
                ids and answers have no text.
            max_num_seqs: Requests in a step at most.
            max_num_batched_tokens: Tokens in a step at most.
            enable_prefix_caching: Whether requests share blocks with equal content.
            policy: Who comes first, see `POLICIES`.
            seed: Where the seeds of requests without one come from.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            BlockManager(
                runner.num_blocks,
                runner.block_size,
                enable_prefix_caching=enable_prefix_caching,
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
        )
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.num_steps = 0
        self._states: dict[str, RequestState] = {}
        self.added: list[Request] = []  # since the last step, as is the next
        self.aborted: list[str] = []
        # Kept from step to step, in case Ctrl-C or a listener cuts one short:
        self._untold: deque[Request] = deque()  # whose news is to be told
        self._outputs: list[RequestOutput] = []  # told, and not handed out yet
        self._num_requests = 0
        self._random = random.Random(seed)
        self._num_low_steps = 0

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, update, emit.

        Returns:
            One output for every request that got a token or ended in this step.
        """
        try:
            plan = self.scheduler.schedule(self.runner.now())
            record = begin_record(self, plan) if self.listeners else None
            self._untold += [*plan.failed, *plan.requests]
            result = self._execute(plan)
        except BaseException:  # Ctrl-C, or a mistake of ours
            self.scheduler.restart()
            self._untold += [state.request for state in self._states.values()]
            raise
        self._emit()
        if record is not None:
            finish_record(record, self, result, self._outputs)
            for listener in self.listeners:
                listener(record)
        self.num_steps += 1
        self.added.clear()
        self.aborted.clear()
        self._watch_free_blocks()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Compute a step and take in the result; its failure ends its requests only."""
        if not plan.requests:
            return ModelOutput(sampled_token_ids={})
        try:
            result = self.runner.execute(plan)
        except Exception as error:  # whatever a runner or a device can raise
            self.scheduler.cancel(plan)
            logger.exception("a step failed; its requests end with an error")
            message = (
                f"the step with {plan.num_tokens} tokens of this and "
                f"{len(plan.requests) - 1} other requests failed "
                f"({type(error).__name__}: {error}): try again, with a smaller "
                "max_num_batched_tokens if memory ran out"
            )
            for request in plan.requests:
                self.scheduler.finish(request, RequestStatus.FINISHED_ERROR, message)
            return ModelOutput(sampled_token_ids={})
        self.scheduler.update(plan, result)
        return result

    def add_request(
        self,
        request_id: str,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        **options: Any,
    ) -> None:
        """Queue a request; `make_request` and `submit` have the arguments.

        Raises:
            RequestError: It can never be served, or its name is in use.
        """
        request = self.make_request(request_id, prompt, sampling_params, **options)
        text = prompt if isinstance(prompt, str) else None
        self.submit(request, text, arrival_time)

    def submit(
        self,
        request: Request,
        prompt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request that `make_request` has made.

        Args:
            request: A new one.
            prompt: Its text, for the output.
            arrival_time: When it came, in seconds on the runner's clock; now, if None.

        Raises:
            RequestError: Its name is that of an unfinished request.
        """
        if request.request_id in self._states:
            raise RequestError(
                f"request_id is {request.request_id!r}, but an unfinished request has "
                "that name: choose another one, or abort the other request first"
            )
        seed = request.sampling_params.seed
        request.seed = self._random.getrandbits(64) if seed is None else seed
        request.arrival = self._num_requests
        if arrival_time is None:
            arrival_time = self.runner.now()
        request.arrival_time = arrival_time
        self._num_requests += 1
        detokenizer = IncrementalDetokenizer(self.tokenizer) if self.tokenizer else None
        state = RequestState(request, prompt, detokenizer, request.prompt_token_ids)
        self._states[request.request_id] = state
        self.added.append(request)
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now, and free its blocks.

        Returns:
            What it had; None if there is no such request, or it is finished already.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        if not state.request.status.is_finished:  # else an interrupted step ended it
            self.scheduler.finish(state.request, RequestStatus.FINISHED_ABORTED)
        self._take_tokens(state)
        self.aborted.append(request_id)
        output = self._output(state)
        self._forget_finished(state.request)
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self._states or self._outputs)

    def make_request(
        self,
        request_id: str,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    ) -> Request:
        """Check a request before anything changes.

        Args:
            request_id: Any name.
            prompt: Text, or token ids.
            sampling_params: How to choose tokens and when to stop.
            priority: Lower goes first, under the policy of that name.
            cache_salt: Only requests with the same salt share blocks.
            default_max_tokens: If the parameters do not say; None for as many as fit.

        Raises:
            RequestError: It can never be served, with the numbers.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(params).__name__}, but must be a "
                "SamplingParams"
            )
        if type(priority) is not int:
            raise RequestError(f"priority is {priority!r}, but must be an integer")
        if not isinstance(cache_salt, str | None):
            raise RequestError(
                f"cache_salt is {cache_salt!r}, but must be text, or None"
            )
        token_ids = check_token_ids(self._encode(prompt), self.runner.vocab_size)
        max_tokens = params.max_tokens
        if max_tokens is UNSET:
            max_tokens = default_max_tokens
        self._check_length(len(token_ids), max_tokens)
        stop_token_ids = frozenset(params.stop_token_ids)
        for token_id in stop_token_ids:
            if token_id >= self.runner.vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}, but the model knows 0 to "
                    f"{self.runner.vocab_size - 1}: use ids of this model's tokenizer"
                )
        if self.tokenizer and not params.ignore_eos:
            stop_token_ids |= self.tokenizer.eos_token_ids
        return Request(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling_params=params,
            max_tokens=max_tokens or self.runner.max_model_len - len(token_ids),
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _encode(self, prompt: str | Iterable[int]) -> Iterable[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError(
                "the prompt is text, but this engine has no tokenizer: give token ids"
            )
        return self.tokenizer.encode(prompt)

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuse a request that is too long for the model, the table or the pool."""
        limit = self.runner.max_model_len
        num_new = max_tokens or 1
        if num_prompt_tokens + num_new > limit:
            ways = [f"shorten the prompt to {limit - num_new:,} tokens"] * (
                num_new < limit
            )
            ways += [f"ask for at most {limit - num_prompt_tokens:,}"] * (
                num_prompt_tokens < limit and num_new > 1
            )
            raise RequestError(
                f"the prompt has {num_prompt_tokens:,} tokens and {num_new:,} more are "
                f"asked for, but max_model_len is {limit:,}: "
                f"{', '.join([*ways, 'or raise max_model_len'])}"
            )
        capacity = self.runner.num_blocks * self.runner.block_size
        if num_prompt_tokens > capacity:
            raise RequestError(
                f"the prompt has {num_prompt_tokens:,} tokens, but the whole KV cache "
                f"has {capacity:,} slots ({self.runner.num_blocks:,} blocks of "
                f"{self.runner.block_size}): shorten the prompt, or raise num_blocks "
                "or kv_cache_memory_bytes"
            )

    def _emit(self) -> None:
        """Write the new tokens of requests as text, where something has changed."""
        while self._untold:
            request = self._untold[0]
            state = self._states.get(request.request_id)
            is_here = state is not None and state.request is request
            if is_here and (self._take_tokens(state) or request.status.is_finished):
                self._outputs.append(self._output(state))
                self._forget_finished(request)
            self._untold.popleft()

    def _take_tokens(self, state: RequestState) -> bool:
        """Append the text of the tokens that came since the last time, if any did."""
        request = state.request
        num_seen = request.num_prompt_tokens + state.num_taken_tokens
        new_token_ids = request.token_ids[num_seen:]
        if not new_token_ids:
            return False
        state.num_taken_tokens += len(new_token_ids)
        if request.first_token_time is None:
            request.first_token_time = self.runner.now()
        if state.detokenizer:
            if request.status is RequestStatus.FINISHED_STOPPED:
                new_token_ids = new_token_ids[:-1]  # a stop mark is no text
            state.text += "".join(map(state.detokenizer.add, new_token_ids))
        return True

    def _output(self, state: RequestState) -> RequestOutput:
        """Show a request as it is now."""
        request = state.request
        status = request.status
        if status.is_finished:
            request.finished_time = self.runner.now()
            if state.detokenizer:
                state.text += state.detokenizer.finish()
        output_token_ids = request.output_token_ids
        stop_reason = None
        if status is RequestStatus.FINISHED_STOPPED:
            last = output_token_ids[-1]
            if last in request.sampling_params.stop_token_ids:
                stop_reason = last
        return RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=state.text,
                    token_ids=output_token_ids,
                    finish_reason=status.value if status.is_finished else None,
                    stop_reason=stop_reason,
                    error=request.error,
                )
            ],
            finished=status.is_finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finished_time,
                num_output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
            ),
        )

    def _forget_finished(self, request: Request) -> None:
        if request.status.is_finished:
            del self._states[request.request_id]

    def _watch_free_blocks(self) -> None:
        """Warn when free blocks stay scarce: preemption is near, or going on."""
        manager = self.scheduler.block_manager
        is_low = manager.num_free_blocks < LOW_SHARE * manager.num_blocks
        self._num_low_steps = self._num_low_steps + 1 if is_low else 0
        if self._num_low_steps == LOW_STEPS:
            logger.warning(
                "%d of %d blocks of the KV cache have been free for %d steps: requests "
                "may be preempted; lower max_num_seqs, or raise num_blocks or "
                "kv_cache_memory_bytes",
                manager.num_free_blocks,
                manager.num_blocks,
                LOW_STEPS,
            )
