"""The ops of experts, in plain torch: choose, bring together, multiply, add up.

A *choice* is a token with one of its experts; choice `token * top_k + place` is the
one in that place, best first. The rows of a product are sorted by expert:

    weights, experts = topk_softmax(logits, top_k, renormalize)
    order, offsets = moe_permute(experts, num_experts)
    y = linear(x[order // top_k], offsets)  # linear = GroupedLinear(weight), once
    out = moe_combine(y, order, weights)

Invariant: what a token gets depends on its own numbers only, up to the rounding of the
product: equal scores are taken in order, and sums run in the order of the choices.

In vLLM: vllm/model_executor/layers/fused_moe/ (fused_topk, moe_align_block_size,
fused_experts).
Source: chapter 7, "One decoder, many families".
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.linear import PackedLinear, TorchLinear, why_not_packed
from minivllm.ops.registry import Backend, define_op


def topk_softmax(
    logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and the weight of each of them.

    The weights are a softmax over all experts, chosen or not.

    Args:
        logits: The scores of all experts, [num_tokens, num_experts].
        top_k: How many are chosen; of equal ones the first.
        renormalize: Whether the weights of the chosen are made to sum to one.

    Returns:
        Weights, float32, and experts, int64, both [num_tokens, top_k], largest first.
    """
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # topk() does not say which of equal numbers it takes; a stable sort does.
    weights, experts = weights.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights.narrow(1, 0, top_k), experts.narrow(1, 0, top_k)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


define_op("topk_softmax", [Backend("torch", topk_softmax)])


def moe_permute(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the choices of all tokens by expert, and those of an expert by number.

    Args:
        experts: [num_tokens, top_k] int64.
        num_experts: How many there are.

    Returns:
        The choice that stands in each row, [num_tokens * top_k] int64: row r is for
        token order[r] // top_k. Where the rows of each expert begin, and where the
        last one's end, [num_experts + 1] int32.
    """
    ordered, order = experts.flatten().sort(stable=True)
    begins = torch.arange(num_experts + 1, device=experts.device)
    return order, torch.searchsorted(ordered, begins, out_int32=True)


class GroupedLinear:
    """The op `grouped_linear`: y = x Wᵀ, each row with the weight of its expert.

    The reference: one product for each expert that has rows, nothing for the others.
    It has to know the offsets: on a GPU, the host waits for them.
    """

    linear: Callable[..., Callable[[Tensor], Tensor]] = TorchLinear  # of one expert

    def __init__(self, weight: Tensor) -> None:
        """Take the weights of all experts, [num_experts, out_features, in_features]."""
        self.experts = [self.linear(part) for part in weight]
        self.out_features = weight.shape[1]

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert.

        Args:
            x: [num_rows, in_features].
            offsets: First row of each expert, then num_rows, [num_experts + 1] int32.

        Returns:
            [num_rows, out_features].
        """
        bounds = zip(self.experts, pairwise(offsets.tolist()), strict=True)
        parts = [linear(x[begin:end]) for linear, (begin, end) in bounds if begin < end]
        return torch.cat(parts) if parts else x.new_empty(0, self.out_features)


def moe_combine(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Add up what the experts of each token say, each with its weight.

    Args:
        y: Rows sorted by expert, [num_tokens * top_k, hidden_size].
        order: The choice that stands in each row, [num_tokens * top_k] int64.
        weights: [num_tokens, top_k] float32.

    Returns:
        [num_tokens, hidden_size], like y; added in float32, in the order of choices.
    """
    said = torch.empty_like(y).index_copy_(0, order, y)  # in the order of choices
    said = said.view(*weights.shape, y.shape[1]).float()
    total, *others = (said * weights.unsqueeze(-1)).unbind(1)
    for other in others:
        total = total + other
    return total.to(y.dtype)


class PackedGroupedLinear(GroupedLinear):
    """The same with weights in the order in which the CPU reads them."""

    linear = PackedLinear


class StackedGroupedLinear:
    """One call for all experts; the offsets stay on the GPU."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.transpose(1, 2)  # a view: rows of W lie as they did

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert; as for `GroupedLinear`."""
        ends = offsets.narrow(0, 1, offsets.shape[0] - 1)
        return F.grouped_mm(x, self.weight, offs=ends)


def why_not_packed_experts(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why the weights of experts cannot be packed here, or None if they can."""
    return why_not_packed(device, dtype)


def why_not_grouped_mm(device: str, dtype: str, **sizes: int) -> str | None:
    """Return why torch has no single call for all experts here, or None if it has."""
    if device != "cuda" or dtype != "bfloat16":
        return f"torch groups products of bfloat16 on a GPU, not of {dtype} on {device}"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major not in (9, 10):  # elsewhere it copies the offsets to the host
            return f"torch has no kernel for compute capability {major}.{minor}"
    for name in ("hidden_size", "intermediate_size"):
        if sizes.get(name, 0) % 8:  # rows have to begin at multiples of 16 bytes
            return f"{name} is {sizes[name]}, no multiple of 8"
    return None


define_op("moe_permute", [Backend("torch", moe_permute)])
define_op(
    "grouped_linear",
    [
        Backend("packed", PackedGroupedLinear, why_not_packed_experts),
        Backend("grouped_mm", StackedGroupedLinear, why_not_grouped_mm),
        Backend("torch", GroupedLinear),
    ],
)
define_op("moe_combine", [Backend("torch", moe_combine)])
