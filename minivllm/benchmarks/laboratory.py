"""Load on an engine in this process, on a clock that only pretends.

Invariant: nothing here waits. When all tasks sleep, the clock jumps to where the first
of them wakes; so equal experiments give equal numbers, whatever the machine does.
Called by the book and by tests.

In vLLM: there is no such thing.
Source: appendix A31, "Load".
"""

import asyncio
import itertools
import selectors
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from minivllm.benchmarks.load import LoadRequest, Piece, Usage
from minivllm.engine.engine import LLMEngine
from minivllm.outputs import RequestOutput
from minivllm.sampling.params import SamplingParams

Result = TypeVar("Result")

MOMENT_S = 1e-6  # what arrives within it arrives together


class JumpingSelector(selectors.DefaultSelector):
    """Where an event loop would wait, lets its clock jump."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return what is ready; if nothing is, the time is later at once."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all tasks wait, and none for a time: none would wake")
        if not ready:
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which an hour passes in no time."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return seconds since the loop was made, on its own clock."""
        return self._clock.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in a loop of its own, in virtual time.

    That is in another thread, since the caller's may have a loop, as a notebook has.
    """

    def run() -> Result:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class LaboratorySender:
    """Sends to an engine around a FakeRunner, and makes its steps.

    A step takes the time of the event loop that its cost says.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._mail: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._numbers = itertools.count()
        self._steps: asyncio.Task[None] | None = None

    async def send(self, request: LoadRequest) -> AsyncIterator[Piece]:
        """Give the engine a request; yield a piece whenever there is a token."""
        name = f"request-{next(self._numbers)}"
        params = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
        )
        now_s = asyncio.get_running_loop().time()
        self.engine.add_request(name, request.prompt, params, arrival_time=now_s)
        mail = self._mail[name] = asyncio.Queue()
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._make_steps())
        try:
            is_finished = False
            while not is_finished:
                output = await mail.get()
                num_prompt = len(output.prompt_token_ids)
                usage = Usage(num_prompt, len(output.outputs[0].token_ids))
                yield Piece(True, usage)
                is_finished = output.finished
        finally:
            del self._mail[name]
            self.engine.abort_request(name)  # harmless if it has finished

    async def _make_steps(self) -> None:
        now, runner = asyncio.get_running_loop().time, self.engine.runner
        await asyncio.sleep(MOMENT_S)
        while self.engine.has_unfinished_requests():
            runner.advance_to(now())
            outputs = self.engine.step()
            await asyncio.sleep(runner.now() - now())
            for output in outputs:
                if output.request_id in self._mail:
                    self._mail[output.request_id].put_nowait(output)
