"""Thousands of requests through a small pool."""

import random

import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import POLICIES
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import (
    LedgerRunner,
    assert_all_free,
    assert_queues_are_right,
    continuation,
)

NUM_REQUESTS = 2000


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_day_ends_with_every_block_free(policy):
    num_preemptions = soak(policy, NUM_REQUESTS)
    if policy == "mixed":
        assert num_preemptions > 50


def soak(policy: str, count: int) -> int:
    """Send so many requests, check every answer, and count the preemptions."""
    rng = random.Random(policy)
    engine = LLMEngine(
        LedgerRunner(num_blocks=24, block_size=4, max_model_len=64),
        max_num_seqs=8,
        max_num_batched_tokens=24,
        policy=policy,
    )
    beginnings = [[rng.randrange(50) for _ in range(16)] for _ in range(4)]
    expected, ended, unfinished = {}, {}, []
    num_preemptions = num_cached = num_steps = 0
    while len(expected) < count or engine.has_unfinished_requests():
        num_steps += 1
        assert num_steps < 50 * count, "the engine gets nowhere"
        arrivals = rng.choice([0, 0, 0, 1, 2, 5])
        for _ in range(min(arrivals, count - len(expected))):
            name = str(len(expected))
            prompt = rng.choice(beginnings)[: rng.randint(0, 16)]
            prompt = [*prompt, *(rng.randrange(50) for _ in range(rng.randint(1, 8)))]
            max_tokens = rng.choice([1, 2, 3, 5, 8, 20])
            engine.add_request(
                name,
                prompt,
                SamplingParams(max_tokens=max_tokens),
                priority=rng.randrange(3),
                cache_salt=rng.choice([None, None, None, "salt"]),
            )
            expected[name] = continuation(prompt, max_tokens)
            unfinished.append(name)
        outputs = engine.step()
        if unfinished and rng.random() < 0.05:
            outputs.append(engine.abort_request(rng.choice(unfinished)))
        for output in outputs:
            if output is None or not output.finished:
                continue
            name, answer = output.request_id, output.outputs[0]
            assert name not in ended
            ended[name] = answer.finish_reason
            unfinished.remove(name)
            is_whole = answer.finish_reason == "length"
            assert answer.token_ids == (
                expected[name] if is_whole else expected[name][: len(answer.token_ids)]
            )
            num_preemptions += output.metrics.num_preemptions
            num_cached += output.num_cached_tokens
        if num_steps % 16 == 0:
            assert_queues_are_right(engine.scheduler)
    assert_all_free(engine)
    assert len(ended) == count
    assert set(ended.values()) == {"length", "abort"}
    assert num_cached > count
    return num_preemptions
