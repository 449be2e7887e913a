"""Start the kernels: which instance, how many blocks of how many threads.

Each op of the ladders has one function here, and takes the version of a rung. The
engine, the tests and the benchmarks all start the kernels this way, so that what is
measured and tested is what runs.

`kernels` is anything that maps the name of an instance, such as "rms_norm_v3<float>",
to something that is called with a grid, a block and the kernel's arguments: an
emulated module or one on a GPU. Further options go to that call as they are.

Invariant: no kernel is started that would read or write outside its tensors, as far as
their shapes tell. What block tables and lengths say is checked on the CPU. On a GPU one
would have to wait for them, so there it is the caller's to know.

Called by `minivllm.ops.cuda`.

In vLLM: vllm/_custom_ops.py; csrc/ chooses grids and blocks in C++.
Source: chapter 6, "CUDA kernels".
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ShapeError
from minivllm.ops.kernel_source import CUDA_TYPES

Kernels = Mapping[str, Callable[..., None]]

DTYPES = ("float32", "float16", "bfloat16")  # that kernels/common.cuh converts
PACK_BYTES = 16  # that one instruction loads
MAX_THREADS = 256  # of a block that has a row
ATTENTION_THREADS = 128  # THREADS in paged_attention.cu
SPLIT_SIZE = 256  # keys that a block of paged_attention_v4 looks at
NO_WINDOW = 2**31 - 1


def cuda_type(x: Tensor) -> str:
    """Return how kernels spell the type of a tensor's elements.

    Raises:
        ShapeError: They have no name for it.
    """
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ShapeError(
            f"the kernels are for {', '.join(DTYPES)}, not for {name}: convert it"
        )
    return CUDA_TYPES[name]


def threads_for(work: int) -> int:
    """Return 32, 64, 128 or 256 threads for so many things to do at once."""
    threads = 32
    while threads < min(work, MAX_THREADS):
        threads *= 2
    return threads


def pack_width(size: int, *tensors: Tensor) -> int:
    """Return how many elements one instruction loads: 16 bytes of them, or one.

    Rows of `size` elements have to begin at multiples of 16 bytes.
    """
    width = PACK_BYTES // tensors[0].element_size()
    is_aligned = all(x.data_ptr() % PACK_BYTES == 0 for x in tensors)
    return width if is_aligned and size % width == 0 else 1


def check_rows(like: Tensor, *others: Tensor) -> tuple[int, int]:
    """Return the shape of contiguous rows, which all tensors share.

    Raises:
        ShapeError: They do not.
    """
    for x in (like, *others):
        if x.ndim != 2 or x.shape != like.shape or x.dtype != like.dtype:
            raise ShapeError(
                f"rows of {like.dtype} {tuple(like.shape)} and of {x.dtype} "
                f"{tuple(x.shape)} do not belong together: give both the same shape "
                "[num_rows, size] and type"
            )
        if not x.is_contiguous():
            raise ShapeError(
                f"rows of {tuple(x.shape)} lie {x.stride()} apart, but kernels take "
                "contiguous ones: call .contiguous()"
            )
    num_rows, size = like.shape
    return num_rows, size


def check_weight(weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that does not fit the rows.

    Raises:
        ShapeError: It has another size or type, or is not contiguous.
    """
    if (weight.shape, weight.dtype) != (x.shape[1:], x.dtype):
        raise ShapeError(
            f"a weight of {weight.dtype} {tuple(weight.shape)} does not fit rows of "
            f"{x.dtype} {tuple(x.shape)}: it needs one number per column"
        )
    if not weight.is_contiguous():
        raise ShapeError(
            f"the numbers of a weight lie {weight.stride(0)} apart, but kernels take "
            "contiguous ones: call .contiguous()"
        )


