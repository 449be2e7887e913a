"""The engine: requests in, text out, one step at a time.

`LLMEngine.step()` is all of it: schedule, execute, update, emit. The engine owns the
requests; the scheduler decides, the runner computes, the detokenizers write.

Invariant: every request that was added ends in exactly one finished `RequestOutput`
with a reason, whatever goes wrong. Not safe to call from several threads: `LLM` is.

In vLLM: vllm/v1/engine/llm_engine.py (LLMEngine), vllm/v1/engine/core.py (EngineCore).
Source: chapter 4, "Continuous batching"; appendix A14, "One prompt, many answers";
    appendix A27, "Thinking"; chapter 8, "Hybrid attention"; chapter 9, "Serving".
"""

import itertools
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.cache_manager import CacheManager
from minivllm.engine.config import EngineConfig
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.scheduler import Policy, Scheduler
from minivllm.engine.trace import (
    TraceWriter,
    begin_record,
    describe_engine,
    finish_record,
)
from minivllm.errors import RequestError
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.request import (
    ModelOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    TokenLogprobs,
    check_token_ids,
)
from minivllm.runners.base import CacheLayout, Runner
from minivllm.sampling.params import (
    DEFAULT_MAX_TOKENS,
    GUIDES,
    UNSET,
    SamplingParams,
    check_max_logprobs,
    check_min_tokens,
)
from minivllm.sampling.uniform import seed_of
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.reasoning import ReasoningSplitter, prompt_end_of, tag_ids
from minivllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOW_SHARE = 0.1  # of the blocks free: less than that is worth a warning ...
LOW_STEPS = 50  # ... when it lasts so many steps


