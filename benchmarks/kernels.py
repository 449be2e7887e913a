"""Time every rung of the ladders on a GPU, beside torch and the limit of the machine.

python -m benchmarks.kernels                 # some minutes
python -m benchmarks.kernels --ops rms_norm  # a part of it, to look at

Prints a table, and writes it to benchmarks/results/gpu-<device>.json if it is complete.

What the kernels do is limited by memory. So each job counts the bytes that have to be
moved at least, each input read once and each output written once, and a rung is told
by the GB/s that it would move if it moved no more. The limit is what a plain copy
reaches. Inputs are cold: a job has several copies of them, more than the cache of the
GPU holds, and takes them in turn. Calls are recorded in a CUDA graph and replayed, so
that the time in which Python starts kernels is not measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import BackendUnavailable
from minivllm.ops import rungs
from minivllm.ops.launch import KernelFile, why_no_launch
from minivllm.ops.paged_attention import PaddedAttention

RESULTS = Path(__file__).parent / "results"
EPS = 1e-5
NUM_COUNTED = 5
REPLAYS_S = 0.02  # of each counted measurement
MAX_COPIES = 256
COPY_BYTES = 2**30

Record = dict[str, Any]
Call = Callable[[], Tensor]
TimeCalls = Callable[[Sequence[Call]], float]  # -> seconds of one of the calls


@dataclass(frozen=True, slots=True)
class Job:
    """One op on inputs of one size, to be done by each rung and by torch.

    Attributes:
        op: Its name.
        dtype: Of the elements.
        sizes: For the report.
        num_bytes: To be moved at least.
        make: Makes inputs, and returns what does the job on them: version -> call.
    """

    op: str
    dtype: torch.dtype
    sizes: dict[str, int]
    num_bytes: int
    make: Callable[[], dict[str, Call]]


def norm_job(
    dtype: torch.dtype, num_rows: int, hidden: int, device: str, is_fused: bool
) -> Job:
    """Return the normalisation of some rows, with or without the addition."""
    kernels = KernelFile("rms_norm.cu")

    def make() -> dict[str, Call]:
        x, residual = torch.randn(2, num_rows, hidden, device=device).to(dtype)
        weight = torch.ones(hidden, dtype=dtype, device=device)
        out = torch.empty_like(x)

        def run(version: str) -> Tensor:
            rungs.rms_norm(kernels, version, out, x, weight, EPS)
            return out

        def add_and_run(version: str) -> Tensor:
            if version == "v5":
                arguments = (kernels, version, out, residual, x, weight, EPS)
                rungs.fused_add_rms_norm(*arguments)
            else:  # what the fusion replaces
                residual.add_(x)
                rungs.rms_norm(kernels, version, out, residual, weight, EPS)
            return out

        def run_torch() -> Tensor:
            rows = residual.add_(x) if is_fused else x
            return F.rms_norm(rows, (hidden,), weight, EPS)

        versions = ["v4", "v5"] if is_fused else ["v1", "v2", "v3", "v4"]
        do = add_and_run if is_fused else run
        calls: dict[str, Call] = {v: lambda v=v: do(v) for v in versions}
        return calls | {"torch": run_torch}

    num_arrays = 4 if is_fused else 2  # read and written
    return Job(
        op="fused_add_rms_norm" if is_fused else "rms_norm",
        dtype=dtype,
        sizes={"num_rows": num_rows, "hidden": hidden},
        num_bytes=dtype.itemsize * (num_arrays * num_rows * hidden + hidden),
        make=make,
    )


def softmax_job(dtype: torch.dtype, num_rows: int, size: int, device: str) -> Job:
    """Return the softmax of some rows."""
    kernels = KernelFile("softmax.cu")

    def make() -> dict[str, Call]:
        x = torch.randn(num_rows, size, device=device).to(dtype)
        out = torch.empty_like(x)

        def run(version: str) -> Tensor:
            rungs.softmax(kernels, version, out, x)
            return out

        versions = ["v1", "v2", "v3", "v4"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: torch.softmax(x, -1, out=out)}

    return Job(
        op="softmax",
        dtype=dtype,
        sizes={"num_rows": num_rows, "size": size},
        num_bytes=dtype.itemsize * 2 * num_rows * size,
        make=make,
    )


def attention_job(
    dtype: torch.dtype,
    num_reqs: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: str,
    block_size: int = 16,
) -> Job:
    """Return the attention of one query per request to keys in scattered blocks."""
    kernels = KernelFile("paged_attention.cu")
    width = -(-num_keys // block_size)
    num_blocks = num_reqs * width

    def make() -> dict[str, Call]:
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        kv_cache = torch.randn(shape, device=device, dtype=dtype)
        q = torch.randn(num_reqs, num_heads, head_dim, device=device, dtype=dtype)
        out = torch.empty_like(q)
        rows = torch.arange(num_reqs, device=device)
        block_table = torch.randperm(num_blocks, device=device).view(num_reqs, width)
        seq_lens = torch.full((num_reqs,), num_keys, device=device)
        tables = [x.int() for x in (rows, block_table, seq_lens)]
        scale = head_dim**-0.5
        last = (seq_lens - 1).unsqueeze(-1)
        group = num_heads // num_kv_heads
        padded = PaddedAttention(rows.unsqueeze(-1), last, block_table, kv_cache, group)

        def run(version: str) -> Tensor:
            rungs.paged_attention(kernels, version, out, q, kv_cache, *tables, scale)
            return out

        versions = ["v1", "v2", "v3", "v4"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: padded.attend(q, kv_cache, scale)}

    keys_and_values = 2 * num_reqs * num_keys * num_kv_heads * head_dim
    queries_and_out = 2 * num_reqs * num_heads * head_dim
    return Job(
        op="paged_attention",
        dtype=dtype,
        sizes={
            "num_reqs": num_reqs,
            "num_keys": num_keys,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        },
        num_bytes=dtype.itemsize * (keys_and_values + queries_and_out),
        make=make,
    )


def all_jobs(device: str, dtype: torch.dtype) -> Iterator[Job]:
    """Yield what is measured: sizes of SmolLM2-135M, and of a model of 8 billion."""
    for kind in (dtype, torch.float32):
        for num_rows, hidden in ((1, 576), (4096, 576), (1, 4096), (4096, 4096)):
            for is_fused in (False, True):
                yield norm_job(kind, num_rows, hidden, device, is_fused)
        for num_rows, size in ((8192, 64), (4096, 1024), (16, 49_152), (64, 128_256)):
            yield softmax_job(kind, num_rows, size, device)
    for heads in ((9, 3, 64), (32, 8, 128)):
        for num_reqs, num_keys in ((1, 512), (1, 8192), (16, 512), (64, 2048)):
            yield attention_job(dtype, num_reqs, num_keys, *heads, device)


def time_calls(calls: Sequence[Call]) -> float:
    """Return the seconds that one of some calls takes on the GPU: a median.

    They are recorded in a graph; each has to have run before.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(num: int) -> float:
        start.record()
        for _ in range(num):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / num / len(calls)

    replay(1)
    seconds = replay(1)
    num = max(1, int(REPLAYS_S / (seconds * len(calls))))
    return statistics.median(replay(num) for _ in range(NUM_COUNTED))


