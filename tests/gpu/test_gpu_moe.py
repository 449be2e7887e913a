"""Experts on the device: contracts, graphs, and the results of the CPU."""

import pytest
import torch

from minivllm.ops import moe
from minivllm.ops.cuda_moe import (
    KernelGroupedLinear,
    kernel_grouped_linear,
    kernel_moe_combine,
    kernel_moe_permute,
    kernel_topk_softmax,
)
from tests.op_tools import assert_close

TOP_K = 4


def layer(
    x: torch.Tensor, logits: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run the four steps, with one product; return what each step returns."""
    weights, experts = kernel_topk_softmax(logits, TOP_K, True)
    order, offsets = kernel_moe_permute(experts, logits.shape[1])
    y = KernelGroupedLinear(weight)(x[order // TOP_K], offsets)
    return weights, experts, order, offsets, kernel_moe_combine(y, order, weights)


def same_on_cpu(
    x: torch.Tensor, logits: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Do the same with the references."""
    x, logits, weight = x.cpu(), logits.cpu(), weight.cpu()
    weights, experts = moe.topk_softmax(logits, TOP_K, True)
    order, offsets = moe.moe_permute(experts, logits.shape[1])
    y = moe.GroupedLinear(weight.float())(x[order // TOP_K].float(), offsets)
    return weights, experts, order, offsets, moe.moe_combine(y, order, weights)


@pytest.fixture(params=[torch.float32, torch.float16])
def batch(request, gpu) -> list[torch.Tensor]:
    """Return 600 tokens, 32 experts, and their weights."""
    random = torch.Generator().manual_seed(0)
    shapes = ((600, 256), (600, 32), (32, 192, 256))
    x, logits, weight = (torch.randn(shape, generator=random) for shape in shapes)
    return [t.to(gpu, request.param) for t in (x, logits, weight / 16)]


def test_a_layer_is_that_of_the_cpu(batch):
    *ours, y = layer(*batch)
    *theirs, expected = same_on_cpu(*batch)
    for x, other in zip(ours[1:], theirs[1:], strict=True):
        assert x.cpu().equal(other)
    torch.testing.assert_close(ours[0].cpu(), theirs[0])
    assert_close(y.cpu(), expected.to(y.dtype), units=32)


def test_a_token_gets_the_same_bits_alone(batch):
    x, logits, weight = batch
    *_, whole = layer(*batch)
    for i in (0, 17, 599):
        *_, y = layer(x[i : i + 1], logits[i : i + 1], weight)
        assert y.equal(whole[i : i + 1])


def test_a_graph_follows_the_router(batch):
    """A replay sorts and multiplies by new choices: nobody has asked the GPU."""
    layer(*batch)  # loads what cannot be loaded during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(*batch)
    logits = batch[1]
    for new in (logits.flip(0).clone(), torch.zeros_like(logits)):
        logits.copy_(new)
        graph.replay()
        for ours, theirs in zip(captured, layer(*batch), strict=True):
            assert ours.equal(theirs)


def test_torchs_own_checks_pass(batch):
    x, logits, weight = batch
    weights, experts, order, offsets, _ = layer(*batch)
    rows = x[order // TOP_K]
    for operator, given in (
        (kernel_topk_softmax, (logits, TOP_K, True)),
        (kernel_moe_permute, (experts, 32)),
        (kernel_grouped_linear, (rows, weight, offsets)),
        (kernel_moe_combine, (rows, order, weights)),
    ):
        verdicts = torch.library.opcheck(operator, given)
        assert set(verdicts.values()) == {"SUCCESS"}
