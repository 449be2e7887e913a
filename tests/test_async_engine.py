"""The engine on a thread of its own: streams, limits, cancellation, ends."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minivllm import LLM, LLMEngine
from minivllm.engine.async_engine import AsyncLLM, OutputStream
from minivllm.engine.config import EngineConfig
from minivllm.errors import (
    ConfigError,
    EngineClosing,
    EngineDead,
    EngineOverloaded,
    RequestError,
    RequestTimeout,
)
from minivllm.outputs import RequestOutput
from minivllm.request import ModelOutput, SchedulerOutput
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import LedgerRunner, assert_all_free, continuation

TEN = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=1000)
WAIT_S = 20.0  # much longer than anything here takes


class GatedRunner(LedgerRunner):
    """Computes a step only when it is let."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 200, "block_size": 4, **options})
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        assert self.gate.wait(WAIT_S)
        time.sleep(0.0005)
        self.num_steps += 1
        return super().execute(step)


def run(
    use: Callable[[AsyncLLM], Coroutine[Any, Any, Any]],
    engine_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run a coroutine with an engine, and check that it has nothing left."""
    engine = LLMEngine(GatedRunner(), **(engine_options or {}))
    llm = AsyncLLM(engine, **options)

    async def main() -> Any:
        return await asyncio.wait_for(use(llm), WAIT_S)

    try:
        return asyncio.run(main())
    finally:
        engine.runner.gate.set()
        llm.close()
        if llm.error is None:
            assert_all_free(engine)
        assert not llm._streams and llm.num_open == 0


async def last_of(stream: Any) -> RequestOutput:
    return [output async for output in stream][-1]


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.001)


def test_each_of_many_requests_gets_what_it_gets_alone():
    async def use(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(
            *(last_of(llm.generate([i, 7, i], TEN)) for i in range(20))
        )

    for i, output in enumerate(run(use, {"max_num_seqs": 6})):
        assert output.outputs[0].token_ids == continuation([i, 7, i], 10)
        assert output.outputs[0].finish_reason == "length"


def test_a_quick_reader_sees_the_answer_grow():
    async def use(llm: AsyncLLM) -> list[int]:
        llm.engine.runner.gate.clear()
        lengths = []
        stream = await llm.add_request([1, 2], TEN)
        llm.engine.runner.gate.set()
        async for output in stream:
            lengths.append(len(output.outputs[0].token_ids))
        return lengths

    lengths = run(use)
    assert lengths == sorted(set(lengths)) and lengths[-1] == 10


def test_a_slow_reader_finds_the_latest_output_and_nothing_piled_up():
    async def use(llm: AsyncLLM) -> list[RequestOutput]:
        stream = await llm.add_request([1, 2], TEN)
        await until(lambda: not llm._streams)
        await asyncio.sleep(0)  # the last delivery
        return [output async for output in stream]

    [output] = run(use)
    assert output.finished and len(output.outputs[0].token_ids) == 10


def test_with_only_final_there_is_one_output():
    async def use(llm: AsyncLLM) -> list[RequestOutput]:
        return [o async for o in llm.generate([1, 2], TEN, only_final=True)]

    [output] = run(use)
    assert output.finished


def test_several_continuations_come_in_one_stream():
    params = SamplingParams(max_tokens=5, n=3)

    async def use(llm: AsyncLLM) -> RequestOutput:
        return await last_of(llm.generate([4, 2], params))

    for index, answer in enumerate(run(use).outputs):
        assert answer.token_ids == continuation([4, 2], 5, index=index)


def test_a_cancelled_reader_takes_its_request_along_within_a_step():
    async def use(llm: AsyncLLM) -> None:
        neighbour = asyncio.create_task(last_of(llm.generate([9], TEN)))
        task = asyncio.create_task(last_of(llm.generate([1, 2], LONG)))
        await until(lambda: len(llm.engine.scheduler.running) == 2)
        llm.engine.runner.gate.clear()
        await asyncio.sleep(0.01)
        before = llm.engine.runner.num_steps
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        llm.engine.runner.gate.set()
        assert (await neighbour).outputs[0].token_ids == continuation([9], 10)
        await until(lambda: not llm._streams)
        assert llm.metrics.finished["abort"] == 1
        steps = [record["num_scheduled_tokens"] for record in records]
        late = [s for s in steps[before + 1 :] if len(s) > 1]
        assert not late, "it was computed after it was cancelled"

    records: list[dict[str, Any]] = []
    engine_options: dict[str, Any] = {}

    async def listen(llm: AsyncLLM) -> None:
        llm.engine.listeners.append(records.append)
        await use(llm)

    run(listen, engine_options)


def test_a_dropped_generator_aborts():
    async def use(llm: AsyncLLM) -> None:
        outputs = llm.generate([1, 2], LONG)
        await anext(outputs)
        del outputs
        gc.collect()
        await until(lambda: not llm._streams)

    run(use)


def test_closing_a_stream_twice_or_after_its_end_is_harmless():
    async def use(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1, 2], TEN)
        await last_of(stream)
        llm.close_stream(stream)
        stream = await llm.add_request([1, 2], LONG)
        llm.close_stream(stream)
        llm.close_stream(stream)
        assert [output async for output in stream] == []
        llm.abort("nobody")

    run(use)


def test_abort_by_name_ends_a_stream_with_what_it_has():
    async def use(llm: AsyncLLM) -> RequestOutput:
        stream = await llm.add_request([1, 2], LONG, request_id="mine")
        await anext(stream)
        llm.abort("mine")
        return await last_of(stream)

    assert run(use).outputs[0].finish_reason == "abort"


def test_a_name_in_use_is_refused_and_its_owner_goes_on():
    async def use(llm: AsyncLLM) -> RequestOutput:
        stream = await llm.add_request([1, 2], TEN, request_id="a#1")
        with pytest.raises(RequestError, match="'a#1'"):
            await llm.add_request([1, 2], TEN, request_id="a#1")
        # The second continuation of "a" would have that name.
        other = await llm.add_request(
            [1, 2], SamplingParams(n=2, max_tokens=500), request_id="a"
        )
        with pytest.raises(RequestError, match="'a#1'"):
            await last_of(other)
        return await last_of(stream)

    options = {"max_num_seqs": 2}
    engine = LLMEngine(GatedRunner(), **options)
    engine.runner.gate.clear()
    llm = AsyncLLM(engine)

    async def main() -> RequestOutput:
        task = asyncio.create_task(use(llm))
        await asyncio.sleep(0.05)
        engine.runner.gate.set()
        return await asyncio.wait_for(task, WAIT_S)

    assert asyncio.run(main()).outputs[0].token_ids == continuation([1, 2], 10)
    llm.close()
    assert_all_free(engine)


def test_a_wrong_request_is_refused_before_it_starts():
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="0 tokens"):
            await llm.add_request([], TEN)
        with pytest.raises(RequestError, match="max_model_len"):
            await last_of(llm.generate([1], SamplingParams(max_tokens=10**6)))
        with pytest.raises(ConfigError, match="timeout_s"):
            await llm.add_request([1], TEN, timeout_s=-1)

    run(use)


def test_one_too_many_is_told_when_to_come_again():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.gate.clear()
        streams = [await llm.add_request([i], TEN) for i in range(3)]
        streams.append(await llm.add_request([5], SamplingParams(n=2, max_tokens=2)))
        with pytest.raises(EngineOverloaded, match="at most 5") as refusal:
            await llm.add_request([3], TEN)
        assert 1 <= refusal.value.retry_after_s <= 60
        llm.engine.runner.gate.set()
        for stream in streams:
            assert (await last_of(stream)).finished
        assert (await last_of(llm.generate([3], TEN))).finished

    run(use, {"max_num_seqs": 2}, max_num_waiting=3)


def test_time_is_up():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.gate.clear()
        with pytest.raises(RequestTimeout, match=r"0\.05 s"):
            await last_of(llm.generate([1], LONG, timeout_s=0.05))
        llm.engine.runner.gate.set()
        await until(lambda: not llm._streams)
        with pytest.raises(RequestTimeout, match=r"0\.3 s"):
            async for output in llm.generate([1], SamplingParams(max_tokens=4000)):
                assert not output.finished

    run(use, timeout_s=0.3)


def test_a_timer_does_not_outlive_its_request():
    async def use(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1], TEN, timeout_s=0.2)
        assert (await last_of(stream)).finished
        await asyncio.sleep(0.25)
        assert [o async for o in stream] == []

    run(use)


@pytest.mark.parametrize("error", [ValueError("bad luck"), MemoryError()])
def test_a_failed_step_ends_its_requests_and_the_engine_lives(error):
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.error = error
        output = await last_of(llm.generate([1], TEN))
        assert output.outputs[0].finish_reason == "error"
        assert (await last_of(llm.generate([1], TEN))).finished

    run(use)


def test_when_the_engine_dies_everybody_hears_of_it():
    dead = []

    async def use(llm: AsyncLLM) -> None:
        llm.death_listeners.append(dead.append)
        streams = [await llm.add_request([i], LONG) for i in range(3)]
        await until(lambda: llm.engine.num_steps > 2)
        llm.engine.listeners.append(lambda record: 1 / 0)
        for stream in streams:
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await last_of(stream)
        with pytest.raises(EngineDead):
            llm.check_health()
        with pytest.raises(EngineDead):
            await llm.add_request([1], TEN)

    run(use)
    assert len(dead) == 1


def test_closing_lets_running_requests_end_if_they_are_quick_enough():
    async def use(llm: AsyncLLM) -> None:
        quick = await llm.add_request([1], TEN)
        slow = await llm.add_request([2], SamplingParams(max_tokens=4000))
        closing = asyncio.create_task(llm.shutdown(drain_s=0.3))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineClosing):
            await llm.add_request([3], TEN)
        assert (await last_of(quick)).outputs[0].finish_reason == "length"
        assert (await last_of(slow)).outputs[0].finish_reason == "abort"
        await closing
        assert not llm._thread.is_alive()

    run(use)


def test_nothing_runs_while_there_is_nothing_to_do():
    async def use(llm: AsyncLLM) -> None:
        await last_of(llm.generate([1], TEN))
        before = time.thread_time(), llm.engine.num_steps
        start = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - start < 0.1
        assert llm.engine.num_steps == before[1]

    run(use)


def test_a_loop_that_ends_leaves_nothing_behind():
    engine = LLMEngine(GatedRunner())
    llm = AsyncLLM(engine)

    async def leave() -> None:
        await llm.add_request([1], LONG)

    asyncio.run(leave())
    end = time.monotonic() + WAIT_S
    while llm._streams:
        assert time.monotonic() < end
        time.sleep(0.001)
    llm.close()
    assert_all_free(engine)


def test_two_event_loops_share_an_engine():
    engine = LLMEngine(GatedRunner())
    llm = AsyncLLM(engine)
    answers: dict[int, list[int]] = {}

    def work(number: int) -> None:
        output = asyncio.run(last_of(llm.generate([number], TEN)))
        answers[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    llm.close()
    assert answers == {i: continuation([i], 10) for i in range(4)}
    assert_all_free(engine)


def test_an_engine_can_be_made_from_a_configuration():
    engine = LLMEngine(EngineConfig(backend="fake", num_blocks=10, seed=3))
    assert engine.runner.num_blocks == 10
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    with LLM(backend="fake", num_blocks=10, seed=3) as llm:
        [same] = llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    assert outputs[0].outputs == same.outputs


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"backend": "tpu"},
        {"seed": -1},
        {"policy": "best"},
        {"enforce_eager": 1},
        {"enable_prefix_caching": "yes"},
        {"max_logprobs": -2},
        {"block_size": 0},
        {"num_blocks": 1, "kv_cache_memory_bytes": 1},
        {"trace": "/no/such/folder/trace.jsonl"},
    ],
)
def test_an_impossible_configuration_is_refused_at_once(options):
    with pytest.raises(ConfigError):
        EngineConfig(**options)


@pytest.mark.parametrize("options", [{"max_num_waiting": -1}, {"timeout_s": 0}])
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncLLM(LLMEngine(LedgerRunner()), **options)


def test_a_stream_belongs_to_a_running_loop():
    with pytest.raises(RuntimeError):
        OutputStream("a")
