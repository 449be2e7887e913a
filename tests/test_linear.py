"""The op `linear`: packed weights give the products of plain ones."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from minivllm.errors import BackendUnavailable
from minivllm.ops import linear
from minivllm.ops.linear import (
    PackedLinear,
    TorchLinear,
    why_not_packed,
)
from minivllm.ops.registry import choose_for

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

needs_packing = pytest.mark.skipif(
    why_not_packed("cpu", "float32") is not None, reason="torch without oneDNN"
)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv("MINIVLLM_OP_LINEAR", raising=False)


def arrays(num_rows, dtype, num_columns=40, num_outputs=24):
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, num_columns), (num_outputs, num_columns), (num_outputs,))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@needs_packing
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 200])
def test_packed_products_are_those_of_the_reference(num_rows, dtype, has_bias):
    if reason := why_not_packed("cpu", str(dtype).removeprefix("torch.")):
        pytest.skip(reason)
    x, weight, bias = arrays(num_rows, dtype)
    bias = bias if has_bias else None
    ours = PackedLinear(weight, bias)(x)
    exact = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert ours.dtype == dtype
    error = (ours.double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCE[dtype]


@needs_packing
def test_inputs_are_not_changed():
    x, weight, bias = arrays(3, torch.float32)
    before = [array.clone() for array in (x, weight, bias)]
    PackedLinear(weight, bias)(x)
    assert all(a.equal(b) for a, b in zip(before, (x, weight, bias), strict=True))


@needs_packing
def test_a_packed_weight_does_not_keep_the_one_that_was_given():
    x, weight, _ = arrays(2, torch.float32)
    before = F.linear(x, weight)
    packed, given = PackedLinear(weight), weakref.ref(weight)
    del weight
    gc.collect()
    assert given() is None
    assert torch.allclose(packed(x), before, atol=1e-5)


@needs_packing
def test_rows_of_another_view_are_multiplied_as_they_are():
    x, weight, _ = arrays(6, torch.float32)
    assert PackedLinear(weight)(x[::2]).equal(PackedLinear(weight)(x[::2].clone()))


def test_a_gpu_takes_plain_weights():
    assert "not for cuda" in why_not_packed("cuda", "float32")


def test_a_build_without_the_private_ops_says_so(monkeypatch):
    class Missing(PackedLinear):
        def __init__(self, weight, bias):
            torch.ops.mkldnn._no_such_op(weight)

    monkeypatch.setattr(linear, "PackedLinear", Missing)
    reason = linear._why_packing_fails.__wrapped__("float32")
    assert "cannot pack float32" in reason
    assert "_no_such_op" in reason


def test_wrong_products_are_found_before_they_are_used(monkeypatch):
    class Wrong(TorchLinear):
        def __call__(self, x):
            return super().__call__(x) + 0.5

    monkeypatch.setattr(linear, "PackedLinear", Wrong)
    assert "is wrong" in linear._why_packing_fails.__wrapped__("float32")


def test_float64_falls_back_to_the_reference_with_a_reason():
    choice = choose_for("linear", torch.zeros(2, 2, dtype=torch.float64))
    assert choice.backend.implementation is TorchLinear
    assert "float64" in choice.passed_over["packed"]


def test_a_forced_packing_that_is_impossible_is_an_error(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_LINEAR", "packed")
    with pytest.raises(BackendUnavailable, match="float64"):
        choose_for("linear", torch.zeros(2, 2, dtype=torch.float64))
