"""Experts by CUDA kernels: how they start, the operators, the backends.

    topk_softmax    which experts each token goes to, and with what weight
    moe_permute     the choices, sorted by expert
    grouped_linear  a product for each expert
    moe_combine     the sum of what the experts of each token say

All have the contracts of the ops in torch, and nothing waits for the device: how many
rows an expert has is known on the GPU only.

Invariant: a token's result does not depend on who else is in the batch. Sums are made
in an order of their own, and the rung depends on types, not on the number of rows.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/model_executor/layers/fused_moe/ (fused_topk, moe_align_block_size,
fused_moe_kernel); vllm/_custom_ops.py (topk_softmax, moe_sum).
Source: appendix A26, "Kernels for experts".
"""

from typing import Any

import torch
from torch import Tensor

import minivllm.ops.moe  # noqa: F401, its ops
from minivllm.errors import ShapeError
from minivllm.ops.cuda import why_not_cuda, why_not_emulated
from minivllm.ops.cuda_layers import check_numbers, in_parts, of_any_size
from minivllm.ops.cuda_prefill import why_no_tensor_cores
from minivllm.ops.launch import KernelFile
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced
from minivllm.ops.rungs import Kernels, cuda_type, pack_width, threads_for

TOPK_SOFTMAX = KernelFile("topk_softmax.cu")
MOE_PERMUTE = KernelFile("moe_permute.cu")
GROUPED_LINEAR = KernelFile("grouped_linear.cu")
MOE_COMBINE = KernelFile("moe_combine.cu")

WARP = 32
WARPS = 4  # of a block of topk_softmax_v2, each with a token
MAX_KEPT = 16  # experts that a lane of it keeps in registers
PART = 256  # threads of a block in moe_permute.cu
PART_SIZE = 2048  # choices of a block of moe_permute_v3
MAX_EXPERTS = 8192  # whose counts fit into shared memory
MAX_CHOICES = 2**31 - 1  # kernels count in 32 bits
FEW = 8  # rows of a tile of grouped_linear_v2
HEIGHTS = (16, 64)  # rows of a tile of v3 and v4
COLUMNS, THREADS = 64, 128  # of a block of v3 and v4


def refuse(op: str, problem: str | None) -> None:
    """Raise, if there is a problem.

    Raises:
        ShapeError: It names the tensors that do not fit.
    """
    if problem:
        raise ShapeError(
            f"{op} cannot run with {problem}: see the shapes that "
            f"minivllm.ops.cuda_moe.{op} takes"
        )


def what_is_wrong_with(**tensors: tuple[Tensor, tuple[int, ...], torch.dtype]) -> str:
    """Return which tensor is not contiguous, or of another shape or type; else "".

    Args:
        tensors: By name; the tensor, and what it should be.
    """
    for name, (x, shape, dtype) in tensors.items():
        if x.shape != shape or x.dtype != dtype:
            return f"{name} of {x.dtype} {tuple(x.shape)}, not {dtype} {shape}"
        if not x.is_contiguous():
            return f"{name} that are not contiguous"
    return ""


def topk_version(num_experts: int, top_k: int) -> str:
    """Return the best rung of topk_softmax that can choose."""
    return "v2" if num_experts <= MAX_KEPT * WARP and top_k <= WARP else "v1"


