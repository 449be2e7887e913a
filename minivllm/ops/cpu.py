"""The compiled backends of the ops, for the CPU.

Each does what the reference of its op does, in one pass: see kernels/cpu_ops.cpp.

Invariant: C++ gets memory of the types and sizes that it is told. Assertions check it:
a mistake of ours would read or write anywhere.

In vLLM: vllm/_custom_ops.py; vllm/v1/attention/backends/cpu_attn.py
(CPUAttentionBackendImpl).
Source: appendix A10, "Compiled operations"; appendix A12, "A sampler for a whole
    batch"; appendix A24, "Windows"; appendix A25, "Experts in the engine".
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

import minivllm.ops.draw  # noqa: F401, its op
from minivllm.errors import BackendUnavailable
from minivllm.ops import linear, paged_attention, reference  # noqa: F401, their ops
from minivllm.ops.compiler import load_library
from minivllm.ops.moe import GroupedLinear
from minivllm.ops.registry import Backend, add_backend

SOURCE = "cpu_ops.cpp"
LANES = 16  # numbers in a vector, output columns in a panel of a weight
INPUTS = 32  # inputs of a weight come in multiples of these
NO_WINDOW = 2**62  # more keys than there can be
# p: pointer, i: 64-bit integer, f: float, t: number of threads
PARAMETERS = {
    "rms_norm": "ppppiiftt",
    "silu_and_mul": "ppiit",
    "rotary_embedding": "pppiiiit",
    "reshape_and_cache": "ppiipppii",
    "paged_attention": "pipppipppiiiiiift",
    "argmax": "pppiiit",
    "linear": "pppiiit",
    "prefill_attention": "pipppippppiiiiiiift",
    "draw": "piippippippppt",
    "gelu_and_mul": "ppiit",
    "gelu_tanh_and_mul": "ppiit",
    "grouped_linear": "ppppiiit",
    "topk_softmax": "pppiiitt",
    "moe_permute": "pppii",
    "moe_combine": "ppppiiit",
}
C_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "t": ctypes.c_int,
}


@cache
def compiled(op: str, dtype: torch.dtype) -> Callable[..., None]:
    """Return the C++ function of an op."""
    name = str(dtype).removeprefix("torch.")
    function = getattr(load_library(SOURCE), f"{op}_{name}")
    function.argtypes = [C_TYPES[kind] for kind in PARAMETERS[op]]
    function.restype = None
    return function


def rows_of(x: Tensor, like: Tensor | None = None) -> tuple[int, int]:
    """Return the shape of contiguous rows, which another tensor has to share."""
    num_rows, size = x.shape
    assert x.is_contiguous(), "compiled operations take contiguous rows"
    if like is not None:
        assert like.is_contiguous() and (like.shape, like.dtype) == (x.shape, x.dtype)
    return num_rows, size


def is_index(x: Tensor, *shape: int) -> bool:
    """Tell whether C++ can read a tensor as 64-bit numbers of a shape."""
    return x.is_contiguous() and x.shape == shape and x.dtype == torch.int64


def attention_arguments(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    group_size: int,
    scale: float,
    window: int | None,
) -> tuple[list, list]:
    """Return the first and the last arguments of the C++ functions of attention."""
    _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    num_heads = num_kv_heads * group_size
    assert q.shape[1:] == (num_heads, head_dim) and q.stride()[1:] == (head_dim, 1)
    assert kv_cache.is_contiguous() and kv_cache.dtype == q.dtype
    first = [q.data_ptr(), q.stride(0), *both_pools(kv_cache)]
    first += [block_table.data_ptr(), block_table.shape[1]]
    window = NO_WINDOW if window is None else window
    last = [num_heads, num_kv_heads, head_dim, block_size, window, scale]
    return first, [*last, torch.get_num_threads()]


def both_pools(kv_cache: Tensor) -> tuple[int, int]:
    """Return the addresses of the keys and of the values of a layer."""
    keys = kv_cache.data_ptr()
    return keys, keys + kv_cache.stride(0) * kv_cache.element_size()


class CompiledRMSNorm:
    """`TorchRMSNorm` in one pass."""

    def __init__(self, weight: Tensor, eps: float, plus_one: bool = False) -> None:
        self.weight = weight.contiguous()
        self.eps = eps
        self.plus_one = int(plus_one)
        self.function = compiled("rms_norm", weight.dtype)

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Add to x, if there is something to add, and return its rows normalised."""
        num_rows, size = rows_of(x, added)
        assert self.weight.shape == (size,) and self.weight.dtype == x.dtype
        y = torch.empty_like(x)
        self.function(
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            self.weight.data_ptr(),
            y.data_ptr(),
            num_rows,
            size,
            self.eps,
            self.plus_one,
            torch.get_num_threads(),
        )
        return y


