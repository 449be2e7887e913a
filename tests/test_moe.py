"""Experts: which ones a token goes to, rows brought together, and the sum."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from minivllm.models.decoder import Decoder
from minivllm.models.layers import MoE
from minivllm.models.merged import MergedDecoder, MergedMoE, choose_ops, gather_ops
from minivllm.models.spec import MoeSpec
from minivllm.ops.cpu import (
    CompiledGroupedLinear,
    compiled_moe_combine,
    compiled_moe_permute,
    compiled_topk_softmax,
    why_not_compiled,
)
from minivllm.ops.moe import (
    GroupedLinear,
    PackedGroupedLinear,
    StackedGroupedLinear,
    moe_combine,
    moe_permute,
    topk_softmax,
    why_not_grouped_mm,
)
from minivllm.ops.registry import OPS, choose
from minivllm.reference.decoder import NumpyDecoder
from minivllm.reference.moe import route
from tests.tiny_decoders import SPEC

MOE = MoeSpec(
    layers=(0, 2),
    num_experts=5,
    top_k=2,
    intermediate_size=12,
    norm_topk_prob=True,
    shared_intermediate_size=8,
)
GROUPED = {
    "torch": GroupedLinear,
    "packed": PackedGroupedLinear,
    "compiled": CompiledGroupedLinear,
    "grouped_mm": StackedGroupedLinear,
}


def random_weights(spec):
    """Draw weights that keep the size of what passes, and routers that differ."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        noise = random.standard_normal(shape, dtype=np.float32)
        is_norm = len(shape) == 1
        weights[name] = 1 + 0.3 * noise if is_norm else noise / shape[1] ** 0.5
    return weights


def make_experts(dtype=torch.float32, **knobs):
    """Return a layer of experts, in the form that is read and in the grouped one."""
    spec = replace(SPEC, moe=replace(MOE, **knobs))
    decoder = Decoder(spec)
    weights = random_weights(spec)
    decoder.load_weights({k: torch.from_numpy(w).to(dtype) for k, w in weights.items()})
    plain = decoder.layers[2].mlp
    assert isinstance(plain, MoE)
    weight = decoder.embed_tokens.weight
    return plain, MergedMoE(plain, gather_ops(choose_ops(spec, weight)))


def random_rows(num_rows, dtype=torch.float32, size=SPEC.hidden_size):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, size, generator=generator).to(dtype)


def skip_without(backend, dtype):
    """Skip what this machine has no backend for."""
    if backend in ("packed", "compiled"):
        backends = {b.name: b for b in OPS["grouped_linear"]}
        dtype = str(dtype).removeprefix("torch.")
        if reason := backends[backend].why_not("cpu", dtype):
            pytest.skip(reason)


def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def test_shares_are_a_softmax_over_all_experts():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    exponentials = logits.exp()
    weights, experts = topk_softmax(logits, 2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    expected = exponentials[:, [1, 2]] / exponentials.sum()
    assert torch.allclose(weights, expected)
    weights, _ = topk_softmax(logits, 2, renormalize=True)
    assert torch.allclose(weights, expected / expected.sum())


def test_shares_are_float32_and_experts_int64():
    weights, experts = topk_softmax(random_rows(3).bfloat16(), 4, renormalize=True)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int64
    assert torch.allclose(weights.sum(1), torch.ones(3))


@pytest.mark.parametrize("top_k", [1, 3, 128])
def test_of_equal_experts_the_first_are_chosen(top_k):
    _, experts = topk_softmax(torch.zeros(2, 128), top_k, renormalize=False)
    assert experts.tolist() == [list(range(top_k))] * 2


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_two_routers_agree(renormalize):
    logits = random_rows(7, size=9)
    ours = topk_softmax(logits, 3, renormalize)
    theirs = route(logits.numpy(), 3, renormalize)
    assert torch.allclose(ours[0], torch.from_numpy(theirs[0]))
    assert ours[1].tolist() == theirs[1].tolist()


def test_choices_of_six_tokens_are_sorted_by_expert():
    experts = torch.tensor([[2, 0], [0, 3], [3, 0], [2, 3], [0, 2], [3, 2]])
    order, offsets = moe_permute(experts, 4)
    # Four choices of expert 0, none of expert 1, four each of 2 and of 3.
    assert order.tolist() == [1, 2, 5, 8, 0, 6, 9, 11, 3, 4, 7, 10]
    assert offsets.tolist() == [0, 4, 4, 8, 12]
    assert order.dtype == torch.int64 and offsets.dtype == torch.int32


def test_no_tokens_are_sorted_into_no_rows():
    order, offsets = moe_permute(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.tolist() == [] and offsets.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", GROUPED)
def test_each_row_is_multiplied_with_the_weight_of_its_expert(backend, dtype):
    offsets = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    weight = random_rows(4 * 24, dtype, size=16).view(4, 24, 16)
    x = random_rows(9, dtype)
    expected = torch.stack(
        [
            weight[expert].double() @ x[row].double()
            for row, expert in enumerate([0, 0, 0, 2, 3, 3, 3, 3, 3])
        ]
    )
    skip_without(backend, dtype)
    y = GROUPED[backend](weight)(x, offsets)
    assert y.dtype == dtype and y.shape == (9, 24)
    assert relative_error(y, expected) < {torch.float32: 1e-6}.get(dtype, 5e-3)


@pytest.mark.parametrize("backend", GROUPED)
def test_an_expert_without_rows_is_not_read(backend):
    skip_without(backend, torch.float32)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    weight = random_rows(3 * 8, size=16).view(3, 8, 16)
    weight[1] = torch.nan
    assert GROUPED[backend](weight)(random_rows(5), offsets).isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "packed", "compiled"])