@dataclass(slots=True)
class Continuation:
    """What the engine keeps of a continuation beside the scheduler's record."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_taken_tokens: int = 0  # of the answer, written as text already

    splitter: ReasoningSplitter | None = None
    reasoning_content: str | None = None

    def add_text(self, piece: str) -> None:
        """Append text that has become certain."""
        if self.splitter is None:
            self.text += piece
        else:
            self._add_parts(*self.splitter.add(piece))

    def finish_text(self) -> None:
        """Append what was held back."""
        if self.detokenizer:
            self.add_text(self.detokenizer.finish())
        if self.splitter:
            self._add_parts(*self.splitter.finish())

    def _add_parts(self, thoughts: str, answer: str) -> None:
        if self.splitter.has_thoughts:
            self.reasoning_content = (self.reasoning_content or "") + thoughts
        self.text += answer


@dataclass(slots=True)
class RequestState:
    """What the engine keeps of a request: its prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    continuations: list[Continuation]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    only_final: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether all continuations have ended."""
        for continuation in self.continuations:  # several times quicker than all(...)
            if not continuation.request.status.is_finished:
                return False
        return True


class LLMEngine:
    """Runs any number of requests at once."""

    metrics: EngineMetrics | None = None  # set one, and it counts from then on
    _trace: TraceWriter | None = None

    def __init__(
        self,
        runner: Runner | EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        policy: str | Policy = "mixed",
        seed: int = 0,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_logprobs: int = 20,
    ) -> None:
        """Build an engine around a runner.

        Args:
            runner: What computes; it brings the size of the cache. Or a configuration,
                which says all the rest as well: the model is loaded then.
            tokenizer: Turns text into tokens and back; without it, prompts are token
                ids and answers have no text.
            max_num_seqs: Requests in a step at most; fewer, if the runner has fewer
                slots for states.
            max_num_batched_tokens: Tokens in a step at most.
            enable_prefix_caching: Whether requests share blocks with equal content.
            policy: Who comes first, see `POLICIES`.
            seed: Where the seeds of requests without one come from.
            sampling_defaults: What the model's makers recommend, by the names of
                `SamplingParams`, for parameters that a request leaves unset.
            max_logprobs: Of how many tokens a request may have the log-probabilities,
                for each place of its text; -1 for all.

        Raises:
            ConfigError: An option is impossible.
            MinivllmError: The model of a configuration cannot be loaded.
        """
        if isinstance(runner, EngineConfig):
            config = runner
            self.__init__(**config.load())
            if config.trace is not None:
                header = describe_engine(self, config.model_name)
                self._trace = TraceWriter(config.trace, header)
                self.listeners.append(self._trace)
            return
        check_max_logprobs(max_logprobs)
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            make_block_manager(runner, enable_prefix_caching),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
        )
        if num_states := runner.layout.num_states:
            scheduler = self.scheduler
            scheduler.max_num_seqs = min(scheduler.max_num_seqs, num_states)
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.num_steps = 0
        self._states: dict[str, RequestState] = {}
        self._names: set[str] = set()  # of all their continuations
        self.added: list[Request] = []  # since the last step, as is the next
        self.aborted: list[str] = []
        # Kept from step to step, in case Ctrl-C or a listener cuts one short:
        self._untold: deque[Request] = deque()  # whose news is to be told
        # By request id, to be told as well; emptied from the front.
        self._changed: OrderedDict[str, RequestState] = OrderedDict()
        self._outputs: list[RequestOutput] = []  # told, and not handed out yet
        self._num_requests = 0
        self._random = random.Random(seed)
        self.sampling_defaults = dict(sampling_defaults or {})
        self.max_logprobs = max_logprobs
        self._num_low_steps = 0

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, update, emit.

        Returns:
            One output for every request that got a token or ended in this step; for
            one with `only_final`, when it has ended.
        """
        try:
            start = self.runner.now()
            plan = self.scheduler.schedule(start)
            record = begin_record(self, plan) if self.listeners else None
            self._untold += [*plan.failed, *plan.requests]
            self._untold += itertools.chain(*plan.followers.values())
            result = self._execute(plan)
        except BaseException:  # Ctrl-C, or a mistake of ours
            self.scheduler.restart()
            for state in self._states.values():
                self._untold += [c.request for c in state.continuations]
            raise
        told = list(self._untold)
        if self.metrics is not None:
            self.metrics.add_step(plan, told, start, self.runner.now())
        self._emit()
        if record is not None:
            finish_record(record, self, result, told)
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
        only_final: bool = False,
    ) -> None:
        """Queue a request that `make_request` has made.

        Args:
            request: A new one.
            prompt: Its text, for the output.
            arrival_time: When it came, in seconds on the runner's clock; now, if None.
            only_final: Whether steps tell nothing of it before it has ended. To show a
                long answer at every step costs the more, the longer it is.

        Raises:
            RequestError: Its name is that of an unfinished request.
        """
        names = [request.request_id]
        names += [follower_id(names[0], i) for i in range(1, request.sampling_params.n)]
        for name in names:
            if name in self._names:
                raise RequestError(
                    f"request_id is {name!r}, but an unfinished request has that name: "
                    "choose another one, or abort the other request first"
                )
        seed = request.sampling_params.seed
        request.seed = self._random.getrandbits(64) if seed is None else seed
        if arrival_time is None:
            arrival_time = self.runner.now()
        state = RequestState(
            request.request_id,
            prompt,
            request.prompt_token_ids,
            continuations=[],
            only_final=only_final,
        )
        for member in [request, *request.followers]:
            member.seed = seed_of(request.seed, member.index)
            member.arrival = self._num_requests
            member.arrival_time = arrival_time
            self._num_requests += 1
            state.continuations.append(self._make_continuation(member))
        self._states[request.request_id] = state
        self._names.update(names)
        for continuation in state.continuations:
            self.added.append(continuation.request)
            self.scheduler.add_request(continuation.request)

    def _make_continuation(self, request: Request) -> Continuation:
        splitter = None
        if self.tokenizer and request.sampling_params.split_reasoning:
            prompt_end = prompt_end_of(self.tokenizer, request.prompt_token_ids)
            splitter = ReasoningSplitter(prompt_end)
        detokenizer = self._make_detokenizer(request)
        return Continuation(request, detokenizer, splitter=splitter)

    def _make_detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        params = request.sampling_params
        return IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=tag_ids(self.tokenizer) if params.split_reasoning else (),
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )

    def _make_processors(
        self, params: SamplingParams
    ) -> tuple[Callable[[list[int], Any], Any], ...]:
        """Return the logits processors of a request, that of its grammar first."""
        processors = tuple(map(fresh, params.logits_processors))
        if not any(getattr(params, name) is not None for name in GUIDES):
            return processors
        from minivllm.sampling.grammar import make_grammar

        return make_grammar(params, self.tokenizer), *processors

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now, with all its continuations, and free its blocks.

        Returns:
            What it had; None if there is no such request, or it is finished already.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        for continuation in state.continuations:
            request = continuation.request
            self._take_tokens(continuation)
            if not request.status.is_finished:  # else an interrupted step ended it
                self.scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
                self.aborted.append(request.request_id)
        output = self._output(state)
        self._forget_finished(state)
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
            recommended = self.sampling_defaults.get("max_tokens")
            if recommended is not None:  # as far as it fits: nobody has asked for it
                room = self.runner.max_model_len - len(token_ids)
                max_tokens = max(1, min(recommended, room))
        self._check_length(len(token_ids), max_tokens)
        max_tokens = max_tokens or self.runner.max_model_len - len(token_ids)
        check_min_tokens(params.min_tokens, max_tokens)
        self._check_params(params)
        stop_token_ids = frozenset(params.stop_token_ids)
        if self.tokenizer and not params.ignore_eos:
            stop_token_ids |= self.tokenizer.eos_token_ids
        wants_prompt = params.prompt_logprobs is not None
        request = Request(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling_params=params.filled(self.sampling_defaults),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            bad_words=self._bad_words(params),
            logits_processors=self._make_processors(params),
            prompt_logprobs=[None] * len(token_ids) if wants_prompt else None,
        )
        request.followers = self._make_followers(request)
        return request

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
            state = self._states.get((request.leader or request).request_id)
            if state and state.continuations[request.index].request is request:
                continuation = state.continuations[request.index]
                if self._take_tokens(continuation) or request.status.is_finished:
                    self._changed[state.request_id] = state
            self._untold.popleft()
        while self._changed:
            request_id, state = next(iter(self._changed.items()))
            if state.is_finished or not state.only_final:
                self._outputs.append(self._output(state))
            self._forget_finished(state)
            del self._changed[request_id]

    def _take_tokens(self, continuation: Continuation) -> bool:
        """Append the text of the tokens that came since the last time, if any did."""
        request = continuation.request
        num_taken = continuation.num_taken_tokens
        new_token_ids = request.token_ids[request.num_prompt_tokens + num_taken :]
        if not new_token_ids:
            return False
        if request.first_token_time is None:
            request.first_token_time = self.runner.now()
        if continuation.detokenizer:
            new_token_ids = self._write(continuation, new_token_ids)
        continuation.num_taken_tokens += len(new_token_ids)
        for token_id, entry in zip(
            new_token_ids, request.logprobs[num_taken:], strict=False
        ):
            continuation.logprobs.append(self._decode_logprobs(entry))
            continuation.cumulative_logprob += entry[token_id][0]
        return True

    def _decode_logprobs(
        self, entry: TokenLogprobs | None
    ) -> dict[int, Logprob] | None:
        """Add the texts of the tokens."""
        return entry and {
            token_id: Logprob(logprob, rank, self._text_of(token_id))
            for token_id, (logprob, rank) in entry.items()
        }

    def _text_of(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        if not self._has_text(token_id):
            return ""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    def _has_text(self, token_id: int) -> bool:
        """Say whether the tokenizer knows a token; a runner may have more of them."""
        return token_id < self.tokenizer.vocab_size

    def _output(self, state: RequestState) -> RequestOutput:
        """Show a request as it is now."""
        now = self.runner.now()
        for continuation in state.continuations:
            request = continuation.request
            if request.status.is_finished and request.finished_time is None:
                request.finished_time = now
                continuation.finish_text()
        leader = state.continuations[0].request
        if state.prompt_logprobs is None and leader.prompt_logprobs is not None:
            if None not in leader.prompt_logprobs[1:]:
                state.prompt_logprobs = list(
                    map(self._decode_logprobs, leader.prompt_logprobs)
                )
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[self._completion(c) for c in state.continuations],
            finished=state.is_finished,
            num_cached_tokens=leader.num_cached_tokens,
            metrics=metrics_of([c.request for c in state.continuations]),
            prompt_logprobs=state.prompt_logprobs,
        )

    def _completion(self, continuation: Continuation) -> CompletionOutput:
        """Show a continuation as it is now."""
        request, detokenizer = continuation.request, continuation.detokenizer
        status = request.status
        output_token_ids = request.output_token_ids
        stop_reason: int | str | None = None
        if status is RequestStatus.FINISHED_STOPPED:
            stop_reason = detokenizer and detokenizer.stop_reason
            last = output_token_ids[-1]
            if stop_reason is None and last in request.sampling_params.stop_token_ids:
                stop_reason = last
        has_logprobs = request.sampling_params.logprobs is not None
        return CompletionOutput(
            index=request.index,
            text=continuation.text,
            token_ids=output_token_ids,
            finish_reason=status.value if status.is_finished else None,
            stop_reason=stop_reason,
            error=request.error,
            logprobs=list(continuation.logprobs) if has_logprobs else None,
            cumulative_logprob=(
                continuation.cumulative_logprob if has_logprobs else None
            ),
            reasoning_content=continuation.reasoning_content,
        )

    def close(self) -> None:
        """Give back the memory of model and cache; requests that run get no end."""
        self.runner.close()
        if self._trace is not None:
            self._trace.close()

    def _forget_finished(self, state: RequestState) -> None:
        if state.is_finished:
            del self._states[state.request_id]
            for continuation in state.continuations:
                self._names.remove(continuation.request.request_id)
                if self.metrics is not None:
                    self.metrics.add_finished(continuation.request)

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

    def _make_followers(self, leader: Request) -> list[Request]:
        """Return the other continuations of a prompt."""
        return [
            replace(
                leader,
                request_id=follower_id(leader.request_id, index),
                token_ids=list(leader.token_ids),
                index=index,
                leader=leader,
                followers=[],
                logprobs=[],
                prompt_logprobs=None,
                logits_processors=tuple(map(fresh, leader.logits_processors)),
            )
            for index in range(1, leader.sampling_params.n)
        ]

    def _write(self, continuation: Continuation, new_token_ids: list[int]) -> list[int]:
        """Turn new tokens into text; end the request where a stop text is complete.

        Returns:
            The new tokens, without those behind the stop text.
        """
        request, detokenizer = continuation.request, continuation.detokenizer
        params = request.sampling_params
        is_stopped = request.status is RequestStatus.FINISHED_STOPPED
        for place, token_id in enumerate(new_token_ids, 1):
            is_stop_mark = is_stopped and place == len(new_token_ids)
            if is_stop_mark and not params.include_stop_str_in_output:
                break
            if self._has_text(token_id):
                continuation.add_text(detokenizer.add(token_id))
            if detokenizer.stop_reason is not None:
                num_behind = len(new_token_ids) - place
                del request.token_ids[request.num_tokens - num_behind :]
                if not request.status.is_finished:
                    self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)
                request.status = RequestStatus.FINISHED_STOPPED
                return new_token_ids[:place]
        return new_token_ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return what must not be said, in tokens; rows without a token as well."""
        if self.tokenizer is None:
            return ()
        missing = [(token_id,) for token_id in self.tokenizer.missing_token_ids]
        spellings = (spellings_of(word, self.tokenizer) for word in params.bad_words)
        return tuple(itertools.chain(missing, *spellings))

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse ids that the model lacks, and texts if there is no tokenizer."""
        ids = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, token_ids in ids.items():
            if token_ids and max(token_ids) >= self.runner.vocab_size:
                raise RequestError(
                    f"{name} holds {max(token_ids)}, but the model knows 0 to "
                    f"{self.runner.vocab_size - 1}: use ids of this model's tokenizer"
                )
        for name in ("stop", "bad_words", "split_reasoning", *GUIDES):
            if self.tokenizer is None and getattr(params, name):
                raise RequestError(
                    f"{name} is {getattr(params, name)!r:.80}, but this engine has no "
                    "tokenizer to read or write text: use token ids, or an engine "
                    "with a tokenizer"
                )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            num_best = self.runner.vocab_size if wanted == -1 else wanted
            if -1 != self.max_logprobs < num_best:
                raise RequestError(
                    f"{name} is {wanted}, which is {num_best:,} tokens for each place, "
                    f"but max_logprobs is {self.max_logprobs:,}: ask for fewer, or "
                    "raise max_logprobs (-1 is no limit)"
                )


