"""The decoder made fast: the same numbers with fewer, larger operations.

q, k and v are one product, gate and up another. The work is done by ops, so that each
part runs in the best backend that this machine has. Called by the torch runner.

Invariant: `MergedDecoder` computes what `Decoder` does, up to rounding.

In vLLM: vllm/model_executor/layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear).
Source: appendix A6, "The torch runner".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.models.context import AttentionContext
from minivllm.models.decoder import Decoder
from minivllm.models.layers import MLP, Attention, DecoderLayer, RMSNorm
from minivllm.ops.linear import TorchLinear
from minivllm.ops.reference import TorchRMSNorm
from minivllm.ops.registry import Choice, choose_for

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


class DecoderOps(NamedTuple):
    """The ops of a decoder: what the chosen backends make or do."""

    linear: type[TorchLinear]  # or one like it
    rms_norm: type[TorchRMSNorm]
    rotary_embedding: Callable[[Tensor, int, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]


class MergedAttention:
    """`layers.Attention` with one product for q, k and v."""

    def __init__(self, attention: Attention, ops: DecoderOps) -> None:
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        num_rows = [part.weight.shape[0] for part in parts]
        self.num_heads, self.num_kv_heads, _ = (n // self.head_dim for n in num_rows)
        self.qkv_proj = merge(parts, ops.linear)
        self.o_proj = merge([attention.o_proj], ops.linear)
        self.rotary_embedding = ops.rotary_embedding

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Mix the tokens. x is [num_tokens, hidden_size], as is the result."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        v = heads.narrow(1, num_rotated, self.num_kv_heads)
        qk = self.rotary_embedding(heads, num_rotated, cos, sin)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        mixed = context.attend(self.layer, q, k, v)
        return self.o_proj(mixed.reshape(x.shape[0], -1))


class MergedMLP:
    """`layers.MLP` with one product for gate and up."""

    def __init__(self, mlp: MLP, ops: DecoderOps) -> None:
        assert mlp.activation is F.silu, "no op for another activation yet"
        self.gate_up_proj = merge([mlp.gate_proj, mlp.up_proj], ops.linear)
        self.down_proj = merge([mlp.down_proj], ops.linear)
        self.silu_and_mul = ops.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        return self.down_proj(self.silu_and_mul(self.gate_up_proj(x)))


class MergedLayer:
    """`layers.DecoderLayer` from merged parts."""

    def __init__(self, layer: DecoderLayer, ops: DecoderOps) -> None:
        def norm(of: RMSNorm) -> Callable[..., Tensor]:
            return ops.rms_norm(of.weight, of.eps)

        self.input_layernorm = norm(layer.input_layernorm)
        self.self_attn = MergedAttention(layer.self_attn, ops)
        self.post_attention_layernorm = norm(layer.post_attention_layernorm)
        self.mlp = MergedMLP(layer.mlp, ops)

    def __call__(
        self,
        x: Tensor,
        added: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext[Tensor],
    ) -> Tensor:
        """Run one layer.

        Args:
            x: [num_tokens, hidden_size], changed.
            added: What the layer before has to add to x, if there is one.
            cos: As for the op `rotary_embedding`.
            sin: Like cos.
            context: Where the keys and values are.

        Returns:
            What this layer has to add to x, once somebody asks.
        """
        mixed = self.self_attn(self.input_layernorm(x, added), cos, sin, context)
        return self.mlp(self.post_attention_layernorm(x, mixed))


class MergedDecoder:
    """A decoder for generating only: no module, so nothing to train, move or save.

    Attributes:
        spec: The knobs of the model.
        choices: For each op, which backend runs, and why not another.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Take over the weights of a loaded decoder, layer by layer.

        Args:
            decoder: Cannot run any more, so that its weights are in memory once.
        """
        weight = decoder.embed_tokens.weight
        self.choices: dict[str, Choice] = {
            op: choose_for(op, weight) for op in DecoderOps._fields
        }
        chosen: dict[str, Any] = {
            op: choice.backend.implementation for op, choice in self.choices.items()
        }
        ops = DecoderOps(**chosen)
        self.spec = decoder.spec
        self.frequencies = decoder.frequencies
        self.embed_tokens = decoder.embed_tokens
        self.embedding = ops.embedding
        self.layers: list[MergedLayer] = []
        layers = list(decoder.layers)
        del decoder.layers
        layers.reverse()
        while layers:
            self.layers.append(MergedLayer(layers.pop(), ops))
        self.norm = ops.rms_norm(decoder.norm.weight, decoder.norm.eps)
        # A tied table stays beside its packed form, since rows are looked up in it.
        is_tied = self.spec.tie_word_embeddings
        head = decoder.embed_tokens if is_tied else decoder.lm_head
        self.lm_head = ops.linear(head.weight, None)
        if not is_tied:
            del decoder.lm_head

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Run the tokens through every layer; as `Decoder.forward`."""
        x = self.embedding(input_ids, self.embed_tokens.weight)
        angles = positions.float().view(-1, 1, 1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        added = None
        for layer in self.layers:
            added = layer(x, added, cos, sin, context)
        return self.norm(x, added)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score every token as the next one, float32, [..., vocab_size]."""
        return self.lm_head(hidden_states).float()