def test_no_rows_make_an_empty_product(backend):
    skip_without(backend, torch.float32)
    linear = GROUPED[backend](torch.ones(3, 8, 16))
    assert linear(torch.empty(0, 16), torch.zeros(4, dtype=torch.int32)).shape == (0, 8)


def test_rows_go_back_to_their_tokens_with_their_weights():
    experts = torch.tensor([[1, 0], [0, 2]])
    order, _ = moe_permute(experts, 3)  # choices 1, 2, 0, 3
    y = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    weights = torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    # token 0: 0.5 of expert 1's 100 and 0.25 of expert 0's 1, and so on
    assert moe_combine(y, order, weights).tolist() == [[50.25], [1001.25]]


def test_the_sum_is_rounded_once():
    y = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    order, weights = torch.arange(3), torch.ones(1, 3)
    # In bfloat16, 256 + 1 is 256, and adding another 1 is lost as well.
    assert moe_combine(y, order, weights).tolist() == [[258.0]]


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_loop_the_grouped_form_and_numpy_agree(renormalize, shared):
    knobs = {"norm_topk_prob": renormalize, "shared_intermediate_size": shared}
    plain, merged = make_experts(**knobs)
    x = random_rows(11)
    spec = replace(SPEC, moe=replace(MOE, **knobs))
    numpy = NumpyDecoder(spec, random_weights(spec)).experts(2, x.numpy())
    with torch.inference_mode():
        expected = plain(x)
        assert relative_error(merged(x), expected) < 1e-6
    assert relative_error(torch.from_numpy(numpy), expected) < 1e-6


@pytest.mark.parametrize("backend", ["torch", "packed", "compiled"])
def test_every_backend_gives_the_same_layer(backend, monkeypatch):
    skip_without(backend, torch.float32)
    monkeypatch.setenv("MINIVLLM_OP_GROUPED_LINEAR", backend)
    others = "torch" if backend == "packed" else backend
    for op in ("TOPK_SOFTMAX", "MOE_PERMUTE", "MOE_COMBINE"):
        monkeypatch.setenv(f"MINIVLLM_OP_{op}", others)
    plain, merged = make_experts()
    assert type(merged.down_proj) is GROUPED[backend]
    with torch.inference_mode():
        assert relative_error(merged(random_rows(6)), plain(random_rows(6))) < 1e-6


