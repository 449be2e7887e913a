"""Timers, what they are put around, floors, and the tables of a profile."""

import json
import random

import pytest
import torch

from minivllm.benchmarks import profile
from minivllm.benchmarks.machine import Limits
from minivllm.benchmarks.profile import (
    GROUP_OF,
    STEP,
    Part,
    Spent,
    StepProfile,
    TimerCost,
    Timers,
    Work,
    decoding,
    middle_half,
    prefilling,
    profile_engine,
    profile_steps,
    profile_table,
    timed,
    without_timers,
)
from minivllm.engine.engine import LLMEngine
from minivllm.runners.build import CacheConfig, build_runner
from minivllm.sampling.params import SamplingParams
from minivllm.text.detokenizer import IncrementalDetokenizer
from tests.tiny_folder import CONFIG, make_tensors, write_byte_tokenizer
from tests.tiny_folder import write_checkpoint as write


class Ticks:
    """A clock that goes on by one whenever somebody looks at it."""

    now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = CONFIG | {
        "vocab_size": 257,
        "hidden_size": 32,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    write(folder, make_tensors(config), config)
    write_byte_tokenizer(folder, None)
    return folder


@pytest.fixture(params=["torch", "numpy"])
def engine(request, tiny):
    return make_engine(tiny, request.param)


def make_engine(folder, backend: str) -> LLMEngine:
    device = {"device": "cpu"} if backend == "torch" else {}
    cache = CacheConfig(num_blocks=400, block_size=16)
    runner, tokenizer = build_runner(folder, backend=backend, cache=cache, **device)
    return LLMEngine(runner, tokenizer=tokenizer, max_num_seqs=16)


# Timers.


def test_a_moment_belongs_to_the_innermost_part():
    readings = iter([0, 1, 4, 9, 10, 30, 31, 40])
    timers = Timers(clock=lambda: next(readings))
    timers.enter("step")
    timers.enter("decoder")
    timers.enter("product")
    timers.leave()
    timers.leave()
    timers.enter("product")
    timers.leave()
    timers.leave()
    spent = timers.take()
    assert spent.seconds == {"step": 1 + 20 + 9, "decoder": 3 + 1, "product": 5 + 1}
    assert spent.num_calls == {"step": 1, "decoder": 1, "product": 2}
    assert spent.num_inside == {"step": 2, "decoder": 1}
    assert timers.take() == Spent()


def test_parts_add_up_however_they_are_nested():
    numbers = random.Random(0)
    for _ in range(200):
        clock = Ticks()
        timers = Timers(clock)

        def nest(depth, timers=timers):
            for _ in range(numbers.randint(0, 4)):
                timers.enter(numbers.choice("abcde"))
                if depth:
                    nest(depth - 1)
                timers.leave()

        timers.enter("whole")
        nest(4)
        timers.leave()
        assert sum(timers.take().seconds.values()) == clock.now - 1


def test_an_error_leaves_the_stack_as_it_was():
    timers = Timers(Ticks())
    timers.enter("step")
    with pytest.raises(ZeroDivisionError):
        timers.wrap("part", lambda: 1 / 0)()
    timers.leave()
    assert timers.take().seconds == {"step": 2, "part": 1}


def test_a_timed_function_gets_and_gives_the_same():
    wrapped = Timers().wrap("part", lambda *a, **b: (a, b))
    assert wrapped(1, 2, x=3) == ((1, 2), {"x": 3})


def test_the_cost_of_a_timer_is_one_reading_inside_and_one_around():
    assert profile.measure_timer_cost(Ticks(), num_calls=10) == TimerCost(1.0, 1.0)


def test_the_cost_is_taken_off_where_it_fell():
    spent = Spent()
    spent.seconds.update({"step": 10.0, "part": 5.0})
    spent.num_calls.update({"step": 1, "part": 2})
    spent.num_inside.update({"step": 2})
    seconds = without_timers(spent, TimerCost(inside_s=0.5, around_s=1.0))
    assert seconds == {"step": 10 - 0.5 - 2 * 1.0, "part": 5 - 2 * 0.5}


def test_the_middle_half_forgets_the_extremes_and_keeps_sums():
    assert middle_half([9, 1, 100, 5, 3, 7, -50, 4], key=float) == [3, 4, 5, 7]
    assert middle_half([2], key=float) == [2]
    assert middle_half([3, 1, 2], key=float) == [1, 2, 3]


# A profile of an engine.


@pytest.mark.parametrize("cost", [TimerCost(), TimerCost(0.25, 0.5)])
def test_the_parts_and_the_timers_are_the_whole_step(engine, cost, monkeypatch):
    clock = Ticks()
    step, ticks = engine.step, []

    def watched():
        before = clock.now
        outputs = step()
        ticks.append(clock.now - before + 1)
        return outputs

    steps = decoding(engine, 3, 2 * 8)
    monkeypatch.setattr(engine, "step", watched)
    found = profile_steps(engine, "decode", steps, 8, None, cost, clock)
    ticks = ticks[-16:]  # before: the prompts, and steps to warm up
    with_timers = ticks[::2]
    assert set(ticks[1::2]) == {1}, "a step without timers looks at the clock"
    assert found.bare_s == 1
    whole = sum(middle_half(with_timers, key=float)) / 4
    assert found.seconds + found.timers_s == pytest.approx(whole, rel=1e-12)
    num_timers = sum(part.num_calls for part in found.parts)
    expected = num_timers * cost.inside_s + (num_timers - 1) * cost.around_s
    assert found.timers_s == pytest.approx(expected)


def test_every_operation_of_the_step_is_seen_as_often_as_it_runs(engine):
    num_layers = CONFIG["num_hidden_layers"]
    is_torch = hasattr(engine.runner, "choices")
    expected = {
        "scheduler": 2,
        "outputs": 1,
        "detokenizer": 3,
        "batch": 1,
        "qkv": num_layers * (1 if is_torch else 3),
        "o": num_layers,
        "gate_up": num_layers * (1 if is_torch else 2),
        "down": num_layers,
        "head": 1,
        "paged_attention": num_layers,
        "rms_norm": 2 * num_layers + 1,
        "rotary_embedding": num_layers * (1 if is_torch else 2),
        "activation": num_layers,
        "reshape_and_cache": num_layers,
        "results": 1,
        "sampler": 1,
        "decoder, between": 1,
        "runner, between": 1,
        STEP: 1,
    }
    if is_torch:
        expected |= dict.fromkeys(("to the device", "attention set-up", "argmax"), 1)
        expected |= {"groups": 2, "sampling inputs": 3, "scores to float32": 1}
        if "embedding" in engine.runner.choices:
            expected["embedding"] = 1
    steps = decoding(engine, 3, 2)
    found = profile_steps(engine, "decode", steps, 1, None, TimerCost())
    assert {part.name: part.num_calls for part in found.parts} == expected
    assert found.num_steps == 1
    # A prompt of 128 tokens, WARM_UP steps, and the step itself.
    assert found.text_lengths == (128 + profile.WARM_UP + 1,) * 2
    assert not engine.has_unfinished_requests()


def test_a_drawn_token_and_a_prompt_have_their_parts(tiny):
    engine = make_engine(tiny, "torch")
    steps = decoding(engine, 2, 2, temperature=1.0)
    found = profile_steps(engine, "decode", steps, 1, None, TimerCost())
    assert {"argmax", "draw"} <= {part.name for part in found.parts}
    found = profile_steps(engine, "prompt", prefilling(engine), 1, None, TimerCost())
    calls = {part.name: part.num_calls for part in found.parts}
    assert calls["prefill_attention"] == CONFIG["num_hidden_layers"]
    assert "paged_attention" not in calls and found.text_lengths == (128, 128)


def test_every_op_that_the_engine_chooses_has_a_part(tiny):
    runner = make_engine(tiny, "torch").runner
    part_of = {"silu_and_mul": "activation", "linear": "gate_up"}
    assert {part_of.get(op, op) for op in runner.choices} <= GROUP_OF.keys()
    for op, choice in runner.choices.items():
        part = part_of.get(op, op)
        assert profile.backend_of(runner, part) == choice.backend.name
    assert profile.backend_of(runner, "batch") == ""


def held(engine) -> dict[str, object]:
    """Return everything that a profile may exchange, by name."""
    from minivllm.reference import decoder as reference
    from minivllm.runners import numpy_runner, torch_runner

    runner = engine.runner
    holders = [engine, engine.scheduler, runner, runner.decoder, reference]
    holders += [numpy_runner, torch_runner, torch_runner.FreshPieces]
    holders.append(IncrementalDetokenizer)
    if hasattr(runner, "ops"):
        holders += [runner.ops, runner.sampling]
        for layer in runner.decoder.layers:
            holders += [layer, layer.self_attn, layer.mlp]
    return {
        f"{index} {name}": value
        for index, holder in enumerate(holders)
        for name, value in vars(holder).items()
        if callable(value)
    }


def test_afterwards_everything_is_as_it_was(engine):
    before = held(engine)
    timers = Timers()
    with pytest.raises(KeyError), timed(engine, timers):
        assert held(engine) != before
        raise KeyError
    after = held(engine)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_profile_that_cannot_begin_leaves_nothing_behind(engine, monkeypatch):
    before = held(engine)
    places = [*profile.engine_places(engine), profile.Place(engine, "nothing", STEP)]
    monkeypatch.setattr(profile, "engine_places", lambda engine: iter(places))
    with pytest.raises(AttributeError), timed(engine, Timers()):
        pass
    assert all(value is before[name] for name, value in held(engine).items())


def test_timers_change_no_answer(engine):
    def answer() -> list[int]:
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
        engine.add_request("a", list(range(60, 100)), params)
        engine.add_request("b", list(range(20, 90)), params)
        ids: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids[output.request_id] = output.outputs[0].token_ids
        return [ids["a"], ids["b"]]

    expected = answer()
    with timed(engine, Timers()):
        assert answer() == expected


@pytest.mark.parametrize("limit", [128, 256, 2048])
def test_all_requests_decode_to_the_end_even_if_prompts_come_late(tiny, limit):
    engine = make_engine(tiny, "numpy")
    engine.scheduler.max_num_batched_tokens = limit
    steps = decoding(engine, 16, num_steps=24)
    for _ in range(24):
        next(steps)
        assert len(engine.scheduler.running) == 16
        engine.step()
    steps.close()
    assert not engine.has_unfinished_requests()


def test_a_whole_profile_has_three_kinds_of_step(engine):
    notes = []
    found = profile_engine(engine, Limits(1e9, 1e9), 2, note=notes.append)
    assert [p.name for p in found] == [
        "decode, 1 request",
        "decode, 16 requests",
        "a prompt of 128 tokens",
    ]
    assert len(notes) == 3 and not engine.has_unfinished_requests()
    for one in found:
        assert all(
            part.floor_s for part in one.parts if GROUP_OF[part.name] == "linear"
        )
        assert 0 < one.seconds < 100 * one.bare_s
        total = sum(one.of_groups().values())
        assert total == pytest.approx(one.seconds)


# Floors.


def test_a_floor_is_reading_or_multiplying_whichever_takes_longer(tiny):
    runner = make_engine(tiny, "numpy").runner
    work = Work(num_tokens=3, num_sampled=2, num_keys=100, num_pairs=150)
    reading = profile.floors_of(runner, work, Limits(1.0, 1e30))
    # 2 layers, 32 wide, 12 in the middle, 2 heads of 16 that share a key head; float32.
    weights = {
        "qkv": 2 * 32 * (32 + 16 + 16),
        "o": 2 * 32 * 32,
        "gate_up": 2 * 2 * 32 * 12,
        "down": 2 * 32 * 12,
        "head": 257 * 32,
    }
    kv_bytes = 100 * 2 * 2 * 16 * 4
    expected = {name: 4.0 * count for name, count in weights.items()}
    assert reading == expected | {
        "paged_attention": kv_bytes,
        "prefill_attention": kv_bytes,
    }
    multiplying = profile.floors_of(runner, work, Limits(1e30, 1.0))
    rows = {name: 2 if name == "head" else 3 for name in weights}
    expected = {name: 2.0 * rows[name] * count for name, count in weights.items()}
    flops = 4 * 2 * 2 * 16 * 150
    assert multiplying == expected | {
        "paged_attention": flops,
        "prefill_attention": flops,
    }


def test_the_clock_of_a_gpu_waits_for_it(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert profile.clock_of("cuda:0")() > 0
    assert waited == ["cuda:0"]
    profile.clock_of("cpu")()
    assert waited == ["cuda:0"]


# Tables.


EXAMPLE = StepProfile(
    name="decode, 2 requests",
    num_steps=8,
    text_lengths=(137, 152),
    parts=[
        Part("scheduler", "", 2, 0.001, None),
        Part("qkv", "compiled", 30, 0.006, 0.004),
        Part("down", "compiled", 30, 0.002, 0.002),
        Part(STEP, "", 1, -1e-6, None),
    ],
    timers_s=0.0005,
    bare_s=0.0091,
)


def test_the_table_has_shares_floors_and_ratios():
    text = profile_table(EXAMPLE)
    first = "decode, 2 requests: 9.00 ms (the middle half of 8 steps, texts of 137 to "
    assert text.startswith(f"{first}152 tokens)\n")
    lines = [line.split() for line in text.splitlines()]
    assert ["bookkeeping", "1.000", "11.1%"] in lines
    assert ["scheduler", "2", "1.000", "11.1%"] in lines
    assert ["linear", "8.000", "88.9%"] in lines
    assert "qkv compiled 30 6.000 66.7% 4.000 1.5".split() in lines
    assert "engine, between 1 0.000 0.0%".split() in lines, "less than its timers"
    assert text.endswith(
        "\n  without timers 9.10 ms; the timers' own 0.50 ms are taken off"
    )
    assert not any("attention" in line for line in lines), "a group without parts"


def test_the_record_is_plain():
    record = json.loads(json.dumps(EXAMPLE.as_json()))
    assert record["workload"] == "profile" and record["step"] == "decode, 2 requests"
    assert (record["ms"], record["without_timers_ms"]) == (8.999, 9.1)
    assert record["parts"]["qkv"] == {
        "group": "linear",
        "backend": "compiled",
        "calls": 30,
        "ms": 6.0,
        "floor_ms": 4.0,
    }
    assert record["parts"]["scheduler"]["backend"] is None
    assert record["text_lengths"] == [137, 152]


def test_the_bars_are_the_shares_of_the_groups():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    profile.draw_profiles(axes, [EXAMPLE, EXAMPLE])
    groups = list(dict.fromkeys(GROUP_OF.values()))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == groups
    widths = [bars.patches[1].get_width() for bars in axes.containers]
    assert widths[groups.index("linear")] == pytest.approx(100 * 8 / 8.999)
    ends = [
        bars.patches[1].get_x() + bars.patches[1].get_width()
        for bars in axes.containers
    ]
    assert ends[-1] == pytest.approx(100, abs=0.1)
