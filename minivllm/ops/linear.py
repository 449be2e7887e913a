"""The op `linear`: y = x Wᵀ + b, with a weight that never changes.

An implementation is made once per weight and called once per step, so that it can
bring the weight into the order in which its kernel reads it:

    linear = choose_for("linear", weight).backend.implementation(weight, bias)
    y = linear(x)

In vLLM: vllm/model_executor/layers/utils.py (dispatch_cpu_unquantized_gemm).
Source: appendix A6, "The torch runner".
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.registry import Backend, define_op


class TorchLinear:
    """The reference: the weight as it is, [out_features, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in the tiles of oneDNN's kernels, copied there once.

    `F.linear` brings a bfloat16 weight into tiles at every call, which for a few rows
    costs more than the product. The weight that was given is not kept.
    """

    # oneDNN chooses the tiles for a number of rows; those for 16 serve a decoding
    # batch best and a long prompt as well as any.
    ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )


def why_not_packed(device: str, dtype: str) -> str | None:
    """Return why weights cannot be packed here, or None if they can."""
    if device != "cpu":
        return f"oneDNN packs weights for the CPU, not for {device}"
    return _why_packing_fails(dtype)


@cache
def _why_packing_fails(dtype: str) -> str | None:
    """Try it: the ops are private, and a build of torch may lack or change them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 48), (32, 48), (32,))  # x, weight, bias
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for shape in shapes
    )
    try:
        packed = PackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"oneDNN cannot pack {dtype} weights here ({str(error).splitlines()[0]})"
    exact = F.linear(x.double(), weight.double(), bias.double())
    if packed.dtype != x.dtype or not torch.allclose(
        packed.double(), exact, rtol=0.02, atol=0.05
    ):
        return f"oneDNN's product of packed {dtype} weights is wrong here"
    return None


define_op(
    "linear",
    [Backend("packed", PackedLinear, why_not_packed), Backend("torch", TorchLinear)],
)
