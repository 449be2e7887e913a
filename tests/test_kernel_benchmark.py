"""What the benchmark of the kernels measures, on the emulator and a clock of ours."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import minivllm
from benchmarks import kernels as script
from benchmarks.kernels import (
    activation_job,
    all_jobs,
    argmax_job,
    attention_job,
    cache_job,
    combine_job,
    conv_job,
    copy_gb_s,
    draw_job,
    embedding_job,
    grouped_job,
    line_of,
    matmul_tflop_s,
    measure,
    mlp_job,
    norm_job,
    permute_job,
    prefill_job,
    result_path,
    rotary_job,
    rule_job,
    run,
    softmax_job,
    time_calls,
    topk_job,
)
from tests.kernels.tools import needs_compiler

SMALL = [
    norm_job(torch.bfloat16, 3, 64, "cpu", is_fused=False),
    norm_job(torch.float32, 3, 64, "cpu", is_fused=True),
    softmax_job(torch.float32, 5, 40, "cpu"),
    attention_job(torch.float32, 2, 300, 4, 2, 64, "cpu"),
    prefill_job(torch.float16, 2, 20, 50, 4, 2, 64, "cpu"),
    argmax_job(3, 400, "cpu"),
    draw_job(3, 400, 400, 1.0, "cpu"),
    draw_job(3, 400, 20, 0.9, "cpu"),
]
LAYER = [
    rotary_job(torch.float32, 3, 5, 16, "cpu"),
    activation_job(torch.float32, 3, 40, "cpu"),
    mlp_job(torch.float32, 3, 40, 12, "cpu"),
    embedding_job(torch.bfloat16, 3, 40, "cpu"),
    cache_job(torch.bfloat16, 3, 2, 16, "cpu"),
]

EXPERTS = [
    topk_job(torch.float16, 3, 40, 4, "cpu"),
    permute_job(5, 6, 2, "cpu"),
    grouped_job(torch.float16, 5, 6, 2, 40, 24, "cpu"),
    combine_job(torch.bfloat16, 3, 2, 40, "cpu"),
]

STATES = [
    conv_job(torch.float32, 3, 5, 20, 4, "cpu"),
    conv_job(torch.bfloat16, 3, 1, 20, 4, "cpu"),
    rule_job(torch.float32, 3, 1, 2, 4, 12, 20, "cpu"),
    rule_job(torch.float32, 2, 19, 2, 4, 12, 20, "cpu"),
]


@needs_compiler
@pytest.mark.parametrize("job", SMALL, ids=lambda job: job.op)
def test_every_rung_and_torch_do_the_same_job(job):
    """Otherwise their times could not be compared."""
    results = {}
    for rung in job.make():
        torch.manual_seed(0)
        results[rung] = job.make()[rung]().float()
    assert list(results)[-1] == "torch" and len(results) >= 3
    eps = torch.finfo(job.dtype).eps
    for result in results.values():
        assert torch.allclose(result, results["torch"], rtol=4 * eps, atol=16 * eps)


@needs_compiler
@pytest.mark.parametrize("job", LAYER, ids=lambda job: job.op)
def test_each_small_kernel_does_what_torch_does(job):
    results = {}
    for rung in job.make():
        torch.manual_seed(0)
        results[rung] = job.make()[rung]().float()
    assert list(results)[-1] == "torch" and len(results) >= 2
    for name in ("gelu", "gelu_tanh"):  # the same bytes, other numbers
        assert not results.pop(name, torch.ones(1)).equal(results["torch"])
    for result in results.values():
        assert torch.allclose(result, results["torch"], rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("job", EXPERTS, ids=lambda job: job.op)
def test_each_step_of_experts_does_what_torch_does(job):
    results = {}
    for rung in job.make():
        torch.manual_seed(0)
        results[rung] = job.make()[rung]().float()
    assert list(results)[-1] == "torch" and len(results) >= 3
    for result in results.values():
        torch.testing.assert_close(result, results["torch"], rtol=0.01, atol=0.002)


@needs_compiler
@pytest.mark.parametrize("job", STATES, ids=lambda job: job.op)
def test_each_op_on_states_does_what_torch_does_again_and_again(job):
    """The second call begins with what the first has left."""
    results = {}
    for rung in job.make():
        torch.manual_seed(0)
        call = job.make()[rung]
        results[rung] = [call().float().clone() for _ in range(2)]
        assert not results[rung][0].equal(results[rung][1])
    assert list(results)[-1] == "torch" and len(results) >= 3
    tolerances = {"rtol": 1e-4, "atol": 1e-4}
    if job.dtype == torch.bfloat16:
        tolerances = {"rtol": 0.01, "atol": 0.002}
    for result in results.values():
        torch.testing.assert_close(result, results["torch"], **tolerances)


def test_the_bytes_of_ops_on_states_are_those_by_hand():
    conv, single, recurrent, chunked = (job.num_bytes for job in STATES)
    # Rows in and out, states in and out, factors; slots, first rows.
    assert conv == 4 * 20 * (2 * 15 + 2 * 3 * 3 + 4) + 3 * 8 + 4 * 4
    assert single == 2 * 20 * (2 * 3 + 2 * 3 * 3 + 4) + 3 * 8 + 4 * 4
    state, row = 4 * 4 * 12 * 20, 4 * (2 * 2 * 12 + 2 * 4 * 20 + 4 + 4)
    assert recurrent == 3 * (2 * state + row) + 3 * 8
    assert chunked == 2 * 2 * state + 38 * row + 2 * 8 + 3 * 4


def test_the_bytes_of_experts_are_those_by_hand():
    topk, permute, grouped, combine = (job.num_bytes for job in EXPERTS)
    assert topk == 3 * (2 * 40 + 4 * (4 + 8))  # weights of 4 bytes, experts of 8
    assert permute == 5 * 2 * (8 + 8) + 4 * 7
    touched = len(script.choose_experts(5, 6, 2).unique())
    assert 2 < touched < 6, "the weights of one expert at least are not read"
    assert grouped == 2 * (touched * 24 * 40 + 10 * (40 + 24)) + 4 * 7
    assert combine == 2 * (6 + 3) * 40 + 6 * (8 + 4)


def test_the_bytes_of_the_small_kernels_are_those_by_hand():
    rotary, activation, mlp, embedding, cache = (job.num_bytes for job in LAYER)
    assert rotary == 4 * (2 * 3 * 5 * 16 + 3 * 16)
    assert activation == 4 * 3 * (80 + 40)
    assert mlp == 4 * (24 * 40 + 3 * 40 + 3 * 12)
    assert embedding == 3 * (8 + 2 * 2 * 40)
    assert cache == 3 * (8 + 2 * 2 * 2 * 2 * 16)


def test_the_bytes_are_those_by_hand():
    plain, fused, softmax, attention, prefill, *choices = (
        job.num_bytes for job in SMALL
    )
    assert plain == 2 * (2 * 3 * 64 + 64)
    assert fused == 4 * (4 * 3 * 64 + 64)
    assert softmax == 4 * 2 * 5 * 40
    # 2 requests, 300 keys and as many values, 2 heads of 64; queries and results.
    assert attention == 4 * (2 * 2 * 300 * 2 * 64 + 2 * 2 * 4 * 64)
    # The scores; of argmax also a score and an id of 8 bytes for each row.
    assert choices == [4 * 3 * 400 + 3 * 12, 4 * 3 * 400, 4 * 3 * 400]
    # Likewise, but each request has 20 queries.
    assert prefill == 2 * (2 * 2 * 50 * 2 * 64 + 2 * 2 * 20 * 4 * 64)


def test_inputs_are_as_many_as_the_cache_cannot_hold():
    made = []
    job = softmax_job(torch.float32, 5, 40, "cpu")
    counted = script.Job(
        job.op, job.dtype, job.sizes, 1000, lambda: made.append(1) or {"torch": print}
    )
    seen = []
    measure(counted, 9_500, lambda calls: seen.append(len(calls)) or 1.0)
    assert seen == [20] and len(made) == 20  # 19 of 1,000 bytes are twice 9,500


def made_of(times: dict[str, float], num_bytes: int) -> script.Job:
    """Return a job of rungs that do nothing, and of torch."""
    calls = {rung: lambda: None for rung in times}
    return script.Job("softmax", torch.float32, {"size": 4}, num_bytes, lambda: calls)


def test_a_faster_rung_is_told_as_faster_than_torch(monkeypatch):
    monkeypatch.setattr(script, "matmul_tflop_s", lambda *arguments: 67.0)
    times = {"v1": 4e-3, "torch": 2e-3}
    clock = iter([1e-3, *times.values()])  # the copy comes first
    jobs = [made_of(times, 10**6)]
    result = run(jobs, "cpu", 0, lambda calls: next(clock), note=lambda text: None)
    copy = 2 * 2**30 / 1e6
    assert result["ceilings"] == {
        "copy_gb_per_s": pytest.approx(copy, rel=1e-3),
        "matmul_tflop_per_s": {"float32": 67.0},
    }
    first, second = result["rows"]
    assert first == {
        "op": "softmax",
        "rung": "v1",
        "dtype": "float32",
        "shape": {"size": 4},
        "median_us": 4000,
        "bytes": 10**6,
        "gb_per_s": 0.25,
        "of_torch": 0.5,
        "of_ceiling": pytest.approx(0.25 / copy, rel=1e-3),
    }
    assert second["of_torch"] == 1
    assert json.loads(json.dumps(result)) == result
    assert "0.50 x torch" in line_of(first)


def test_a_job_that_is_too_large_is_named_and_the_others_run(monkeypatch):
    monkeypatch.setattr(script, "matmul_tflop_s", lambda *arguments: 67.0)

    def make():
        raise torch.OutOfMemoryError("as on a small GPU")

    large = script.Job("softmax", torch.float32, {"size": 10**12}, 10**13, make)
    jobs = [large, made_of({"torch": 1.0}, 10)]
    result = run(jobs, "cpu", 0, lambda calls: 1.0, note=lambda text: None)
    assert result["left_out"] == [{"op": "softmax", "shape": {"size": 10**12}}]
    assert len(result["rows"]) == 1


def test_a_copy_reads_and_writes():
    assert copy_gb_s("cpu", lambda calls: 1e-3, num_bytes=10**6) == pytest.approx(2)


def test_a_product_multiplies_and_adds():
    def clock(calls):
        (call,) = calls
        assert call().shape == (100, 100)
        return 1e-6

    assert matmul_tflop_s("cpu", torch.bfloat16, clock, 100) == pytest.approx(2)


class FakeGraph:
    """Stands for a CUDA graph on a clock of its own: a replay takes some seconds."""

    now = 0.0
    num_replays = 0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def replay(self) -> None:
        FakeGraph.now += self.seconds
        FakeGraph.num_replays += 1


class FakeEvent:
    """Stands for a CUDA event on that clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeGraph.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at - self.at) * 1000


