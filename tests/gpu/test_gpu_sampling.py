"""The choice of tokens on the device: contracts, graphs, and the tokens of the CPU."""

import pytest
import torch

from minivllm.ops.cuda_sampling import kernel_argmax, kernel_draw
from minivllm.ops.draw import draw as draw_in_torch
from tests.test_cuda_sampling import draw_arguments


def on(device: str, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return arguments on a device."""
    return {name: x.to(device) for name, x in arguments.items()}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Return 64 rows of a vocabulary, half of them with cuts."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 49_152, generator=random) * 3
    return {
        "logits": logits,
        "largest": logits.amax(dim=-1),
        "rows": torch.randperm(64, generator=random),
        "temperatures": torch.rand(64, generator=random).double() + 0.5,
        "uniforms": torch.rand(64, generator=random, dtype=torch.float64),
        "min_p": torch.rand(32, generator=random).double() / 100,
        "top_k": torch.randint(1, 49_152, (32,), generator=random),
        "top_p": torch.rand(32, generator=random).double(),
    }


def test_torchs_own_checks_pass(gpu):
    arguments = on(gpu, draw_arguments())
    for operator, given in (
        (kernel_argmax, (arguments["logits"],)),
        (kernel_draw, tuple(arguments.values())),
    ):
        verdicts = torch.library.opcheck(operator, given)
        assert set(verdicts.values()) == {"SUCCESS"}


def test_the_tokens_are_those_of_the_cpu(gpu, batch):
    expected = draw_in_torch(**batch)
    given = on(gpu, batch)
    largest, ids = kernel_argmax(given["logits"])
    assert largest.cpu().equal(batch["largest"])
    assert ids.cpu().equal(batch["logits"].argmax(dim=-1))
    drawn = kernel_draw(**given)
    # A number may fall within rounding of a border: hardly ever one of 64.
    assert (drawn.cpu() != expected).sum() <= 1
    for _ in range(20):
        assert kernel_draw(**given).equal(drawn), "masses do not depend on the order"


def test_a_request_gets_the_same_token_alone(gpu, batch):
    given = on(gpu, batch)
    drawn = kernel_draw(**given)
    names = ("rows", "temperatures", "uniforms", "min_p", "top_k", "top_p")
    for i in range(32):
        alone = given | {name: given[name][i : i + 1] for name in names}
        assert kernel_draw(**alone).equal(drawn[i : i + 1])


def test_a_draw_is_captured_into_a_graph(gpu, batch):
    given = on(gpu, batch)
    expected = kernel_draw(**given)  # loads, too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = kernel_argmax(given["logits"])
        drawn = kernel_draw(**given)
    graph.replay()
    assert drawn.equal(expected)
    given["logits"].copy_(given["logits"].flip(-1))
    graph.replay()
    assert ids.equal(given["logits"].argmax(dim=-1))
    assert drawn.equal(kernel_draw(**given))
