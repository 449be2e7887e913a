"""How the bookkeeping of a step grows: with those who run, those who wait, the texts.

Bookkeeping is a step without its runner: scheduler, block manager, outputs. It runs on
a runner that only pretends, with real requests that arrive, share, end and make room.

Called by the tests and by appendix A22.

Source: appendix A22, "Profiling".
"""

import random
import statistics
import time

from minivllm.benchmarks.profile import Timers, timed
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import Policy
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams

NUM_PROMPT_TOKENS = 64
ANSWER_LENGTHS = (32, 96)
BLOCK_SIZE = 16
# What a step's bookkeeping may take, on a quiet machine.
PER_STEP_S = 1e-3
PER_REQUEST_S = 20e-6


def busy_engine(
    num_running: int, num_waiting: int, policy: str | Policy = "mixed"
) -> LLMEngine:
    """Return an engine with so many requests that run, and that wait behind them."""
    most = NUM_PROMPT_TOKENS + ANSWER_LENGTHS[1]
    runner = FakeRunner(
        num_blocks=num_running * -(-most // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=most,
        vocab_size=50_000,
    )
    engine = LLMEngine(
        runner,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * NUM_PROMPT_TOKENS,
        policy=policy,
    )
    numbers = random.Random(0)
    # At the start, answers have come differently far, as in an engine that has run.
    for name in range(num_running + num_waiting):
        low = 1 if name < num_running else ANSWER_LENGTHS[0]
        params = SamplingParams(
            temperature=0,
            max_tokens=numbers.randint(low, ANSWER_LENGTHS[1]),
            ignore_eos=True,
        )
        prompt = numbers.choices(range(runner.vocab_size), k=NUM_PROMPT_TOKENS)
        engine.add_request(str(name), prompt, params)
    engine.step()
    return engine


def bookkeeping_s(engine: LLMEngine, num_steps: int) -> float:
    """Return the median of the seconds that steps take beside the runner."""
    timers, seconds = Timers(), []
    with timed(engine, timers):
        for _ in range(num_steps):
            timers.enter("engine, between")
            engine.step()
            timers.leave()
            spent = timers.take().seconds
            seconds.append(sum(spent.values()) - spent["runner, between"])
    return statistics.median(seconds)


def lookup_s(num_blocks: int, num_times: int = 20) -> float:
    """Return the median of the seconds that finding a cached prefix takes."""
    manager = BlockManager(num_blocks + 1, BLOCK_SIZE)
    text = random.Random(0).choices(range(50_000), k=(num_blocks + 1) * BLOCK_SIZE)
    manager.allocate_slots("first", len(text))
    manager.cache_full_blocks("first", text, len(text))
    seconds = []
    for _ in range(num_times):
        start = time.perf_counter()
        found = manager.find_cached_prefix(text)
        seconds.append(time.perf_counter() - start)
        assert len(found) == num_blocks
    return statistics.median(seconds)