@pytest.mark.parametrize(
    ("replay_s", "num_replays"),
    [(1e-3, 2 + 5 * 20), (0.05, 2 + 5), (0.3, 2 + 3), (30.0, 2 + 1)],
)
def test_slow_rungs_are_counted_less_often(replay_s, num_replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(replay_s))
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeGraph, "num_replays", 0)
    done = []
    calls = [lambda i=i: done.append(i) for i in range(4)]
    assert time_calls(calls) == pytest.approx(replay_s / 4)
    assert done == [0, 1, 2, 3], "all are recorded, once"
    assert FakeGraph.num_replays == num_replays


def test_the_jobs_cover_every_op_and_what_they_name_can_be_made():
    jobs = list(all_jobs("cpu", torch.bfloat16))
    ops = {"rms_norm", "fused_add_rms_norm", "softmax", "paged_attention"}
    ops |= {job.op for job in LAYER}
    ops |= {"argmax", "draw", "cut_and_draw"}
    ops |= {"prefill_attention"}
    ops |= {job.op for job in EXPERTS}
    ops |= {"causal_conv1d", "recurrent_delta_rule", "chunked_delta_rule"}
    assert {job.op for job in jobs} == ops
    assert all(job.num_bytes > 0 for job in jobs)
    assert len({(job.op, job.dtype, *job.sizes.values()) for job in jobs}) == len(jobs)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla T4", "gpu-tesla-t4.json"),
        (
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "gpu-nvidia-a100-sxm4-40gb-mig-1g-5gb.json",
        ),
        ("Quadro RTX 6000/8000", "gpu-quadro-rtx-6000-8000.json"),
    ],
)
def test_a_device_has_a_file_of_its_own(device, name):
    assert result_path(device).name == name


