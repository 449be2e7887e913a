"""The engine on a thread of its own: streams, limits, cancellation, ends."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import fields
from functools import partial
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
from minivllm.request import ModelOutput, Request, SchedulerOutput
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import LedgerRunner, assert_all_free, continuation
from tests.tiny_folder import write_parrot

TEN = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=1000)
NAN, INF = float("nan"), float("inf")
SECRET = "words of somebody"
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


def test_all_who_leave_during_a_step_are_gone_before_the_next():
    records: list[dict[str, Any]] = []

    async def use(llm: AsyncLLM) -> None:
        runner = llm.engine.runner
        llm.engine.listeners.append(records.append)
        streams = [await llm.add_request([i], LONG) for i in range(4)]
        stays = await llm.add_request([9], LONG)
        await until(lambda: len(llm.engine.scheduler.running) == 5)
        runner.gate.clear()
        await until(lambda: len(llm.engine.scheduler.running) == 5)
        for stream in streams:
            llm.close_stream(stream)
        runner.gate.set()
        await until(lambda: len(llm._streams) == 1)
        llm.close_stream(stays)

    run(use)
    sizes = [len(record["running"]) for record in records]
    assert not {2, 3, 4} & set(sizes[sizes.index(5) :]), "they left one by one"


def test_who_asks_the_engine_itself_disturbs_nobody():
    async def use(llm: AsyncLLM) -> RequestOutput:
        params = SamplingParams(max_tokens=500)
        call = llm.call_in_engine(lambda e: e.add_request("mine", [5], params))
        await asyncio.wrap_future(call)
        answer = await last_of(llm.generate([1, 2], TEN))
        llm.abort("mine")
        return answer

    assert run(use).outputs[0].token_ids == continuation([1, 2], 10)


def test_a_prompt_is_read_in_a_thread_of_its_own_with_all_options():
    threads = []

    async def use(llm: AsyncLLM) -> RequestOutput:
        make = llm.engine.make_request

        def watched(*arguments: Any, **options: Any) -> Request:
            threads.append(threading.current_thread().name)
            return make(*arguments, **options)

        llm.engine.make_request = watched
        return await last_of(llm.generate([1, 2], default_max_tokens=3))

    assert len(run(use).outputs[0].token_ids) == 3
    assert [name.rpartition("_")[0] for name in threads] == ["minivllm-tokenizer"]


def test_a_prompt_of_text_is_told_with_its_answer(tmp_path):
    config = EngineConfig(
        model=str(write_parrot(tmp_path)), backend="numpy", num_blocks=64
    )
    llm = AsyncLLM(config)
    answer = asyncio.run(last_of(llm.generate("xy", SamplingParams(max_tokens=2))))
    llm.close()
    assert answer.prompt == "xy" and answer.outputs[0].text == "zx"


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
        make, llm.engine.make_request = llm.engine.make_request, None  # not even read
        with pytest.raises(EngineOverloaded, match="at most 5") as refusal:
            await llm.add_request([3], TEN)
        llm.engine.make_request = make
        assert 1 <= refusal.value.retry_after_s <= 60
        llm.engine.runner.gate.set()
        for stream in streams:
            assert (await last_of(stream)).finished
        assert (await last_of(llm.generate([3], TEN))).finished

    run(use, {"max_num_seqs": 2}, max_num_waiting=3)


def test_those_who_come_at_the_same_moment_are_no_more_than_fit():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.gate.clear()
        found = await asyncio.gather(
            *(llm.add_request([i], TEN) for i in range(9)), return_exceptions=True
        )
        assert sum(isinstance(f, OutputStream) for f in found) == 5
        assert sum(isinstance(f, EngineOverloaded) for f in found) == 4

    run(use, {"max_num_seqs": 2}, max_num_waiting=3)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        *(((), 1), ((5.0,), 1), ((5.0, 7.5), 3), ((0.0, 1.0, 6.0), 3)),
        *(((1.0, 1.0), 1), ((1.0, 500.0), 60)),
    ],
)
def test_how_long_until_there_is_a_place(times, seconds):
    async def use(llm: AsyncLLM) -> None:
        llm._end_times.extend(times)
        assert llm._seconds_until_place() == seconds

    run(use)


def test_ends_are_remembered_for_a_while():
    async def use(llm: AsyncLLM) -> None:
        for _ in range(20):
            await last_of(llm.generate([1], SamplingParams(max_tokens=1)))
        times = list(llm._end_times)
        assert len(times) == 16 and times == sorted(times)
        assert all(0 < time.monotonic() - t < 2 * WAIT_S for t in times)

    run(use)


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


def output(finished: bool = False) -> RequestOutput:
    names = (field.name for field in fields(RequestOutput))
    return RequestOutput(**dict.fromkeys(names) | {"finished": finished})


def test_an_ended_stream_takes_and_tells_nothing_more():
    async def use() -> None:
        first, last = output(), output(finished=True)
        for end in (last, RequestTimeout("too late")):
            stream = OutputStream("a")
            stream.put(first)
            assert stream.is_open and await anext(stream) is first
            stream.put(end)
            assert not stream.is_open
            stream.put(output())
            stream.put(EngineDead("afterwards"))
            if end is last:
                assert await anext(stream) is last
            else:
                with pytest.raises(RequestTimeout):
                    await anext(stream)
            for _ in range(2):
                assert [o async for o in stream] == []
        stream = OutputStream("a")
        stream.end()
        stream.put(last)
        assert [o async for o in stream] == []

    asyncio.run(asyncio.wait_for(use(), WAIT_S))


def test_who_waits_for_a_stream_hears_that_somebody_else_closed_it():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.gate.clear()
        stream = await llm.add_request([1], LONG)
        reader = asyncio.create_task(anext(stream, "no more"))
        await asyncio.sleep(0)  # now it waits
        llm.close_stream(stream)
        assert await reader == "no more"

    run(use)


def test_the_timer_of_an_ended_stream_is_off():
    async def use() -> list[str]:
        called, later = [], asyncio.Event()
        for name in ("goes on", "ends"):
            stream = OutputStream(name)
            stream.limit(0.01, partial(called.append, name))
            if name == "ends":
                stream.end()
        stream.loop.call_later(0.02, later.set)
        await later.wait()
        return called

    assert asyncio.run(use()) == ["goes on"]


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


class Fault(BaseException):
    """Nothing that a runner should raise."""


@pytest.mark.parametrize("error", [ZeroDivisionError(SECRET), Fault(SECRET)])
def test_when_the_engine_dies_everybody_hears_of_it(caplog, error):
    dead = []

    def die(record: dict[str, Any]) -> None:
        raise error

    async def use(llm: AsyncLLM) -> None:
        llm.death_listeners.append(dead.append)
        streams = [await llm.add_request([i], LONG) for i in range(3)]
        await until(lambda: llm.engine.num_steps > 2)
        llm.engine.listeners.append(die)
        told = []
        for stream in streams:
            with pytest.raises(EngineDead, match=type(error).__name__) as caught:
                await last_of(stream)
            told.append(caught.value)
        # Each has one of its own: what is raised gets a traceback and a context.
        assert len({id(error) for error in [*told, llm.error]}) == 4
        assert not any(SECRET in str(error) for error in told)
        with pytest.raises(EngineDead):
            llm.check_health()
        with pytest.raises(EngineDead):
            await llm.add_request([1], TEN)

    run(use)
    assert len(dead) == 1
    assert SECRET in caplog.text  # for whoever runs it


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


def test_closing_waits_no_longer_than_for_the_last_request():
    async def use(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1, 2], TEN)
        llm.engine.runner.gate.clear()  # so that it has not ended before
        closing = asyncio.create_task(llm.shutdown(drain_s=3600))
        await until(lambda: llm._is_closing)
        llm.engine.runner.gate.set()
        await closing
        assert (await last_of(stream)).outputs[0].finish_reason == "length"

    run(use)


def test_who_comes_while_the_engine_closes_gets_an_end():
    async def use(llm: AsyncLLM) -> RequestOutput:
        admit = llm._admit

        def admit_at_the_last_moment(*arguments: Any) -> None:
            admit(*arguments)
            closing = threading.Thread(target=llm.close)
            closing.start()
            closing.join(WAIT_S)

        llm._admit = admit_at_the_last_moment
        return await last_of(await llm.add_request([1], LONG))

    assert run(use).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("end", ["closing", "dead"])
def test_an_engine_that_ends_while_a_prompt_is_read_takes_it_no_more(end):
    async def use(llm: AsyncLLM) -> None:
        reads, goes_on = threading.Event(), threading.Event()
        make = llm.engine.make_request

        def slowly(*arguments: Any, **options: Any) -> Request:
            reads.set()
            assert goes_on.wait(WAIT_S)
            return make(*arguments, **options)

        neighbour = await llm.add_request([2], LONG)
        llm.engine.make_request = slowly
        task = asyncio.create_task(llm.add_request([1], LONG))
        await asyncio.to_thread(reads.wait, WAIT_S)
        if end == "closing":
            await llm.shutdown()
        else:
            llm.engine.listeners.append(lambda record: 1 / 0)
            with pytest.raises(EngineDead):
                await last_of(neighbour)
        goes_on.set()
        with pytest.raises(EngineClosing if end == "closing" else EngineDead):
            await task

    run(use)


def test_who_waits_for_the_last_requests_does_not_wait_for_a_dead_engine():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.runner.gate.clear()
        stream = await llm.add_request([1], LONG)
        closing = asyncio.create_task(llm.shutdown(drain_s=3600))
        await until(lambda: llm._is_closing)
        await asyncio.sleep(0.02)  # now it waits
        llm.engine.listeners.append(lambda record: 1 / 0)
        llm.engine.runner.gate.set()
        with pytest.raises(EngineDead):
            await last_of(stream)
        await closing

    run(use)


def test_an_engine_that_was_closed_is_kept_by_nobody():
    llm = AsyncLLM(LLMEngine(GatedRunner()))
    llm.close()
    left = weakref.ref(llm)
    del llm
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_call_that_nobody_waits_for_any_more_is_left_out(is_closing):
    engine = LLMEngine(GatedRunner())
    llm = AsyncLLM(engine)
    holds, goes_on, closed = threading.Event(), threading.Event(), threading.Event()
    engine.close = closed.set
    called: list[LLMEngine] = []

    def hold(engine: LLMEngine) -> None:
        holds.set()
        goes_on.wait(WAIT_S)

    llm.call_in_engine(hold)
    assert holds.wait(WAIT_S)
    if is_closing:
        llm._inbox.put(None)  # what `close` puts there
    assert llm.call_in_engine(called.append).cancel()
    goes_on.set()
    if not is_closing:
        assert llm.call_in_engine(lambda engine: 7).result(WAIT_S) == 7
    llm.close()
    assert llm.error is None and closed.is_set() and not called


def test_an_engine_that_nobody_uses_ends_at_once_and_gives_its_memory_back():
    async def use(llm: AsyncLLM) -> None:
        llm.engine.close = lambda: closed.append(threading.current_thread())
        await llm.shutdown(drain_s=3600)
        assert closed == [llm._thread]

    closed: list[threading.Thread] = []
    run(use)


def test_a_program_that_forgets_to_close_ends_in_the_middle_of_a_step():
    script = """
import asyncio
from minivllm import LLMEngine, SamplingParams
from minivllm.engine.async_engine import AsyncLLM
from minivllm.runners.fake_runner import FakeRunner

engine = LLMEngine(FakeRunner())
close = engine.close
engine.close = lambda: (close(), print("closed"))
llm = AsyncLLM(engine)

async def leave():
    stream = await llm.add_request([1], SamplingParams(max_tokens=4000))
    await anext(stream)

asyncio.run(leave())
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


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
    assert llm.metrics.finished["abort"] == 1, "it was computed for nobody"
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


@pytest.mark.parametrize(
    "options",
    [
        *({"max_num_waiting": value} for value in (-1, True, 2.0)),
        *({"timeout_s": value} for value in (0, -1, True, "1", NAN, INF)),
    ],
)
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncLLM(LLMEngine(LedgerRunner()), **options)


def test_a_stream_belongs_to_a_running_loop():
    with pytest.raises(RuntimeError):
        OutputStream("a")