def rms_norm(
    kernels: Kernels,
    version: str,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    plus_one: bool = False,
    **options: Any,
) -> None:
    """Write the normalised rows of x.

    Args:
        kernels: From rms_norm.cu.
        version: "v1" to "v4".
        out: [num_rows, hidden].
        x: Like out.
        weight: [hidden].
        eps: Added to the mean square.
        plus_one: Whether the weights are stored less one, as Gemma's are.
        options: For the call.
    """
    num_rows, hidden = check_rows(out, x)
    check_weight(weight, x)
    if num_rows == 0:
        return  # a grid has at least one block
    kind = cuda_type(x)
    sizes = [eps, hidden, int(plus_one)]
    if version == "v1":
        threads = threads_for(num_rows)
        grid, sizes = -(-num_rows // threads), [eps, num_rows, *sizes[1:]]
    elif version == "v4":
        width = pack_width(hidden, out, x, weight)
        grid, threads, kind = num_rows, threads_for(hidden // width), f"{kind}, {width}"
    else:
        grid, threads = num_rows, threads_for(hidden)
    kernel = kernels[f"rms_norm_{version}<{kind}>"]
    kernel(grid, threads, out, x, weight, *sizes, **options)


def fused_add_rms_norm(
    kernels: Kernels,
    version: str,
    out: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    plus_one: bool = False,
    **options: Any,
) -> None:
    """Add x to the residual, in place, and write the normalised rows of the sum.

    Args:
        kernels: From rms_norm.cu.
        version: "v5".
        out: [num_rows, hidden].
        residual: Like out.
        x: Like out.
        weight: [hidden].
        eps: Added to the mean square.
        plus_one: Whether the weights are stored less one, as Gemma's are.
        options: For the call.
    """
    num_rows, hidden = check_rows(out, residual, x)
    check_weight(weight, x)
    if num_rows == 0:
        return
    width = pack_width(hidden, out, residual, x, weight)
    kernel = kernels[f"rms_norm_{version}<{cuda_type(x)}, {width}>"]
    kernel(
        num_rows,
        threads_for(hidden // width),
        out,
        residual,
        x,
        weight,
        eps,
        hidden,
        int(plus_one),
        shared_bytes=hidden * x.element_size(),
        **options,
    )


def softmax(
    kernels: Kernels, version: str, out: Tensor, x: Tensor, **options: Any
) -> None:
    """Write the shares that the scores in each row have.

    Args:
        kernels: From softmax.cu.
        version: "v1" to "v4".
        out: [num_rows, size].
        x: Like out.
        options: For the call.
    """
    num_rows, size = check_rows(out, x)
    if num_rows == 0:
        return
    threads, sizes = threads_for(size), [size]
    grid = num_rows
    if version == "v1":
        threads, sizes = threads_for(num_rows), [num_rows, size]
        grid = -(-num_rows // threads)
    elif version == "v4":
        warps = 4  # each has a row
        threads, sizes = 32 * warps, [num_rows, size]
        grid = -(-num_rows // warps)
    kernel = kernels[f"softmax_{version}<{cuda_type(x)}>"]
    kernel(grid, threads, out, x, *sizes, **options)


def why_not_attention(head_dim: int, itemsize: int) -> str | None:
    """Return why heads cannot be loaded in packs, or None if they can."""
    if head_dim * itemsize % PACK_BYTES:
        return (
            f"it loads {PACK_BYTES} bytes at once, and a head has {head_dim * itemsize}"
        )
    return None


def paged_attention(
    kernels: Kernels,
    version: str,
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    split_size: int = SPLIT_SIZE,
    **options: Any,
) -> None:
    """Let one query of each request attend to its keys in the cache.

    Args:
        kernels: From paged_attention.cu.
        version: "v1" to "v4".
        out: [num_reqs, num_heads, head_dim].
        q: Queries of a batch, [num_tokens, num_heads, head_dim]; only its rows may lie
            apart.
        kv_cache: Of a layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        rows: Row of each request's query, [num_reqs] int32.
        block_table: [num_reqs, max_num_blocks] int32.
        seq_lens: Keys of each request, at least 1, [num_reqs] int32.
        scale: Of the scores.
        window: How many of the last keys a query sees; None for all.
        split_size: Keys that a block of v4 looks at.
        options: For the calls.

    Raises:
        ShapeError: Shapes do not fit, or a request has no keys.
    """
    check_attention(out, q, kv_cache, rows, block_table, seq_lens)
    window = NO_WINDOW if window is None else window
    if window < 1 or split_size < 1:
        raise ShapeError(
            f"window is {window} and split_size {split_size}, but a query sees at "
            "least one key: make both at least 1"
        )
    num_reqs, num_heads, head_dim = out.shape
    if num_reqs == 0:
        return
    if seq_lens.device.type == "cpu":  # a GPU would have to be waited for
        check_tables(q, kv_cache, rows, block_table, seq_lens, window)
    block_size, num_kv_heads = kv_cache.shape[2:4]
    max_num_blocks = block_table.shape[1]
    keys, values = kv_cache.unbind()
    sizes = [scale, q.stride(0), num_kv_heads, max_num_blocks, window]
    arguments = [q, keys, values, rows, block_table, seq_lens, *sizes]
    kind = f"{cuda_type(q)}, {head_dim}, {block_size}"
    # The longest text is on the GPU only; this is what fits into the block table.
    num_splits = -(-min(max_num_blocks * block_size, window) // split_size)
    if version in ("v3", "v4"):
        check_packs(q, keys, values)
    if version == "v4" and num_splits == 1:
        version = "v3"  # the same, without a second kernel
    if version == "v1":
        kernel = kernels[f"paged_attention_v1<{kind}>"]
        kernel(num_reqs, num_heads, out, *arguments, **options)
    elif version in ("v2", "v3"):
        threads = 32 if version == "v2" else ATTENTION_THREADS
        kernel = kernels[f"paged_attention_{version}<{kind}>"]
        kernel((num_heads, num_reqs), threads, out, *arguments, **options)
    else:
        split = (num_reqs, num_heads, num_splits)
        tops, totals = q.new_empty((2, *split), dtype=torch.float32).unbind()
        mixed = q.new_empty((*split, head_dim), dtype=torch.float32)
        grid = (num_heads, num_reqs, num_splits)
        partial = [tops, totals, mixed]
        kernel = kernels[f"paged_attention_v4<{kind}>"]
        kernel(grid, ATTENTION_THREADS, *partial, *arguments, split_size, **options)
        kernel = kernels[f"merge_splits<{cuda_type(q)}, {head_dim}>"]
        threads = threads_for(head_dim)
        ends = [seq_lens, num_splits, window, split_size]
        kernel((num_heads, num_reqs), threads, out, *partial, *ends, **options)


def check_attention(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
) -> None:
    """Refuse tensors that kernels would read or write outside of.

    Raises:
        ShapeError: They do not fit each other, or a request has no keys.
    """
    dimensions = [x.ndim for x in (out, q, kv_cache, rows, block_table, seq_lens)]
    if dimensions != [3, 3, 5, 1, 2, 1]:
        raise ShapeError(
            f"out, q, kv_cache, rows, block_table and seq_lens have {dimensions} "
            "dimensions, but attention takes [3, 3, 5, 1, 2, 1]: see "
            "minivllm.ops.rungs.paged_attention"
        )
    num_reqs, num_heads, head_dim = out.shape
    num_kv_heads = kv_cache.shape[3]
    problem = None
    if min(num_heads, num_kv_heads, head_dim) < 1:
        problem = f"{num_heads} heads, {num_kv_heads} key heads of {head_dim} numbers"
    elif q.shape[1:] != out.shape[1:] or q.stride()[1:] != (head_dim, 1):
        problem = f"queries of {tuple(q.shape)}, {q.stride()} apart"
    elif kv_cache.shape[0] != 2 or kv_cache.shape[4] != head_dim:
        problem = f"a cache of {tuple(kv_cache.shape)}"
    elif num_heads % num_kv_heads:
        problem = f"{num_kv_heads} key heads"
    elif not (rows.shape == seq_lens.shape == (num_reqs,) == block_table.shape[:1]):
        problem = (
            f"rows of {tuple(rows.shape)}, block_table {tuple(block_table.shape)} and "
            f"seq_lens {tuple(seq_lens.shape)}"
        )
    elif {x.dtype for x in (rows, block_table, seq_lens)} != {torch.int32}:
        problem = "a block_table, rows or seq_lens of another type than int32"
    elif not q.dtype == kv_cache.dtype == out.dtype:
        problem = f"{q.dtype} queries for {kv_cache.dtype} keys"
    elif not all(
        x.is_contiguous() for x in (out, kv_cache, rows, block_table, seq_lens)
    ):
        problem = "tensors that are not contiguous"
    if problem:
        raise ShapeError(
            f"attention cannot write {tuple(out.shape)} from {problem}: see the shapes "
            "that minivllm.ops.rungs.paged_attention takes"
        )


def check_tables(
    q: Tensor,
    kv_cache: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int,
) -> None:
    """Refuse numbers in tables that lead out of the tensors.

    Raises:
        ShapeError: A request has no keys or more than its blocks hold, or there is no
            such query or block.
    """
    if int(seq_lens.min()) < 1:
        raise ShapeError(
            f"a request has {int(seq_lens.min())} keys, but attention needs at least "
            "1, that of the query itself: write it to the cache first"
        )
    num_blocks, block_size = kv_cache.shape[1:3]
    begins = torch.arange(block_table.shape[1]) * block_size
    ends = seq_lens[:, None]
    is_seen = (begins < ends) & (begins + block_size > ends - window)
    for name, numbers, most in (
        ("seq_lens", seq_lens, block_table.shape[1] * block_size),
        ("rows", rows, len(q) - 1),
        ("block_table", block_table[is_seen], num_blocks - 1),
    ):
        if int(numbers.min()) < 0 or int(numbers.max()) > most:
            raise ShapeError(
                f"{name} has numbers from {int(numbers.min())} to "
                f"{int(numbers.max())}, but 0 to {most} fit the other tensors: "
                "correct them"
            )


def check_packs(*tensors: Tensor) -> None:
    """Refuse tensors whose heads do not begin at multiples of 16 bytes.

    Raises:
        ShapeError: For one of them.
    """
    for x in tensors:
        itemsize = x.element_size()
        if reason := why_not_attention(x.shape[-1], itemsize):
            raise ShapeError(f"this kernel cannot run: {reason}; use v2")
        if x.data_ptr() % PACK_BYTES or x.stride(0) * itemsize % PACK_BYTES:
            raise ShapeError(
                f"a tensor begins at {x.data_ptr()} with rows {x.stride(0)} elements "
                f"apart, but packs begin at multiples of {PACK_BYTES} bytes: make it "
                "contiguous, or use v2"
            )