def topk_softmax(
    kernels: Kernels,
    version: str,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    renormalize: bool,
    **options: Any,
) -> None:
    """Write the best experts of each token, best first, and their weights.

    Args:
        kernels: From topk_softmax.cu.
        version: "v1" or "v2".
        weights: [num_tokens, top_k] float32.
        experts: [num_tokens, top_k] int64; of equal scores the first.
        logits: Scores of all experts, [num_tokens, num_experts].
        renormalize: Whether weights are shares of the chosen experts, not of all.
        options: For the call.

    Raises:
        ShapeError: Shapes or types do not fit, or the rung takes fewer experts.
    """
    if logits.ndim != 2 or weights.ndim != 2:
        refuse("topk_softmax", f"logits of {tuple(logits.shape)}")
    (num_tokens, num_experts), top_k = logits.shape, weights.shape[1]
    chosen = (num_tokens, top_k)
    problem = what_is_wrong_with(
        logits=(logits, (num_tokens, num_experts), logits.dtype),
        weights=(weights, chosen, torch.float32),
        experts=(experts, chosen, torch.int64),
    )
    if not 1 <= top_k <= num_experts:
        problem = f"{top_k} of {num_experts} experts"
    elif version == "v2" and topk_version(num_experts, top_k) != "v2":
        problem = (
            f"{top_k} of {num_experts} experts (v2 chooses {WARP} of "
            f"{MAX_KEPT * WARP} at most; v1 has no limit)"
        )
    refuse("topk_softmax", problem)
    kind = cuda_type(logits)
    if num_tokens == 0:
        return
    if version == "v1":
        threads = threads_for(num_tokens)
        grid = -(-num_tokens // threads)
    else:
        threads, grid = WARP * WARPS, -(-num_tokens // WARPS)
        num_kept = -(-num_experts // WARP)  # by a lane
        kind = f"{kind}, {2 ** (num_kept - 1).bit_length()}"
    kernel = kernels[f"topk_softmax_{version}<{kind}>"]
    sizes = (num_tokens, num_experts, top_k, int(renormalize))
    kernel(grid, threads, weights, experts, logits, *sizes, **options)


def moe_permute(
    kernels: Kernels,
    version: str,
    order: Tensor,
    offsets: Tensor,
    experts: Tensor,
    part_size: int = PART_SIZE,
    /,  # the emulator has an option `order`, too
    **options: Any,
) -> None:
    """Write the choices sorted by expert; those of one expert keep their order.

    Args:
        kernels: From moe_permute.cu.
        version: "v1" to "v3".
        order: Which choice, counted token by token, stands where; [num_tokens * top_k]
            int64.
        offsets: Where each expert's begin, and the end; [num_experts + 1] int32.
        experts: The choices, [num_tokens, top_k] int64.
        part_size: Choices of a block of v3.
        options: For the calls.

    Raises:
        ShapeError: Shapes or types do not fit, or there is no such expert.
    """
    num_choices, num_experts = experts.numel(), offsets.numel() - 1
    problem = what_is_wrong_with(
        experts=(experts, tuple(experts.shape), torch.int64),
        order=(order, (num_choices,), torch.int64),
        offsets=(offsets, (num_experts + 1,), torch.int32),
    )
    if part_size < 1 or num_choices > MAX_CHOICES:
        problem = f"{num_choices} choices in parts of {part_size}"
    elif num_experts < 1 or (version != "v1" and num_experts > MAX_EXPERTS):
        problem = f"{num_experts} experts (v1 has no limit, others {MAX_EXPERTS})"
    refuse("moe_permute", problem)
    check_numbers("experts", experts, 0, num_experts - 1)
    if num_choices == 0:
        offsets.zero_()
        return
    num_parts = -(-num_choices // part_size)
    if version == "v3" and num_parts == 1:
        version = "v2"  # the same, in one launch
    sizes, shared_bytes = (num_choices, num_experts), 4 * num_experts
    if version == "v1":
        threads = threads_for(num_experts + 1)
        grid = -(-(num_experts + 1) // threads)
        kernel = kernels["moe_permute_v1"]
        kernel(grid, threads, order, offsets, experts, *sizes, **options)
        return
    in_shared = options | {"shared_bytes": shared_bytes}
    if version == "v2":
        kernel = kernels["moe_permute_v2"]
        kernel(1, PART, order, offsets, experts, *sizes, **in_shared)
        return
    counts = offsets.new_empty(num_experts * num_parts)
    part = (*sizes, part_size)
    kernels["count_parts"](num_parts, PART, counts, experts, *part, **in_shared)
    kernels["add_up_parts"](1, PART, counts, offsets, *sizes, num_parts, **options)
    kernel = kernels["moe_permute_v3"]
    kernel(num_parts, PART, order, counts, experts, *part, **in_shared)


def best_grouped_version(dtype: torch.dtype, device: torch.device) -> str:
    """Return the best rung of grouped_linear that can multiply numbers of a type."""
    if dtype.itemsize != 2 or why_no_tensor_cores(device, dtype):
        return "v3"
    return "v4"


def height_for(num_rows: int, num_experts: int) -> int:
    """Return how many rows a tile should have: many, if each expert has many."""
    low, high = HEIGHTS
    return high if num_rows >= num_experts * high // 2 else low


def grouped_linear(
    kernels: Kernels,
    version: str,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    height: int | None = None,
    **options: Any,
) -> None:
    """Write the rows of each expert, multiplied by its weight.

    Args:
        kernels: From grouped_linear.cu.
        version: "v1" to "v4"; v4 takes numbers of 16 bits.
        out: [num_rows, out_size].
        x: Rows, sorted by expert, [num_rows, in_size].
        weight: [num_experts, out_size, in_size].
        offsets: First row of each expert, and num_rows; [num_experts + 1] int32.
        height: Rows of a tile of v3 and v4, 16 or 64, which changes no result; None
            for what suits the number of rows.
        options: For the call.

    Raises:
        ShapeError: Shapes or types do not fit, or offsets do not rise from 0 to
            num_rows.
    """
    if x.ndim != 2 or weight.ndim != 3:
        refuse("grouped_linear", f"rows of {tuple(x.shape)}, {tuple(weight.shape)}")
    (num_rows, in_size), (num_experts, out_size) = x.shape, weight.shape[:2]
    height = height_for(num_rows, num_experts) if height is None else height
    problem = what_is_wrong_with(
        rows=(x, (num_rows, in_size), x.dtype),
        weights=(weight, (num_experts, out_size, in_size), x.dtype),
        results=(out, (num_rows, out_size), x.dtype),
        offsets=(offsets, (num_experts + 1,), torch.int32),
    )
    if height not in HEIGHTS:
        problem = f"tiles of {height} rows"
    elif version == "v4" and x.element_size() != 2:
        problem = f"{x.dtype} (v4 multiplies numbers of 16 bits; v3 all)"
    elif num_rows > MAX_CHOICES:
        problem = f"{num_rows} rows"
    refuse("grouped_linear", problem)
    kind = cuda_type(x)
    if offsets.device.type == "cpu":  # a GPU would have to be waited for
        check_offsets(offsets, num_rows)
    if out.numel() == 0:
        return
    if version == "v1":
        threads = threads_for(out_size)
        kernel, grid = kernels[f"grouped_linear_v1<{kind}>"], -(-out_size // threads)
        sizes = (in_size, out_size)
        kernel((num_rows, grid), threads, out, x, weight, offsets, *sizes, **options)
        return
    kind = f"{kind}, {pack_width(in_size, x, weight)}"
    if version == "v2":
        height, columns = FEW, THREADS // WARP
    else:
        kind, columns = f"{kind}, {height}", COLUMNS
    # As many tiles as there may be: each expert may have one that is not full.
    num_tiles = num_rows // height + min(num_experts, num_rows)
    kernel = kernels[f"grouped_linear_{version}<{kind}>"]
    grid, sizes = (num_tiles, -(-out_size // columns)), (num_experts, in_size, out_size)
    kernel(grid, THREADS, out, x, weight, offsets, *sizes, **options)


def check_offsets(offsets: Tensor, num_rows: int) -> None:
    """Refuse offsets that lead out of the rows.

    Raises:
        ShapeError: They do not rise from 0 to num_rows.
    """
    numbers = offsets.tolist()
    if numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] != num_rows:
        raise ShapeError(
            f"offsets are {numbers}, but those of {num_rows} rows begin at 0, never "
            f"fall, and end at {num_rows}: take what moe_permute returns"
        )


def moe_combine(
    kernels: Kernels,
    version: str,
    out: Tensor,
    y: Tensor,
    order: Tensor,
    weights: Tensor,
    /,  # the emulator has an option `order`, too
    **options: Any,
) -> None:
    """Write the weighed sum of what the experts of each token say.

    Args:
        kernels: From moe_combine.cu.
        version: "v1" or "v2".
        out: [num_tokens, size].
        y: Rows, sorted by expert, [num_tokens * top_k, size].
        order: Which choice each row is, [num_tokens * top_k] int64.
        weights: [num_tokens, top_k] float32.
        options: For the calls.

    Raises:
        ShapeError: Shapes or types do not fit, or a choice is missing in the order.
    """
    if weights.ndim != 2 or y.ndim != 2:
        refuse(
            "moe_combine", f"rows of {tuple(y.shape)}, weights {tuple(weights.shape)}"
        )
    (num_tokens, top_k), size = weights.shape, y.shape[1]
    num_choices = num_tokens * top_k
    problem = what_is_wrong_with(
        rows=(y, (num_choices, size), y.dtype),
        order=(order, (num_choices,), torch.int64),
        weights=(weights, (num_tokens, top_k), torch.float32),
        results=(out, (num_tokens, size), y.dtype),
    )
    if num_choices > MAX_CHOICES:
        problem = f"{num_choices} choices"
    elif order.device.type == "cpu" and not problem:
        is_complete = order.sort().values.equal(torch.arange(num_choices))
        problem = "" if is_complete else "an order that does not name each choice once"
    refuse("moe_combine", problem)
    kind = cuda_type(y)
    if out.numel() == 0:
        return
    if version == "v1":
        kernel, threads = kernels[f"moe_combine_v1<{kind}>"], threads_for(size)
        sizes, options = (
            (num_choices, top_k, size),
            options | {"shared_bytes": 4 * top_k},
        )
        kernel(num_tokens, threads, out, y, order, weights, *sizes, **options)
        return
    rows = order.new_empty(num_choices, dtype=torch.int32)
    threads = threads_for(num_choices)
    kernel, grid = kernels["turn_around"], -(-num_choices // threads)
    kernel(grid, threads, rows, order, num_choices, **options)
    width = pack_width(size, y, out)
    grid, threads = in_parts(num_tokens, size // width)
    kernel = kernels[f"moe_combine_v2<{kind}, {width}>"]
    kernel(grid, threads, out, y, rows, weights, top_k, size, **options)


def chosen_of(logits: Tensor, top_k: int, *rest: object) -> tuple[Tensor, Tensor]:
    """Return weights and experts for each token."""
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    return weights, logits.new_empty(shape, dtype=torch.int64)


@operator(
    "topk_softmax(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)",
    fake=chosen_of,
)
def kernel_topk_softmax(
    logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, as `moe.topk_softmax`."""
    weights, experts = chosen_of(logits, top_k)
    version = topk_version(logits.shape[-1], top_k)
    topk_softmax(TOPK_SOFTMAX, version, weights, experts, logits, renormalize)
    return weights, experts


def order_of(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return a place for each choice, and for where each expert's begin."""
    order = experts.new_empty(experts.numel())
    return order, experts.new_empty(num_experts + 1, dtype=torch.int32)


@operator(
    "moe_permute(Tensor experts, int num_experts) -> (Tensor, Tensor)", fake=order_of
)
def kernel_moe_permute(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort choices by expert, as `moe.moe_permute`."""
    order, offsets = order_of(experts, num_experts)
    version = "v3" if num_experts <= MAX_EXPERTS else "v1"
    moe_permute(MOE_PERMUTE, version, order, offsets, experts)
    return order, offsets


def rows_of_weight(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return a result for each row."""
    return x.new_empty(x.shape[0], weight.shape[1])


@operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
    fake=rows_of_weight,
)
def kernel_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight, as `moe.GroupedLinear`."""
    out = rows_of_weight(x, weight, offsets)
    version = best_grouped_version(x.dtype, x.device)
    grouped_linear(GROUPED_LINEAR, version, out, x, weight, offsets)
    return out


def row_per_token(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return a result for each token."""
    return y.new_empty(weights.shape[0], y.shape[-1])


@operator(
    "moe_combine(Tensor y, Tensor order, Tensor weights) -> Tensor", fake=row_per_token
)
def kernel_moe_combine(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Add up what the experts of each token say, as `moe.moe_combine`."""
    out = row_per_token(y, order, weights)
    moe_combine(MOE_COMBINE, "v2", out, y, order, weights)
    return out


class KernelGroupedLinear:
    """The op `grouped_linear` by a kernel: offsets stay where they are."""

    def __init__(self, weight: Tensor) -> None:
        """Take the weights of all experts, [num_experts, out_features, in_features]."""
        self.weight = weight.contiguous()

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert, as `moe.GroupedLinear`."""
        return kernel_grouped_linear(x, self.weight, offsets)


KERNELS: dict[str, Any] = {
    "topk_softmax": kernel_topk_softmax,
    "moe_permute": kernel_moe_permute,
    "grouped_linear": KernelGroupedLinear,
    "moe_combine": kernel_moe_combine,
}
for op, implementation in KERNELS.items():
    better = "grouped_mm" if op == "grouped_linear" else None
    condition = only_if_forced(op, of_any_size(why_not_emulated))
    add_backend(op, Backend("emulated", implementation, condition), behind=better)
    condition = of_any_size(why_not_cuda)
    add_backend(op, Backend("cuda", implementation, condition), behind=better)
