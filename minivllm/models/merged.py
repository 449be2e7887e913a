"""The decoder made fast: the same numbers with fewer, larger operations.

q, k and v are one product, gate and up another. The work is done by ops, so that each
part runs in the best backend that this machine has. Called by the torch runner.

Invariant: `MergedDecoder` computes what `Decoder` does, up to rounding.

In vLLM: vllm/model_executor/layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear).
Source: appendix A6, "The torch runner"; chapter 7, "One decoder, many families";
    appendix A25, "Experts in the engine"; appendix A28, "Delta nets in torch".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.models.context import AttentionContext
from minivllm.models.decoder import Decoder, rope_tables
from minivllm.models.expert_counts import ExpertCounts
from minivllm.models.gated_delta_net import GatedDeltaNet
from minivllm.models.layers import MLP, Attention, DecoderLayer, MoE, RMSNorm
from minivllm.models.spec import ModelSpec
from minivllm.ops.linear import TorchLinear
from minivllm.ops.moe import GroupedLinear
from minivllm.ops.reference import TorchRMSNorm
from minivllm.ops.registry import Choice, choose_for

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


class Product(NamedTuple):
    """A weight and perhaps a bias: what is merged, like an `nn.Linear`."""

    weight: Tensor
    bias: Tensor | None


def merge(parts: Sequence[nn.Linear | Product], make_linear: MakeLinear) -> Linear:
    """Return one linear whose output is that of its parts, side by side."""
    if len(parts) == 1:
        return make_linear(parts[0].weight, parts[0].bias)
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    return make_linear(weight, torch.cat(biases) if biases else None)


class ExpertOps(NamedTuple):
    """The ops of experts; see `minivllm.ops.moe`."""

    topk_softmax: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    moe_permute: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    grouped_linear: type[GroupedLinear]  # or one like it
    moe_combine: Callable[[Tensor, Tensor, Tensor], Tensor]


class DecoderOps(NamedTuple):
    """The ops of a decoder: what the chosen backends make or do."""

    linear: type[TorchLinear]  # or one like it
    rms_norm: type[TorchRMSNorm]
    rotary_embedding: Callable[[Tensor, int, Tensor, Tensor], Tensor]
    act_and_mul: Callable[[Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    experts: ExpertOps | None = None  # in a model without any


class MergedAttention:
    """`layers.Attention` with one product for q, k and v."""

    def __init__(self, attention: Attention, ops: DecoderOps) -> None:
        parts: list[nn.Linear | Product]
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        if attention.has_gate:  # the gates go behind: so queries and keys are together
            parts[0], gates = split_gate(attention.q_proj, self.head_dim)
            parts.append(gates)
        self.num_heads = [part.weight.shape[0] // self.head_dim for part in parts]
        self.qkv_proj = merge(parts, ops.linear)
        self.o_proj = merge([attention.o_proj], ops.linear)
        self.rotary_embedding = ops.rotary_embedding
        self.qk_norms: list[Callable[[Tensor], Tensor]] = []
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = (attention.q_norm, attention.k_norm)
            self.qk_norms = [ops.rms_norm(n.weight, n.eps, n.plus_one) for n in norms]

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Return queries and keys normalised, each with its weight, and rotated."""
        results = []
        for norm, part in zip(self.qk_norms, (q, k), strict=True):
            # With a single head, the rows of a slice are not neighbours.
            rows = part.reshape(-1, self.head_dim).contiguous()
            rows = norm(rows).view(part.shape)
            results.append(self.rotate(rows, part.shape[1], cos, sin))
        return results

    def rotate(self, heads: Tensor, num: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the first heads, with so many dimensions rotated as there are angles.

        The op rotates whole heads: what is rotated becomes a head of its own.
        """
        if cos.shape[-1] == self.head_dim:
            return self.rotary_embedding(heads, num, cos, sin)
        sizes = [cos.shape[-1], self.head_dim - cos.shape[-1]]
        turned, rest = heads.narrow(1, 0, num).split(sizes, dim=-1)
        turned = self.rotary_embedding(turned.contiguous(), num, cos, sin)
        return torch.cat([turned, rest], dim=-1)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Mix the tokens. x is [num_tokens, hidden_size], as is the result."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q, k, v, *gates = heads.split(self.num_heads, dim=1)
        if self.qk_norms:
            q, k = self.rotated(q, k, cos, sin)
        else:  # both at once
            qk = self.rotate(heads, sum(self.num_heads[:2]), cos, sin)
            q, k = qk.split(self.num_heads[:2], dim=1)
        mixed = context.attend(self.layer, q, k, v)
        for gate in gates:
            mixed = mixed * gate.sigmoid()
        return self.o_proj(mixed.reshape(x.shape[0], -1))


class MergedMLP:
    """`layers.MLP` with one product for gate and up."""

    def __init__(self, mlp: MLP, ops: DecoderOps) -> None:
        self.gate_up_proj = merge([mlp.gate_proj, mlp.up_proj], ops.linear)
        self.down_proj = merge([mlp.down_proj], ops.linear)
        self.act_and_mul = ops.act_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        return self.down_proj(self.act_and_mul(self.gate_up_proj(x)))


class MergedLayer:
    """`layers.DecoderLayer` from merged parts."""

    def __init__(self, layer: DecoderLayer, ops: DecoderOps) -> None:
        def norm(of: RMSNorm) -> Callable[..., Tensor]:
            return ops.rms_norm(of.weight, of.eps, of.plus_one)

        self.input_layernorm = norm(layer.input_layernorm)
        self.mixer: MergedAttention | MergedDeltaNet
        if layer.is_recurrent:
            self.mixer = self.linear_attn = MergedDeltaNet(layer.linear_attn, ops)
        else:
            self.mixer = self.self_attn = MergedAttention(layer.self_attn, ops)
        self.post_attention_layernorm = norm(layer.post_attention_layernorm)
        self.post_norms = layer.post_norms
        if layer.post_norms:
            self.pre_feedforward_layernorm = norm(layer.pre_feedforward_layernorm)
            self.post_feedforward_layernorm = norm(layer.post_feedforward_layernorm)
        mlp = layer.mlp
        self.mlp: Callable[[Tensor], Tensor]
        if isinstance(mlp, MoE):
            self.mlp = MergedMoE(mlp, ops)
        else:
            self.mlp = MergedMLP(mlp, ops)

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
            context: Where keys and values, or states, are.

        Returns:
            What this layer has to add to x, once somebody asks.
        """
        mixed = self.mixer(self.input_layernorm(x, added), cos, sin, context)
        if not self.post_norms:
            return self.mlp(self.post_attention_layernorm(x, mixed))
        mixed = self.post_attention_layernorm(mixed)
        transformed = self.mlp(self.pre_feedforward_layernorm(x, mixed))
        return self.post_feedforward_layernorm(transformed)


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
        self.spec = decoder.spec
        choices = choose_ops(self.spec, weight)
        self.choices = {choice.op: choice for choice in choices.values()}
        ops = gather_ops(choices)
        self.frequencies = decoder.frequencies
        self.embed_tokens = decoder.embed_tokens
        # A number that the weights' type has: a graph takes no tensor of the CPU.
        scale = torch.tensor(self.spec.embedding_scale, dtype=weight.dtype)
        self.embedding_scale = scale.item()
        self.embedding = ops.embedding
        self.layers: list[MergedLayer] = []
        layers = list(cast(Any, decoder.layers))
        del decoder.layers
        layers.reverse()
        while layers:
            self.layers.append(MergedLayer(layers.pop(), ops))
        norm = decoder.norm
        self.norm = ops.rms_norm(norm.weight, norm.eps, norm.plus_one)
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
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        tables = [
            (torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
            for cos, sin in rope_tables(self.spec, self.frequencies, positions)
        ]
        added = None
        for index, layer in enumerate(self.layers):
            cos, sin = tables[self.spec.rope_index(index)]
            added = layer(x, added, cos, sin, context)
        return self.norm(x, added)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score every token as the next one, float32, [..., vocab_size]."""
        return self.lm_head(hidden_states).float()

    def count_experts(self) -> ExpertCounts:
        """Count from now on how many tokens each expert gets.

        Raises:
            ConfigError: The model has no experts.
        """
        moe = self.spec.moe
        if moe is None:
            raise ConfigError(
                f"{self.spec.architecture} has no experts to count: choose a model "
                "that has"
            )
        shape = (len(moe.layers), moe.num_experts)
        device = self.embed_tokens.weight.device
        num_rows = torch.zeros(shape, dtype=torch.int64, device=device)
        for row, layer in enumerate(moe.layers):
            cast(MergedMoE, self.layers[layer].mlp).num_rows = num_rows[row]
        return ExpertCounts(moe.layers, num_rows)


def choose_ops(spec: ModelSpec, weight: Tensor) -> dict[str, Choice]:
    """Choose the ops that a decoder needs, by their use.

    Args:
        spec: The model.
        weight: Any of its weights, for device and number type.
    """
    names = {name: name for name in DecoderOps._fields if name != "experts"}
    names["act_and_mul"] = f"{spec.hidden_act}_and_mul"
    choices = {use: choose_for(op, weight) for use, op in names.items()}
    if spec.moe is not None:
        sizes = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.moe.intermediate_size,
            "num_experts": spec.moe.num_experts,
            "top_k": spec.moe.top_k,
        }
        choices |= {op: choose_for(op, weight, **sizes) for op in ExpertOps._fields}
    return choices


def gather_ops(choices: dict[str, Choice]) -> DecoderOps:
    """Return what the chosen backends make or do."""
    chosen: dict[str, Any] = {
        use: choice.backend.implementation for use, choice in choices.items()
    }
    experts = {use: chosen.pop(use) for use in ExpertOps._fields if use in chosen}
    return DecoderOps(**chosen, experts=ExpertOps(**experts) if experts else None)


def stack_experts(experts: list[MLP], *names: str) -> Tensor:
    """Return one weight of all experts: in each, the named ones below one another.

    Returns:
        [num_experts, out_features, in_features].
    """
    parts = [getattr(expert, name).weight for expert in experts for name in names]
    return torch.cat(parts).view(len(experts), -1, parts[0].shape[1])


class MergedMoE:
    """`layers.MoE` with one product for the rows of all experts."""

    def __init__(self, moe: MoE, ops: DecoderOps) -> None:
        assert ops.experts is not None
        self.topk_softmax, self.moe_permute, make_linear, self.moe_combine = ops.experts
        self.top_k, self.norm_topk_prob = moe.top_k, moe.norm_topk_prob
        self.num_experts = len(moe.experts)
        self.gate = merge([moe.gate], ops.linear)
        experts = cast(list[MLP], list(moe.experts))
        gate_up = stack_experts(experts, "gate_proj", "up_proj")
        self.gate_up_proj = make_linear(gate_up)
        self.down_proj = make_linear(stack_experts(experts, "down_proj"))
        self.act_and_mul = ops.act_and_mul
        self.num_rows: Tensor | None = None  # of each expert, where somebody counts
        self.shared_expert: MergedMLP | None = None
        if moe.shared_expert is not None:
            self.shared_expert = MergedMLP(moe.shared_expert, ops)
            self.shared_expert_gate = merge([moe.shared_expert_gate], ops.linear)

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row. x is [num_tokens, hidden_size], as is the result."""
        logits = self.gate(x)
        weights, experts = self.topk_softmax(logits, self.top_k, self.norm_topk_prob)
        order, offsets = self.moe_permute(experts, self.num_experts)
        if self.num_rows is not None:
            self.num_rows += offsets.diff()
        rows = x.index_select(0, order // self.top_k)
        rows = self.act_and_mul(self.gate_up_proj(rows, offsets))
        y = self.moe_combine(self.down_proj(rows, offsets), order, weights)
        if self.shared_expert is not None:
            y += self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return y


def split_gate(q_proj: nn.Linear, head_dim: int) -> tuple[Product, Product]:
    """Return the product of all queries, and that of all gates: they lie in turns."""
    weights = q_proj.weight.unflatten(0, (-1, 2, head_dim)).unbind(1)
    biases: Sequence[Tensor | None] = (None, None)
    if q_proj.bias is not None:
        biases = q_proj.bias.view(-1, 2, head_dim).unbind(1)
    queries, gates = (
        Product(weight.flatten(0, 1), None if bias is None else bias.flatten())
        for weight, bias in zip(weights, biases, strict=True)
    )
    return queries, gates


class MergedDeltaNet:
    """`gated_delta_net.GatedDeltaNet` with one product for all that it begins with."""

    def __init__(self, net: GatedDeltaNet, ops: DecoderOps) -> None:
        parts = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
        self.sizes = [part.weight.shape[0] for part in parts]
        self.in_proj = merge(parts, ops.linear)
        self.out_proj = merge([net.out_proj], ops.linear)
        del net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a, net.out_proj
        self.mix = net.mix

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Mix the tokens, which need no positions; as `MergedAttention`."""
        parts = self.in_proj(x).split(self.sizes, dim=1)
        return self.out_proj(self.mix(*parts, context))
