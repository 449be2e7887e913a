"""Decode steps as CUDA graphs: what the eager steps give, token by token."""

import gc

import pytest
import torch

from minivllm.runners.build import CacheConfig, torch_runner
from minivllm.runners.cuda_graphs import bucket_sizes
from minivllm.runners.torch_runner import TorchRunner, graph_cuda_bytes
from tests.gpu.test_gpu_engine import make_runner
from tests.parity.tiny import torch_decoder
from tests.test_cuda_graphs import (
    MAX_ROWS,
    every_batch_size,
    note_sizes,
    one_decode_step,
    tell_story,
)
from tests.test_torch_runner import (
    BLOCK_SIZE,
    EXPECTED,
    PROMPTS,
    SPEC,
    WEIGHTS,
    answers,
    make_request,
    make_scheduler,
    run,
)


def make_graphs(gpu: str, num_blocks: int = 63) -> TorchRunner:
    """Return a runner on the device that replays its decode steps."""
    runner = make_runner(gpu, num_blocks=num_blocks + 1)
    runner.capture_graphs(MAX_ROWS)
    return runner


def test_every_batch_from_one_to_the_largest(gpu):
    ours, theirs = every_batch_size(), every_batch_size()
    runner, eager = make_graphs(gpu, 120), make_runner(gpu, num_blocks=120)
    replayed, _ = note_sizes(runner)
    run(runner, ours, make_scheduler(runner))
    run(eager, theirs, make_scheduler(eager))
    assert answers(ours) == answers(theirs)
    assert set(replayed) == set(range(1, MAX_ROWS + 1))


@pytest.mark.parametrize("budget", [7, 2048])
@pytest.mark.parametrize("num_blocks", [12, 63])
def test_with_chunks_and_preemptions_between(budget, num_blocks, gpu):
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    runner = make_graphs(gpu, num_blocks)
    run(runner, requests, make_scheduler(runner, budget))
    assert answers(requests) == EXPECTED


@pytest.mark.parametrize("seed", range(3))
def test_a_story_with_arrivals_aborts_and_all_wishes(seed, gpu):
    ours, _ = tell_story(make_graphs(gpu, 24), seed)
    theirs, _ = tell_story(make_runner(gpu, num_blocks=24), seed)
    assert ours == theirs


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_a_replay_is_the_function_that_was_recorded(num_rows, gpu):
    runner = make_graphs(gpu)
    runner.kv_cache[:, :, :-1].normal_()
    inputs = torch.from_numpy(one_decode_step(runner, num_rows)).to(gpu)
    before = runner.kv_cache.clone()
    with torch.inference_mode():
        replayed = runner.graphs.replay(inputs, num_rows).clone()
        after = runner.kv_cache.clone()
        runner.kv_cache.copy_(before)
        size = next(s for s in bucket_sizes(MAX_ROWS) if s >= num_rows)
        called = runner._decode(runner.graphs.views(size))[:num_rows]
    torch.testing.assert_close(replayed, called, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, runner.kv_cache, rtol=1e-5, atol=1e-5)


def test_weights_that_change_in_place_count(gpu):
    runner = make_graphs(gpu)
    inputs = torch.from_numpy(one_decode_step(runner, 3)).to(gpu)
    with torch.inference_mode():
        before = runner.graphs.replay(inputs, 3).clone()
        runner.decoder.lm_head.weight.mul_(2)
        after = runner.graphs.replay(inputs, 3)
    torch.testing.assert_close(after, 2 * before)


def test_memory_returns_on_close(gpu):
    def free_bytes() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    held = []
    for _ in range(3):  # at first, torch's libraries reserve what they keep
        before = free_bytes()
        runner = make_graphs(gpu)
        run(runner, [make_request(0, PROMPTS[0])], make_scheduler(runner))
        runner.close()
        del runner
        held.append(before - free_bytes())
    assert held[-1] <= 0, f"bytes held after closing: {held}"


def test_the_cache_leaves_room_for_the_graphs(gpu):
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 2**30 / total  # one GiB more than is in use
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=share,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    decoder = torch_decoder(SPEC, WEIGHTS).to(gpu)
    runner = torch_runner(decoder, cache, SPEC.vocab_size)
    assert list(runner.graphs.replays) == bucket_sizes(MAX_ROWS)[::-1]
    torch.cuda.empty_cache()
    used = free - torch.cuda.mem_get_info()[0]
    assert used <= 2**30 + 2**26, f"{used} bytes used, a GiB was to be"
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner))
    assert answers(requests) == EXPECTED
    runner.close()


def test_graphs_take_memory_and_give_it_back(gpu):
    runner = make_runner(gpu)
    for _ in range(2):
        needed = graph_cuda_bytes(runner.decoder, MAX_ROWS, BLOCK_SIZE, 256)
        assert 0 < needed < 2**28


def test_enforce_eager_records_nothing(gpu):
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=64, enforce_eager=True)
    decoder = torch_decoder(SPEC, WEIGHTS).to(gpu)
    runner = torch_runner(decoder, cache, SPEC.vocab_size)
    assert runner.graphs is None
    assert runner.kv_cache.shape[2] == runner.num_blocks == 64
