"""The cases of tests/kernels on a GPU: the same rungs, the same numbers."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from minivllm.errors import KernelError
from minivllm.ops import rungs
from minivllm.ops.launch import CudaModule, architecture
from minivllm.ops.nvrtc import installed
from tests.gpu.sanitized import KERNELS
from tests.kernels.cases import (
    AttentionCase,
    Case,
    NormCase,
    VarianceCase,
    instances,
    source_of,
)
from tests.kernels.kinds import KINDS, RUNGS, factors_of, make
from tests.kernels.pairwise import all_combinations

ROOT = Path(__file__).parents[2]
LARGE = [case for kind in KINDS for case in kind.large()]


@cache
def cases_of(kind: type[Case], version: str) -> list[Case]:
    """Return all cases of a rung; a GPU orders its threads as it likes."""
    here = {"order": [None], "dtype": kind.dtypes_on(architecture(0))}
    values = all_combinations(factors_of(kind, version) | here)
    return [make(kind, version, v)[0] for v in values]


def compiled(cases: list[Case]) -> CudaModule:
    """Compile what cases of one file start."""
    return CudaModule(source_of(cases[0].file), instances(cases))


@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_a_rung_computes_what_numpy_does(kind, version):
    cases = cases_of(kind, version)
    module, failures = compiled(cases), []
    for case in cases:
        try:
            case.run(module, device="cuda")
        except (AssertionError, KernelError) as error:
            failures.append(f"{case!r}: {error}")
    told = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} are wrong, such as\n{told}"


@pytest.mark.parametrize("case", [*LARGE, VarianceCase("v1", "float32", 5000, 99)])
def test_sizes_that_the_emulator_has_no_time_for(case):
    case.run(compiled([case]), device="cuda")


def test_a_captured_step_is_the_step():
    """Norms and attention in a CUDA graph: what new inputs give, replayed."""
    norm = NormCase("v5", "float16", 576, 8, False)
    attention = AttentionCase("v4", "float16", 64, 16, 9, 3, (300,) * 8, None)
    norms, attentions = compiled([norm]), compiled([attention])
    x, residual, out = torch.randn(3, 8, 576, device="cuda").half()
    weight = torch.ones(576, device="cuda").half()
    q = torch.randn(8, 9, 64, device="cuda").half()
    kv_cache = torch.randn(2, 160, 16, 3, 64, device="cuda").half()
    rows = torch.arange(8, device="cuda").int()
    tables = torch.randperm(160, device="cuda")[:152].view(8, 19).int()
    seq_lens = torch.full((8,), 300, device="cuda").int()
    mixed = torch.empty_like(q)

    def step() -> None:
        rungs.fused_add_rms_norm(norms, "v5", out, residual, x, weight, 1e-5)
        rungs.paged_attention(
            attentions, "v4", mixed, q, kv_cache, rows, tables, seq_lens, 0.125
        )

    step()  # loads what cannot be loaded during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        x.normal_()
        q.normal_()
        before = residual.clone()
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone(), mixed.clone(), residual.clone()
        residual.copy_(before)
        step()
        for ours, theirs in zip(replayed, (out, mixed, residual), strict=True):
            assert ours.equal(theirs)


# What each tool says of the mistake in `sanitized.py` that is meant for it.
COMPLAINTS = {
    "memcheck": "Invalid __global__",
    "racecheck": "Race reported",
    "initcheck": "Uninitialized __global__",
}


def find_sanitizer() -> str | None:
    """Return compute-sanitizer: of the PATH, of a toolkit, or of a wheel."""
    found = reversed(installed("bin/compute-sanitizer"))  # wheels may be incomplete
    return shutil.which("compute-sanitizer") or next(map(str, found), None)


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `sanitized.py` under a tool, which watches our kernels and not torch's."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer, a part of NVIDIA's CUDA toolkit, is not here")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
    # Importing torch takes a while; and torch asks CUDA things that it may refuse.
    command += ["--launch-timeout", "0", "--report-api-errors", "no"]
    command += ["--target-processes", "application-only"]
    for kernel in KERNELS:
        command += ["--kernel-name", f"kns={kernel}"]
    command += [sys.executable, "-m", "tests.gpu.sanitized", *arguments]
    # Each tensor gets memory of its own from CUDA, so that what lies behind it is
    # nobody's, and what was there before is not known.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )
    if "Device not supported" in done.stdout:
        pytest.skip(f"{tool} does not run here: Device not supported")
    return done


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_sanitizer_has_no_complaint(tool):
    done = sanitize(tool)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(KERNELS)} kernels ran" in done.stdout


@pytest.mark.parametrize("tool", COMPLAINTS)
def test_the_sanitizer_would_complain(tool):
    done = sanitize(tool, tool)
    assert COMPLAINTS[tool] in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rms_norm_v2" in done.stdout
