"""Gated delta nets by CUDA kernels: how they start, the operators, the backends.

    causal_conv1d         the last few tokens of each channel, added up
    recurrent_delta_rule  the rule for one new token of each text
    chunked_delta_rule    the rule for any number of them

All have the contracts of the ops in torch, and change the states where they lie. Which
rung runs depends on types and sizes, not on the number of texts or tokens.

Conditions take these sizes, all of which may be left out: key_head_dim, value_head_dim,
group_size (value heads of a key head), conv_kernel_size.

Invariant: as in `rungs`, no kernel is started that would read or write outside its
tensors, as far as their shapes tell; what slots and lengths say is checked on the CPU.

Called by `minivllm.ops.registry`, at the first choice.

In vLLM: vllm/model_executor/layers/mamba/ops/causal_conv1d.py,
vllm/third_party/flash_linear_attention/ops/ (fused_recurrent.py, chunk.py).
Source: appendix A29, "Kernels for delta nets".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import minivllm.ops.delta_net  # noqa: F401, its ops
from minivllm.errors import ShapeError
from minivllm.ops.cuda import why_not_cuda, why_not_emulated
from minivllm.ops.launch import KernelFile
from minivllm.ops.operators import operator
from minivllm.ops.registry import Backend, add_backend, only_if_forced
from minivllm.ops.rungs import Kernels, cuda_type, pack_width, threads_for

CAUSAL_CONV1D = KernelFile("causal_conv1d.cu")
RECURRENT = KernelFile("recurrent_delta_rule.cu")
CHUNKED = KernelFile("chunked_delta_rule.cu")

WARP = 32
PIECE = 64  # tokens of a block of causal_conv1d_v3
MAX_WINDOW = 16  # inputs that a thread of v2 and v3 keeps in registers


def refuse(op: str, problem: str | None) -> None:
    """Raise, if there is a problem.

    Raises:
        ShapeError: It names the tensors that do not fit.
    """
    if problem:
        raise ShapeError(
            f"{op} cannot run with {problem}: see the shapes that "
            f"minivllm.ops.cuda_delta_net.{op} takes"
        )


def what_is_wrong_with_slots(slots: Tensor, num_texts: int, num_slots: int) -> str:
    """Return what is wrong with the slots of texts, or ""."""
    if slots.shape != (num_texts,) or slots.dtype != torch.int64:
        return f"slots of {slots.dtype} {tuple(slots.shape)} for {num_texts} texts"
    if not slots.is_contiguous():
        return "slots that are not contiguous"
    if slots.device.type == "cpu" and num_texts:  # a GPU would have to be waited for
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= num_slots:
            return f"slots from {low} to {high}, of {num_slots}"
        if len(slots.unique()) < num_texts:
            return "a slot that two texts have"
    return ""


def what_is_wrong_with_starts(query_start_loc: Tensor, num_tokens: int) -> str:
    """Return what is wrong with the first rows of texts, or ""."""
    if query_start_loc.ndim != 1 or query_start_loc.dtype != torch.int32:
        kind = f"{query_start_loc.dtype} {tuple(query_start_loc.shape)}"
        return f"a query_start_loc of {kind}"
    if not len(query_start_loc) or not query_start_loc.is_contiguous():
        return "a query_start_loc that is empty or not contiguous"
    if query_start_loc.device.type == "cpu":
        numbers = query_start_loc.tolist()
        if numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] != num_tokens:
            return f"a query_start_loc of {numbers} for {num_tokens} tokens"
    return ""


def best_conv_version(kernel_size: int) -> str:
    """Return the best rung of causal_conv1d that can look at so many tokens."""
    return "v3" if 2 <= kernel_size <= MAX_WINDOW else "v1"


def causal_conv1d(
    kernels: Kernels,
    version: str,
    y: Tensor,
    states: Tensor,
    x: Tensor,
    weight: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    piece_size: int = PIECE,
    **options: Any,
) -> None:
    """Write the last few tokens of each text, added up, and replace what it keeps.

    Args:
        kernels: From causal_conv1d.cu.
        version: "v1" to "v3".
        y: [num_tokens, conv_size].
        states: [num_slots, conv_size, kernel_size - 1], float32 or of the type of x.
        x: Like y; its rows may lie apart.
        weight: [conv_size, kernel_size].
        slots: [num_texts] int64.
        query_start_loc: [num_texts + 1] int32.
        piece_size: Tokens of a block of v3, which changes no result.
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or states.ndim != 3:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, states))
        refuse("causal_conv1d", f"inputs, factors and states of {shapes}")
    (num_tokens, conv_size), kernel_size = x.shape, weight.shape[1]
    num_texts, problem = len(slots), ""
    if weight.shape[0] != conv_size or kernel_size < 1 or weight.dtype != x.dtype:
        problem = f"factors of {weight.dtype} {tuple(weight.shape)}"
    elif states.shape[1:] != (conv_size, kernel_size - 1):
        problem = f"states of {tuple(states.shape)}"
    elif states.dtype not in (torch.float32, x.dtype):
        problem = f"states of {states.dtype} for inputs of {x.dtype}"
    elif y.shape != x.shape or y.dtype != x.dtype:
        problem = f"results of {y.dtype} {tuple(y.shape)}"
    elif x.stride(1) != 1 and x.numel() > 1:
        problem = f"inputs {x.stride()} apart"
    elif not all(t.is_contiguous() for t in (y, states, weight)):
        problem = "tensors that are not contiguous"
    elif query_start_loc.shape != (num_texts + 1,):
        problem = f"a query_start_loc of {tuple(query_start_loc.shape)}"
    elif version != "v1" and best_conv_version(kernel_size) == "v1":
        problem = f"{kernel_size} factors ({version} takes 2 to {MAX_WINDOW}; v1 all)"
    elif piece_size < max(1, kernel_size - 1):
        problem = f"pieces of {piece_size} tokens, fewer than are kept"
    problem = problem or what_is_wrong_with_slots(slots, num_texts, len(states))
    problem = problem or what_is_wrong_with_starts(query_start_loc, num_tokens)
    refuse("causal_conv1d", problem)
    kind = f"{cuda_type(x)}, {cuda_type(states)}"
    if x.numel() == 0:
        return
    threads = threads_for(conv_size)
    tensors = (y, states, x, weight, slots, query_start_loc)
    sizes, num_blocks = [x.stride(0), conv_size], num_texts
    if version == "v1":
        sizes.append(kernel_size)
    else:
        kind = f"{kind}, {kernel_size}"
    if version == "v3":  # as many blocks as there may be pieces
        num_blocks = num_tokens // piece_size + num_texts
        sizes = [num_texts, piece_size, *sizes]
    grid = (num_blocks, -(-conv_size // threads))
    kernel = kernels[f"causal_conv1d_{version}<{kind}>"]
    kernel(grid, threads, *tensors, *sizes, **options)


WARPS = 4  # of a block of the best rungs: each has a part of the columns
TEAMS, LANES = 8, 4  # of a warp, in kernels/delta_rule.cuh
COLUMNS = 64  # of a block of recurrent_delta_rule_v2
MAX_SHARED = 48 * 1024  # bytes that any block may have
MAX_KEY_HEAD_DIM = 256  # that a warp does


def what_is_wrong_with_heads(
    out: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
) -> str:
    """Return which tensors of the delta rule do not fit, or ""."""
    shapes = [tuple(x.shape) for x in (q, k, v, states)]
    if [len(shape) for shape in shapes] != [3, 3, 3, 4]:
        return "q, k, v and states of " + ", ".join(map(str, shapes))
    (num_tokens, num_key_heads, key_head_dim), (_, num_heads, value_head_dim) = (
        q.shape,
        v.shape,
    )
    if min(num_key_heads, num_heads, key_head_dim, value_head_dim) < 1:
        return "q, k, v and states of " + ", ".join(map(str, shapes))
    if num_heads % num_key_heads:
        return f"{num_heads} heads of values for {num_key_heads} of keys"
    if k.shape != q.shape or len(v) != num_tokens:
        return "q, k and v of " + ", ".join(map(str, shapes[:3]))
    if states.shape[1:] != (num_heads, key_head_dim, value_head_dim):
        return f"states of {shapes[3]}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != out.dtype or (x.numel() and x[0].stride() != (x.shape[2], 1)):
            return f"{name} of {x.dtype}, {x.stride()} apart"
    for name, x, shape in (
        ("results", out, v.shape),
        ("log_decay", log_decay, v.shape[:2]),
        ("beta", beta, v.shape[:2]),
        ("states", states, states.shape),
    ):
        dtype = v.dtype if x is out else torch.float32
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
            return f"{name} of {x.dtype} {tuple(x.shape)}, {x.stride()} apart"
    return ""


def parts_of(key_head_dim: int, states: Tensor) -> tuple[str, int]:
    """Return template arguments of a warp's part of a state, and its columns."""
    width = pack_width(states.shape[-1], states)
    return f"{-(-key_head_dim // TEAMS)}, {width}", LANES * width


def best_recurrent_version(key_head_dim: int) -> str:
    """Return the best rung of recurrent_delta_rule that can run."""
    return "v3" if key_head_dim <= MAX_KEY_HEAD_DIM else "v1"


def recurrent_delta_rule(
    kernels: Kernels,
    version: str,
    out: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    slots: Tensor,
    **options: Any,
) -> None:
    """Write what one token of each text reads, and change the states of the texts.

    Args:
        kernels: From recurrent_delta_rule.cu.
        version: "v1" to "v3".
        out: [num_texts, num_value_heads, value_head_dim].
        states: float32, [num_slots, num_value_heads, key_head_dim, value_head_dim].
        q: [num_texts, num_key_heads, key_head_dim]; its rows may lie apart.
        k: Like q.
        v: Like out; its rows may lie apart.
        log_decay: float32, [num_texts, num_value_heads].
        beta: Like log_decay.
        slots: [num_texts] int64.
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit, or the rung does not take heads
            of that size.
    """
    problem = what_is_wrong_with_heads(out, states, q, k, v, log_decay, beta)
    problem = problem or what_is_wrong_with_slots(slots, len(q), len(states))
    key_head_dim, most = q.shape[-1], MAX_SHARED // 4 // (COLUMNS + 3)
    limits = {"v2": most, "v3": MAX_KEY_HEAD_DIM}
    if not problem and key_head_dim > limits.get(version, key_head_dim):
        problem = f"keys of {key_head_dim} ({version} takes {limits[version]} at most)"
    refuse("recurrent_delta_rule", problem)
    kind = cuda_type(q)
    if out.numel() == 0:
        return
    num_texts, num_heads, value_head_dim = v.shape
    columns = threads = COLUMNS if version == "v2" else threads_for(value_head_dim)
    sizes = [q.stride(0), k.stride(0), v.stride(0), num_heads // q.shape[1]]
    sizes += [value_head_dim, key_head_dim]
    if version == "v2":
        options = options | {"shared_bytes": 4 * key_head_dim * (2 + COLUMNS)}
    elif version == "v3":
        part, columns = parts_of(key_head_dim, states)
        kind, columns, threads = f"{kind}, {part}", columns * WARPS, WARP * WARPS
    grid = (num_texts, num_heads, -(-value_head_dim // columns))
    tensors = (out, states, q, k, v, log_decay, beta, slots)
    kernel = kernels[f"recurrent_delta_rule_{version}<{kind}>"]
    kernel(grid, threads, *tensors, *sizes, **options)


def why_not_chunked(key_head_dim: int) -> str | None:
    """Return why no rung of chunked_delta_rule can run, or None if all can."""
    if key_head_dim > MAX_KEY_HEAD_DIM:
        return f"it takes keys of {MAX_KEY_HEAD_DIM} numbers, not of {key_head_dim}"
    return None


def chunked_delta_rule(
    kernels: Kernels,
    version: str,
    out: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    **options: Any,
) -> None:
    """Write what the tokens of each text read, and change the states of the texts.

    A text without tokens leaves its state as it is.

    Args:
        kernels: From chunked_delta_rule.cu.
        version: "v1" or "v2".
        out: [num_tokens, num_value_heads, value_head_dim].
        states: float32, [num_slots, num_value_heads, key_head_dim, value_head_dim].
        q: [num_tokens, num_key_heads, key_head_dim]; its rows may lie apart.
        k: Like q.
        v: Like out; its rows may lie apart.
        log_decay: float32, [num_tokens, num_value_heads].
        beta: Like log_decay.
        slots: [num_texts] int64.
        query_start_loc: [num_texts + 1] int32.
        options: For the call.

    Raises:
        ShapeError: Shapes, types or strides do not fit, or keys are longer than
            a warp can do.
    """
    problem = what_is_wrong_with_heads(out, states, q, k, v, log_decay, beta)
    problem = problem or what_is_wrong_with_slots(slots, len(slots), len(states))
    problem = problem or what_is_wrong_with_starts(query_start_loc, len(q))
    if not problem and len(query_start_loc) != len(slots) + 1:
        problem = f"a query_start_loc of {len(query_start_loc)} for {len(slots)} texts"
    if not problem and (reason := why_not_chunked(q.shape[-1])):
        problem = f"such keys: {reason}"
    refuse("chunked_delta_rule", problem)
    kind = cuda_type(q)
    if out.numel() == 0:
        return
    (_, num_heads, value_head_dim), key_head_dim = v.shape, q.shape[-1]
    part, columns = parts_of(key_head_dim, states)
    sizes = [q.stride(0), k.stride(0), v.stride(0), num_heads // q.shape[1]]
    sizes += [value_head_dim, key_head_dim]
    grid = (len(slots), num_heads, -(-value_head_dim // (columns * WARPS)))
    tensors = (out, states, q, k, v, log_decay, beta, slots, query_start_loc)
    kernel = kernels[f"chunked_delta_rule_{version}<{kind}, {part}>"]
    kernel(grid, WARP * WARPS, *tensors, *sizes, **options)


def like_inputs(x: Tensor, *rest: object) -> Tensor:
    """Return a result for each input."""
    return x.new_empty(x.shape)


@operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor(a!) states, Tensor slots, "
    "Tensor query_start_loc) -> Tensor",
    fake=like_inputs,
)
def kernel_causal_conv1d(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, query_start_loc: Tensor
) -> Tensor:
    """Convolve the tokens of each text, as `delta_net.causal_conv1d`."""
    y, weight = like_inputs(x), weight.contiguous()
    tables = (slots, query_start_loc.int())
    version = best_conv_version(weight.shape[1])
    causal_conv1d(CAUSAL_CONV1D, version, y, states, x, weight, *tables)
    return y


def like_values(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    """Return what the queries read."""
    return v.new_empty(v.shape)


@operator(
    "recurrent_delta_rule(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, "
    "Tensor(a!) states, Tensor slots) -> Tensor",
    fake=like_values,
)
def kernel_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """Run the rule for a token of each text, as `delta_net.recurrent_delta_rule`."""
    out = like_values(q, k, v)
    version = best_recurrent_version(q.shape[-1])
    factors = (log_decay.contiguous(), beta.contiguous())
    recurrent_delta_rule(RECURRENT, version, out, states, q, k, v, *factors, slots)
    return out


@operator(
    "chunked_delta_rule(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, "
    "Tensor(a!) states, Tensor slots, Tensor query_start_loc) -> Tensor",
    fake=like_values,
)
def kernel_chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Run the rule for the tokens of each text, as `delta_net.chunked_delta_rule`."""
    out = like_values(q, k, v)
    factors = (log_decay.contiguous(), beta.contiguous())
    tables = (slots, query_start_loc.int())
    chunked_delta_rule(CHUNKED, "v2", out, states, q, k, v, *factors, *tables)
    return out


def without_lengths(*tensors: Any) -> Tensor:
    """Run the rule; the kernel knows the lengths of texts from query_start_loc."""
    *given, _ = tensors
    return kernel_chunked_delta_rule(*given)


def of_these_sizes(op: str, why_not: Callable[..., str | None]) -> Callable[..., Any]:
    """Return a condition that knows how large the heads of an op may be."""

    def condition(device: str, dtype: str, **sizes: int) -> str | None:
        reason = why_not(device, dtype)
        if reason is None and op == "chunked_delta_rule":
            return why_not_chunked(sizes.get("key_head_dim", 1))
        return reason

    return condition


KERNELS: dict[str, Callable[..., Tensor]] = {
    "causal_conv1d": kernel_causal_conv1d,
    "recurrent_delta_rule": kernel_recurrent_delta_rule,
    "chunked_delta_rule": without_lengths,
}
for op, implementation in KERNELS.items():
    condition = only_if_forced(op, of_these_sizes(op, why_not_emulated))
    add_backend(op, Backend("emulated", implementation, condition))
    condition = of_these_sizes(op, why_not_cuda)
    add_backend(op, Backend("cuda", implementation, condition))