def test_a_layer_is_close_in_bfloat16():
    plain, merged = make_experts(torch.bfloat16)
    exact, _ = make_experts()
    x = random_rows(40, torch.bfloat16)
    with torch.inference_mode():
        expected = exact(x.float())
        # Scores are rounded, so a token may go to another, nearly equal expert.
        for ours in (plain(x), merged(x)):
            errors = (ours.float() - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.median() < 1e-2


def test_a_token_does_not_notice_the_others():
    _, merged = make_experts()
    x = random_rows(9)
    with torch.inference_mode():
        together = merged(x)
        for row in range(9):
            alone = merged(x[row : row + 1])[0]
            assert relative_error(alone, together[row]) < 1e-6
        assert relative_error(merged(x.flip(0)).flip(0), together) < 1e-6


def test_the_input_is_left_alone():
    plain, merged = make_experts()
    x = random_rows(5)
    with torch.inference_mode():
        plain(x)
        merged(x)
    assert x.equal(random_rows(5))


def test_each_weight_is_in_memory_once():
    spec = replace(SPEC, moe=MOE)
    decoder = Decoder(spec)
    weights = random_weights(spec)
    decoder.load_weights({k: torch.from_numpy(w) for k, w in weights.items()})
    plain = decoder.layers[2].mlp
    ops = gather_ops(choose_ops(spec, decoder.embed_tokens.weight))
    stacked = ops.experts._replace(grouped_linear=GroupedLinear)
    linear = MergedMoE(plain, ops._replace(experts=stacked)).gate_up_proj
    storages = {part.weight.untyped_storage().data_ptr() for part in linear.experts}
    assert len(storages) == 1
    assert linear.experts[0].weight.untyped_storage().nbytes() == 4 * 5 * 24 * 16


def test_on_a_gpu_nobody_waits_for_the_offsets():
    """A number of a tensor that is not there cannot be asked for."""
    spec = replace(SPEC, moe=replace(MOE, intermediate_size=16))
    on_gpu = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder = Decoder(spec)
        shapes = spec.weight_shapes()
        decoder.load_weights({n: torch.empty(shapes[n], **on_gpu) for n in shapes})
        merged = MergedDecoder(decoder)
        assert merged.choices["grouped_linear"].backend.name == "grouped_mm"
        y = merged.layers[0].mlp(torch.empty(7, spec.hidden_size, **on_gpu))
        assert y.shape == (7, spec.hidden_size) and y.device.type == "cuda"
        loop = GroupedLinear(torch.empty(5, 8, 16, **on_gpu))
        offsets = torch.empty(6, dtype=torch.int32, device="cuda")
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            loop(torch.empty(7, 16, **on_gpu), offsets)


def test_a_grouped_product_of_torch_says_why_it_cannot_run():
    assert "not of float32 on cuda" in why_not_grouped_mm("cuda", "float32")
    assert "on cpu" in why_not_grouped_mm("cpu", "bfloat16")
    reason = why_not_grouped_mm(
        "cuda", "bfloat16", hidden_size=64, intermediate_size=12
    )
    assert "intermediate_size is 12" in reason


def test_a_dense_model_has_no_ops_of_experts():
    decoder = Decoder(SPEC)
    weights = random_weights(SPEC)
    decoder.load_weights({k: torch.from_numpy(w) for k, w in weights.items()})
    assert "grouped_linear" not in MergedDecoder(decoder).choices
    assert choose("grouped_linear", "cpu", "float32").passed_over.keys() <= {
        *("cuda", "emulated", "compiled", "packed", "grouped_mm")
    }


needs_compiler = pytest.mark.skipif(
    why_not_compiled("cpu", "float32") is not None, reason="there is no C++ compiler"
)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(0, 4, 2), (1, 1, 1), (7, 5, 5), (33, 128, 8), (300, 60, 4)],
)
def test_compiled_operations_say_what_the_references_say(
    num_tokens, num_experts, top_k, renormalize, dtype
):
    logits = 3 * random_rows(num_tokens, size=num_experts)
    logits = logits.to(dtype)  # in bfloat16 some are equal
    expected = topk_softmax(logits, top_k, renormalize)
    weights, experts = compiled_topk_softmax(logits, top_k, renormalize)
    assert experts.equal(expected[1])
    assert torch.allclose(weights, expected[0], rtol=1e-5, atol=1e-12)
    order, offsets = compiled_moe_permute(experts, num_experts)
    for ours, reference in zip(
        (order, offsets), moe_permute(experts, num_experts), strict=True
    ):
        assert ours.equal(reference) and ours.dtype == reference.dtype
    y = random_rows(num_tokens * top_k, dtype, size=20)
    out = compiled_moe_combine(y, order, weights)
    exact = moe_combine(y, order, weights)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    assert out.dtype == dtype
    assert torch.allclose(out, exact, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_scores_that_are_no_numbers_choose_experts_that_exist():
    logits = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan] * 3])
    for choose_experts in (topk_softmax, compiled_topk_softmax):
        weights, experts = choose_experts(logits, 2, True)
        assert weights.isnan().all()
        assert all(len(set(row) & {0, 1, 2}) == 2 for row in experts.tolist())