def fresh(processor: Callable[..., Any]) -> Callable[..., Any]:
    """Return a logits processor for one continuation; one with a state starts anew."""
    make = getattr(processor, "fresh", None)
    if not callable(make):
        return processor
    try:
        new = make()
    except Exception as error:  # whatever code of the user's can raise
        raise RequestError(
            f"a logits processor has no fresh copy ({type(error).__name__}: {error}): "
            "correct its method fresh"
        ) from error
    if not callable(new):
        raise RequestError(
            f"fresh() of a logits processor returned {new!r:.80}, but must return a "
            "function"
        )
    return new


def follower_id(request_id: str, index: int) -> str:
    """Return the name that a continuation has in the scheduler."""
    return f"{request_id}#{index}"


def spellings_of(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the beginning of a text, and behind a space."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    texts = [word] if word[0].isspace() else [word, f" {word}"]
    spellings = list(map(encode, texts))
    if tokenizer.spelling.strips_leading_space:
        # Encoding puts a space in front of a text; in the middle there is none.
        start, whole = encode("\n"), encode(f"\n{word}")
        if whole[: len(start)] == start:
            spellings.append(whole[len(start) :])
    return [spelling for spelling in dict.fromkeys(spellings) if spelling]


def metrics_of(requests: Sequence[Request]) -> RequestMetrics:
    """Sum up when things happened to the continuations of a prompt."""
    first_token_times = [
        request.first_token_time
        for request in requests
        if request.first_token_time is not None
    ]
    finished_times = [request.finished_time for request in requests]
    return RequestMetrics(
        arrival_time=requests[0].arrival_time,
        first_scheduled_time=requests[0].first_scheduled_time,
        first_token_time=min(first_token_times, default=None),
        finished_time=None if None in finished_times else max(finished_times),
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        num_preemptions=sum(request.num_preemptions for request in requests),
    )


def make_block_manager(runner: Runner, enable_prefix_caching: bool) -> BlockManager:
    """Open the books that a runner's caches need."""
    sizes = (runner.num_blocks, runner.block_size)
    if runner.layout == CacheLayout():
        return BlockManager(*sizes, enable_prefix_caching=enable_prefix_caching)
    return CacheManager(
        *sizes, runner.layout, enable_prefix_caching=enable_prefix_caching
    )
