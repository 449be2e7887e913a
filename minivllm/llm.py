"""`LLM`: a model and its engine behind three methods.

    with LLM() as llm:
        for output in llm.generate(["Once upon a time", "The sky is"]):
            print(output.outputs[0].text)

Any number of threads may call the methods at the same time: their requests share the
steps of one engine. There is no thread of its own; a caller who waits makes the next
step for all, unless another caller is making it.

In vLLM: vllm/entrypoints/llm.py (LLM).
Source: appendix A7, "LLM"; appendix A14, "One prompt, many answers"; appendix A21,
    "CUDA graphs"; appendix A25, "Experts in the engine"; appendix A27, "Thinking";
    appendix A28, "Delta nets in torch"; appendix A30, "Speaking OpenAI"; chapter 9,
    "Serving".
"""

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from minivllm.config import DEFAULT_MODEL
from minivllm.engine.config import EngineConfig
from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import Policy
from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.interrupts import HeldInterrupts
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.request import Request
from minivllm.runners.build import (
    describe_layout,
)
from minivllm.sampling.params import (
    DEFAULT_MAX_TOKENS,
    SamplingParams,
)

Prompt = str | Sequence[int]
Message = dict[str, Any]

WAIT_S = 0.1  # after so long, whoever waits looks whether Ctrl-C was pressed

OPTIONS = tuple(field.name for field in fields(EngineConfig))


