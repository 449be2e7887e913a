"""A gated delta net in torch: the layer, and what it keeps of several texts.

Invariant: a state is changed by the tokens of its own text only, in their order,
whatever else is in the pass.

In vLLM: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py
(QwenGatedDeltaNetAttention), vllm/v1/attention/backends/gdn_attn.py
(GDNAttentionMetadata).
Source: appendix A28, "Delta nets in torch".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.models.context import AttentionContext
from minivllm.models.spec import DeltaNetSpec, ModelSpec
from minivllm.ops.delta_net import (
    causal_conv1d,
    chunked_delta_rule,
    recurrent_delta_rule,
)
from minivllm.ops.registry import Choice, choose_for


class DeltaOps(NamedTuple):
    """The ops of a delta net; see `minivllm.ops.delta_net`."""

    causal_conv1d: Callable[..., Tensor]
    recurrent_delta_rule: Callable[..., Tensor]
    chunked_delta_rule: Callable[..., Tensor]


PLAIN_OPS = DeltaOps(causal_conv1d, recurrent_delta_rule, chunked_delta_rule)


def choose_delta_ops(net: DeltaNetSpec, weight: Tensor) -> dict[str, Choice]:
    """Choose the ops of a delta net, on the device and in the dtype of a weight."""
    sizes = {
        "key_head_dim": net.key_head_dim,
        "value_head_dim": net.value_head_dim,
        "group_size": net.num_value_heads // net.num_key_heads,
        "conv_kernel_size": net.conv_kernel_size,
    }
    return {op: choose_for(op, weight, **sizes) for op in DeltaOps._fields}


class RecurrentStates:
    """What the delta nets of a model keep of several texts, a slot for each.

    Attributes:
        index: Place of a layer among the delta nets.
        conv: In the dtype of the model, [num_delta_nets, num_slots, conv_size,
            conv_kernel_size - 1].
        recurrent: float32, [num_delta_nets, num_slots, num_value_heads, key_head_dim,
            value_head_dim].
    """

    def __init__(
        self,
        net: DeltaNetSpec,
        num_slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make slots for texts without a token: all zeros."""
        shape = (len(net.layers), num_slots)
        self.index = {layer: index for index, layer in enumerate(net.layers)}
        self.conv = torch.zeros(
            (*shape, *net.conv_state_shape), device=device, dtype=dtype
        )
        self.recurrent = torch.zeros(
            (*shape, *net.state_shape), device=device, dtype=torch.float32
        )

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Let some slots be as others; no target is a source."""
        if sources.numel():
            for states in (self.conv, self.recurrent):
                states.index_copy_(1, targets, states.index_select(1, sources))

    def clear(self, slots: Tensor) -> None:
        """Let texts without a token have these slots."""
        if slots.numel():
            for states in (self.conv, self.recurrent):
                states.index_fill_(1, slots, 0)


class TextRows:
    """Whose the rows of a flat batch are, in numbers for a device.

    The rules take texts with a single token first, then the others; `order` brings the
    rows into this order, and `places` back. Both are empty if they are in order.
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Note texts that lie one behind another.

        Args:
            slots: Where the states of each are, all different.
            lengths: How many new tokens each has, at least one.
        """
        counts, of = (np.array(x, dtype=np.int64) for x in (lengths, slots))
        ends = np.cumsum(counts)
        singles, longer = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        self.num_single, self.longer = len(singles), counts[longer].tolist()
        self.order = self.places = np.empty(0, dtype=np.int64)
        sorted_texts = np.concatenate([singles, longer])
        if (np.diff(sorted_texts) < 0).any():
            rows = [np.arange(ends[t] - counts[t], ends[t]) for t in sorted_texts]
            self.order = np.concatenate(rows)
            self.places = np.argsort(self.order)
        self.slots, self.starts = of, np.concatenate([[0], ends])
        self.sorted_slots = of[sorted_texts]
        self.longer_starts = np.concatenate([[0], np.cumsum(counts[longer])])

    def arrays(self) -> list[np.ndarray]:
        """Return what the device has to know, int64."""
        return [
            *(self.slots, self.starts, self.sorted_slots, self.longer_starts),
            *(self.order, self.places),
        ]


class RecurrentPass:
    """The part of delta nets in a context: states, and whose rows are whose."""

    def __init__(
        self,
        states: RecurrentStates,
        rows: TextRows,
        tensors: Sequence[Tensor] | None = None,
        ops: DeltaOps = PLAIN_OPS,
    ) -> None:
        """Prepare what all layers share.

        Args:
            states: Changed by `convolve` and `mix`.
            rows: Of a pass.
            tensors: `rows.arrays()` on the device of the states; made if not given.
            ops: What runs.
        """
        if tensors is None:
            device = states.conv.device
            tensors = [torch.from_numpy(x).to(device) for x in rows.arrays()]
        self.states, self.ops = states, ops
        self.num_single, self.longer = rows.num_single, rows.longer
        self.slots, self.starts, self.sorted_slots, self.longer_starts = tensors[:4]
        self.order, self.places = tensors[4:]

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve each text behind its own tokens; see `AttentionContext`."""
        states = self.states.conv[self.states.index[layer]]
        return self.ops.causal_conv1d(x, weight, states, self.slots, self.starts)

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the rule, each text from its own state on; see `AttentionContext`."""
        states = self.states.recurrent[self.states.index[layer]]
        if self.order.numel():
            rows = tuple(x.index_select(0, self.order) for x in rows)
        num, reads = self.num_single, []
        if num:
            singles = (x[:num] for x in rows)
            reads.append(
                self.ops.recurrent_delta_rule(*singles, states, self.sorted_slots[:num])
            )
        if self.longer:
            longer = (x[num:] for x in rows)
            texts = (self.sorted_slots[num:], self.longer_starts, self.longer)
            reads.append(self.ops.chunked_delta_rule(*longer, states, *texts))
        read = torch.cat(reads) if len(reads) > 1 else reads[0]
        return read.index_select(0, self.places) if self.places.numel() else read


class GatedRMSNorm(nn.Module):
    """Scale each row to a root mean square of one, by a weight, and by silu(gate)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise over the last axis; gate is like x."""
        x_float = x.float()
        mean_square = x_float.square().mean(-1, keepdim=True)
        normed = (x_float * torch.rsqrt(mean_square + self.eps)).to(x.dtype)
        return (normed * self.weight * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Let the tokens exchange information through a state of a fixed size."""

    def __init__(self, spec: ModelSpec, net: DeltaNetSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.key_head_dim = layer, net.key_head_dim
        self.sizes = [net.key_size, net.key_size, net.value_size]
        for name, size in (
            ("qkv", net.conv_size),
            ("z", net.value_size),
            ("b", net.num_value_heads),
            ("a", net.num_value_heads),
        ):
            linear = nn.Linear(spec.hidden_size, size, bias=False)
            self.add_module(f"in_proj_{name}", linear)
        self.conv1d = nn.Conv1d(
            net.conv_size,
            net.conv_size,
            net.conv_kernel_size,
            groups=net.conv_size,
            bias=False,
        )
        self.dt_bias = nn.Parameter(torch.empty(net.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(net.num_value_heads))
        # The weight of this norm is plain, whatever those of the other norms are.
        self.norm = GatedRMSNorm(net.value_head_dim, spec.rms_norm_eps)
        self.out_proj = nn.Linear(net.value_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, context: AttentionContext[Tensor]) -> Tensor:
        """Mix the tokens. x is [num_tokens, hidden_size], as is the result."""
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return self.out_proj(self.mix(*(part(x) for part in parts), context))

    def mix(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, context: AttentionContext
    ) -> Tensor:
        """Do what lies between the products.

        Args:
            qkv: Queries, keys and values, [num_tokens, conv_size].
            z: Of the gate, [num_tokens, value_size].
            b: How much is written, [num_tokens, num_value_heads].
            a: How fast the state fades, like b.
            context: Where the states are.

        Returns:
            Like z.
        """
        qkv = context.convolve(self.layer, qkv, self.conv1d.weight.squeeze(1))
        q, k, v = qkv.split(self.sizes, dim=1)
        q, k = (x.unflatten(1, (-1, self.key_head_dim)) for x in (q, k))
        v = v.unflatten(1, (b.shape[1], -1))
        speed = F.softplus(a.float() + self.dt_bias.float())
        log_decay = -self.A_log.float().exp() * speed
        read = context.mix(self.layer, q, k, v, log_decay, b.float().sigmoid())
        return self.norm(read, z.reshape(read.shape)).flatten(1)