def compiled_silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, as `reference.silu_and_mul`."""
    return compiled_act_and_mul("silu_and_mul", gate_up)


def compiled_rotary_embedding(
    heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rotate the first heads in place, as `reference.rotary_embedding`."""
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.is_contiguous() and num_rotated <= num_heads
    for angles in (cos, sin):
        assert angles.is_contiguous() and angles.dtype == torch.float32
        assert angles.shape == (num_tokens, 1, head_dim)
    compiled("rotary_embedding", heads.dtype)(
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens,
        num_heads,
        num_rotated,
        head_dim,
        torch.get_num_threads(),
    )
    return heads.narrow(1, 0, num_rotated)


def compiled_reshape_and_cache(
    k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor
) -> None:
    """Put keys and values into their slots, as `reference.reshape_and_cache`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    keys, values = both_pools(kv_cache)
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1) and v.shape == k.shape
    assert kv_cache.is_contiguous() and is_index(slots, num_tokens)
    assert kv_cache.shape[3:] == (num_kv_heads, head_dim)
    assert k.dtype == v.dtype == kv_cache.dtype
    compiled("reshape_and_cache", k.dtype)(
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        v.stride(0),
        keys,
        values,
        slots.data_ptr(),
        num_tokens,
        num_kv_heads * head_dim,
    )


def compiled_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row and its place, as `reference.argmax`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    largest = logits.new_empty(num_rows)
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    compiled("argmax", logits.dtype)(
        logits.data_ptr(),
        largest.data_ptr(),
        token_ids.data_ptr(),
        num_rows,
        vocab_size,
        logits.stride(0),
        torch.get_num_threads(),
    )
    return largest, token_ids


class CompiledAttention:
    """`PaddedAttention` for pieces of one query, without padding."""

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        group_size: int,
    ) -> None:
        assert positions.shape[1] == 1, "compiled attention takes one query a piece"
        self.rows = rows.contiguous()
        self.positions = positions.contiguous()
        self.block_table = block_table.contiguous()
        assert is_index(self.rows, len(rows), 1)
        assert is_index(self.positions, len(rows), 1)
        assert is_index(self.block_table, len(rows), block_table.shape[1])
        self.group_size = group_size
        self.function = compiled("paged_attention", kv_cache.dtype)

    def attend(
        self, q: Tensor, kv_cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend to the last keys in the cache, [num_pieces, num_heads, head_dim].

        A window is how many of them a query sees, its own among them; None for all.
        """
        first, last = attention_arguments(
            q, kv_cache, self.block_table, self.group_size, scale, window
        )
        y = q.new_empty(len(self.rows), *q.shape[1:])
        rows, positions = self.rows.data_ptr(), self.positions.data_ptr()
        self.function(*first, rows, positions, y.data_ptr(), len(y), *last)
        return y