class LLM:
    """A model that answers many requests at once."""

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        backend: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        max_logprobs: int = 20,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        policy: str | Policy = "mixed",
        seed: int = 0,
        trace: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        """Load a model and reserve its KV cache.

        Args:
            model: A short name, a folder, a .gguf file or a hub id.
            backend: "torch", "numpy", "fake" (random tokens, no model), or "auto":
                torch where it is installed, else numpy.
            dtype: "float32", "bfloat16", "float16", or "auto" (numpy has float32).
            device: "cpu", "cuda", "cuda:N", "mps", or "auto".
            block_size: Tokens in a block of the KV cache.
            num_blocks: Size of the KV cache in blocks; or
            kv_cache_memory_bytes: in bytes (on a CPU, 1 GiB by default); or
            gpu_memory_utilization: what is left of this share of a GPU's memory (0.9
                by default) after weights and activations.
            max_num_seqs: Requests that run at the same time at most.
            max_num_batched_tokens: Tokens in a step at most.
            max_model_len: Tokens of a request at most, prompt and answer together, by
                default the smaller of 4,096 and what the model was trained for.
                Rounded down to full blocks.
            max_logprobs: What `logprobs` and `prompt_logprobs` of a request may be at
                most; -1 for no limit.
            enforce_eager: Whether to start every kernel of every step anew, where a GPU
                could replay decode steps as CUDA graphs.
            enable_prefix_caching: Whether equal beginnings of prompts are computed
                once.
            policy: "mixed", "prefill_first", "decode_first", "priority", "shortest".
            seed: Of the random choices of requests that bring no seed.
            trace: A file to record every step in; `minivllm trace` shows it, and
                `minivllm.replay` computes it again.
            unknown: Refused, with the nearest name.

        Raises:
            ConfigError: An option is unknown or impossible.
            MinivllmError: The model cannot be loaded, see `load_model`.
        """
        given = {name: value for name, value in locals().items() if name in OPTIONS}
        for name in unknown:
            nearest = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(
                f"LLM has no option {name}{hint or ': see help(LLM.__init__)'}"
            )
        config = EngineConfig(**given)
        self.model = config.model_name
        self.engine = LLMEngine(config)
        self.tokenizer = self.engine.tokenizer
        self._turn = threading.Condition()  # guards all below, and the engine
        self._stepper: int | None = None  # the thread that makes a step, if any does
        self._is_closed = False
        self._to_do: list[Callable[[], None]] = []  # for the end of the running step
        self._mailboxes: dict[str, list[RequestOutput | Exception]] = {}
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many.

        Args:
            prompts: A text or a list of token ids, or a list of these, mixed at will.
            sampling_params: One for all, or one for each.
            use_tqdm: Whether to show a progress bar.
            priority: One for all, or one for each; for the policy of that name.
            cache_salt: One for all, or one for each: only requests with the same salt
                share what the prefix cache knows.

        Returns:
            One output per prompt, in the order of the prompts. A request that fails on
            the way has the finish reason "error" and a message.

        Raises:
            RequestError: A prompt or a parameter is impossible; nothing was started.
        """
        batch = as_batch(prompts)
        return self._run(
            self._make_requests(
                batch, sampling_params, priority, cache_salt, DEFAULT_MAX_TOKENS
            ),
            [prompt if isinstance(prompt, str) else None for prompt in batch],
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: A list of {"role": ..., "content": ...}, or a list of such lists.
            sampling_params: As for `generate`; `max_tokens` is by default as many as
                fit.
            chat_template_kwargs: Variables of the chat template, for all of them, such
                as {"enable_thinking": False} or {"tools": [...]}.
            use_tqdm: Whether to show a progress bar.
            priority: As for `generate`.
            cache_salt: As for `generate`.

        Returns:
            One output per conversation, in their order.

        Raises:
            RequestError: As for `generate`, or the model has no chat template, or one
                that does not take a variable.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template, so it cannot answer messages: use "
                "generate() to let it continue a text"
            )
        variables = self.tokenizer.check_template_kwargs(chat_template_kwargs)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                f"messages is {messages!r:.80}, but must be a list of messages such as "
                '{"role": "user", "content": "Hello"}, or a list of such lists'
            )
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts = [self.tokenizer.encode_chat(c, **variables) for c in conversations]
        return self._run(
            self._make_requests(prompts, sampling_params, priority, cache_salt, None),
            [None] * len(prompts),
            use_tqdm,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[CompletionOutput]:
        """Continue one prompt, piece by piece.

        Returns:
            An iterator over the pieces: new text, new token ids and their logprobs,
            and in the last one the finish reason; the pieces of several continuations
            come mixed, each with its index. The request starts when the first piece is
            asked for; dropping the iterator aborts it.

        Raises:
            RequestError: At the call, for an impossible request.
        """
        requests = self._make_requests(
            [prompt], sampling_params, priority, cache_salt, DEFAULT_MAX_TOKENS
        )
        text = prompt if isinstance(prompt, str) else None
        return self._stream(requests, text)

    def abort(self, request_id: str) -> None:
        """End a request, from any thread; harmless if there is none of that name."""

        def do() -> None:
            output = self.engine.abort_request(request_id)
            if output is not None:
                self._deliver([output])

        self._do(do)

    def close(self) -> None:
        """Give back the memory; a second call is harmless.

        Calls that wait in other threads end with a MinivllmError.
        """
        self._check_outside()
        with HeldInterrupts(), self._turn:
            self._is_closed = True  # nobody begins another step
            self._turn.wait_for(lambda: self._stepper is None)
            self.engine.close()
            self._turn.notify_all()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        runner = self.engine.runner
        num_tokens = runner.num_blocks * runner.block_size
        more = describe_layout(runner)
        return (
            f"LLM({self.model!r}): {type(runner).__name__}, KV cache for "
            f"{num_tokens:,} tokens ({runner.num_blocks:,} blocks of "
            f"{runner.block_size}){'; ' + more if more else ''}, max_model_len "
            f"{runner.max_model_len:,}"
        )

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        cache_salt: str | Sequence[str | None] | None,
        default_max_tokens: int | None,
    ) -> list[Request]:
        """Check all requests of a call before any of them starts."""
        self._check_outside()
        self._check_open()
        params = one_for_each("sampling_params", sampling_params, len(prompts))
        priorities = one_for_each("priority", priority, len(prompts))
        salts = one_for_each("cache_salt", cache_salt, len(prompts))
        with HeldInterrupts(), self._turn:
            first = self._num_requests
            self._num_requests += len(prompts)
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                request = self.engine.make_request(
                    str(first + index),
                    prompt,
                    params[index],
                    priority=priorities[index],
                    cache_salt=salts[index],
                    default_max_tokens=default_max_tokens,
                )
            except RequestError as error:
                if len(prompts) > 1:
                    raise RequestError(f"prompt {index}: {error}") from None
                raise
            requests.append(request)
        return requests

    def _run(
        self,
        requests: Sequence[Request],
        prompts: Sequence[str | None],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run requests to their end."""
        finished: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), use_tqdm) as bar:
            for output in self._outputs(requests, prompts, only_final=True):
                finished[output.request_id] = output
                bar.update()
        return [finished[request.request_id] for request in requests]

    def _stream(
        self, requests: Sequence[Request], prompt: str | None
    ) -> Iterator[CompletionOutput]:
        shown: dict[int, CompletionOutput] = {}  # by index, what was yielded so far
        for output in self._outputs(requests, [prompt], only_final=False):
            for whole in output.outputs:
                before = shown.get(whole.index)
                if before and before.finish_reason:
                    continue
                piece = piece_of(whole, before)
                if piece.token_ids or piece.text or piece.finish_reason:
                    shown[whole.index] = whole
                    yield piece

    def _outputs(
        self,
        requests: Sequence[Request],
        prompts: Sequence[str | None],
        only_final: bool,
    ) -> Iterator[RequestOutput]:
        """Start requests and yield their outputs until all have finished."""
        mailbox: list[RequestOutput | Exception] = []
        unfinished = {request.request_id for request in requests}

        def start() -> None:
            try:
                for request, prompt in zip(requests, prompts, strict=True):
                    self.engine.submit(request, prompt, only_final=only_final)
                    self._mailboxes[request.request_id] = mailbox
            except Exception as error:  # ours, even if another caller's thread is here
                mailbox.append(error)

        try:
            self._do(start)
            while unfinished:
                for output in self._wait_for(mailbox):
                    if isinstance(output, Exception):
                        raise output
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:  # Ctrl-C, or the caller has dropped the stream
            with HeldInterrupts():
                for request_id in unfinished:
                    self.abort(request_id)

    def _do(self, command: Callable[[], None]) -> None:
        """Change the engine between two steps: now, or after the one that runs."""
        with HeldInterrupts(), self._turn:
            if self._stepper is not None:
                self._to_do.append(command)
            elif not self._is_closed:
                command()

    def _wait_for(
        self, mailbox: list[RequestOutput | Exception]
    ) -> list[RequestOutput | Exception]:
        """Empty a mailbox; if there is nothing in it, make steps until there is."""
        self._check_outside()
        while True:
            with HeldInterrupts():
                if mail := self._take_turn(mailbox):
                    return mail

    def _take_turn(
        self, mailbox: list[RequestOutput | Exception]
    ) -> list[RequestOutput | Exception]:
        """Empty a mailbox; if there is nothing in it, make a step or wait for one."""
        outputs: list[RequestOutput] = []
        try:
            with self._turn:
                self._turn.wait_for(lambda: mailbox or self._stepper is None, WAIT_S)
                if mailbox or self._stepper is not None:
                    mail = mailbox.copy()
                    mailbox.clear()
                    return mail
                self._check_open()
                assert self.engine.has_unfinished_requests(), "a request was lost"
                self._stepper = threading.get_ident()
            outputs = self.engine.step()
        finally:  # the turn is given back in any case
            if self._stepper == threading.get_ident():
                self._end_turn(outputs)
        return []

    def _end_turn(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand out what a step has brought, do what was put off, wake the others."""
        with HeldInterrupts(), self._turn:
            self._stepper = None
            try:
                self._deliver(outputs)
                while self._to_do:
                    self._to_do.pop(0)()
            finally:
                self._turn.notify_all()

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id not in self._mailboxes:
                continue  # somebody gave it to the engine directly
            self._mailboxes[output.request_id].append(output)
            if output.finished:
                del self._mailboxes[output.request_id]

    def _check_open(self) -> None:
        if self._is_closed:
            raise MinivllmError("this LLM is closed: make a new one")

    def _check_outside(self) -> None:
        """Refuse a call from the middle of a step, which would wait for itself."""
        if self._stepper == threading.get_ident():
            raise MinivllmError(
                "this LLM was called from inside its own step, by a logits processor "
                "or a listener, and would wait for itself: call it before or after the "
                "step, or use another LLM"
            )

    def count_experts(self) -> None:
        """Have the trace say from now on how many tokens each expert gets.

        Records have the field `tokens_per_expert` then: for each layer with experts a
        list of counts. `minivllm.engine.trace.expert_loads` adds them up.

        Raises:
            ConfigError: The model has no experts, or there is no model.
        """
        count = getattr(self.engine.runner, "count_experts", None)
        if count is None:
            raise ConfigError(
                "the fake backend has no experts to count: use torch or numpy"
            )
        if self.engine.runner.decoder.spec.moe is None:
            raise ConfigError(
                f"{self.model} has no experts to count: choose a model that has"
            )
        self._do(count)

    def outputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
        only_final: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Continue one prompt or many, and tell of all of them as they go on.

        Args:
            prompts: As for `generate`.
            sampling_params: As for `generate`.
            default_max_tokens: If the parameters do not say; None for as many as fit.
            only_final: Whether to tell of each prompt only when it has ended.
            priority: As for `generate`.
            cache_salt: As for `generate`.

        Returns:
            An iterator over pairs: a prompt's number, and all of its answer so far. The
            requests start when the first is asked for; dropping the iterator aborts
            them.

        Raises:
            RequestError: At the call, for an impossible request.
        """
        batch = as_batch(prompts)
        requests = self._make_requests(
            batch, sampling_params, priority, cache_salt, default_max_tokens
        )
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        numbers = {request.request_id: n for n, request in enumerate(requests)}
        return (
            (numbers[output.request_id], output)
            for output in self._outputs(requests, texts, only_final)
        )


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, whether one prompt was given or many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {prompts!r}, but must be a text, a list of token ids, or a "
            "list of these"
        )
    batch = list(prompts)
    if batch and all(is_integer(item) for item in batch):
        return [batch]
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, Iterable):
            raise RequestError(
                f"prompt {index} is {prompt!r}, but must be a text or a list of token "
                "ids"
            )
    return batch


def is_integer(item: Any) -> bool:
    """Tell an integer, from whatever library, from an array of them."""
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def one_for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value per prompt, whether one was given or a list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts: give one for all, "
            "or one for each"
        )
    return list(value)


def progress_bar(total: int, is_shown: bool) -> Any:
    """Return a tqdm bar over requests; a silent one if it is not wanted."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="requests", unit="request", disable=not is_shown)


def piece_of(
    whole: CompletionOutput, before: CompletionOutput | None
) -> CompletionOutput:
    """Return what an answer has more than it had before."""
    if before is None:
        return whole
    num_tokens = len(before.token_ids)
    thoughts = whole.reasoning_content
    return replace(
        whole,
        text=whole.text[len(before.text) :],
        token_ids=whole.token_ids[num_tokens:],
        logprobs=whole.logprobs and whole.logprobs[num_tokens:],
        reasoning_content=thoughts and thoughts[len(before.reasoning_content or "") :],
    )
