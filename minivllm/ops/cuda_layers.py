"""The small kernels of a layer: how they are started, as operators, as backends.

    cuda       on a GPU that NVRTC can compile for
    emulated   on the CPU, if it is forced

Each `launch_` function takes kernels like those of `minivllm.ops.rungs`, and keeps the
same invariant: what shapes tell is checked, and what tensors on the CPU say.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/_custom_ops.py (rotary_embedding, reshape_and_cache_flash),
vllm/model_executor/layers/activation.py (SiluAndMul, GeluAndMul).
Source: appendix A18, "Small kernels"; appendix A24, "Windows".
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import minivllm.ops.reference  # noqa: F401, its ops
from minivllm.errors import ConfigError, ShapeError
from minivllm.ops import cuda, rungs
from minivllm.ops.launch import KernelFile
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced

ROTARY = KernelFile("rotary.cu")
ACTIVATIONS = KernelFile("activations.cu")
GATED_MLP = KernelFile("gated_mlp.cu")
EMBEDDING = KernelFile("embedding.cu")
RESHAPE_AND_CACHE = KernelFile("reshape_and_cache.cu")

# What users call an activation, and what kernels/activations.cuh does.
KINDS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh"}
MAX_ROWS = 8  # that gated_mlp computes at once, with sums in registers
MLP_THREADS = 128  # of a block of gated_mlp: four columns


def refuse(op: str, problem: str | None) -> None:
    """Raise, if there is a problem.

    Raises:
        ShapeError: It names the tensors that do not fit.
    """
    if problem:
        raise ShapeError(
            f"{op} cannot run with {problem}: see the shapes that "
            f"minivllm.ops.cuda_layers.launch_{op} takes"
        )


def check_numbers(name: str, numbers: Tensor, least: int, most: int) -> None:
    """Refuse numbers that lead out of a tensor, if they are on the CPU.

    A GPU would have to be waited for; there it is the caller's to know.

    Raises:
        ShapeError: There is one.
    """
    if numbers.device.type != "cpu" or numbers.numel() == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < least or high > most:
        raise ShapeError(
            f"{name} has numbers from {low} to {high}, but {least} to {most} fit the "
            "other tensors: correct them"
        )


def in_parts(num_rows: int, num_packs: int) -> tuple[tuple[int, int], int]:
    """Return a grid and the threads of its blocks: one for each pack of each row."""
    threads = rungs.threads_for(num_packs)
    return (num_rows, -(-num_packs // threads)), threads


def what_is_wrong_with(
    heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor
) -> str | None:
    """Return which heads or angles cannot be rotated, or None if all can."""
    if heads.ndim != 3:
        return f"heads of {tuple(heads.shape)}"
    head_dim = heads.shape[2]
    if head_dim % 2 or heads.stride()[1:] != (head_dim, 1):
        return f"heads of {tuple(heads.shape)}, {heads.stride()} apart"
    if not 0 <= num_rotated <= heads.shape[1]:
        return f"{num_rotated} of {heads.shape[1]} heads"
    for angles in (cos, sin):
        is_float = angles.dtype == torch.float32 and angles.is_contiguous()
        if not is_float or angles.shape != (len(heads), 1, head_dim):
            return f"angles of {angles.dtype} {tuple(angles.shape)}"
    return None


def launch_rotary_embedding(
    kernels: rungs.Kernels,
    heads: Tensor,
    num_rotated: int,
    cos: Tensor,
    sin: Tensor,
    **options: Any,
) -> None:
    """Rotate the first heads of each token, in place.

    Args:
        kernels: From rotary.cu.
        heads: [num_tokens, num_heads, head_dim]; only its tokens may lie apart.
        num_rotated: How many heads.
        cos: float32, [num_tokens, 1, head_dim], both halves alike.
        sin: Like cos, the first half negated.
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit.
    """
    refuse("rotary_embedding", what_is_wrong_with(heads, num_rotated, cos, sin))
    kind = rungs.cuda_type(heads)
    num_tokens, _, head_dim = heads.shape
    if heads.numel() == 0 or num_rotated == 0:
        return
    half, stride = head_dim // 2, heads.stride(0)
    width = rungs.pack_width(math.gcd(half, stride), heads)
    if any(x.data_ptr() % (width * x.element_size()) for x in (cos, sin)):
        width = 1
    packs = half // width
    if packs > rungs.MAX_THREADS:
        refuse("rotary_embedding", f"{packs} packs of half a head")
    block = (packs, min(num_rotated, rungs.MAX_THREADS // packs))
    kernel = kernels[f"rotary_embedding<{kind}, {width}>"]
    sizes = (stride, num_rotated, head_dim)
    kernel(num_tokens, block, heads, cos, sin, *sizes, **options)


def nothing(*arguments: object) -> None:
    """Return what an operator does that works in place."""


@operator(
    "rotary_embedding(Tensor(a!) heads, int num_rotated, Tensor cos, Tensor sin) -> ()",
    fake=nothing,
)
def rotary_embedding(heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first heads, in place; see `launch_rotary_embedding`."""
    launch_rotary_embedding(ROTARY, heads, num_rotated, cos, sin)


