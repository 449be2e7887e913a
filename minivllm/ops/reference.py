"""The small operations of a decoder, in plain torch.

Each is an op of its name, and this is the backend that runs anywhere.

In vLLM: vllm/model_executor/layers/layernorm.py (RMSNorm), activation.py (SiluAndMul),
rotary_embedding/base.py (RotaryEmbedding).
Source: appendix A6, "The torch runner"; chapter 7, "One decoder, many families".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.registry import Backend, define_op


class TorchRMSNorm:
    """The op `rms_norm`: `layers.RMSNorm`, and the addition before it.

    A decoder normalises sums: the text so far, and what the layer before has to add.
    """

    def __init__(self, weight: Tensor, eps: float, plus_one: bool = False) -> None:
        """Take a weight w, [size]; with `plus_one`, columns are scaled by 1 + w."""
        self.weight = 1 + weight.float() if plus_one else weight
        self.eps = torch.full((1, 1), eps, device=weight.device)

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Add to x, if there is something to add, and return its rows normalised.

        Args:
            x: [num_rows, size]; changed by the addition only.
            added: Like x.
        """
        if added is not None:
            x += added
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        # eps + length ** 2 / size, the mean square
        mean_square = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1])
        normed = x * mean_square.rsqrt_()
        if self.weight.dtype != x.dtype:  # 1 + w, which must not be rounded before
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table, [num_tokens, size], that token ids ask for."""
    return F.embedding(token_ids, table)


def rotary_embedding(
    heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rotate pair (i, i + head_dim / 2) of each of the first heads by its angle.

    The formula of `layers.apply_rotary_emb` over whole heads, which saves cutting them
    in halves: (a, b) * (cos, cos) + (b, a) * (-sin, sin).

    Args:
        heads: [num_tokens, num_heads, head_dim]; may be overwritten.
        num_rotated: How many heads are rotated, and returned.
        cos: float32, [num_tokens, 1, head_dim], both halves alike.
        sin: Like cos, the first half negated.
    """
    heads = heads.narrow(1, 0, num_rotated)
    x_float = heads.float()
    swapped = x_float.roll(heads.shape[-1] // 2, dims=-1)
    return (x_float * cos).addcmul_(swapped, sin).to(heads.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [num_rows, size], of [gate, up], [num_rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def reshape_and_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Put the keys and values of new tokens into their slots.

    Args:
        k: [num_tokens, num_kv_heads, head_dim].
        v: Like k.
        kv_cache: Of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim].
        slots: Token slots of the cache, [num_tokens] int64.
    """
    keys, values = kv_cache.flatten(1, 2).unbind()
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row, NaN if one is, and where it first stands.

    Args:
        logits: float32, [num_rows, vocab_size].
    """
    largest, token_ids = logits.max(dim=-1)
    return largest, token_ids


define_op("rms_norm", [Backend("torch", TorchRMSNorm)])
define_op("embedding", [Backend("torch", embedding)])
define_op("rotary_embedding", [Backend("torch", rotary_embedding)])
define_op("silu_and_mul", [Backend("torch", silu_and_mul)])
define_op("reshape_and_cache", [Backend("torch", reshape_and_cache)])
define_op("argmax", [Backend("torch", argmax)])


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, [num_rows, size], of [gate, up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up by its approximation with tanh, of [gate, up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


define_op("gelu_and_mul", [Backend("torch", gelu_and_mul)])
define_op("gelu_tanh_and_mul", [Backend("torch", gelu_tanh_and_mul)])
