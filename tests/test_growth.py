"""The work of a step grows with those who run, not with those who wait.

Operations are counted, not timed: lines of Python that run in the engine, sort keys,
hashes. The one test that looks at a clock is slow and generous.
"""

import random
import sys
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm import request as request_module
from minivllm.benchmarks import growth
from minivllm.benchmarks.growth import bookkeeping_s, busy_engine, lookup_s
from minivllm.engine import scheduler as scheduler_module
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import POLICIES, Policy, Scheduler, by_arrival
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams

FOLDER = Path(scheduler_module.__file__).parent
FILES = {str(path) for path in FOLDER.glob("*.py")} | {request_module.__file__}


def lines_run(function) -> int:
    """Count the lines of the engine that run in a call."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def lines_of_steps(engine: LLMEngine, num_steps: int = 20) -> float:
    """Return the mean number of lines that a step runs."""
    total = lines_run(lambda: [engine.step() for _ in range(num_steps)])
    assert engine.scheduler.waiting, "the queue ran dry"
    return total / num_steps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_does_not_look_at_those_who_wait(policy):
    few = lines_of_steps(busy_engine(16, 64, policy))
    many = lines_of_steps(busy_engine(16, 1000, policy))
    # A few more to find a place: a search halves the queue.
    assert many < 1.1 * few


def test_a_step_grows_in_proportion_to_those_who_run():
    at_16, at_64 = (lines_of_steps(busy_engine(n, 4 * n)) for n in (16, 64))
    assert at_64 < 4.2 * at_16


def counting_policy(calls: list[str], **options) -> Policy:
    def order(request, now):
        calls.append(request.request_id)
        return by_arrival(request, now)

    return Policy("counting", order, **options)


def test_only_a_policy_that_depends_on_the_time_sorts_the_queue_at_every_step():
    steady, sorting = [], []
    engines = [
        busy_engine(4, 500, counting_policy(steady, is_steady=True)),
        busy_engine(4, 500, counting_policy(sorting)),
    ]
    for calls in (steady, sorting):
        calls.clear()
    for engine in engines:
        for _ in range(20):
            engine.step()
    assert len(steady) == 20 * 4, "those who run, and nobody else"
    assert len(sorting) > 20 * 400


def test_to_leave_a_long_queue_takes_a_short_search():
    calls: list[str] = []
    engine = busy_engine(1, 1000, counting_policy(calls, is_steady=True))
    names = [request.request_id for request in engine.scheduler.waiting]
    random.Random(0).shuffle(names)
    calls.clear()
    num_lines = lines_run(lambda: [engine.abort_request(name) for name in names])
    assert not engine.scheduler.waiting
    assert len(calls) <= 1000 * 11, "its own key, and ten of others: 2 ** 10 > 1000"
    assert num_lines < 1000 * 200


def test_those_who_end_together_are_not_searched_one_by_one(monkeypatch):
    engine = LLMEngine(FakeRunner(), max_num_seqs=8)
    for name in "abcdefgh":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=2))
    monkeypatch.setattr(Scheduler, "finish", None)
    engine.step()
    outputs = engine.step()
    assert [output.finished for output in outputs] == [True] * 8
    assert engine.scheduler.running == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_queue_that_is_kept_in_order_gives_the_same_steps_as_a_sorted_one(name):
    def plans(policy: Policy) -> list:
        rng = random.Random(name)
        engine = LLMEngine(
            FakeRunner(num_blocks=40, block_size=4, max_model_len=64),
            max_num_seqs=6,
            max_num_batched_tokens=24,
            policy=policy,
        )
        seen = []
        engine.listeners.append(
            lambda record: seen.append((record["waiting"], record["running"]))
        )
        for step in range(300):
            for index in range(rng.choice([0, 0, 1, 2])):
                engine.add_request(
                    f"{step}.{index}",
                    [rng.randrange(9) for _ in range(rng.randint(1, 20))],
                    SamplingParams(
                        max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 1, 3])
                    ),
                    priority=rng.randrange(3),
                )
            if rng.random() < 0.1 and engine.scheduler.waiting:
                waiting = {(r.leader or r).request_id for r in engine.scheduler.waiting}
                engine.abort_request(rng.choice(sorted(waiting)))
            if rng.random() < 0.02:
                engine.scheduler.restart()
            engine.step()
        seen.append(engine.num_steps)
        return seen

    policy = POLICIES[name]
    kept = plans(policy)
    assert policy.is_steady
    # The queue of the other one is in order when a step begins, and not before.
    assert [sorted_names(step) for step in kept] == [
        sorted_names(step) for step in plans(replace(policy, is_steady=False))
    ]


def sorted_names(step) -> object:
    return step if isinstance(step, int) else (sorted(step[0]), step[1])


def test_who_waits_for_the_end_only_is_shown_once(monkeypatch):
    shown = []
    show = LLMEngine._output

    def watched(self, state):
        shown.append(state.request_id)
        return show(self, state)

    monkeypatch.setattr(LLMEngine, "_output", watched)
    engine = LLMEngine(FakeRunner())
    params = SamplingParams(temperature=0, max_tokens=20, n=2)
    for name, only_final in (("each step", False), ("end", True)):
        request = engine.make_request(name, [1, 2, 3], params)
        engine.submit(request, only_final=only_final)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.finished or output.request_id == "each step"
            last[output.request_id] = output
    assert (shown.count("end"), shown.count("each step")) == (1, 20)
    assert [len(c.token_ids) for c in last["end"].outputs] == [20, 20]
    assert last["end"].metrics.first_token_time == pytest.approx(
        last["each step"].metrics.first_token_time
    )
    shown.clear()
    with LLM("fake", backend="fake") as llm:
        llm.generate([[1], [2], [3]], SamplingParams(max_tokens=9))
        assert len(shown) == 3
        assert len(list(llm.stream([1], SamplingParams(max_tokens=9)))) == 9


def test_the_queue_of_free_blocks_has_no_holes():
    """A dict has: its first key is found behind all that were removed before it.

    Nothing in Python counts these steps, so it is the type that is asked for.
    """
    manager = BlockManager(8, 16)
    assert type(manager.free_blocks) is OrderedDict
    manager.allocate_slots("first", 16 * 8)
    manager.free("first")
    assert type(manager.free_blocks) is OrderedDict


@pytest.mark.parametrize("num_blocks", [10, 200])
def test_a_cached_prefix_takes_one_hash_for_each_block(num_blocks):
    hashed = []

    def counting_hash(content):
        hashed.append(content)
        return hash(content)

    manager = BlockManager(num_blocks + 1, 16, hash_function=counting_hash)
    text = list(range((num_blocks + 1) * 16))
    manager.allocate_slots("first", len(text))
    manager.cache_full_blocks("first", text, len(text))
    hashed.clear()
    found = []
    num_lines = lines_run(lambda: found.extend(manager.find_cached_prefix(text)))
    assert len(found) == len(hashed) == num_blocks
    assert num_lines < 30 * num_blocks


def test_the_measured_engine_stays_full_while_requests_come_and_go():
    engine = busy_engine(16, 200)
    names = {request.request_id for request in engine.scheduler.running}
    assert bookkeeping_s(engine, 60) > 0
    assert len(engine.scheduler.running) > 12 and engine.scheduler.waiting
    assert names != {request.request_id for request in engine.scheduler.running}
    assert lookup_s(20, num_times=2) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_running", [1, 16, 64, 256])
def test_bookkeeping_stays_small(num_running):
    """Five times what a quiet machine is allowed, and the best of three."""
    limit_s = 5 * (growth.PER_STEP_S + num_running * growth.PER_REQUEST_S)
    engine = busy_engine(num_running, 10_000)
    assert min(bookkeeping_s(engine, 40) for _ in range(3)) < limit_s


@pytest.mark.slow
def test_a_block_costs_the_same_from_a_pool_of_any_size():
    """With holes, eight times the blocks would take sixty-four times as long."""

    def seconds(num_blocks: int) -> float:
        manager = BlockManager(num_blocks, 16)
        start = time.perf_counter()
        manager.allocate_slots("all", 16 * num_blocks)
        return time.perf_counter() - start

    few, many = (min(seconds(n) for _ in range(3)) for n in (20_000, 160_000))
    assert many < 24 * few
