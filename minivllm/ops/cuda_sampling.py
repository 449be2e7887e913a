"""The kernels that choose tokens: how they are started, as operators, as backends.

    argmax   the best token of each row
    draw     first the cuts, for the rows that have any, then a token for each row

Both have the contracts of the ops in torch, and take numbers as the runner has them:
nothing is converted, and nothing waits for the device.

Invariant: masses are whole numbers, so a request gets the same token whatever the order
of threads and whoever its neighbours are.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/v1/sample/ops/topk_topp_triton.py (apply_top_k_top_p_triton).
Source: appendix A19, "Sampling kernels".
"""

from typing import Any

import torch
from torch import Tensor

import minivllm.ops.draw  # its op
import minivllm.ops.reference  # noqa: F401, its op
from minivllm.errors import ShapeError
from minivllm.ops.cuda import why_not_cuda, why_not_emulated
from minivllm.ops.cuda_layers import check_numbers
from minivllm.ops.launch import KernelFile
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced
from minivllm.ops.rungs import Kernels, cuda_type, threads_for

ARGMAX = KernelFile("argmax.cu")
CUT = KernelFile("cut.cu")
DRAW = KernelFile("draw.cu")

PART_SIZE = 2048  # scores that a block of argmax_v3 looks at
DIGITS = 256  # in cut.cu: its blocks have a thread for each
PAGE = 256  # in draw.cu
WARPS = 8  # of a block of page_masses; each has a page
MAX_TOKENS = 2**19  # whose masses add up to less than 2^64


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Return num_rows and vocab_size; rows may lie apart, scores of a row may not.

    Raises:
        ShapeError: They do, or a row has no scores, or too many.
    """
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_TOKENS:
        raise ShapeError(
            f"logits are {tuple(logits.shape)}, but the kernels take [num_rows, "
            f"vocab_size] with 1 to {MAX_TOKENS:,} tokens: split or reshape them"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ShapeError(
            f"scores of a row lie {logits.stride(1)} apart, but kernels take "
            "neighbours: call .contiguous()"
        )
    num_rows, vocab_size = logits.shape
    return num_rows, vocab_size


def check_columns(size: int, **columns: tuple[Tensor, torch.dtype]) -> None:
    """Refuse what is not one number of a type for each row or request.

    Args:
        size: How many there are.
        columns: Name, and the tensor with the type it needs.

    Raises:
        ShapeError: For one of them.
    """
    for name, (column, dtype) in columns.items():
        is_fine = column.shape == (size,) and column.is_contiguous()
        if not is_fine or column.dtype != dtype:
            raise ShapeError(
                f"{name} is {column.dtype} {tuple(column.shape)} with strides "
                f"{column.stride()}, but a contiguous {dtype} of ({size},) fits the "
                "other tensors: convert it"
            )


def argmax(
    kernels: Kernels,
    version: str,
    largest: Tensor,
    ids: Tensor,
    logits: Tensor,
    part_size: int = PART_SIZE,
    **options: Any,
) -> None:
    """Write the largest score of each row, NaN if one is, and where it first stands.

    Args:
        kernels: From argmax.cu.
        version: "v1" to "v3".
        largest: [num_rows], of the type of the logits.
        ids: [num_rows] int64.
        logits: [num_rows, vocab_size]; rows may lie apart.
        part_size: Scores that a block of v3 looks at.
        options: For the calls.

    Raises:
        ShapeError: Shapes or types do not fit.
    """
    num_rows, size = check_logits(logits)
    check_columns(num_rows, largest=(largest, logits.dtype), ids=(ids, torch.int64))
    if part_size < 1:
        raise ShapeError(f"part_size is {part_size}: make it at least 1")
    kind = cuda_type(logits)
    if num_rows == 0:
        return  # a grid has at least one block
    rows = [logits, logits.stride(0)]
    num_parts = -(-size // part_size)
    if version == "v3" and num_parts == 1:
        version = "v2"  # the same, without a second kernel
    if version == "v1":
        threads = threads_for(num_rows)
        kernel, grid = kernels[f"argmax_v1<{kind}>"], -(-num_rows // threads)
        kernel(grid, threads, largest, ids, *rows, num_rows, size, **options)
    elif version == "v2":
        kernel, threads = kernels[f"argmax_v2<{kind}>"], threads_for(size)
        kernel(num_rows, threads, largest, ids, *rows, size, **options)
    else:
        bests = ids.new_empty((num_rows, num_parts), dtype=torch.uint64)
        kernel, threads = kernels[f"argmax_v3<{kind}>"], threads_for(part_size)
        grid = (num_parts, num_rows)
        kernel(grid, threads, bests, *rows, size, part_size, **options)
        kernel, threads = kernels[f"merge_bests<{kind}>"], threads_for(num_parts)
        kernel(num_rows, threads, largest, ids, bests, num_parts, *rows, **options)


def check_requests(
    logits: Tensor, largest: Tensor, rows: Tensor, temperatures: Tensor
) -> None:
    """Refuse requests whose rows or temperatures do not fit the logits.

    Raises:
        ShapeError: They do not.
    """
    num_rows, _ = check_logits(logits)
    check_columns(num_rows, largest=(largest, logits.dtype))
    check_columns(len(rows), rows=(rows, torch.int64))
    check_columns(len(rows), temperatures=(temperatures, torch.float64))
    check_numbers("rows", rows, 0, num_rows - 1)


def draw(
    kernels: Kernels,
    version: str,
    drawn: Tensor,
    logits: Tensor,
    largest: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    last_ids: Tensor,
    **options: Any,
) -> None:
    """Write a token for each request.

    Args:
        kernels: From draw.cu.
        version: "v1" to "v3".
        drawn: [num_sampled] int64; 0 for a row without a best score.
        logits: [num_rows, vocab_size]; rows may lie apart.
        largest: The largest score of each row, [num_rows].
        rows: Of the requests, [num_sampled] int64.
        temperatures: Like rows, float64, above 0.
        uniforms: Like temperatures: how much of the line lies before the point.
        last_ids: What `cut` has written for the first of them, [num_cut] int64.
        options: For the calls.

    Raises:
        ShapeError: Shapes or types do not fit, or numbers lead out of them.
    """
    check_requests(logits, largest, rows, temperatures)
    num_sampled, num_cut, size = len(rows), len(last_ids), logits.shape[1]
    check_columns(num_sampled, drawn=(drawn, torch.int64))
    check_columns(num_sampled, uniforms=(uniforms, torch.float64))
    check_columns(num_cut, last_ids=(last_ids, torch.int64))
    check_columns(num_cut, rows=(rows[:num_cut], torch.int64))
    check_numbers("last_ids", last_ids, 0, size - 1)
    kind = cuda_type(logits)
    if num_sampled == 0:
        return
    scores = [logits, logits.stride(0), size, largest, rows, temperatures]
    cuts = [last_ids if num_cut else None, num_cut]  # the address of nothing is 0
    arguments = [drawn, *scores, uniforms, *cuts]
    if version == "v1":
        threads = threads_for(num_sampled)
        grid, arguments = -(-num_sampled // threads), [*arguments, num_sampled]
    elif version == "v2":
        grid, threads = num_sampled, threads_for(size)
    else:
        grid, threads, num_pages = num_sampled, PAGE, -(-size // PAGE)
        masses = rows.new_empty((num_sampled, num_pages), dtype=torch.uint64)
        kernel = kernels[f"page_masses<{kind}>"]
        blocks = (-(-num_pages // WARPS), num_sampled)
        pages = [masses, *scores, *cuts, num_pages]
        kernel(blocks, 32 * WARPS, *pages, **options)
        arguments += [masses, num_pages]
    kernels[f"draw_{version}<{kind}>"](grid, threads, *arguments, **options)


def cut(
    kernels: Kernels,
    version: str,
    last_ids: Tensor,
    logits: Tensor,
    largest: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    **options: Any,
) -> None:
    """Write the last token, from the best to the worst, that each request keeps.

    Tokens whose share is below 2^-44 of the best one's do not count: nobody draws them.

    Args:
        kernels: From cut.cu.
        version: "v1" to "v3".
        last_ids: [num_cut] int64; 0 for a row without a best score.
        logits: [num_rows, vocab_size]; rows may lie apart.
        largest: The largest score of each row, [num_rows].
        rows: Of the requests; the first num_cut of them have cuts. int64
        temperatures: Like rows, float64, above 0.
        min_p: [num_cut] float64.
        top_k: [num_cut] int64, 1 to vocab_size.
        top_p: [num_cut] float64.
        options: For the call.

    Raises:
        ShapeError: Shapes or types do not fit, or numbers lead out of them.
    """
    check_requests(logits, largest, rows, temperatures)
    num_cut, size = len(top_k), logits.shape[1]
    check_columns(num_cut, top_k=(top_k, torch.int64), last_ids=(last_ids, torch.int64))
    check_columns(num_cut, min_p=(min_p, torch.float64), top_p=(top_p, torch.float64))
    check_columns(num_cut, rows=(rows[:num_cut], torch.int64))
    check_numbers("top_k", top_k, 1, size)
    kind = cuda_type(logits)
    if num_cut == 0:
        return
    scores = [logits, logits.stride(0), size, largest]
    arguments = [last_ids, *scores, rows, temperatures, min_p, top_k, top_p]
    kernel, grid, threads = kernels[f"cut_{version}<{kind}>"], num_cut, DIGITS
    if version == "v1":
        threads = threads_for(num_cut)
        grid = -(-num_cut // threads)
        arguments.append(num_cut)
    kernel(grid, threads, *arguments, **options)


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a score and an id for each row."""
    num_rows = logits.shape[0]
    return logits.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.int64)


