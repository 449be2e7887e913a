"""The parts of the torch decoder, any device and dtype.

Parameter names are those of `ModelSpec.weight_shapes()`. The norms (RMSNorm, Zhang and
Sennrich 2019) and the rotation compute in float32 and return the dtype they were given.

In vLLM: vllm/model_executor/layers/.
Source: chapter 1, "Naive generation"; chapter 2, "The KV cache"; chapter 7, "One
    decoder, many families"; appendix A24, "Windows"; appendix A28, "Delta nets in
    torch".
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.models.context import AttentionContext, check_room, first_key_of
from minivllm.models.gated_delta_net import (
    GatedDeltaNet,
    RecurrentPass,
    RecurrentStates,
    TextRows,
)
from minivllm.models.spec import ModelSpec, MoeSpec
from minivllm.ops.moe import topk_softmax


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of one, then each column by its weight."""

    def __init__(self, size: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis; x is not changed."""
        x_float = x.float()
        mean_square = x_float.square().mean(-1, keepdim=True)
        normed = x_float * torch.rsqrt(mean_square + self.eps)
        if self.plus_one:  # Gemma's: what is near one must not be rounded before
            return (normed * (1 + self.weight.float())).to(x.dtype)
        return normed.to(x.dtype) * self.weight


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + rope_dim / 2) of each head by its angle; leave the rest.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: float32, [num_tokens, 1, rope_dim // 2].
        sin: Like cos.
    """
    rope_dim = 2 * cos.shape[-1]
    turned, rest = x.float().split([rope_dim, x.shape[-1] - rope_dim], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Let the tokens exchange information, through the context."""

    has_gate = False

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self.head_dim = spec.head_dim
        self.has_gate = spec.attention_gate
        q_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        q_rows = 2 * q_size if spec.attention_gate else q_size
        self.q_proj = nn.Linear(spec.hidden_size, q_rows, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=spec.o_bias)
        self.q_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Mix the tokens. x is [num_tokens, hidden_size], as is the result."""
        heads = (len(x), -1, self.head_dim)
        q, gate = self.q_proj(x), None
        if self.has_gate:  # in each head, its query and then its gate
            q, gate = q.view(len(x), -1, 2 * self.head_dim).chunk(2, dim=-1)
        q, k, v = q.reshape(heads), self.k_proj(x).view(heads), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        mixed = context.attend(self.layer, q, k, v.view(heads))
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.o_proj(mixed.reshape(len(x), -1))


TORCH_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Transform each token alone: a gated unit (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, size: int, has_bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, size, bias=has_bias)
        self.up_proj = nn.Linear(spec.hidden_size, size, bias=has_bias)
        self.down_proj = nn.Linear(size, spec.hidden_size, bias=has_bias)
        self.activation = TORCH_ACTIVATIONS[spec.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before and the residual around it."""

    is_recurrent = False

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        nn.Module.__init__(self)
        self.input_layernorm = norm_of(spec)
        self.is_recurrent = spec.is_recurrent(layer)
        if spec.delta_net is not None and self.is_recurrent:
            self.linear_attn = GatedDeltaNet(spec, spec.delta_net, layer)
        else:
            self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = norm_of(spec)
        self.post_norms = spec.post_norms
        if spec.post_norms:
            self.pre_feedforward_layernorm = norm_of(spec)
            self.post_feedforward_layernorm = norm_of(spec)
        if spec.moe is not None and spec.has_experts(layer):
            self.mlp: MLP | MoE = MoE(spec, spec.moe)
        else:
            self.mlp = MLP(spec, spec.intermediate_size, spec.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Run one layer. x is [num_tokens, hidden_size], as is the result."""
        normed = self.input_layernorm(x)
        if self.is_recurrent:
            mixed = self.linear_attn(normed, context)
        else:
            mixed = self.self_attn(normed, cos, sin, context)
        if not self.post_norms:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(mixed)
        transformed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(transformed)


class TorchDenseContext:
    """The simplest context: the tokens given are the whole text."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.scale = spec.attention_scale

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally among the given tokens."""
        mask = causal_mask(len(q), len(q), self.spec.window_of(layer), q.device)
        return masked_attention(q, k, v, self.scale, mask)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the given tokens, before which there is nothing."""
        return self._from_nothing(layer, x).convolve(layer, x, weight)

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the delta rule over the given tokens, from nothing on."""
        return self._from_nothing(layer, rows[0]).mix(layer, *rows)

    def _from_nothing(self, layer: int, x: Tensor) -> RecurrentPass:
        assert self.spec.delta_net is not None
        net = replace(self.spec.delta_net, layers=(layer,))
        states = RecurrentStates(net, 1, device=x.device, dtype=x.dtype)
        return RecurrentPass(states, TextRows([0], [len(x)]))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Mix the values, for each query those of the keys that its mask allows.

    Args:
        q: [..., num_queries, num_heads, head_dim].
        k: [..., num_keys, num_kv_heads, head_dim].
        v: Like k.
        scale: Factor on the products.
        mask: True where a query may look, [..., num_queries, num_keys]; None if each
            may look everywhere.

    Returns:
        Like q.
    """
    group = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    mask = None if mask is None else mask.unsqueeze(-3)  # the same for all heads
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return mixed.transpose(-3, -2)


class TorchCachedContext:
    """Keeps the keys and values of one text, one row per token in each layer.

    The first `num_tokens` rows are filled. In a pass every layer writes its new rows
    behind them, all at the same place; `advance` then ends the pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Reserve room for a text of `max_tokens` tokens, all at once."""
        shape = (spec.num_layers, max_tokens, spec.num_kv_heads, spec.head_dim)
        self.k_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.num_tokens = 0
        self.spec = spec
        self.states = states_of(spec, 1, device, dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, and attend to those in the window.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        keys, values = self.k_cache[layer], self.v_cache[layer]
        check_room(self.num_tokens, len(k), len(keys))
        end = self.num_tokens + len(k)
        keys[self.num_tokens : end] = k
        values[self.num_tokens : end] = v
        window = self.spec.window_of(layer)
        start = first_key_of(self.num_tokens, window)
        mask = None  # a single query sees all that is left
        if len(q) > 1:
            mask = causal_mask(len(q), end - start, window, q.device)
        keys, values = keys[start:end], values[start:end]
        return masked_attention(q, keys, values, self.spec.attention_scale, mask)

    def positions(self, num_new: int) -> Tensor:
        """Return the positions of the next tokens, [num_new]."""
        end = self.num_tokens + num_new
        return torch.arange(self.num_tokens, end, device=self.k_cache.device)

    def advance(self, num_new: int) -> None:
        """Count the rows that all layers have written; call it once per pass."""
        self.num_tokens += num_new

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the new tokens, behind those before.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        check_room(self.num_tokens, len(x), self.k_cache.shape[1])
        return self._pass_of(len(x)).convolve(layer, x, weight)

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the delta rule over the new tokens, from the state on."""
        return self._pass_of(len(rows[0])).mix(layer, *rows)

    def _pass_of(self, num_new: int) -> RecurrentPass:
        assert self.states is not None
        return RecurrentPass(self.states, TextRows([0], [num_new]))


class TorchStaticBatchContext:
    """Keeps the keys and values of several texts that grow in step.

    The texts are the lines of a rectangle, padded on the left: text i begins in column
    `num_padding[i]`. `num_tokens` columns are filled. A pass gives the new columns of
    all texts in flat rows, text after text. A row of padding sees itself alone, and
    nobody else attends to it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Reserve `max_tokens` columns for prompts of the given lengths."""
        self.padding = [max(lengths) - length for length in lengths]
        self.num_padding = torch.tensor(self.padding, device=device)
        shape = (spec.num_layers, len(lengths), max_tokens)
        heads = (spec.num_kv_heads, spec.head_dim)
        self.k_cache = torch.zeros(shape + heads, device=device, dtype=dtype)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.num_tokens = 0
        self.spec = spec
        self.states = states_of(spec, len(lengths), device, dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new columns, and attend within each text.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        batch_size = len(self.num_padding)
        q, k, v = (x.unflatten(0, (batch_size, -1)) for x in (q, k, v))
        keys, values = self.k_cache[layer], self.v_cache[layer]
        check_room(self.num_tokens, k.shape[1], keys.shape[1])
        end = self.num_tokens + k.shape[1]
        keys[:, self.num_tokens : end] = k
        values[:, self.num_tokens : end] = v
        window = self.spec.window_of(layer)
        start = first_key_of(self.num_tokens, window)
        keys, values = keys[:, start:end], values[:, start:end]
        mask = self.mask(start, end, window)
        scale = self.spec.attention_scale
        return masked_attention(q, keys, values, scale, mask).flatten(0, 1)

    def mask(self, start: int, end: int, window: int | None) -> Tensor:
        """Return which new column may look at which, [batch_size, num_new, columns].

        Args:
            start: The first column that is looked at.
            end: The column behind the last.
            window: Of the layer.
        """
        keys = torch.arange(start, end, device=self.k_cache.device)
        queries = keys[self.num_tokens - start :, None]
        is_text = keys >= self.num_padding[:, None, None]
        is_seen = causal_mask(len(queries), len(keys), window, keys.device)
        # Without a key to see, a softmax is NaN: padding sees itself.
        return is_seen & is_text | (keys == queries)

    def positions(self, num_new: int) -> Tensor:
        """Return the positions of the next columns, text after text, padding at 0."""
        end = self.num_tokens + num_new
        columns = torch.arange(self.num_tokens, end, device=self.k_cache.device)
        return (columns - self.num_padding[:, None]).clamp(min=0).flatten()

    def advance(self, num_new: int) -> None:
        """Count the columns that all layers have written; call it once per pass."""
        self.num_tokens += num_new

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the new columns, each text behind its own.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        num_new = len(x) // len(self.padding)
        check_room(self.num_tokens, num_new, self.k_cache.shape[2])
        own, texts = self._texts(num_new)
        y = torch.zeros_like(x)
        return y.index_copy_(
            0, own, texts.convolve(layer, x.index_select(0, own), weight)
        )

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the delta rule over the new columns, each text from its state on."""
        own, texts = self._texts(len(rows[0]) // len(self.padding))
        read = torch.zeros_like(rows[2])
        return read.index_copy_(
            0, own, texts.mix(layer, *(x.index_select(0, own) for x in rows))
        )

    def _texts(self, num_new: int) -> tuple[Tensor, RecurrentPass]:
        """Return the rows without padding, and whose they are."""
        assert self.states is not None
        lengths = [
            min(max(self.num_tokens + num_new - padding, 0), num_new)
            for padding in self.padding
        ]
        slots = [slot for slot, length in enumerate(lengths) if length]
        texts = TextRows(slots, [lengths[slot] for slot in slots])
        lines = np.arange(len(lengths) * num_new).reshape(len(lengths), num_new)
        is_text = np.arange(num_new) >= num_new - np.array(lengths)[:, np.newaxis]
        own = torch.from_numpy(lines[is_text]).to(self.k_cache.device)
        return own, RecurrentPass(self.states, texts)


def norm_of(spec: ModelSpec, size: int | None = None) -> RMSNorm:
    """Return a norm of hidden states, or of rows of a size, as the spec wants it."""
    return RMSNorm(size or spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Return who may look where, [num_queries, num_keys]: the queries come last."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    distances = queries.unsqueeze(1) - torch.arange(num_keys, device=device)
    if window is None:
        return distances >= 0
    return (distances >= 0) & (distances < window)


class MoE(nn.Module):
    """Experts in place of an MLP: each token goes to a few of them."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = moe.top_k, moe.norm_topk_prob
        self.gate = nn.Linear(spec.hidden_size, moe.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(spec, moe.intermediate_size, has_bias=False)
            for _ in range(moe.num_experts)
        )
        self.shared_expert: MLP | None = None
        if moe.shared_intermediate_size:
            size = moe.shared_intermediate_size
            self.shared_expert = MLP(spec, size, has_bias=False)
            self.shared_expert_gate = nn.Linear(spec.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        logits = self.gate(x)
        shares, experts = topk_softmax(logits, self.top_k, self.norm_topk_prob)
        y = torch.zeros_like(x)
        for index in experts.unique().tolist():
            tokens, places = torch.where(experts == index)
            rows = self.experts[index](x[tokens])
            y.index_add_(0, tokens, rows * shares[tokens, places, None].to(x.dtype))
        if self.shared_expert is not None:
            y += self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return y


def states_of(
    spec: ModelSpec, num_slots: int, device: torch.device, dtype: torch.dtype
) -> RecurrentStates | None:
    """Return states of texts without a token, None if no layer keeps any."""
    net = spec.delta_net
    return RecurrentStates(net, num_slots, device=device, dtype=dtype) if net else None
