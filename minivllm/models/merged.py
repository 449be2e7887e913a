"""The decoder made fast: the same numbers with fewer, larger operations.

q, k and v are one product, gate and up another, and every product goes through the op
`linear`, which may keep its weight in an order of its own. Called by the torch runner.

Invariant: `MergedDecoder` computes what `Decoder` does, up to rounding.

In vLLM: vllm/model_executor/layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear).
Source: appendix A6, "The torch runner".
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.models.context import AttentionContext
from minivllm.models.decoder import Decoder
from minivllm.models.layers import MLP, Attention, DecoderLayer, RMSNorm
from minivllm.ops.linear import choose_linear
from minivllm.ops.registry import Choice

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


def merge(parts: list[nn.Linear], make_linear: MakeLinear) -> Linear:
    """Return one linear whose output is that of its parts, side by side."""
    if len(parts) == 1:
        return make_linear(parts[0].weight, parts[0].bias)
    weight = torch.cat([part.weight for part in parts])
    has_bias = parts[0].bias is not None
    bias = torch.cat([part.bias for part in parts]) if has_bias else None
    return make_linear(weight, bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + head_dim / 2) of each head by its angle.

    The formula of `layers.apply_rotary_emb` over whole heads, which saves cutting them
    in halves: (a, b) * (cos, cos) + (b, a) * (-sin, sin).

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: float32, [num_tokens, 1, head_dim], both halves alike.
        sin: Like cos, the first half negated.
    """
    x_float = x.float()
    swapped = x_float.roll(x.shape[-1] // 2, dims=-1)
    return (x_float * cos).addcmul_(swapped, sin).to(x.dtype)


class Norm:
    """`layers.RMSNorm` in fewer operations: a row is read once for its length."""

    def __init__(self, norm: RMSNorm) -> None:
        self.weight = norm.weight
        self.eps = torch.full((1, 1), norm.eps, device=norm.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row; x, [num_tokens, hidden_size], is not changed."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        # eps + length ** 2 / hidden_size, the mean square
        mean_square = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1])
        return (x * mean_square.rsqrt_()).to(x.dtype).mul_(self.weight)


class MergedAttention:
    """`layers.Attention` with one product for q, k and v."""

    def __init__(self, attention: Attention, make_linear: MakeLinear) -> None:
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        num_rows = [part.weight.shape[0] for part in parts]
        self.num_heads, self.num_kv_heads, _ = (n // self.head_dim for n in num_rows)
        self.qkv_proj = merge(parts, make_linear)
        self.o_proj = merge([attention.o_proj], make_linear)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Mix the tokens. x is [num_tokens, hidden_size], as is the result."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = heads.split([num_rotated, self.num_kv_heads], dim=1)
        qk = rotate(qk, cos, sin)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        mixed = context.attend(self.layer, q, k, v)
        return self.o_proj(mixed.reshape(x.shape[0], -1))


class MergedMLP:
    """`layers.MLP` with one product for gate and up."""

    def __init__(self, mlp: MLP, make_linear: MakeLinear) -> None:
        self.gate_up_proj = merge([mlp.gate_proj, mlp.up_proj], make_linear)
        self.down_proj = merge([mlp.down_proj], make_linear)
        self.activation = mlp.activation

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate).mul_(up))


class MergedLayer:
    """`layers.DecoderLayer` from merged parts."""

    def __init__(self, layer: DecoderLayer, make_linear: MakeLinear) -> None:
        self.input_layernorm = Norm(layer.input_layernorm)
        self.self_attn = MergedAttention(layer.self_attn, make_linear)
        self.post_attention_layernorm = Norm(layer.post_attention_layernorm)
        self.mlp = MergedMLP(layer.mlp, make_linear)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Run one layer; x, [num_tokens, hidden_size], is changed and returned."""
        x += self.self_attn(self.input_layernorm(x), cos, sin, context)
        x += self.mlp(self.post_attention_layernorm(x))
        return x


class MergedDecoder:
    """A decoder for generating only: no module, so nothing to train, move or save.

    Attributes:
        spec: The knobs of the model.
        linear: Which backend multiplies, and why not another.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Take over the weights of a loaded decoder, layer by layer.

        Args:
            decoder: Cannot run any more, so that its weights are in memory once.
        """
        self.linear: Choice = choose_linear(decoder.embed_tokens.weight)
        make_linear = self.linear.backend.implementation
        self.spec = decoder.spec
        self.frequencies = decoder.frequencies
        self.embed_tokens = decoder.embed_tokens
        self.layers: list[MergedLayer] = []
        layers = list(decoder.layers)
        del decoder.layers
        layers.reverse()
        while layers:
            self.layers.append(MergedLayer(layers.pop(), make_linear))
        self.norm = Norm(decoder.norm)
        # A tied table stays beside its packed form, since rows are looked up in it.
        is_tied = self.spec.tie_word_embeddings
        head = decoder.embed_tokens if is_tied else decoder.lm_head
        self.lm_head = make_linear(head.weight, None)
        if not is_tied:
            del decoder.lm_head

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Run the tokens through every layer; as `Decoder.forward`."""
        x = F.embedding(input_ids, self.embed_tokens.weight)
        angles = positions.float().view(-1, 1, 1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        return self.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score every token as the next one, float32, [..., vocab_size]."""
        return self.lm_head(hidden_states).float()
