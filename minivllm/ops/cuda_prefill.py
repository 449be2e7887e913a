"""Attention for prompts by CUDA kernels: how they start, the operator, the backends.

Invariant: as in `rungs`, no kernel is started that would read or write outside its
tensors, as far as their shapes tell; what tables say is checked on the CPU.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/v1/attention/backends/flash_attn.py (FlashAttentionImpl), which calls
flash_attn_varlen_func.
Source: appendix A20, "Prefill attention".
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

import minivllm.ops.paged_attention  # noqa: F401, its op
from minivllm.errors import ShapeError
from minivllm.ops.cuda import why_not_cuda, why_not_emulated
from minivllm.ops.launch import KernelFile, cuda_major
from minivllm.ops.nvrtc import why_no_mma
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced
from minivllm.ops.rungs import (
    NO_WINDOW,
    Kernels,
    check_packs,
    cuda_type,
    why_not_attention,
)

PREFILL_ATTENTION = KernelFile("prefill_attention.cu")
VERSIONS = ("v4", "v3", "v2", "v1")  # best first
WARP = 32
THREADS = 128  # of a block of v2 and v3
SIDE = 16  # of the matrices that tensor cores multiply
BFLOAT16_SINCE = (8, 0)  # GPUs whose tensor cores take it: sm_80 and later
# The largest heads of which v2 and v3 have room for 8 and 32 keys.
MAX_HEAD_BYTES = 1024
MAX_HEAD_DIM = 256  # likewise, v4 for 32 and 32


def queries_of_block(version: str, head_dim: int, itemsize: int) -> int:
    """Return how many queries a block has: FEW, SOME and MANY of the kernels."""
    if version in ("v1", "v2"):
        return 1 if version == "v1" else 8
    if version == "v3":
        return 8 if head_dim * itemsize > 512 else 32
    return 32 if head_dim > 128 else 64


def why_not_version(version: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why a rung cannot attend with such heads, or None if it can."""
    num_bytes = head_dim * dtype.itemsize
    if version == "v4":
        if dtype.itemsize != 2:
            return f"it multiplies numbers of 16 bits, not {dtype}"
        if head_dim % SIDE or head_dim > MAX_HEAD_DIM:
            return f"it takes heads of {SIDE}, {2 * SIDE}, ... {MAX_HEAD_DIM} numbers"
    elif version in ("v2", "v3") and num_bytes > MAX_HEAD_BYTES:
        return f"it takes heads of at most {MAX_HEAD_BYTES} bytes, not {num_bytes}"
    return why_not_attention(head_dim, dtype.itemsize) if version == "v3" else None