def test_the_numbers_are_written_with_what_they_belong_to(monkeypatch, tmp_path):
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=140 * 2**30,
        L2_cache_size=60 * 2**20,
    )
    for name, answer in {
        "current_device": lambda: 0,
        "get_device_properties": lambda index: properties,
        "get_device_capability": lambda: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(script, "why_no_launch", lambda: None)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    asked = []

    def fake_run(jobs, device, cache_bytes, clock):
        asked.append(({job.dtype for job in jobs}, device, cache_bytes, clock))
        return {"rows": []}

    monkeypatch.setattr(script, "run", fake_run)
    script.main([])
    types = {torch.bfloat16, torch.float32, torch.int64}
    assert asked == [(types, "cuda", 60 * 2**20, time_calls)]
    written = json.loads((tmp_path / "gpu-nvidia-h200.json").read_text())
    assert written["capability"] == "9.0"
    assert written["cuda"] == "13.0"
    assert written["torch"] == torch.__version__
    assert written["minivllm"] == minivllm.__version__
    assert written["rows"] == []
    assert {"driver", "commit", "date", "command"} <= written.keys()


def test_a_part_of_the_numbers_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "why_no_launch", lambda: None)
    monkeypatch.setattr(
        script, "describe_gpu", lambda: {"device": "T4", "cache_mib": 4}
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "run", lambda *arguments: {"rows": []})
    script.main(["--ops", "softmax"])
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_says_nothing():
    assert script.output_of("no-such-command", "--version") is None
    assert script.output_of(sys.executable, "-c", "print('one\\ntwo')") == "one"
    assert script.output_of(sys.executable, "-c", "pass") is None


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(script, "why_no_launch", lambda: "torch sees no GPU")
    with pytest.raises(SystemExit, match=r"^the kernels are .*: torch sees no GPU$"):
        script.main([])
