"""The engine on a thread of its own, for users who come and go as they like.

    event loop(s)                                engine thread
    add_request --> tokenise in a pool --> inbox --> submit
    OutputStream <-- one call per step <------------ step, step, step ...

Invariant: only the engine's thread touches the engine; only the thread of its event
loop touches a stream. Whatever happens, a stream ends: with its last output or with an
error. A request whose stream is closed leaves the engine before the next step.

Called by the server; for programs of one's own, too.

In vLLM: vllm/v1/engine/async_llm.py (AsyncLLM), vllm/v1/engine/core.py
(EngineCoreProc), vllm/v1/engine/output_processor.py (RequestOutputCollector).
Source: chapter 9, "Serving"; appendix A33, "A page to look inside".
"""

import asyncio
import atexit
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from minivllm.engine.config import EngineConfig
from minivllm.engine.engine import LLMEngine
from minivllm.engine.metrics import EngineMetrics
from minivllm.errors import (
    ConfigError,
    EngineClosing,
    EngineDead,
    EngineOverloaded,
    RequestError,
    RequestTimeout,
)
from minivllm.outputs import RequestOutput
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams


class OutputStream:
    """The outputs of one request, for one reader in one event loop.

    `async for output in stream` yields the answer so far, whenever there is more of it.
    A reader who is slow finds the latest output only, so nothing piles up.
    """

    def __init__(self, request_id: str, num_places: int = 1) -> None:
        """Make a stream in the running event loop.

        Args:
            request_id: Of the request.
            num_places: How many continuations it has.
        """
        self.request_id = request_id
        self.num_places = num_places
        self.loop = asyncio.get_running_loop()
        self.is_open = True  # more may come
        self._latest: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, news: RequestOutput | Exception) -> None:
        """Take an output, or the error that ends the stream."""
        if not self.is_open:
            return
        if isinstance(news, Exception):
            self._error = news
        else:
            self._latest = news
        if isinstance(news, Exception) or news.finished:
            self.end()
        self._has_news.set()

    def end(self) -> None:
        """Take nothing more, and let nobody wait for it."""
        self.is_open = False
        self._has_news.set()
        if self._timer is not None:
            self._timer.cancel()

    def limit(self, seconds: float, expire: Callable[[], None]) -> None:
        """Call a function after so many seconds, unless the stream has ended."""
        self._timer = self.loop.call_later(seconds, expire)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output.

        Raises:
            MinivllmError: The engine died, or the request took too long.
        """
        if self._latest is None and self._error is None and not self.is_open:
            raise StopAsyncIteration
        await self._has_news.wait()
        self._has_news.clear()
        output, self._latest = self._latest, None
        if output is not None:
            if self._error is not None:
                self._has_news.set()  # comes next
            return output
        if self._error is None:  # closed by its reader
            raise StopAsyncIteration
        error, self._error = self._error, None
        raise error


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class AsyncLLM:
    """An engine that runs on its own, and any number of requests at once.

    llm = AsyncLLM(EngineConfig(model="smollm2-135m-instruct"))
    async for output in llm.generate("Once upon a time"):
        print(output.outputs[0].text)
    """

    def __init__(
        self,
        engine: LLMEngine | EngineConfig,
        *,
        max_num_waiting: int = 256,
        timeout_s: float | None = None,
    ) -> None:
        """Start the thread.

        Args:
            engine: It belongs to the new thread from now on.
            max_num_waiting: Requests beyond those that can run at once, at most; each
                continuation counts.
            timeout_s: After so many seconds a request is aborted; None for never.

        Raises:
            ConfigError: A limit is impossible.
        """
        if type(max_num_waiting) is not int or max_num_waiting < 0:
            raise ConfigError(
                f"max_num_waiting is {max_num_waiting!r}, but must be an integer from 0"
            )
        check_timeout(timeout_s)
        self.engine = engine if isinstance(engine, LLMEngine) else LLMEngine(engine)
        self.metrics = self.engine.metrics = EngineMetrics()
        self.max_num_waiting = max_num_waiting
        self.timeout_s = timeout_s
        self.error: EngineDead | None = None
        self.death_listeners: list[Callable[[EngineDead], None]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next four
        self._streams: dict[str, OutputStream] = {}
        self._num_open = 0  # continuations of their requests
        self._is_closing = False
        self._end_times: deque[float] = deque(maxlen=16)  # of the latest requests
        self._numbers = itertools.count()
        self._tokenizers = ThreadPoolExecutor(1, "minivllm-tokenizer")
        self._thread = threading.Thread(
            target=self._run, name="minivllm-engine", daemon=True
        )
        self._thread.start()
        # A thread that is in the middle of a step when Python ends crashes it.
        atexit.register(self.close)

    has_stopped = False  # its thread takes no more calls

    def call_in_engine(
        self, function: Callable[[LLMEngine], Result]
    ) -> "Future[Result]":
        """Have the engine's thread call a function, between two steps.

        From any thread. All requests wait as long as the function takes.

        Args:
            function: It gets the engine, which nobody else touches meanwhile.

        Returns:
            What the function returns or raises; `asyncio.wrap_future` makes it a thing
            to await.

        Raises:
            EngineDead: The engine has died.
            EngineClosing: It was closed.
        """
        call = EngineCall(self.engine, function)
        with self._changed:
            if self.has_stopped:
                raise self._refusal()
            self._inbox.put(call)
        return call.future

    def _run(self) -> None:
        """Make steps as long as there is something to do; wait while there is not."""
        try:
            while self._do_commands():
                self._hand_out(self.engine.step())
        except BaseException as error:  # a mistake of ours: nobody may wait for ever
            self._die(error)
        finally:
            self._refuse_calls()
            self.engine.close()

    def _do_commands(self) -> bool:
        """Do what was asked for since the last step; False if that was to stop."""
        while True:
            is_idle = not self.engine.has_unfinished_requests()
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Send outputs to their streams: one call for each event loop."""
        mail: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                self._forget(stream)
            mail.setdefault(stream.loop, []).append((stream, output))
        for loop, letters in mail.items():
            if not call_in_loop(loop, partial(deliver, letters)):
                for stream, output in letters:  # whoever asked is gone
                    self._forget(stream)
                    if not output.finished:
                        self.engine.abort_request(stream.request_id)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; `add_request` has the arguments.

        Yields:
            The answer so far, whenever there is more of it. To stop asking, for example
            because the task is cancelled, aborts the request.

        Raises:
            RequestError: It can never be served.
            EngineOverloaded: Too many requests wait.
            MinivllmError: The engine is closing or dead, or the time is up.
        """
        stream = await self.add_request(prompt, sampling_params, **options)
        try:
            async for output in stream:
                yield output
        finally:
            self.close_stream(stream)

    async def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        only_final: bool = False,
        timeout_s: float | None = None,
        **options: Any,
    ) -> OutputStream:
        """Check a request and hand it to the engine; whoever calls must end it.

        Args:
            prompt: Text, or token ids.
            sampling_params: How to choose tokens and when to stop.
            request_id: A name for `abort`; made up, if None.
            only_final: Whether the stream has nothing but the whole answer.
            timeout_s: Seconds until it is aborted; None for the engine's own limit.
            options: `priority`, `cache_salt` and `default_max_tokens`, as for
                `LLMEngine.make_request`.

        Returns:
            Its outputs. `close_stream` ends a request that is not wanted any more.

        Raises:
            MinivllmError: As for `generate`.
        """
        check_timeout(timeout_s)
        self._check_open()
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        make = partial(
            self.engine.make_request, request_id, prompt, sampling_params, **options
        )
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(self._tokenizers, make)
        stream = OutputStream(request_id, request.sampling_params.n)
        text = prompt if isinstance(prompt, str) else None
        self._admit(stream, partial(self._submit, stream, request, text, only_final))
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if limit_s is not None:
            stream.limit(limit_s, partial(self._expire, stream, limit_s))
        return stream

    def _submit(
        self, stream: OutputStream, request: Request, text: str | None, only_final: bool
    ) -> None:
        """Give a request to the engine, between two steps."""
        try:
            self.engine.submit(request, text, only_final=only_final)
        except RequestError as error:  # the name of one of its continuations is in use
            self._forget(stream)
            call_in_loop(stream.loop, partial(stream.put, error))

    def close_stream(self, stream: OutputStream) -> None:
        """Abort the request of a stream, unless it has ended; it tells no more."""
        if stream.is_open:
            stream.end()
            self.abort(stream.request_id)

    def abort(self, request_id: str) -> None:
        """End a request, from any thread; harmless if there is none of that name."""
        self._inbox.put(partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        if output is not None:
            self._hand_out([output])

    def _expire(self, stream: OutputStream, limit_s: float) -> None:
        stream.put(
            RequestTimeout(
                f"the request has not ended after {limit_s:g} s, which is the limit: "
                "ask for fewer tokens, or raise the limit"
            )
        )
        self.abort(stream.request_id)

    def _check_open(self) -> None:
        """Refuse a request that could not even wait."""
        with self._changed:
            self.check_health()
            if self._is_closing:
                raise EngineClosing(
                    "the engine is closing and takes no new requests: ask another one, "
                    "or try again when it is back"
                )
            if self._num_open >= self.num_places:
                raise EngineOverloaded(
                    f"{self._num_open} requests run or wait, but at most "
                    f"{self.num_places} may: try again later, or raise max_num_waiting",
                    self._seconds_until_place(),
                )

    def _admit(self, stream: OutputStream, submit: Callable[[], None]) -> None:
        """Enter a request in the books, so that it can be told how it ends.

        It is on its way to the engine before anybody can see it there and abort it.
        """
        with self._changed:
            self._check_open()
            if stream.request_id in self._streams:
                raise RequestError(
                    f"request_id is {stream.request_id!r}, but an unfinished request "
                    "has that name: choose another one, or abort the other first"
                )
            self._streams[stream.request_id] = stream
            self._num_open += stream.num_places
            self._inbox.put(submit)

    def _forget(self, stream: OutputStream) -> None:
        """Strike a request that has ended out of the books."""
        with self._changed:
            if self._streams.pop(stream.request_id, None) is not None:
                self._num_open -= stream.num_places
                self._end_times.append(time.monotonic())
                self._changed.notify_all()

    def _seconds_until_place(self) -> int:
        """Guess when the next request will end, by how often one did lately."""
        times = self._end_times
        if len(times) < 2:
            return 1
        mean_s = (times[-1] - times[0]) / (len(times) - 1)
        return min(max(1, math.ceil(mean_s)), 60)

    def check_health(self) -> None:
        """Raise EngineDead if the engine has stopped working."""
        if self.error is not None:
            raise EngineDead(*self.error.args)

    def _die(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing will come."""
        # What went wrong in one request is no business of the others' clients: they
        # are told its kind only.
        logger.critical("the engine died", exc_info=error)
        dead = EngineDead(
            f"the engine died of {type(error).__name__}: its log says why; start it "
            "again"
        )
        with self._changed:
            self.error = dead
            streams = list(self._streams.values())
            self._streams.clear()
            self._num_open = 0
            self._changed.notify_all()
        for stream in streams:
            call_in_loop(stream.loop, partial(stream.put, EngineDead(*dead.args)))
        for listener in self.death_listeners:
            listener(dead)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those that run end, and stop the thread.

        Args:
            drain_s: Seconds that they have; then they are aborted.
        """
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._streams, drain_s)
            request_ids = list(self._streams)
        for request_id in request_ids:
            self.abort(request_id)
        self._inbox.put(None)
        self._thread.join()
        self._tokenizers.shutdown(wait=False)
        atexit.unregister(self.close)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Do what `close` does, without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close, drain_s)

    @property
    def num_places(self) -> int:
        """Continuations that may run or wait; the last one that fits may have more."""
        return self.engine.scheduler.max_num_seqs + self.max_num_waiting

    @property
    def num_open(self) -> int:
        """Continuations that run or wait, or are on their way to the engine."""
        return self._num_open

    def _refuse_calls(self) -> None:
        """Tell those who wait for a call that it will not come."""
        with self._changed:
            self.has_stopped = True  # no call is put into the inbox from now on
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, EngineCall):
                if command.future.set_running_or_notify_cancel():
                    command.future.set_exception(self._refusal())

    def _refusal(self) -> EngineClosing | EngineDead:
        if self.error is not None:
            return EngineDead(*self.error.args)
        return EngineClosing(
            "the engine is closed and takes no calls: make another one"
        )


def check_timeout(value: float | None) -> None:
    """Refuse a time limit that is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ConfigError(
            f"timeout_s is {value!r}, but must be a number of seconds above 0, or None"
        )


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    """Have an event loop call a function; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


def deliver(letters: Iterable[tuple[OutputStream, RequestOutput]]) -> None:
    """Put outputs into their streams."""
    for stream, output in letters:
        stream.put(output)


class EngineCall:
    """A function in the inbox of an engine, and what became of it."""

    def __init__(self, engine: LLMEngine, function: Callable[[LLMEngine], Any]) -> None:
        self.engine = engine
        self.function = function
        self.future: Future[Any] = Future()

    def __call__(self) -> None:
        """Call the function, unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(self.engine))
        except Exception as error:  # of whoever called: the engine goes on
            self.future.set_exception(error)