class CompiledPrefill:
    """`PaddedAttention` for pieces of many queries, without padding the keys."""

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        group_size: int,
    ) -> None:
        assert why_no_tiles("cpu", "bfloat16") is None
        self.shape = rows.shape
        # The queries of a piece are neighbours.
        self.starts = rows[:, 0].contiguous()
        # A shorter piece repeats its last query.
        self.num_keys = positions[:, -1] + 1
        self.lengths = self.num_keys - positions[:, 0]
        self.block_table = block_table.contiguous()
        for array in (self.starts, self.num_keys, self.lengths):
            assert is_index(array, len(rows))
        assert is_index(self.block_table, len(rows), block_table.shape[1])
        self.group_size = group_size
        self.function = compiled("prefill_attention", kv_cache.dtype)

    def attend(
        self, q: Tensor, kv_cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend to keys in the cache, [num_pieces * num_queries, num_heads, head_dim].

        A window is as above. What stands in the place of a repeated query is not
        defined.
        """
        first, last = attention_arguments(
            q, kv_cache, self.block_table, self.group_size, scale, window
        )
        num_pieces, longest = self.shape
        y = q.new_empty(num_pieces * longest, *q.shape[1:])
        self.function(
            *first,
            self.starts.data_ptr(),
            self.lengths.data_ptr(),
            self.num_keys.data_ptr(),
            y.data_ptr(),
            num_pieces,
            longest,
            *last,
        )
        return y


class CompiledLinear:
    """A weight in panels; the weight that was given is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype = weight.dtype
        name = str(self.dtype).removeprefix("torch.")
        assert why_no_product("cpu", name) is None
        is_float32 = self.dtype == torch.float32
        self.out_features, self.in_features = weight.shape
        self.missing = 0 if is_float32 else -self.in_features % INPUTS
        padding = (0, self.missing, 0, -self.out_features % LANES)
        weight = F.pad(weight, padding) if any(padding) else weight.contiguous()
        # Two inputs of bfloat16 are neighbours in a panel: they move as one number.
        units = weight if is_float32 else weight.view(torch.int32)
        panels = units.view(len(weight) // LANES, LANES, -1)
        self.panels = panels.transpose(1, 2).contiguous()  # [panels, in or in / 2, 16]
        self.bias = bias
        self.function = compiled("linear", weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features
        rows = x.reshape(-1, self.in_features)
        rows = F.pad(rows, (0, self.missing)) if self.missing else rows.contiguous()
        y = rows.new_empty(len(rows), self.out_features)
        if len(rows):
            self.function(
                rows.data_ptr(),
                self.panels.data_ptr(),
                y.data_ptr(),
                *rows.shape,
                self.out_features,
                torch.get_num_threads(),
            )
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def why_not_compiled(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why the compiled operations cannot run, or None if they can."""
    if device != "cpu":
        return f"it is compiled for the CPU, not for {device}"
    if dtype not in ("float32", "bfloat16"):
        return f"it is compiled for float32 and bfloat16, not for {dtype}"
    if remainder := sizes.get("head_dim", 0) % LANES:
        return f"it takes heads of a multiple of {LANES} numbers, not {remainder} more"
    try:
        load_library(SOURCE)
    except BackendUnavailable as error:
        return str(error)
    return None


def why_no_tiles(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why what multiplies tiles cannot run, or None if it can."""
    if reason := why_not_compiled(device, dtype, **sizes):
        return reason
    if dtype != "bfloat16":
        return f"it multiplies bfloat16, not {dtype}"
    if remainder := sizes.get("head_dim", 0) % INPUTS:
        return f"it takes heads of a multiple of {INPUTS} numbers, not {remainder} more"
    function = load_library(SOURCE).why_no_tiles
    function.restype = ctypes.c_char_p
    reason = function()
    return reason.decode() if reason else None


def why_no_product(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why the compiled products cannot run, or None if they can."""
    condition = why_not_compiled if dtype == "float32" else why_no_tiles
    return condition(device, dtype, **sizes)


def compiled_draw(
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
    num_rows, vocab_size = logits.shape
    num_sampled, num_cut = len(rows), len(top_k)
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert largest.dtype == torch.float32 and largest.shape == (num_rows,)
    assert is_index(rows, num_sampled) and is_index(top_k, num_cut)
    for x, size in ((temperatures, num_sampled), (uniforms, num_sampled)):
        assert x.is_contiguous() and (x.shape, x.dtype) == ((size,), torch.float64)
    for x in (min_p, top_p):
        assert x.is_contiguous() and (x.shape, x.dtype) == ((num_cut,), torch.float64)
    drawn = torch.empty_like(rows)
    compiled("draw", logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        largest.contiguous().data_ptr(),
        rows.data_ptr(),
        num_sampled,
        temperatures.data_ptr(),
        uniforms.data_ptr(),
        num_cut,
        min_p.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        drawn.data_ptr(),
        torch.get_num_threads(),
    )
    return drawn


def compiled_gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, as `reference.gelu_and_mul`."""
    return compiled_act_and_mul("gelu_and_mul", gate_up)


def compiled_gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up by tanh, as `reference.gelu_tanh_and_mul`."""
    return compiled_act_and_mul("gelu_tanh_and_mul", gate_up)


IMPLEMENTATIONS = {
    "rms_norm": CompiledRMSNorm,
    "silu_and_mul": compiled_silu_and_mul,
    "rotary_embedding": compiled_rotary_embedding,
    "reshape_and_cache": compiled_reshape_and_cache,
    "paged_attention": CompiledAttention,
    "argmax": compiled_argmax,
    "draw": compiled_draw,
    "gelu_and_mul": compiled_gelu_and_mul,
    "gelu_tanh_and_mul": compiled_gelu_tanh_and_mul,
}
for op, implementation in IMPLEMENTATIONS.items():
    add_backend(op, Backend("compiled", implementation, why_not_compiled))
add_backend("linear", Backend("compiled", CompiledLinear, why_no_product))
add_backend("prefill_attention", Backend("compiled", CompiledPrefill, why_no_tiles))


def compiled_act_and_mul(op: str, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up, [num_rows, size], of [gate, up]."""
    num_rows, width = rows_of(gate_up)
    y = gate_up.new_empty(num_rows, width // 2)
    compiled(op, gate_up.dtype)(
        gate_up.data_ptr(), y.data_ptr(), *y.shape, torch.get_num_threads()
    )
    return y


class CompiledGroupedLinear(GroupedLinear):
    """All products in one call, with the weights of the experts in panels."""

    linear = CompiledLinear

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.panels = torch.stack([expert.panels for expert in self.experts])
        self.one = self.experts.pop()  # all have the same sizes
        self.one.panels = self.panels[-1]
        self.experts.clear()
        self.function = compiled("grouped_linear", weight.dtype)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert; as for `moe.GroupedLinear`."""
        num_rows, in_features = rows_of(x)
        assert in_features == self.one.in_features and x.dtype == self.one.dtype
        assert offsets.dtype == torch.int32 and offsets.is_contiguous()
        assert offsets.shape == (len(self.panels) + 1,)
        if self.one.missing:
            x = F.pad(x, (0, self.one.missing))
        y = x.new_empty(num_rows, self.one.out_features)
        self.function(
            x.data_ptr(),
            self.panels.data_ptr(),
            y.data_ptr(),
            offsets.data_ptr(),
            len(self.panels),
            x.shape[1],
            self.one.out_features,
            torch.get_num_threads(),
        )
        return y


def compiled_topk_softmax(
    logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, as `moe.topk_softmax`."""
    num_tokens, num_experts = rows_of(logits)
    assert 1 <= top_k <= num_experts
    weights = torch.empty(num_tokens, top_k)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64)
    compiled("topk_softmax", logits.dtype)(
        logits.data_ptr(),
        weights.data_ptr(),
        experts.data_ptr(),
        num_tokens,
        num_experts,
        top_k,
        int(renormalize),
        torch.get_num_threads(),
    )
    return weights, experts


def compiled_moe_permute(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the choices of all tokens by expert, as `moe.moe_permute`."""
    assert is_index(experts, *experts.shape)
    order = torch.empty(experts.numel(), dtype=torch.int64)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32)
    compiled("moe_permute", experts.dtype)(
        experts.data_ptr(),
        order.data_ptr(),
        offsets.data_ptr(),
        len(order),
        num_experts,
    )
    return order, offsets


def compiled_moe_combine(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Add up what the experts of each token say, as `moe.moe_combine`."""
    num_rows, size = rows_of(y)
    num_tokens, top_k = rows_of(weights)
    assert num_rows == weights.numel() and weights.dtype == torch.float32
    assert is_index(order, num_rows)
    out = y.new_empty(num_tokens, size)
    compiled("moe_combine", y.dtype)(
        y.data_ptr(),
        order.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        num_tokens,
        top_k,
        size,
        torch.get_num_threads(),
    )
    return out


EXPERT_IMPLEMENTATIONS = {
    "topk_softmax": compiled_topk_softmax,
    "moe_permute": compiled_moe_permute,
    "moe_combine": compiled_moe_combine,
}
for op, implementation in EXPERT_IMPLEMENTATIONS.items():
    add_backend(op, Backend("compiled", implementation, why_not_compiled))
add_backend(
    "grouped_linear", Backend("compiled", CompiledGroupedLinear, why_no_product)
)
