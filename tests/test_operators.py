"""Functions as operators of torch: known to compilers, and only what they promise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.ops.operators import operator


@operator("test_double(Tensor x) -> Tensor", fake=lambda x: torch.empty_like(x))
def double(x):
    """Return 2 * x."""
    return 2 * x.contiguous()


@operator("test_add_(Tensor(a!) x, Tensor y) -> ()", fake=lambda x, y: None)
def add_(x, y):
    """Add y to x."""
    x += y


def test_an_operator_is_called_like_the_function():
    assert double(torch.arange(3.0)).tolist() == [0, 2, 4]
    x = torch.ones(2)
    assert add_(x, torch.ones(2)) is None
    assert x.tolist() == [2, 2]


def test_its_namespace_is_the_package_it_is_defined_in():
    assert double == torch.ops.tests.test_double.default
    assert double.name() == "tests::test_double"


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_it_is_there_for_both_devices(device):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("tests::test_double", device)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [(double, (torch.rand(2, 3),)), (add_, (torch.rand(3), torch.rand(3)))],
)
def test_torchs_own_checks_pass(op, arguments):
    verdicts = torch.library.opcheck(op, arguments)
    assert set(verdicts.values()) == {"SUCCESS"}


def test_compiled_into_one_graph_it_does_the_same():
    def function(x):
        y = x + 1
        add_(y, x)
        return double(y.T).relu()

    x = torch.randn(3, 4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(x).equal(function(x))


def test_it_runs_on_a_device_that_is_not_there():
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
        assert double(x).device.type == "cuda"
        assert double(x).shape == (2, 3)


def test_a_definition_can_be_made_again():
    for factor in (3, 4):

        @operator("test_again(Tensor x) -> Tensor", fake=lambda x: torch.empty_like(x))
        def again(x, factor=factor):
            """Return x times a factor."""
            return factor * x

        assert again(torch.ones(1)).item() == factor
    assert torch.ops.tests.test_again(torch.ones(1)).item() == 4


def test_a_schema_that_lies_is_found_by_torchs_checks():
    @operator("test_lie(Tensor x, Tensor y) -> Tensor", fake=lambda x, y: x.clone())
    def lie(x, y):
        """Change x without saying so."""
        x += y
        return x.clone()

    with pytest.raises(Exception, match="not defined as mutable but was mutated"):
        torch.library.opcheck(lie, (torch.ones(2), torch.ones(2)))
