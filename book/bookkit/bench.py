"""Measures this machine: times of a call, and the limits that estimates start from.

A measurement is a median with its range, since one number says nothing about noise.
Thread counts are left as they are set, and `machine` prints them.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds one call took: the median of several, and their range."""

    median: float
    min: float
    max: float
    repeats: int

    def __str__(self) -> str:
        # One unit for all three, that of the median.
        scale, unit = _time_unit(self.median)
        low, high = (f"{value * scale:.3g}" for value in (self.min, self.max))
        spread = f"{low} to {high} {unit}, median of {self.repeats}"
        return f"{duration(self.median)} ({spread})"

    __repr__ = __str__


def median(fn: Callable[[], Any], repeat: int = 5, warmup: int = 1) -> Measurement:
    """Time `fn` and return the median.

    Args:
        fn: Called without arguments; its result is thrown away.
        repeat: How many calls are timed.
        warmup: How many calls come before, untimed (caches fill, pages are mapped).
    """
    if repeat < 1 or warmup < 0:
        raise ValueError(
            f"repeat is {repeat} and warmup {warmup}: repeat needs 1 or more, "
            "warmup 0 or more"
        )
    for _ in range(warmup):
        fn()
    times = [_time_once(fn) for _ in range(repeat)]
    return Measurement(statistics.median(times), min(times), max(times), repeat)


def _time_once(fn: Callable[[], Any]) -> float:
    _finish_gpu()
    start = time.perf_counter()
    fn()
    _finish_gpu()
    return time.perf_counter() - start


def _finish_gpu() -> None:
    """Wait until the GPU is done: CUDA calls return before the work is."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def matmul_rate(
    dtype: str = "float32",
    size: int = 2048,
    *,
    library: str = "numpy",
    device: str = "cpu",
) -> float:
    """Measure the floating-point operations per second of a square matrix product.

    A product of two [size, size] matrices takes 2 * size**3 operations. Takes about a
    second on a laptop.

    Args:
        dtype: "float32" or "float64" with NumPy, any of torch's with torch.
        size: Rows and columns.
        library: "numpy" or "torch".
        device: For torch.
    """
    left, right = (_random((size, size), dtype, library, device) for _ in range(2))
    return 2 * size**3 / _best_of_budget(lambda: left @ right)


def read_bandwidth(
    dtype: str = "float32",
    num_bytes: int = 2**28,
    *,
    library: str = "numpy",
    device: str = "cpu",
) -> float:
    """Measure the bytes per second at which a matrix-vector product reads its matrix.

    This is what decoding one token does with every weight. The matrix is larger than
    the caches of most processors, so that it comes from memory. Takes about a second.

    Args:
        dtype: Of the matrix, as for `matmul_rate`.
        num_bytes: Size of the matrix.
        library: "numpy" or "torch".
        device: For torch.
    """
    columns = 4096
    vector = _random((columns,), dtype, library, device)
    row_bytes = columns * vector.itemsize
    rows = num_bytes // row_bytes
    if rows < 1:
        raise ValueError(
            f"num_bytes is {num_bytes:,}, less than one row of the matrix: ask for "
            f"{row_bytes:,} or more"
        )
    # One row many times: random numbers for all of it would take longer than reading.
    tile = sys.modules[library].tile
    matrix = tile(vector, (rows, 1))
    return rows * row_bytes / _best_of_budget(lambda: matrix @ vector)


def _random(shape: tuple[int, ...], dtype: str, library: str, device: str) -> Any:
    if library == "torch":
        import torch

        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(
                f"torch has no dtype {dtype!r}: try 'float32' or 'bfloat16'"
            )
        generator = torch.Generator(device).manual_seed(0)
        return torch.rand(shape, generator=generator, device=device, dtype=kind)
    if library != "numpy":
        raise ValueError(f"library is {library!r}: choose 'numpy' or 'torch'")
    if dtype not in ("float32", "float64"):
        raise ValueError(
            f"NumPy multiplies {dtype} without BLAS, very slowly: choose 'float32' or "
            "'float64', or library='torch'"
        )
    return np.random.default_rng(0).random(shape, dtype=dtype)


def _best_of_budget(fn: Callable[[], Any], budget_s: float = 0.5) -> float:
    """Return the shortest time of `fn` within a time budget, of three calls at least.

    For a limit the best run counts: whatever made another one slower was not the limit.
    """
    fn()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 50):
        times.append(_time_once(fn))
    return min(times)


def machine() -> str:
    """Describe this machine in a line: processor, threads, memory, GPU, versions."""
    cores = num_cores()
    parts = [
        _cpu_model(),
        f"{cores} core{'s' * (cores != 1)}",
        f"NumPy on {numpy_threads()} thread{'s' * (numpy_threads() != 1)}",
    ]
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    memory = _memory_bytes()
    if memory:
        parts.append(f"{memory / 2**30:.0f} GiB RAM")
    torch = sys.modules.get("torch")
    if torch is not None:
        threads = torch.get_num_threads()
        parts.insert(3, f"torch on {threads} thread{'s' * (threads != 1)}")
        versions += f", torch {torch.__version__}"
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_device_name())
    return " · ".join([*parts, versions])


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def numpy_threads() -> int:
    """Return how many threads NumPy's matrix products use, as the environment says."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return min(int(value), num_cores())
    return num_cores()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.stdout.strip():
            return answer.stdout.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def duration(seconds: float) -> str:
    """Write a time with three digits and a fitting unit: "12.3 ms"."""
    scale, unit = _time_unit(seconds)
    return f"{seconds * scale:.3g} {unit}"


def _time_unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e9, "ns"


def si(value: float, unit: str) -> str:
    """Write a number with three digits and a decimal prefix: "32 GFLOP/s"."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