def measure(job: Job, cache_bytes: int, time_calls: TimeCalls) -> list[Record]:
    """Time each rung, and torch, on a job.

    Args:
        job: What to do.
        cache_bytes: Of the GPU; the inputs are to be colder than that.
        time_calls: The clock.

    Returns:
        For each rung its time, the GB/s that it would move if it moved no more than it
        has to, and how much faster than torch it is.
    """
    num_copies = min(MAX_COPIES, -(-2 * cache_bytes // job.num_bytes)) + 1
    copies = [job.make() for _ in range(num_copies)]
    seconds = {}
    for version in copies[0]:
        calls = [copy[version] for copy in copies]
        calls[0]()  # compiles and loads it
        seconds[version] = time_calls(calls)
    return [
        {
            "op": job.op,
            "version": version,
            "dtype": str(job.dtype).removeprefix("torch."),
            **job.sizes,
            "us": seconds[version] * 1e6,
            "gb_s": job.num_bytes / seconds[version] / 1e9,
            "times_torch": seconds["torch"] / seconds[version],
        }
        for version in copies[0]
    ]


def copy_gb_s(device: str, time_calls: TimeCalls, num_bytes: int = COPY_BYTES) -> float:
    """Return how fast a plain copy reads and writes memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / time_calls([lambda: target.copy_(source)]) / 1e9


def run(
    jobs: Sequence[Job],
    device: str,
    cache_bytes: int,
    time_calls: TimeCalls,
    note: Callable[[str], None] = print,
) -> Record:
    """Measure the limit, then all jobs; every rung is told as a share of the limit."""
    limit = copy_gb_s(device, time_calls)
    note(f"a copy moves {limit:.0f} GB/s")
    records: list[Record] = []
    for job in jobs:
        for record in measure(job, cache_bytes, time_calls):
            record["of_limit"] = record["gb_s"] / limit
            records.append(record)
            note(row_of(record))
    return {"copy_gb_s": limit, "results": [rounded(record) for record in records]}


def rounded(record: Record) -> Record:
    """Keep as many digits as were measured."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in record.items()
    }


def row_of(record: Record) -> str:
    """Write a result in one line."""
    measured = ("us", "gb_s", "of_limit", "times_torch")
    named = ("op", "version", "dtype", *measured)
    sizes = " x ".join(str(v) for name, v in record.items() if name not in named)
    return (
        f"{record['op']:18} {record['version']:5} {record['dtype']:8} {sizes:26}"
        f"{record['us']:10.1f} us {record['gb_s']:7.0f} GB/s "
        f"{record['of_limit']:6.1%} of the limit, {record['times_torch']:.2f} x torch"
    )


def describe_gpu() -> Record:
    """Return what the numbers belong to."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False)
    return {
        "device": properties.name,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cache_mib": properties.L2_cache_size / 2**20,
        "driver": (driver.stdout.split() or ["unknown"])[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
    }


def result_path(device: str) -> Path:
    """Return where the numbers of a device are kept."""
    return RESULTS / f"gpu-{'-'.join(device.lower().split())}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything on the current GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ops = ["rms_norm", "fused_add_rms_norm", "softmax", "paged_attention"]
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    options = parser.parse_args(arguments)
    if reason := why_no_launch():
        raise BackendUnavailable(f"the kernels cannot be timed: {reason}")
    gpu = describe_gpu()
    # Before sm_80, bfloat16 is emulated by the processor.
    has_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    jobs = [job for job in all_jobs("cuda", dtype) if job.op in options.ops]
    measured = run(jobs, "cuda", int(gpu["cache_mib"] * 2**20), time_calls)
    if options.ops == ops:
        path = result_path(gpu["device"])
        path.write_text(json.dumps(gpu | measured, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
