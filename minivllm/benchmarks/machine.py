"""What a machine is, and how fast anything could be on it.

A model that decodes one request reads every weight for every token, so memory sets the
limit; one that reads a long prompt multiplies every weight with every token, so
arithmetic does. `Limits` says how far an engine is from both.

Called by the command line and by the scripts in benchmarks/.

Source: appendix A9, "Measuring".
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from minivllm.models.spec import ModelSpec

READ_BYTES = 2**28  # more than the caches of most processors hold
MATRIX_SIZE = 2048
BUDGET_S = 0.5  # for each limit


@dataclass(frozen=True, slots=True)
class Limits:
    """How fast a machine reads memory and multiplies matrices.

    Attributes:
        read_bytes_per_s: Of memory, in order.
        flops_per_s: Of a product of two large matrices; an addition and a
            multiplication are two.
    """

    read_bytes_per_s: float
    flops_per_s: float

    def decode_s(self, spec: ModelSpec, bytes_per_weight: int) -> float:
        """Return the seconds that reading all weights takes, for one token."""
        return weight_bytes(spec, bytes_per_weight) / self.read_bytes_per_s

    def prefill_s(
        self, spec: ModelSpec, bytes_per_weight: int, num_tokens: int
    ) -> float:
        """Return the seconds that a prompt takes: its products, or the reading."""
        layers = sum(
            prod(shape)
            for name, shape in spec.weight_shapes().items()
            if name.startswith("layers.")
        )
        head = spec.vocab_size * spec.hidden_size  # for the last token only
        products_s = 2 * (layers * num_tokens + head) / self.flops_per_s
        return max(products_s, self.decode_s(spec, bytes_per_weight))

    def as_json(self) -> dict[str, float]:
        """Return plain values, in giga per second."""
        return {
            "read_gb_s": round(self.read_bytes_per_s / 1e9, 1),
            "gemm_gflop_s": round(self.flops_per_s / 1e9, 1),
        }


def weight_bytes(spec: ModelSpec, bytes_per_weight: int) -> int:
    """Return what a step reads of the weights: all but an embedding of its own."""
    num_weights = spec.num_parameters
    if not spec.tie_word_embeddings:
        num_weights -= spec.vocab_size * spec.hidden_size  # it looks up a few rows
    return num_weights * bytes_per_weight


def measure_limits(library: str, dtype: str, device: str = "cpu") -> Limits:
    """Measure the limits of a device, with as many threads as are set.

    Args:
        library: "numpy" (float32 on the CPU) or "torch".
        dtype: Of the matrix product: "float32", "bfloat16" or "float16".
        device: For torch.

    Cost:
        One to three seconds, and 256 MiB.
    """
    if library == "torch":
        return _torch_limits(dtype, device)
    import numpy as np

    vector = np.ones(MATRIX_SIZE, dtype=np.float32)
    matrix = np.ones((READ_BYTES // 4 // MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    square = matrix[:MATRIX_SIZE]
    return Limits(
        READ_BYTES / _shortest(lambda: matrix @ vector),
        2 * MATRIX_SIZE**3 / _shortest(lambda: square @ square),
    )


def _torch_limits(dtype: str, device: str) -> Limits:
    import torch

    def wait() -> None:
        """A GPU works on after the call has returned."""
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    numbers = torch.ones(READ_BYTES // 4, device=device)
    square = torch.ones(
        (MATRIX_SIZE, MATRIX_SIZE), device=device, dtype=getattr(torch, dtype)
    )
    return Limits(
        READ_BYTES / _shortest(lambda: (numbers.sum(), wait())),
        2 * MATRIX_SIZE**3 / _shortest(lambda: (square @ square, wait())),
    )


def _shortest(fn: Callable[[], Any]) -> float:
    """Return the shortest time of some calls: what slowed the others is no limit."""
    fn()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET_S and len(times) < 1000):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores this process may use, memory and versions."""
    machine: dict[str, Any] = {"cpu": _cpu_model(), "cores": num_cores()}
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        machine["memory_gib"] = round(num_bytes / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    machine["system"] = platform.system()
    machine["python"] = platform.python_version()
    for package in ("numpy", "torch"):
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return machine


def machine_line(machine: dict[str, Any]) -> str:
    """Write the description of a machine in one line."""
    parts = [machine["cpu"], f"{machine['cores']} cores"]
    if "memory_gib" in machine:
        parts.append(f"{machine['memory_gib']:.0f} GiB RAM")
    if "gpu" in machine:
        parts.append(machine["gpu"])
    names = {"python": "Python", "numpy": "NumPy", "torch": "torch"}
    versions = [f"{names[key]} {machine[key]}" for key in names if key in machine]
    return ", ".join([*parts, machine["system"], *versions])


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads(library: str) -> int:
    """Return how many CPU threads a library computes with."""
    torch = sys.modules.get("torch")
    if library == "torch" and torch is not None:
        return torch.get_num_threads()
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
