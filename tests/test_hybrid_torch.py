"""Hybrid models on the torch runner: the answers of NumPy, however they are computed.

The tests of the engine are those of `test_hybrid`, with the other runner.
"""

import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.benchmarks import profile
from minivllm.benchmarks.machine import Limits
from minivllm.benchmarks.profile import Timers, timed
from minivllm.engine.engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.models.decoder import Decoder
from minivllm.models.merged import MergedDecoder
from minivllm.ops.registry import known_ops
from minivllm.request import SchedulerOutput
from minivllm.runners.base import CacheLayout
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import make_request
from tests.fake_cuda import IndexWithoutCuda
from tests.tape import DirectRecorder, TapeRecorder
from tests.test_hybrid import (
    SPECS,
    alone,
    count_preemptions,
    layout_of,
    run,
    texts,
)
from tests.tiny_decoders import numpy_decoder, torch_decoder

BLOCK_SIZE = 4
PROMPTS = texts(6)
RECORDERS = {"eager": None, "direct": DirectRecorder, "tape": TapeRecorder}


@pytest.fixture(scope="module", params=SPECS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(name):
    return numpy_decoder(SPECS[name])


@pytest.fixture(scope="module")
def answers(oracle):
    """What each prompt gets alone, where the best token is no close call."""
    return [[alone(oracle, prompt)] for prompt in PROMPTS]


def plain_torch():
    """Let torch do everything: what C++ does, a tape does not see."""
    ops = {f"MINIVLLM_OP_{op.upper()}": "torch" for op in known_ops()}
    return patch.dict(os.environ, ops)


def padded(layout):
    """A layout with one more of everything, for graphs."""
    changes = {}
    if layout.num_window_blocks:
        changes["num_window_blocks"] = layout.num_window_blocks + 1
    if layout.num_states:
        changes["num_kept_states"] = layout.num_kept_states + 1
    return replace(layout, **changes)


def make_engine(spec, num_blocks=40, layout=None, recorder=None, **options):
    layout = layout or layout_of(spec, num_blocks)
    has_graphs = recorder is not None
    with plain_torch():
        runner = TorchRunner(
            torch_decoder(spec),
            num_blocks=num_blocks + has_graphs,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            layout=padded(layout) if has_graphs else layout,
        )
        if recorder:
            runner.capture_graphs(6, recorder())
    assert (runner.num_blocks, runner.layout) == (num_blocks, layout)
    # What nobody has written to is anything: here, what would be noticed.
    if not has_graphs:
        for cache in (runner.kv_cache, runner.window_cache):
            if cache is not None:
                cache.fill_(torch.nan)
    if runner.states is not None:
        for states in (runner.states.conv, runner.states.recurrent):
            states.fill_(torch.nan)
    return LLMEngine(runner, **options)


@pytest.mark.parametrize(
    ("budget", "num_blocks", "caching"),
    [(3, 14, True), (7, 14, False), (64, 14, True), (7, 40, True), (64, 40, False)],
)
def test_requests_that_come_and_go_get_what_they_get_alone(
    name, answers, budget, num_blocks, caching
):
    engine = make_engine(
        SPECS[name],
        num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    preempted = count_preemptions(engine)
    assert run(engine, PROMPTS, stagger=2) == answers
    if num_blocks == 14 and budget > 3:
        assert preempted, "the cache was too large to be a test"


@pytest.mark.parametrize(("kind", "budget"), [("direct", 7), ("tape", 64)])
def test_recorded_steps_give_the_same(name, answers, kind, budget):
    engine = make_engine(
        SPECS[name], 20, recorder=RECORDERS[kind], max_num_batched_tokens=budget
    )
    replays = []
    graphs = engine.runner.graphs
    replay = graphs.replay
    graphs.replay = lambda *arguments: replays.append(1) or replay(*arguments)
    assert run(engine, PROMPTS, stagger=2) == answers
    assert len(replays) > 8, "hardly a step was replayed"


@pytest.mark.parametrize("kind", RECORDERS)
def test_several_answers_begin_with_one_state(name, oracle, kind):
    prompts = texts(3, seed=1)
    engine = make_engine(
        SPECS[name], recorder=RECORDERS[kind], max_num_batched_tokens=9
    )
    found = run(engine, prompts, n=3, stagger=1)
    assert found == [[alone(oracle, prompt)] * 3 for prompt in prompts]


@pytest.mark.parametrize("abort_at", [1, 4])
def test_an_aborted_request_leaves_the_others_alone(name, oracle, abort_at):
    engine = make_engine(SPECS[name], max_num_batched_tokens=10)
    prompts = texts(4, seed=3)
    params = SamplingParams(max_tokens=12, temperature=0)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = {}
    for step in range(200):
        if step == abort_at:
            engine.abort_request("1")
            engine.add_request("late", prompts[1], params)
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
        if not engine.has_unfinished_requests():
            break
    for request_id, prompt in (("0", 0), ("2", 2), ("3", 3), ("late", 1)):
        assert outputs[request_id] == alone(oracle, prompts[prompt])


def test_the_same_prompt_again_is_a_hit(name, oracle):
    engine = make_engine(SPECS[name], max_num_batched_tokens=7)
    prompt = texts(1, seed=6, low=22, high=23)[0]
    hits = []
    for i in range(3):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=6, temperature=0))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].outputs[0].token_ids == alone(oracle, prompt)[:6]
        hits.append(outputs[-1].num_cached_tokens)
    assert hits == [0, 20, 20]


