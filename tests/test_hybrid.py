"""Hybrid models in the engine: states, windows that give blocks back, and prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.models.spec import DeltaNetSpec
from minivllm.runners.base import CacheLayout
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import assert_queues_are_right
from tests.tiny_decoders import GEMMA, SPEC, numpy_decoder

NET = DeltaNetSpec(
    layers=(0, 2),
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=6,
    value_head_dim=5,
    conv_kernel_size=4,
)
HYBRID = replace(
    SPEC,
    num_layers=4,
    head_dim=16,
    qk_norm=True,
    norm_plus_one=True,
    attention_gate=True,
    rotary_dim=8,
    delta_net=NET,
)
EVERYTHING = replace(HYBRID, windows=(None, 5, None, None))
SPECS = {
    "states": HYBRID,
    "windows": replace(GEMMA, num_layers=4, windows=(5, None, 6, 6)),
    "states and windows": EVERYTHING,
    "states alone": replace(HYBRID, delta_net=replace(NET, layers=(0, 1, 2, 3))),
    "windows alone": replace(SPEC, windows=(5, 6, 5)),
}


def layout_of(spec, num_blocks=40, num_states=6, num_kept=5):
    states = {}
    if spec.delta_net:
        states = {"num_states": num_states, "num_kept_states": num_kept}
    windows = {}
    if spec.windows:
        windows = {"window": spec.max_window, "num_window_blocks": num_blocks}
    return CacheLayout(**states, **windows)


@pytest.fixture(scope="module")
def decoders():
    return {name: numpy_decoder(spec) for name, spec in SPECS.items()}


def make_engine(decoder, num_blocks=40, layout=None, **options):
    runner = NumpyRunner(
        decoder,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=64,
        layout=layout or layout_of(decoder.spec),
    )
    return LLMEngine(runner, **options)


def texts(n, seed=0, low=3, high=30):
    random = np.random.default_rng(seed)
    return [
        random.integers(50, size=random.integers(low, high)).tolist() for _ in range(n)
    ]


def run(engine, prompts, max_tokens=12, n=1, stagger=0):
    outputs = {}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, n=n)
    pending = list(enumerate(prompts))
    while pending or engine.has_unfinished_requests():
        take = 1 if stagger else len(pending)
        for i, prompt in pending[:take]:
            engine.add_request(str(i), prompt, params)
        del pending[:take]
        for _ in range(stagger or 1):
            for output in engine.step():
                outputs[output.request_id] = output
            assert_queues_are_right(engine.scheduler)
    assert_all_is_free(engine)
    return [[c.token_ids for c in outputs[str(i)].outputs] for i in range(len(prompts))]


def assert_all_is_free(engine):
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    if manager.windows:
        assert manager.windows.num_free_blocks == manager.windows.num_blocks
    if manager.states:
        assert not manager.states.slots


def alone(decoder, prompt, max_tokens=12):
    context, answer = decoder.cached_context(64), []
    logits = decoder.extend(prompt, context)
    for _ in range(max_tokens):
        answer.append(int(logits.argmax()))
        logits = decoder.extend(answer[-1:], context)
    return answer


def count_preemptions(engine):
    preempted = []
    engine.listeners.append(lambda record: preempted.extend(record["preempted"]))
    return preempted


@pytest.mark.parametrize(
    ("name", "num_full", "num_apart"),
    [
        ("states", 2, 0),  # the other two of its four layers have states
        ("windows", 1, 3),
        ("states and windows", 1, 1),
        ("states alone", 0, 0),
        ("windows alone", 0, 3),
    ],
)
def test_each_layer_that_attends_has_its_place_in_one_cache(
    decoders, name, num_full, num_apart
):
    block = (2, 40, 4, SPECS[name].num_kv_heads, SPECS[name].head_dim)
    runner = make_engine(decoders[name]).runner
    assert runner.kv_cache.shape == (num_full, *block)
    if num_apart:
        assert runner.window_cache.shape == (num_apart, *block)
    else:
        assert runner.window_cache is None
    # Without blocks for windows, all are in the first one.
    together = replace(layout_of(SPECS[name]), window=None, num_window_blocks=0)
    runner = make_engine(decoders[name], layout=together).runner
    assert runner.kv_cache.shape == (num_full + num_apart, *block)
    assert runner.window_cache is None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("num_blocks", [14, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_requests_that_come_and_go_get_what_they_get_alone(
    decoders, name, budget, num_blocks, caching
):
    decoder = decoders[name]
    prompts = texts(6)
    engine = make_engine(
        decoder,
        num_blocks,
        layout_of(decoder.spec, num_blocks),
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    preempted = count_preemptions(engine)
    answers = run(engine, prompts, stagger=2)
    assert answers == [[alone(decoder, prompt)] for prompt in prompts]
    if num_blocks == 14 and budget > 3:
        assert preempted, "the cache was too large to be a test"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_states", [3, 4, 9])
def test_several_answers_begin_with_one_state(decoders, name, num_states):
    decoder = decoders[name]
    layout = replace(layout_of(decoder.spec), num_states=0)
    if decoder.spec.delta_net:
        layout = replace(layout, num_states=num_states)
    engine = make_engine(decoder, 40, layout, max_num_batched_tokens=9)
    prompts = texts(3, seed=1)
    answers = run(engine, prompts, n=3, stagger=1)
    assert answers == [[alone(decoder, prompt)] * 3 for prompt in prompts]


@pytest.mark.parametrize("name", SPECS)
def test_answers_drawn_apart_go_apart(decoders, name):
    """Each follower has its own state, and its own copy of the last block."""
    engine = make_engine(decoders[name])
    prompt = texts(1, seed=2)[0]
    params = SamplingParams(max_tokens=12, temperature=2.0, n=4, seed=5)
    engine.add_request("a", prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert_queues_are_right(engine.scheduler)
    answers = [c.token_ids for c in outputs[-1].outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    again = make_engine(decoders[name], max_num_batched_tokens=5)
    again.add_request("a", prompt, params)
    while again.has_unfinished_requests():
        outputs = again.step()
    assert [c.token_ids for c in outputs[-1].outputs] == answers


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("abort_at", [0, 1, 3, 6])
def test_an_aborted_request_leaves_the_others_alone(decoders, name, abort_at):
    decoder = decoders[name]
    engine = make_engine(decoder, max_num_batched_tokens=10)
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
        assert_queues_are_right(engine.scheduler)
        if not engine.has_unfinished_requests():
            break
    assert_all_is_free(engine)
    for name_, prompt in (("0", 0), ("2", 2), ("3", 3), ("late", 1)):
        assert outputs[name_] == alone(decoder, prompts[prompt])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("fail_at", range(8))
def test_a_failed_step_ends_its_requests_and_no_others(decoders, name, fail_at):
    decoder = decoders[name]
    engine = make_engine(decoder, max_num_batched_tokens=10, max_num_seqs=2)
    prompts = texts(4, seed=4)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=8, temperature=0))
    forward, calls, outputs = decoder.forward, [], {}

    def failing(*arguments):
        calls.append(1)
        result = forward(*arguments)  # what it writes into states is there
        if len(calls) == fail_at + 1:
            raise RuntimeError("out of luck")
        return result

    engine.runner.decoder = type(
        "Failing", (), {"__getattr__": lambda _, n: getattr(decoder, n)}
    )()
    engine.runner.decoder.forward = failing
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0]
        assert_queues_are_right(engine.scheduler)
    assert_all_is_free(engine)
    assert any(o.finish_reason == "error" for o in outputs.values())
    for i, prompt in enumerate(prompts):
        if outputs[str(i)].finish_reason != "error":
            assert outputs[str(i)].token_ids == alone(decoder, prompt)[:8]


@pytest.mark.parametrize("name", SPECS)
def test_an_interrupted_step_starts_all_over(decoders, name):
    decoder = decoders[name]
    engine = make_engine(decoder, max_num_batched_tokens=10)
    prompts = texts(4, seed=5)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=8, temperature=0, n=1 + i % 2)
        engine.add_request(str(i), prompt, params)
    execute, outputs = engine.runner.execute, {}
    for step in range(200):
        if step % 4 == 3:

            def interrupted(plan):
                execute(plan)
                raise KeyboardInterrupt

            engine.runner.execute = interrupted
            if engine.has_unfinished_requests() and step < 20:
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.runner.execute = execute
        for output in engine.step():
            outputs[output.request_id] = output
        assert_queues_are_right(engine.scheduler)
        if not engine.has_unfinished_requests():
            break
    assert_all_is_free(engine)
    for i, prompt in enumerate(prompts):
        answers = [c.token_ids for c in outputs[str(i)].outputs]
        assert answers == [alone(decoder, prompt)[:8]] * (1 + i % 2)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("budget", [7, 64])
def test_the_same_prompt_again_is_a_hit(decoders, name, budget):
    decoder = decoders[name]
    engine = make_engine(decoder, max_num_batched_tokens=budget)
    prompt = texts(1, seed=6, low=22, high=23)[0]
    hits = []
    for i in range(3):
        params = SamplingParams(max_tokens=6, temperature=0)
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].outputs[0].token_ids == alone(decoder, prompt)[:6]
        hits.append(outputs[-1].num_cached_tokens)
    assert hits == [0, 20, 20], "all blocks but the last, which is not full"


@pytest.mark.parametrize("name", SPECS)
def test_a_beginning_that_two_have_shared_is_a_hit_for_the_third(decoders, name):
    decoder = decoders[name]
    engine = make_engine(decoder)
    random = np.random.default_rng(7)
    beginning = random.integers(50, size=18).tolist()  # four blocks and a half
    hits = []
    for i in range(4):
        prompt = beginning + random.integers(50, size=11).tolist()
        params = SamplingParams(max_tokens=6, temperature=0)
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].outputs[0].token_ids == alone(decoder, prompt)[:6]
        hits.append(outputs[-1].num_cached_tokens)
    if decoder.spec.delta_net:  # nobody could know of the beginning at the first time
        assert hits == [0, 0, 16, 16]
    elif not decoder.spec.full_layers:
        assert hits[0] == 0
    else:
        assert hits == [0, 16, 16, 16]


def test_without_room_for_states_there_is_no_hit(decoders):
    decoder = decoders["states"]
    engine = make_engine(decoder, layout=layout_of(HYBRID, num_kept=0))
    prompt = texts(1, seed=6, low=22, high=23)[0]
    for i in range(2):
        params = SamplingParams(max_tokens=6, temperature=0)
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].num_cached_tokens == 0
        assert outputs[-1].outputs[0].token_ids == alone(decoder, prompt)[:6]


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_the_state_used_longest_ago_makes_room(decoders, num_kept):
    decoder = decoders["states"]
    engine = make_engine(decoder, 60, layout_of(HYBRID, 60, num_kept=num_kept))
    prompts = texts(num_kept + 1, seed=8, low=22, high=23)
    params = SamplingParams(max_tokens=4, temperature=0)

    def hits_of(prompt):
        engine.add_request("x", prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].outputs[0].token_ids == alone(decoder, prompt)[:4]
        return outputs[-1].num_cached_tokens

    assert [hits_of(p) for p in prompts[:-1]] == [0] * num_kept
    assert [hits_of(p) for p in reversed(prompts[:-1])] == [20] * num_kept
    assert hits_of(prompts[-1]) == 0
    assert hits_of(prompts[-2]) == 0, "used longest ago, it has made room"
    assert hits_of(prompts[-1]) == (20 if num_kept > 1 else 0)


def test_another_salt_shares_no_state(decoders):
    decoder = decoders["states"]
    engine = make_engine(decoder)
    prompt = texts(1, seed=6, low=22, high=23)[0]
    hits = []
    for i, salt in enumerate(("a", "b", "a")):
        params = SamplingParams(max_tokens=4, temperature=0)
        engine.add_request(str(i), prompt, params, cache_salt=salt)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        hits.append(outputs[-1].num_cached_tokens)
    assert hits == [0, 0, 20]


def test_forgetting_the_cache_forgets_states_and_windows(decoders):
    engine = make_engine(decoders["states and windows"])
    prompt = texts(1, seed=6, low=22, high=23)[0]
    manager = engine.scheduler.block_manager
    for i in range(2):
        params = SamplingParams(max_tokens=4, temperature=0)
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if engine.has_unfinished_requests():
                assert not manager.reset_prefix_cache(), "a request rests on it"
        assert outputs[-1].num_cached_tokens == 0
        assert manager.states.kept and manager.windows.key_of
        assert manager.reset_prefix_cache()
        assert not manager.states.kept and not manager.windows.key_of


@pytest.mark.parametrize("name", ["windows", "states and windows", "windows alone"])
def test_blocks_come_back_when_they_have_left_the_window(decoders, name):
    engine = make_engine(decoders[name], max_num_batched_tokens=8)
    prompt = texts(1, seed=9, low=30, high=31)[0]
    params = SamplingParams(max_tokens=20, temperature=0)
    engine.add_request("a", prompt, params)
    manager = engine.scheduler.block_manager
    window, held = manager.windows.window, []
    while engine.has_unfinished_requests():
        engine.step()
        if ids := manager.windows.block_ids.get("a"):
            num_tokens = engine.scheduler.running[0].num_computed_tokens
            needed = (num_tokens + 1 - window) // 4
            assert [i >= needed for i in range(len(ids))] == [i >= 0 for i in ids]
            held.append(manager.windows.num_blocks - manager.windows.num_free_blocks)
    assert max(held) <= -(-window // 4) + 1
    assert manager.num_blocks == manager.num_free_blocks
