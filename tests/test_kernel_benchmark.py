"""What the benchmark of the kernels measures, on the emulator and a clock of ours."""

import json
import sys

import pytest
import torch

from benchmarks import kernels as script
from benchmarks.kernels import (
    all_jobs,
    attention_job,
    copy_gb_s,
    measure,
    norm_job,
    result_path,
    row_of,
    run,
    softmax_job,
)
from minivllm.errors import BackendUnavailable
from tests.kernels.tools import needs_compiler

SMALL = [
    norm_job(torch.bfloat16, 3, 64, "cpu", is_fused=False),
    norm_job(torch.float32, 3, 64, "cpu", is_fused=True),
    softmax_job(torch.float32, 5, 40, "cpu"),
    attention_job(torch.float32, 2, 300, 4, 2, 64, "cpu"),
]


@needs_compiler
@pytest.mark.parametrize("job", SMALL, ids=lambda job: job.op)
def test_every_rung_and_torch_do_the_same_job(job):
    """Otherwise their times could not be compared."""
    results = {}
    for version in job.make():
        torch.manual_seed(0)
        results[version] = job.make()[version]().float()
    assert list(results)[-1] == "torch" and len(results) >= 3
    eps = torch.finfo(job.dtype).eps
    for result in results.values():
        assert torch.allclose(result, results["torch"], rtol=4 * eps, atol=16 * eps)


def test_the_bytes_are_those_by_hand():
    plain, fused, softmax, attention = (job.num_bytes for job in SMALL)
    assert plain == 2 * (2 * 3 * 64 + 64)
    assert fused == 4 * (4 * 3 * 64 + 64)
    assert softmax == 4 * 2 * 5 * 40
    # 2 requests, 300 keys and as many values, 2 heads of 64; queries and results.
    assert attention == 4 * (2 * 2 * 300 * 2 * 64 + 2 * 2 * 4 * 64)


def test_inputs_are_as_many_as_the_cache_cannot_hold():
    made = []
    job = softmax_job(torch.float32, 5, 40, "cpu")
    counted = script.Job(
        job.op, job.dtype, job.sizes, 1000, lambda: made.append(1) or {"torch": print}
    )
    seen = []
    measure(counted, 9_500, lambda calls: seen.append(len(calls)) or 1.0)
    assert seen == [20] and len(made) == 20  # 19 of 1,000 bytes are twice 9,500


def test_a_faster_rung_is_told_as_faster_than_torch():
    times = {"v1": 4e-3, "torch": 2e-3}
    calls = {name: lambda: None for name in times}
    job = script.Job("softmax", torch.float32, {"size": 4}, 10**6, lambda: calls)
    clock = iter([1e-3, *times.values()])  # the copy comes first
    result = run([job], "cpu", 0, lambda calls: next(clock), note=lambda text: None)
    assert result["copy_gb_s"] == pytest.approx(2 * 2**30 / 1e6)
    first, second = result["results"]
    assert (first["times_torch"], second["times_torch"]) == (0.5, 1)
    assert first["of_limit"] == pytest.approx(0.25 / result["copy_gb_s"], rel=1e-3)
    json.dumps(result)
    assert "x torch" in row_of(first) and "250" not in row_of(second)


def test_a_copy_reads_and_writes():
    assert copy_gb_s("cpu", lambda calls: 1e-3, num_bytes=10**6) == pytest.approx(2)


def test_the_jobs_cover_every_op_and_what_they_name_can_be_made():
    jobs = list(all_jobs("cpu", torch.bfloat16))
    ops = {"rms_norm", "fused_add_rms_norm", "softmax", "paged_attention"}
    assert {job.op for job in jobs} == ops
    assert all(job.num_bytes > 0 for job in jobs)
    assert len({(job.op, job.dtype, *job.sizes.values()) for job in jobs}) == len(jobs)


def test_a_device_has_a_file_of_its_own():
    assert result_path("Tesla T4").name == "gpu-tesla-t4.json"


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(script, "why_no_launch", lambda: "torch sees no GPU")
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(BackendUnavailable, match="torch sees no GPU"):
        script.main()
