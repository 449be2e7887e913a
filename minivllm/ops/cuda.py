"""The CUDA kernels as operators of torch, and as backends of the ops.

    cuda       on a GPU that NVRTC can compile for
    emulated   on the CPU, if it is forced: the same kernels, one thread after the other

Invariant: both run the same rungs of the same files.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/_custom_ops.py (rms_norm, fused_add_rms_norm).
Source: chapter 6, "CUDA kernels".
"""

import sys

import torch
from torch import Tensor

import minivllm.ops.paged_attention  # its op
import minivllm.ops.reference  # noqa: F401, its ops
from minivllm.errors import BackendUnavailable
from minivllm.ops import rungs
from minivllm.ops.compiler import compiler_command
from minivllm.ops.launch import KernelFile, why_no_launch
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced

RMS_NORM = KernelFile("rms_norm.cu")
SOFTMAX = KernelFile("softmax.cu")
PAGED_ATTENTION = KernelFile("paged_attention.cu")


def like_first(x: Tensor, *rest: object) -> Tensor:
    """Return a tensor like the first argument: what most operators return."""
    return torch.empty_like(x)


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps, bool plus_one=False) -> Tensor",
    fake=like_first,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Return the normalised rows of x; see `rungs.rms_norm`."""
    out = torch.empty_like(x)
    rungs.rms_norm(RMS_NORM, "v4", out, x, weight, eps, plus_one)
    return out


@operator(
    "fused_add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps, "
    "bool plus_one=False) -> Tensor",
    fake=like_first,
)
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, plus_one: bool = False
) -> Tensor:
    """Add x to the residual, in place, and return the normalised rows of the sum."""
    out = torch.empty_like(x)
    rungs.fused_add_rms_norm(RMS_NORM, "v5", out, residual, x, weight, eps, plus_one)
    return out


@operator("softmax(Tensor x) -> Tensor", fake=like_first)
def softmax(x: Tensor) -> Tensor:
    """Return the shares that the scores in each row have."""
    out = torch.empty_like(x)
    rungs.softmax(SOFTMAX, "v3", out, x)
    return out


def like_queries(q: Tensor, kv_cache: Tensor, rows: Tensor, *rest: object) -> Tensor:
    """Return a query for each request."""
    return q.new_empty(rows.shape[0], *q.shape[1:])


@operator(
    "paged_attention(Tensor q, Tensor kv_cache, Tensor rows, Tensor block_table, "
    "Tensor seq_lens, float scale, int? window=None) -> Tensor",
    fake=like_queries,
)
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Let one query of each request attend; see `rungs.paged_attention`."""
    out = q.new_empty(len(rows), *q.shape[1:])
    arguments = (out, q, kv_cache, rows, block_table, seq_lens, scale, window)
    rungs.paged_attention(PAGED_ATTENTION, "v4", *arguments)
    return out


class KernelRMSNorm:
    """`TorchRMSNorm` by a kernel: one launch, with the addition or without."""

    def __init__(self, weight: Tensor, eps: float, plus_one: bool = False) -> None:
        self.weight = weight.contiguous()
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Add to x, if there is something to add, and return its rows normalised."""
        if added is None:
            return rms_norm(x, self.weight, self.eps, self.plus_one)
        return fused_add_rms_norm(x, added, self.weight, self.eps, self.plus_one)


class KernelAttention:
    """`PaddedAttention` for pieces of one query, without padding."""

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        group_size: int,
    ) -> None:
        assert positions.shape[1] == 1, "the kernel takes one query a piece"
        # Once per step, for all layers: kernels index in 32 bits.
        self.rows = rows.flatten().int()
        self.block_table = block_table.int()
        self.seq_lens = (positions.flatten() + 1).int()

    def attend(
        self, q: Tensor, kv_cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend to the last keys in the cache, [num_pieces, num_heads, head_dim].

        A window is how many of them a query sees, its own among them; None for all.
        """
        tables = (self.rows, self.block_table, self.seq_lens)
        return paged_attention(q, kv_cache, *tables, scale, window)


def why_not_kernels(dtype: str, **sizes: int) -> str | None:
    """Return why there is no kernel for these types and sizes, or None if there is."""
    if dtype not in rungs.DTYPES:
        return f"the kernels are for {', '.join(rungs.DTYPES)}, not for {dtype}"
    head_dim = sizes.get("head_dim", 0)
    return rungs.why_not_attention(head_dim, getattr(torch, dtype).itemsize)


def why_not_cuda(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why the kernels cannot run on a GPU, or None if they can."""
    if device != "cuda":
        return f"it runs on a GPU, not on {device}"
    return why_not_kernels(dtype, **sizes) or why_no_launch()


def why_not_emulated(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why the kernels cannot be emulated, or None if they can."""
    if device != "cpu":
        return f"it runs on the CPU, not on {device}"
    if sys.platform != "linux":
        return f"the emulator runs on Linux, not on {sys.platform}"
    try:
        compiler_command()
    except BackendUnavailable as error:
        return str(error)
    return why_not_kernels(dtype, **sizes)


KERNELS = {"rms_norm": KernelRMSNorm, "paged_attention": KernelAttention}
for op, implementation in KERNELS.items():
    condition = only_if_forced(op, why_not_emulated)
    add_backend(op, Backend("emulated", implementation, condition))
    add_backend(op, Backend("cuda", implementation, why_not_cuda))