def test_after_each_step_both_runners_hold_the_same(name, oracle):
    """Not only the tokens agree: so do all blocks in use, and all states."""
    spec = SPECS[name]
    numpy_runner = NumpyRunner(
        oracle, num_blocks=40, block_size=4, max_model_len=64, layout=layout_of(spec)
    )
    engine = make_engine(spec, max_num_batched_tokens=9)
    runner, execute = engine.runner, engine.runner.execute

    def execute_both(step):
        output, expected = execute(step), numpy_runner.execute(step)
        assert output.sampled_token_ids == expected.sampled_token_ids
        pools = [(step.block_ids, runner.kv_cache, numpy_runner.kv_cache)]
        if runner.window_cache is not None:
            caches = runner.window_cache, numpy_runner.window_cache
            pools.append((step.window_block_ids, *caches))
        for block_ids, mine, theirs in pools:
            used = sorted({b for ids in block_ids.values() for b in ids if b >= 0})
            near(mine[:, :, used], theirs[:, :, used])
        if runner.states is not None:
            slots = [*step.state_slots.values(), *(t for _, t in step.state_saves)]
            for kind in ("conv", "recurrent"):
                mine, theirs = (getattr(r.states, kind) for r in (runner, numpy_runner))
                near(mine[:, slots], theirs[:, slots])
        return output

    runner.execute = execute_both
    run(engine, PROMPTS, stagger=2)


def near(mine, theirs):
    if theirs.size:
        error = np.abs(mine.numpy() - theirs).max()
        assert error <= 1e-4 * max(np.abs(theirs).max(), 1e-3)


def test_one_step_on_cuda_mixes_no_devices(name):
    spec = SPECS[name]
    requests = [make_request(str(i), PROMPTS[0][:n]) for i, n in enumerate((9, 14, 5))]
    requests[0].num_computed_tokens, requests[1].num_computed_tokens = 8, 10
    blocks = {"0": [0, 1, 2], "1": [3, 4, 5, 6], "2": [7, 8]}
    more = {}
    if spec.windows:
        more["window_block_ids"] = {"0": [-1, 1, 2], "1": [-1, -1, 5, 6], "2": [7, 8]}
        more["window_block_copies"] = [(1, 9)]
    if spec.delta_net:
        more["state_slots"] = {"0": 2, "1": 0, "2": 1}
        more |= {"state_loads": [(6, 0)], "state_saves": [(2, 3), (1, 7)]}
    step = SchedulerOutput(
        requests=requests,
        num_scheduled_tokens={"0": 1, "1": 4, "2": 5},
        block_ids=blocks,
        block_copies=[(1, 9)],
        **more,
    )
    with FakeTensorMode(), IndexWithoutCuda():
        decoder = Decoder(spec)
        decoder.load_weights(
            {
                name: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                for name, shape in spec.weight_shapes().items()
            }
        )
        runner = TorchRunner(
            decoder,
            num_blocks=16,
            block_size=4,
            max_model_len=64,
            layout=layout_of(spec, 16),
        )
        launched = runner.launch(step)
    assert launched.results.device.type == "cuda"


def test_a_state_is_half_in_half_types_only_where_the_convolution_looks():
    spec = SPECS["states and windows"]
    decoder = torch_decoder(spec).to(torch.bfloat16)
    runner = TorchRunner(decoder, num_blocks=8, block_size=4, max_model_len=32)
    assert runner.states.conv.dtype == runner.kv_cache.dtype == torch.bfloat16
    assert runner.states.recurrent.dtype == torch.float32
    assert runner.layout == CacheLayout(num_states=64)
    assert runner.states.conv.shape[:2] == (2, 64)
    assert runner.window_cache is None and len(runner.kv_cache) == 2
    runner.close()
    assert runner.states is None


def test_memory_that_graphs_do_not_get_is_an_error_of_ours():
    spec = SPECS["states"]
    runner = TorchRunner(
        torch_decoder(spec), num_blocks=8, block_size=4, max_model_len=32
    )

    def refuse(function):
        raise RuntimeError("out of memory")

    with pytest.raises(ConfigError, match=r"cannot be recorded \(out of memory\)"):
        runner.capture_graphs(2, refuse)