def kind_of(activation: str) -> str:
    """Return what the kernels call an activation.

    Raises:
        ConfigError: There is none of that name.
    """
    if activation not in KINDS:
        raise ConfigError(
            f"activation {activation!r} is unknown: use one of {', '.join(KINDS)}"
        )
    return KINDS[activation]


def launch_act_and_mul(
    kernels: rungs.Kernels,
    out: Tensor,
    gate_up: Tensor,
    activation: str,
    **options: Any,
) -> None:
    """Write act(gate) * up.

    Args:
        kernels: From activations.cu.
        out: [num_rows, size].
        gate_up: [num_rows, 2 * size], the gates first.
        activation: "silu", "gelu" or "gelu_tanh".
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit.
        ConfigError: There is no such activation.
    """
    problem = None
    if out.ndim != 2 or gate_up.shape != (len(out), 2 * out.shape[1]):
        problem = f"rows of {tuple(gate_up.shape)} for {tuple(out.shape)}"
    elif out.dtype != gate_up.dtype:
        problem = f"{gate_up.dtype} for {out.dtype}"
    elif not (out.is_contiguous() and gate_up.is_contiguous()):
        problem = "rows that are not contiguous"
    refuse("act_and_mul", problem)
    num_rows, size = out.shape
    kind = f"{kind_of(activation)}, {rungs.cuda_type(out)}"
    if out.numel() == 0:
        return
    width = rungs.pack_width(size, out, gate_up)
    grid, threads = in_parts(num_rows, size // width)
    kernel = kernels[f"act_and_mul<{kind}, {width}>"]
    kernel(grid, threads, out, gate_up, size, **options)


def half_as_wide(gate_up: Tensor) -> Tensor:
    """Return a tensor for act(gate) * up."""
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up; see `launch_act_and_mul`."""
    out = half_as_wide(gate_up)
    launch_act_and_mul(ACTIVATIONS, out, gate_up, activation)
    return out


@operator("silu_and_mul(Tensor gate_up) -> Tensor", fake=half_as_wide)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [gate, up]."""
    return act_and_mul(gate_up, "silu")


@operator("gelu_and_mul(Tensor gate_up) -> Tensor", fake=half_as_wide)
def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up of [gate, up]."""
    return act_and_mul(gate_up, "gelu")


@operator("gelu_tanh_and_mul(Tensor gate_up) -> Tensor", fake=half_as_wide)
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up of [gate, up], by its approximation with tanh."""
    return act_and_mul(gate_up, "gelu_tanh")


def launch_gated_mlp(
    kernels: rungs.Kernels,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    activation: str,
    **options: Any,
) -> None:
    """Write act(x W_gate^T) * (x W_up^T).

    Args:
        kernels: From gated_mlp.cu.
        out: [num_rows, size].
        x: [num_rows, hidden]. Each `MAX_ROWS` rows read the weight once.
        weight: W_gate above W_up, [2 * size, hidden].
        activation: "silu", "gelu" or "gelu_tanh".
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit.
        ConfigError: There is no such activation.
    """
    tensors, problem = (out, x, weight), None
    if {t.ndim for t in tensors} != {2} or len(out) != len(x):
        problem = f"rows of {tuple(x.shape)} for {tuple(out.shape)}"
    elif weight.shape != (2 * out.shape[1], x.shape[1]):
        problem = f"a weight of {tuple(weight.shape)} for rows of {tuple(x.shape)}"
    elif len({t.dtype for t in tensors}) > 1:
        problem = f"{x.dtype} rows, a {weight.dtype} weight and {out.dtype} results"
    elif not all(t.is_contiguous() for t in tensors):
        problem = "tensors that are not contiguous"
    refuse("gated_mlp", problem)
    num_rows, hidden = x.shape
    size = out.shape[1]
    kind = f"{kind_of(activation)}, {rungs.cuda_type(out)}"
    if out.numel() == 0:
        return
    width = rungs.pack_width(hidden, x, weight)
    rows_at_once = min(MAX_ROWS, 2 ** (num_rows - 1).bit_length())
    grid = (-(-size // (MLP_THREADS // 32)), -(-num_rows // rows_at_once))
    kernel = kernels[f"gated_mlp<{kind}, {width}, {rows_at_once}>"]
    kernel(grid, MLP_THREADS, out, x, weight, num_rows, hidden, size, **options)


def half_of_weight(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """Return a tensor for the results of a gated MLP."""
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


@operator(
    'gated_mlp(Tensor x, Tensor weight, str activation="silu") -> Tensor',
    fake=half_of_weight,
)
def gated_mlp(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """Return act(x W_gate^T) * (x W_up^T); see `launch_gated_mlp`."""
    out = half_of_weight(x, weight)
    launch_gated_mlp(GATED_MLP, out, x, weight, activation)
    return out


def launch_embedding(
    kernels: rungs.Kernels,
    out: Tensor,
    token_ids: Tensor,
    table: Tensor,
    **options: Any,
) -> None:
    """Write the rows of a table that token ids ask for.

    Args:
        kernels: From embedding.cu.
        out: [num_tokens, size].
        token_ids: Rows of the table, [num_tokens] int64.
        table: [vocab_size, size].
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit, or an id has no row.
    """
    problem = None
    if table.ndim != 2 or out.shape != (token_ids.numel(), table.shape[1]):
        problem = f"a table of {tuple(table.shape)} for {tuple(out.shape)}"
    elif token_ids.ndim != 1 or token_ids.dtype != torch.int64:
        problem = f"token ids of {token_ids.dtype} {tuple(token_ids.shape)}"
    elif out.dtype != table.dtype:
        problem = f"a table of {table.dtype} for {out.dtype}"
    elif not all(x.is_contiguous() for x in (out, token_ids, table)):
        problem = "tensors that are not contiguous"
    refuse("embedding", problem)
    check_numbers("token_ids", token_ids, 0, len(table) - 1)
    num_tokens, size = out.shape
    kind = rungs.cuda_type(table)
    if out.numel() == 0:
        return
    width = rungs.pack_width(size, out, table)
    grid, threads = in_parts(num_tokens, size // width)
    kernel = kernels[f"embedding<{kind}, {width}>"]
    kernel(grid, threads, out, token_ids, table, size, **options)


def rows_of_table(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return a tensor for a row of the table for each token."""
    return table.new_empty(token_ids.shape[0], table.shape[1])


@operator("embedding(Tensor token_ids, Tensor table) -> Tensor", fake=rows_of_table)
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table that token ids ask for; see `launch_embedding`."""
    out = rows_of_table(token_ids, table)
    launch_embedding(EMBEDDING, out, token_ids, table)
    return out


def launch_reshape_and_cache(
    kernels: rungs.Kernels,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    **options: Any,
) -> None:
    """Put the keys and values of new tokens into their slots.

    Args:
        kernels: From reshape_and_cache.cu.
        k: [num_tokens, num_kv_heads, head_dim]; only its tokens may lie apart.
        v: Like k, with a distance of its own.
        kv_cache: Of a layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        slots: Slot of each token, -1 to skip it, [num_tokens] int64.
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit, or a slot is not in the cache.
    """
    problem = None
    if k.ndim != 3 or k.shape != v.shape:
        problem = f"keys of {tuple(k.shape)} and values of {tuple(v.shape)}"
    elif {x.stride()[1:] for x in (k, v)} != {(k.shape[2], 1)}:
        problem = f"heads that lie {k.stride()} and {v.stride()} apart"
    elif kv_cache.ndim != 5 or kv_cache.shape[0::3] != (2, k.shape[1]):
        problem = f"a cache of {tuple(kv_cache.shape)} for {tuple(k.shape)}"
    elif kv_cache.shape[4] != k.shape[2] or not kv_cache.is_contiguous():
        problem = f"a cache of {tuple(kv_cache.shape)} for {tuple(k.shape)}"
    elif slots.shape != k.shape[:1] or slots.dtype != torch.int64:
        problem = f"slots of {slots.dtype} {tuple(slots.shape)}"
    elif not slots.is_contiguous():
        problem = "slots that are not contiguous"
    elif not k.dtype == v.dtype == kv_cache.dtype:
        problem = f"{k.dtype} keys, {v.dtype} values and a {kv_cache.dtype} cache"
    refuse("reshape_and_cache", problem)
    keys, values = kv_cache.flatten(1, 2).unbind()
    check_numbers("slots", slots, -1, len(keys) - 1)
    num_tokens, num_kv_heads, head_dim = k.shape
    size, strides = num_kv_heads * head_dim, (k.stride(0), v.stride(0))
    kind = rungs.cuda_type(k)
    if k.numel() == 0:
        return
    width = rungs.pack_width(math.gcd(size, *strides), k, v, keys, values)
    kernel = kernels[f"reshape_and_cache<{kind}, {width}>"]
    arguments = (k, v, keys, values, slots, *strides, size)
    kernel(num_tokens, rungs.threads_for(size // width), *arguments, **options)


@operator(
    "reshape_and_cache(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slots) -> ()",
    fake=nothing,
)
def reshape_and_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Put keys and values into their slots; see `launch_reshape_and_cache`."""
    launch_reshape_and_cache(RESHAPE_AND_CACHE, k, v, kv_cache, slots)


def rotated(heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first heads in place, as `reference.rotary_embedding`."""
    rotary_embedding(heads, num_rotated, cos, sin)
    return heads.narrow(1, 0, num_rotated)


def of_any_size(why_not: Callable[..., str | None]) -> Callable[..., str | None]:
    """Return a condition that sizes do not matter to: packs may hold one number."""
    return lambda device, dtype, **sizes: why_not(device, dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "rotary_embedding": rotated,
    "silu_and_mul": silu_and_mul,
    "reshape_and_cache": reshape_and_cache,
    "embedding": embedding,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
}
for op, implementation in KERNELS.items():
    condition = only_if_forced(op, of_any_size(cuda.why_not_emulated))
    add_backend(op, Backend("emulated", implementation, condition))
    condition = of_any_size(cuda.why_not_cuda)
    add_backend(op, Backend("cuda", implementation, condition))