@cache
def why_no_tensor_cores(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a device cannot multiply matrices of a type, or None if it can."""
    if device.type != "cuda":
        return None  # the emulator multiplies everything
    capability = torch.cuda.get_device_capability(device)
    if dtype == torch.bfloat16 and capability < BFLOAT16_SINCE:
        return "this GPU's tensor cores do not take bfloat16: those since sm_80 do"
    return why_no_mma(cuda_major())


def best_version(head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the best rung that can attend."""
    for version in VERSIONS:
        reason = why_not_version(version, head_dim, dtype)
        if version == "v4":
            reason = reason or why_no_tensor_cores(device, dtype)
        if reason is None:
            return version
    raise AssertionError("v1 takes everything")


def prefill_attention(
    kernels: Kernels,
    version: str,
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    **options: Any,
) -> None:
    """Let the queries of each request attend to the keys up to their own.

    The last query of a request sees all of its keys, the one before it one less, and
    so on.

    Args:
        kernels: From prefill_attention.cu.
        version: "v1" to "v4".
        out: [num_tokens, num_heads, head_dim]; rows of no request stay as they are.
        q: Like out; its rows may lie apart.
        kv_cache: Of a layer, [2, num_blocks, block_size, num_kv_heads, head_dim], with
            the keys and values of these queries.
        starts: First row of each request, [num_reqs] int32.
        ends: The row behind its last one, like starts. Of a whole batch, the two are
            query_start_loc[:-1] and query_start_loc[1:].
        block_table: [num_reqs, max_num_blocks] int32.
        seq_lens: Keys of each request, [num_reqs] int32.
        max_query_len: The most queries that a request has.
        scale: Of the scores.
        window: How many keys a query sees, its own the last; None for all.
        options: For the call.

    Raises:
        ShapeError: Shapes do not fit, or the rung does not take such heads.
    """
    tables = (starts, ends, block_table, seq_lens)
    check_shapes(out, q, kv_cache, *tables)
    _, num_heads, head_dim = q.shape
    window = NO_WINDOW if window is None else window
    if window < 1 or max_query_len < 0:
        raise ShapeError(
            f"window is {window} and max_query_len {max_query_len}, but a query sees "
            "its own key at least: give a window of 1 or more"
        )
    if reason := why_not_version(version, head_dim, q.dtype):
        raise ShapeError(f"{version} of prefill_attention cannot run: {reason}")
    if len(starts) == 0 or max_query_len == 0:
        return
    keys, values = kv_cache.unbind()
    if version in ("v3", "v4"):
        check_packs(out, q, keys, values)
    if starts.device.type == "cpu":  # a GPU would have to be waited for
        check_tables(q, kv_cache, *tables, max_query_len, window)
    block_size, num_kv_heads = kv_cache.shape[2:4]
    # v1 and v2 have a block for each head, v3 and v4 for each head of the keys.
    group = num_heads // num_kv_heads if version in ("v3", "v4") else 1
    size = queries_of_block(version, head_dim, q.element_size())
    grid = (-(-max_query_len * group // size), num_heads // group, len(starts))
    threads = {"v1": WARP, "v4": size // SIDE * WARP}.get(version, THREADS)
    sizes = [q.stride(0), num_heads, num_kv_heads, block_table.shape[1], window]
    kernel = kernels[
        f"prefill_attention_{version}<{cuda_type(q)}, {head_dim}, {block_size}>"
    ]
    kernel(grid, threads, out, q, keys, values, *tables, scale, *sizes, **options)


def check_shapes(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
) -> None:
    """Refuse tensors that kernels would read or write outside of.

    Raises:
        ShapeError: They do not fit each other.
    """
    tensors = (out, q, kv_cache, starts, ends, block_table, seq_lens)
    dimensions = [x.ndim for x in tensors]
    if dimensions != [3, 3, 5, 1, 1, 2, 1]:
        raise ShapeError(
            f"out, q, kv_cache, starts, ends, block_table and seq_lens have "
            f"{dimensions} dimensions, but attention takes [3, 3, 5, 1, 1, 2, 1]: see "
            "minivllm.ops.cuda_prefill.prefill_attention"
        )
    _, num_heads, head_dim = out.shape
    num_kv_heads = kv_cache.shape[3]
    tables = (starts, ends, block_table, seq_lens)
    problem = None
    if min(num_heads, num_kv_heads, head_dim) < 1:
        problem = f"{num_heads} heads, {num_kv_heads} key heads of {head_dim} numbers"
    elif q.shape != out.shape or q.stride()[1:] != (head_dim, 1):
        problem = f"queries of {tuple(q.shape)}, {q.stride()} apart"
    elif kv_cache.shape[0] != 2 or kv_cache.shape[4] != head_dim:
        problem = f"a cache of {tuple(kv_cache.shape)}"
    elif num_heads % num_kv_heads:
        problem = f"{num_kv_heads} key heads"
    elif len({len(x) for x in tables}) > 1:
        problem = f"tables of {', '.join(str(len(x)) for x in tables)} requests"
    elif {x.dtype for x in tables} != {torch.int32}:
        problem = "a table of another type than int32"
    elif not q.dtype == kv_cache.dtype == out.dtype:
        problem = f"{q.dtype} queries for {kv_cache.dtype} keys"
    elif not all(x.is_contiguous() for x in (out, kv_cache, *tables)):
        problem = "tensors that are not contiguous"
    if problem:
        raise ShapeError(
            f"attention cannot write {tuple(out.shape)} from {problem}: see the shapes "
            "that minivllm.ops.cuda_prefill.prefill_attention takes"
        )


def check_tables(
    q: Tensor,
    kv_cache: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    window: int,
) -> None:
    """Refuse numbers in tables that lead out of the tensors.

    Raises:
        ShapeError: A request has fewer keys than queries, more than its blocks hold, or
            more queries than it may; or there is no such row or block.
    """
    num_blocks, block_size = kv_cache.shape[1:3]
    num_queries = ends - starts
    begins = torch.arange(block_table.shape[1]) * block_size
    first_seen = (seq_lens - num_queries + 1 - window)[:, None]
    is_seen = (begins < seq_lens[:, None]) & (begins + block_size > first_seen)
    is_seen &= (num_queries > 0)[:, None]
    for name, numbers, most in (
        ("starts", starts, len(q)),
        ("ends", ends, len(q)),
        ("the number of queries", num_queries, max_query_len),
        ("seq_lens", seq_lens, block_table.shape[1] * block_size),
        ("keys before the queries", seq_lens - num_queries, NO_WINDOW),
        ("block_table", block_table[is_seen], num_blocks - 1),
    ):
        if not numbers.numel():
            continue
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > most:
            raise ShapeError(
                f"{name}: there are numbers from {low} to {high}, but 0 to {most} fit "
                "the other tensors: correct them"
            )


def like_queries(q: Tensor, *rest: object) -> Tensor:
    """Return a result for each row."""
    return q.new_empty(q.shape)


@operator(
    "prefill_attention(Tensor q, Tensor kv_cache, Tensor starts, Tensor ends, "
    "Tensor block_table, Tensor seq_lens, int max_query_len, float scale, "
    "int? window=None) -> Tensor",
    fake=like_queries,
)
def prefill_attention_of(
    q: Tensor,
    kv_cache: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Let the queries of each request attend; rows of no request are not defined."""
    out = q.new_empty(q.shape)
    version = best_version(q.shape[-1], q.dtype, q.device)
    tables = (starts, ends, block_table, seq_lens)
    limits = (max_query_len, scale, window)
    prefill_attention(PREFILL_ATTENTION, version, out, q, kv_cache, *tables, *limits)
    return out


class KernelPrefill:
    """`PaddedAttention` for pieces of many queries, without padding the keys."""

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        group_size: int,
    ) -> None:
        """Prepare what all layers share, from what `PaddedAttention` takes.

        The queries of a piece are neighbours in the batch, so its first row and its
        last one say it all; a shorter piece repeats its last one.
        """
        self.rows = rows.flatten()
        self.max_query_len = rows.shape[1]
        self.starts = rows.select(1, 0).int()  # kernels index in 32 bits
        self.ends = (rows.select(1, -1) + 1).int()
        self.seq_lens = (positions.select(1, -1) + 1).int()
        self.block_table = block_table.int()

    def attend(
        self, q: Tensor, kv_cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend to keys in the cache of a layer.

        Args:
            q: All queries of the batch, [num_tokens, num_heads, head_dim].
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
            scale: Of the scores.
            window: How many keys a query sees, its own the last; None for all.

        Returns:
            [num_pieces * max_query_len, num_heads, head_dim], in the order of rows.
        """
        tables = (self.starts, self.ends, self.block_table, self.seq_lens)
        limits = (self.max_query_len, scale, window)
        out = prefill_attention_of(q, kv_cache, *tables, *limits)
        return out.index_select(0, self.rows)


for name, why_not in (
    ("emulated", only_if_forced("prefill_attention", why_not_emulated)),
    ("cuda", why_not_cuda),
):
    add_backend("prefill_attention", Backend(name, KernelPrefill, why_not))