def test_the_whole_hybrid_in_one_decoder_has_its_ops_chosen():
    decoder = MergedDecoder(torch_decoder(SPECS["states"]))
    runner = TorchRunner(decoder, num_blocks=8, block_size=4, max_model_len=32)
    for op in ("causal_conv1d", "recurrent_delta_rule", "chunked_delta_rule"):
        assert runner.choices[op].backend.implementation is getattr(runner.ops, op)
    plain = torch_decoder(SPECS["windows alone"])
    runner = TorchRunner(plain, num_blocks=8, block_size=4, max_model_len=32)
    assert "causal_conv1d" not in runner.choices


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_profile_has_the_parts_of_delta_nets_and_changes_no_answer(kind):
    spec = SPECS["states and windows"]
    oracle = numpy_decoder(spec)
    if kind == "torch":
        engine = make_engine(spec)
    else:
        engine = LLMEngine(
            NumpyRunner(
                oracle,
                num_blocks=40,
                block_size=4,
                max_model_len=64,
                layout=layout_of(spec),
            )
        )
    timers = Timers()
    with timed(engine, timers):
        answers = run(engine, PROMPTS[:2])
    assert answers == [[alone(oracle, prompt)] for prompt in PROMPTS[:2]]
    calls = timers.spent.num_calls
    assert calls.keys() <= profile.GROUP_OF.keys()
    parts = ["in_proj", "out_proj", "causal_conv1d", "recurrent_delta_rule"]
    assert all(calls[part] > 0 for part in [*parts, "qkv", "o", "paged_attention"])
    if kind == "torch":
        assert calls["chunked_delta_rule"] > 0
    work = profile.Work(num_tokens=4, num_keys=10, num_pairs=10, num_sampled=1)
    floors = profile.floors_of(engine.runner, work, Limits(1e9, 1e9))
    net, size = spec.delta_net, spec.hidden_size
    rows = net.conv_size + net.value_size + 2 * net.num_value_heads
    assert floors["in_proj"] == pytest.approx(2 * rows * size * 2 * 4 / 1e9)
    assert floors["paged_attention"] == pytest.approx(
        max(10 * 2 * 2 * 2 * 16 * 4, 4 * 2 * 4 * 16 * 10) / 1e9
    )


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)]
)
def test_the_floor_of_states_is_reading_and_writing_them_or_three_products(
    dtype, num_bytes
):
    decoder = torch_decoder(SPECS["states"]).to(dtype)
    runner = TorchRunner(decoder, num_blocks=8, block_size=4, max_model_len=32)
    work = profile.Work(num_tokens=7, num_sampled=3, num_keys=90, num_pairs=100)
    # 2 layers, 4 heads, matrices of 6 x 5 in float32; 44 channels of 4 factors that
    # keep 3 numbers. A state for each of 3 requests, however long their texts are.
    reading = profile.floors_of(runner, work, Limits(1.0, 1e30))
    assert reading["causal_conv1d"] == num_bytes * 2 * (3 * 2 * 44 * 3 + 44 * 4)
    for rule in ("recurrent_delta_rule", "chunked_delta_rule"):
        assert reading[rule] == 2 * 3 * 2 * 4 * 6 * 5 * 4
    multiplying = profile.floors_of(runner, work, Limits(1e30, 1.0))
    assert multiplying["causal_conv1d"] == 7 * 2 * 2 * 44 * 4
    for rule in ("recurrent_delta_rule", "chunked_delta_rule"):
        assert multiplying[rule] == 7 * 2 * 3 * 2 * 4 * 6 * 5


@pytest.mark.parametrize("num_states", [1, 3, 20])
def test_a_profile_takes_whole_prompts_and_as_many_requests_as_have_states(num_states):
    spec = replace(SPECS["states and windows"], max_position_embeddings=256)
    runner = TorchRunner(
        torch_decoder(spec),
        num_blocks=1000,
        block_size=4,
        max_model_len=256,
        layout=layout_of(spec, 1000, num_states),
    )
    engine = LLMEngine(runner)
    most = min(16, num_states)
    names = ["decode, 1 request", f"decode, {most} requests"][: min(2, most)]
    profiles = profile.profile_engine(engine, None, 1)
    assert [p.name for p in profiles] == [*names, "a prompt of 128 tokens"]
    *_, prompt = profiles
    calls = {part.name: part.num_calls for part in prompt.parts}
    assert calls["chunked_delta_rule"] == calls["causal_conv1d"] == 2  # layers
    assert "recurrent_delta_rule" not in calls
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.block_manager.enable_prefix_caching


def test_numpy_is_what_runs_the_ops_on_states():
    spec = SPECS["states"]
    runner = NumpyRunner(
        numpy_decoder(spec), num_blocks=8, block_size=4, max_model_len=32
    )
    parts = ("causal_conv1d", "recurrent_delta_rule", "qkv", "sampler", "scheduler")
    backends = [profile.backend_of(runner, part) for part in parts]
    assert backends == ["numpy", "numpy", "numpy", "", ""]