@operator("argmax(Tensor logits) -> (Tensor, Tensor)", fake=best_of)
def kernel_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row and its place, as `reference.argmax`."""
    largest, ids = best_of(logits)
    argmax(ARGMAX, "v3", largest, ids, logits)
    return largest, ids


def like_rows(logits: Tensor, largest: Tensor, rows: Tensor, *rest: object) -> Tensor:
    """Return a token for each request."""
    return torch.empty_like(rows)


@operator(
    "draw(Tensor logits, Tensor largest, Tensor rows, Tensor temperatures, "
    "Tensor uniforms, Tensor min_p, Tensor top_k, Tensor top_p) -> Tensor",
    fake=like_rows,
)
def kernel_draw(
    logits: Tensor,
    largest: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """Draw a token for each of some rows, as `draw.draw`."""
    requests = (logits, largest, rows, temperatures)
    last_ids, drawn = torch.empty_like(top_k), torch.empty_like(rows)
    cut(CUT, "v3", last_ids, *requests, min_p, top_k, top_p)
    draw(DRAW, "v3", drawn, *requests, uniforms, last_ids)
    return drawn


KERNELS = {"argmax": kernel_argmax, "draw": kernel_draw}
for op, implementation in KERNELS.items():
    condition = only_if_forced(op, why_not_emulated)
    add_backend(op, Backend("emulated", implementation, condition))
    add_backend(op, Backend("cuda", implementation, why_not_cuda))
