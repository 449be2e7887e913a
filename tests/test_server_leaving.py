"""Clients that leave, at every moment; and clients that stay, but do not read."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.request import ModelOutput, SchedulerOutput
from minivllm.runners.fake_runner import FakeRunner
from minivllm.text.tokenizer import Tokenizer
from tests.engine_tools import LedgerRunner, assert_all_free
from tests.served import WAIT_S, Served
from tests.tiny_folder import write_byte_tokenizer


class SteppedRunner(LedgerRunner):
    """Computes a step only when it is told to, and checks what it reads."""

    def __init__(self) -> None:
        super().__init__(num_blocks=200, block_size=4, max_model_len=700, vocab_size=99)
        self.permits = threading.Semaphore(0)
        self.num_begun = self.num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self.num_begun += 1
        assert self.permits.acquire(timeout=WAIT_S)
        self.num_steps += 1
        return super().execute(step)


class Stepped(Served):
    """A server for one request at a time, whose steps the test makes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.runner = SteppedRunner()
        engine = LLMEngine(self.runner, max_num_seqs=1, max_num_batched_tokens=32)
        engine.tokenizer = tokenizer
        super().__init__(engine)

    def step(self, count: int = 1) -> None:
        """Let the engine make steps, and wait until they are made."""
        end = self.runner.num_steps + count
        self.runner.permits.release(count)
        self.until(lambda: self.runner.num_steps == end)

    def until_in(self, number: int) -> None:
        """Wait until the engine is in the middle of its step of that number."""
        self.until(lambda: self.runner.num_begun == number)

    def until_told(self) -> None:
        """Wait until the engine would hear of something, if it were not in a step."""
        self.until(lambda: not self.llm._inbox.empty())

    @property
    def scheduler(self) -> Any:
        return self.llm.engine.scheduler


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder, None)
    return Tokenizer.from_dir(folder)


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[Stepped]:
    served = Stepped(tokenizer)
    yield served
    served.runner.permits.release(10_000)
    served.until_idle()
    served.close()


def run(use: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(use, 2 * WAIT_S))


@asynccontextmanager
async def asking(
    served: Served, receive_bytes: int | None = None, **wishes: Any
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request, and leave at the end, whatever has come until then."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, served.address)
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**14)
    content = json.dumps({"max_tokens": 500, "prompt": [1], **wishes}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    try:
        yield reader
    finally:
        writer.close()


async def choices_of(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    """Return the choices of a stream, until its end."""
    lines = [line async for line in reader if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    return [choice for event in events for choice in event["choices"]]


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for choice in choices)


# Each of them leaves within a step. When the step is over, nothing may be left: had the
# engine made one more, it would have asked for a permit.


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_is_never_computed(served, stream):
    async def use() -> None:
        async with asking(served, stream=True, max_tokens=10) as first:
            await asyncio.to_thread(served.until_in, 1)
            async with asking(served, stream=stream, prompt=[7] * 50):
                await asyncio.to_thread(served.until_told)
                await asyncio.to_thread(served.step)
                await asyncio.to_thread(served.until_in, 2)
                assert len(served.scheduler.waiting) == 1
            await asyncio.to_thread(served.until_told)
            await asyncio.to_thread(served.step)
            await asyncio.to_thread(served.until_in, 3)
            assert not served.scheduler.waiting and served.llm.num_open == 1
            await asyncio.to_thread(served.step, 8)
            assert len(text_of(await choices_of(first))) == 10

    run(use())
    assert served.runner.num_steps == 10  # all of them for the first
    served.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_while_the_prompt_is_read_gives_it_back_within_a_step(
    served, stream
):
    async def use() -> None:
        prompt = [token_id % 50 for token_id in range(600)]
        async with asking(served, stream=stream, prompt=prompt, max_tokens=50):
            await asyncio.to_thread(served.step, 2)
            await asyncio.to_thread(served.until_in, 3)
            manager = served.scheduler.block_manager
            assert manager.num_free_blocks < manager.num_blocks - 2 * 32 // 4
        await asyncio.to_thread(served.until_told)
        await asyncio.to_thread(served.step)

    run(use())
    served.until_idle()
    assert served.runner.num_steps == 3  # of 19 that the prompt would take


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_between_two_tokens_gives_all_back_within_a_step(served, stream):
    async def use() -> None:
        async with asking(served, stream=stream, prompt=[3] * 20) as reader:
            await asyncio.to_thread(served.step, 5)
            if stream:
                await reader.readuntil(b"data: ")
            await asyncio.to_thread(served.until_in, 6)
        await asyncio.to_thread(served.until_told)
        await asyncio.to_thread(served.step)

    run(use())
    served.until_idle()
    assert served.runner.num_steps == 6
    assert served.llm.metrics.finished["abort"] == 1


def test_who_leaves_takes_all_answers_of_all_prompts_along(served):
    async def use() -> None:
        prompts = [[1, 2], [3, 4], [5, 6]]
        async with asking(served, prompt=prompts, n=2, stream=True):
            await asyncio.to_thread(served.until_in, 1)
            await asyncio.to_thread(served.until, lambda: queue.qsize() == 2)
            assert served.llm.num_open == 6
            await asyncio.to_thread(served.step)
            await asyncio.to_thread(served.until_in, 2)
        await asyncio.to_thread(served.until, lambda: queue.qsize() == 3)
        await asyncio.to_thread(served.step)

    queue = served.llm._inbox
    run(use())
    served.until_idle()
    assert served.runner.num_steps == 2


# Who does not read


@pytest.mark.skipif(sys.platform == "win32", reason="its sockets take everything")
def test_readers_that_do_not_read_stall_nobody_and_pile_nothing_up(tokenizer):
    """Their streams stand still, those of others do not; then they read on."""
    engine = LLMEngine(FakeRunner(vocab_size=99), max_num_seqs=64)
    engine.tokenizer = tokenizer
    served = Served(engine)
    [listener] = served.server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connections = served.server.server_state.connections
    slow = {"stream": True, "max_tokens": 2000, "seed": 1}

    def are_stuck(count: int) -> bool:
        return sum(c.flow.write_paused for c in list(connections)) == count

    async def use() -> None:
        async with (
            asking(served, receive_bytes=4096, **slow) as one,
            asking(served, receive_bytes=4096, **slow, n=2),
        ):
            await asyncio.to_thread(served.until, lambda: are_stuck(2))
            # Who reads gets all of it, meanwhile.
            for number in range(8):
                wishes = {"prompt": [number], "max_tokens": 50, "stream": True}
                async with asking(served, **wishes) as quick:
                    assert len(text_of(await choices_of(quick))) == 50
            await asyncio.to_thread(served.until, lambda: not served.llm.num_open)
            assert are_stuck(2)  # the engine has long ended, they have not
            for connection in list(connections):
                limit = 2 * connection.transport.get_write_buffer_limits()[1]
                assert connection.transport.get_write_buffer_size() < limit
            # What was written meanwhile comes in one piece.
            choices = await choices_of(one)
            assert len(choices) < 1500 and text_of(choices) == whole

    try:
        body = {"prompt": [1], **slow, "stream": False}
        whole = run(whole_text(served, body))
        assert len(whole) == 2000
        run(use())
        served.until_idle()
        assert_all_free(served.llm.engine)
        served.until(lambda: not connections)
    finally:
        served.close()


async def whole_text(served: Served, wishes: dict[str, Any]) -> str:
    async with asking(served, **wishes) as reader:
        content = (await reader.read()).partition(b"\r\n\r\n")[2]
    return json.loads(content)["choices"][0]["text"]
