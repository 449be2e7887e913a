"""The kernels of experts, as operators and as backends, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ShapeError
from minivllm.ops import cuda, cuda_moe, moe, registry
from minivllm.ops.cuda import why_not_emulated
from minivllm.ops.cuda_moe import (
    KernelGroupedLinear,
    best_grouped_version,
    height_for,
    kernel_grouped_linear,
    kernel_moe_combine,
    kernel_moe_permute,
    kernel_topk_softmax,
)
from minivllm.ops.registry import OPS, choose, explain
from tests.kernels.cases import Names, emulated
from tests.kernels.moe_cases import TensorTileCase, TileCase
from tests.kernels.test_traffic import traced
from tests.op_tools import DTYPES, assert_close, needs_compiler
from tests.test_moe import make_experts, random_rows

# The same as the references.


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (1, 1), (40, 36)])
def test_experts_and_weights(num_experts, top_k, renormalize, dtype, numbers):
    logits = (torch.randn(5, num_experts, generator=numbers) * 3).to(dtype)
    logits[1], logits[2, 1:] = 0, -torch.inf  # of equal ones the first
    given = (logits, top_k, renormalize)
    (weights, experts), theirs = kernel_topk_softmax(*given), moe.topk_softmax(*given)
    assert experts.equal(theirs[1])
    torch.testing.assert_close(weights, theirs[0])
    assert experts[1].tolist() == list(range(top_k))


@needs_compiler
def test_experts_of_scores_without_a_sum_are_experts_all_the_same():
    logits = torch.zeros(3, 40)
    logits[0, 7], logits[1, 39], logits[2] = torch.nan, torch.inf, -torch.inf
    for top_k in (3, 36):
        weights, experts = kernel_topk_softmax(logits, top_k, True)
        assert weights.isnan().all()
        assert all(len(set(row)) == top_k for row in experts.tolist())
        assert experts.min() >= 0 and experts.max() < 40


@needs_compiler
@pytest.mark.parametrize("num_experts", [3, 9000])  # the latter: more than v3 counts
def test_an_order_and_offsets(num_experts, numbers):
    experts = torch.randint(0, num_experts, (7, 3), generator=numbers)
    ours = kernel_moe_permute(experts, num_experts)
    for x, y in zip(ours, moe.moe_permute(experts, num_experts), strict=True):
        assert x.equal(y) and x.dtype == y.dtype


@needs_compiler
def test_a_long_batch_is_sorted_in_parts(numbers):
    experts = torch.randint(0, 5, (1100, 2), generator=numbers)
    assert experts.numel() > cuda_moe.PART_SIZE
    order, offsets = kernel_moe_permute(experts, 6)
    assert order.equal(experts.flatten().argsort(stable=True))
    assert offsets[-2:].tolist() == [2200, 2200]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts(dtype, numbers):
    x = torch.randn(9, 40, generator=numbers).to(dtype)
    weight = torch.randn(4, 70, 40, generator=numbers).div(6).to(dtype)
    offsets = torch.tensor([0, 2, 2, 8, 9], dtype=torch.int32)
    expected = moe.GroupedLinear(weight.float())(x.float(), offsets)
    y = KernelGroupedLinear(weight)(x, offsets)
    assert_close(y, expected.to(dtype), units=16)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_choices(dtype, numbers):
    y = torch.randn(15, 24, generator=numbers).to(dtype)
    order = torch.randperm(15, generator=numbers)
    weights = torch.rand(5, 3, generator=numbers)
    assert_close(
        kernel_moe_combine(y, order, weights), moe.moe_combine(y, order, weights)
    )


def force(monkeypatch, backend):
    """Force a backend for all ops of experts."""
    for op in cuda_moe.KERNELS:
        monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", backend)


@needs_compiler
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_layer_on_kernels_says_what_the_loop_says(renormalize, monkeypatch):
    force(monkeypatch, "emulated")
    plain, ours = make_experts(norm_topk_prob=renormalize)
    assert isinstance(ours.down_proj, KernelGroupedLinear)
    x = random_rows(9)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)


# A token's result does not depend on who else is there.


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_alone(dtype, monkeypatch, numbers):
    force(monkeypatch, "emulated")
    x = torch.randn(70, 40, generator=numbers).to(dtype)
    weight = torch.randn(2, 24, 40, generator=numbers).to(dtype)
    assert height_for(70, 2) == 64 and height_for(1, 2) == 16
    offsets = torch.tensor([0, 1, 70], dtype=torch.int32)
    linear = KernelGroupedLinear(weight)
    whole = linear(x, offsets)
    for row, ends in ((0, [0, 1, 1]), (1, [0, 0, 1]), (69, [0, 0, 1])):
        alone = linear(x[row : row + 1], torch.tensor(ends, dtype=torch.int32))
        assert alone.equal(whole[row : row + 1])


@needs_compiler
@pytest.mark.parametrize("kind", [TileCase, TensorTileCase])
def test_the_height_of_tiles_changes_no_bit(kind, numbers):
    (version,), dtype = kind.versions, getattr(torch, kind.dtypes[0])
    x = torch.randn(50, 31, generator=numbers).to(dtype)
    weight = torch.randn(2, 70, 31, generator=numbers).to(dtype)
    offsets = torch.tensor([0, 3, 50], dtype=torch.int32)
    cases = [kind(version, kind.dtypes[0], 31, 70, (3, 47), h) for h in (16, 64)]
    kernels, results = emulated(cases), torch.zeros(2, 50, 70, dtype=dtype)
    for out, height in zip(results, (16, 64), strict=True):
        given = (out, x, weight, offsets, height)
        cuda_moe.grouped_linear(kernels, version, *given)
    assert results[0].equal(results[1])
    assert results.count_nonzero() > 6900


@needs_compiler
def test_weights_are_read_once_for_a_tile_and_those_of_absent_experts_never():
    (trace,) = traced(TileCase("v3", "float32", 64, 70, (0, 9, 0, 20), 16))
    # 9 rows are a tile, 20 are two.
    assert trace.bytes_read("weight") == (1 + 2) * 70 * 64 * 4
    assert trace.bytes_read("x") == 29 * 64 * 4 * 2  # once for each 64 columns
    assert trace.bank_conflicts() == 0


# What does not fit.


@needs_compiler
def test_nothing_to_do_is_no_launch():
    none = torch.zeros(0, 2, dtype=torch.int64)
    weights, experts = kernel_topk_softmax(torch.zeros(0, 4), 2, True)
    assert weights.shape == experts.shape == (0, 2)
    order, offsets = kernel_moe_permute(none, 4)
    assert order.shape == (0,) and offsets.tolist() == [0] * 5
    y = KernelGroupedLinear(torch.zeros(4, 6, 8))(torch.zeros(0, 8), offsets)
    assert y.shape == (0, 6)
    assert kernel_moe_combine(y, order, weights).shape == (0, 6)


@pytest.mark.parametrize(
    ("logits", "top_k", "message"),
    [
        (torch.zeros(4), 2, r"logits of \(4,\)"),
        (torch.zeros(3, 4), 0, "0 of 4 experts"),
        (torch.zeros(3, 4), 5, "5 of 4 experts"),
        (torch.zeros(4, 3).T, 2, "logits that are not contiguous"),
        (torch.zeros(3, 4).double(), 2, "not for float64"),
    ],
)
def test_scores(logits, top_k, message):
    with pytest.raises(ShapeError, match=message):
        kernel_topk_softmax(logits, top_k, True)


@pytest.mark.parametrize(("num_experts", "top_k"), [(513, 8), (64, 33)])
def test_more_experts_than_a_warp_keeps_are_left_to_the_first_rung(num_experts, top_k):
    weights, names = torch.zeros(3, top_k), Names()
    given = (weights, weights.long(), torch.zeros(3, num_experts), True)
    with pytest.raises(ShapeError, match="v2 chooses 32 of 512 at most; v1 has no"):
        cuda_moe.topk_softmax(names, "v2", *given)
    assert cuda_moe.topk_version(num_experts, top_k) == "v1"
    cuda_moe.topk_softmax(names, "v1", *given)
    assert list(names) == ["topk_softmax_v1<float>"]


@pytest.mark.parametrize(
    ("num_experts", "name"), [(1, 1), (32, 1), (33, 2), (128, 4), (512, 16)]
)
def test_a_lane_keeps_as_many_experts_as_it_needs(num_experts, name):
    weights, names = torch.zeros(3, 1), Names()
    given = (weights, weights.long(), torch.zeros(3, num_experts), True)
    cuda_moe.topk_softmax(names, "v2", *given)
    assert list(names) == [f"topk_softmax_v2<float, {name}>"]


@pytest.mark.parametrize(
    ("experts", "num_experts", "message"),
    [
        (torch.tensor([[0, 4]]), 4, "experts has numbers from 0 to 4, but 0 to 3 fit"),
        (torch.tensor([[0, -1]]), 4, "experts has numbers from -1 to 0"),
        (torch.tensor([[0, 1]]).int(), 4, "experts of torch.int32"),
        (torch.tensor([[0, 1]]), 0, "0 experts"),
        (torch.tensor([[0, 1], [2, 3]]).T, 4, "experts that are not contiguous"),
    ],
)
def test_choices(experts, num_experts, message):
    with pytest.raises(ShapeError, match=message):
        kernel_moe_permute(experts, num_experts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"part_size": 0}, "parts of 0"),
        ({"order": torch.zeros(3).long()}, "order of"),
        ({"order": torch.zeros(4).int()}, "order of torch.int32"),
        ({"offsets": torch.zeros(5).long()}, "offsets of torch.int64"),
        ({"offsets": torch.zeros(9000).int()}, "8999 experts"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(changed, message):
    names = Names()
    arguments = {
        "order": torch.zeros(4).long(),
        "offsets": torch.zeros(5).int(),
        "experts": torch.zeros(2, 2).long(),
        "part_size": 100,
    }
    with pytest.raises(ShapeError, match=message):
        cuda_moe.moe_permute(names, "v3", *(arguments | changed).values())
    assert not names.asked


def offsets_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(3)}, r"rows of \(3,\)"),
        ({"x": torch.zeros(3, 9)}, "weights of"),
        ({"x": torch.zeros(8, 3).T}, "rows that are not contiguous"),
        ({"x": torch.zeros(3, 8).half()}, "weights of torch.float32"),
        ({"weight": torch.zeros(5, 8)}, r"\(5, 8\)"),
        ({"weight": torch.zeros(2, 8, 5).transpose(1, 2)}, "weights that are not"),
        ({"offsets": torch.tensor([0, 1, 3])}, "offsets of torch.int64"),
        ({"offsets": offsets_of(0, 3)}, "offsets of"),
        ({"offsets": offsets_of(0, 4, 3)}, r"\[0, 4, 3\], but those of 3 rows"),
        ({"offsets": offsets_of(1, 2, 3)}, r"\[1, 2, 3\], but"),
        ({"offsets": offsets_of(0, 2, 4)}, r"\[0, 2, 4\], but"),
    ],
)
def test_rows_and_weights(changed, message):
    arguments = {
        "x": torch.zeros(3, 8),
        "weight": torch.zeros(2, 5, 8),
        "offsets": offsets_of(0, 1, 3),
    }
    with pytest.raises(ShapeError, match=message):
        kernel_grouped_linear(*(arguments | changed).values())


def test_tiles_and_types_that_no_rung_has_are_refused():
    names, x = Names(), torch.zeros(3, 8)
    given = (torch.zeros(3, 5), x, torch.zeros(2, 5, 8), offsets_of(0, 1, 3))
    with pytest.raises(ShapeError, match="tiles of 32 rows"):
        cuda_moe.grouped_linear(names, "v3", *given, height=32)
    with pytest.raises(ShapeError, match="v4 multiplies numbers of 16 bits; v3 all"):
        cuda_moe.grouped_linear(names, "v4", *given)
    assert not names.asked


def test_rows_at_odd_addresses_are_loaded_one_by_one():
    weight, odd = torch.zeros(2, 5, 8), torch.zeros(3 * 8 + 1)[1:].view(3, 8)
    for x, width in ((odd, 1), (odd.clone(), 4)):
        names = Names()
        given = (torch.zeros(3, 5), x, weight, offsets_of(0, 1, 3))
        cuda_moe.grouped_linear(names, "v3", *given)
        assert list(names) == [f"grouped_linear_v3<float, {width}, 16>"]


def test_there_are_blocks_for_every_way_to_cut_rows_into_tiles():
    grids = []

    class Started:
        def __getitem__(self, name):
            return lambda grid, *arguments: grids.append(grid)

    weight = torch.zeros(4, 70, 8)
    for num_rows, height in ((1, 16), (3, 16), (33, 16), (129, 64)):
        ends = torch.full((5,), num_rows).int()
        ends[0] = 0
        given = (torch.zeros(num_rows, 70), torch.zeros(num_rows, 8), weight, ends)
        cuda_moe.grouped_linear(Started(), "v3", *given)
        assert height_for(num_rows, 4) == height
    # One row is one tile; 33 may be 16 + 1 + 1 + 15 ... but never more than 2 + 4.
    assert grids == [(1, 2), (3, 2), (6, 2), (6, 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": torch.zeros(6)}, r"rows of \(6,\)"),
        ({"y": torch.zeros(5, 8)}, "rows of"),
        ({"y": torch.zeros(8, 6).T}, "rows that are not contiguous"),
        ({"order": torch.arange(6).int()}, "order of torch.int32"),
        ({"order": torch.arange(5)}, "order of"),
        ({"order": torch.tensor([0, 1, 2, 3, 4, 4])}, "name each choice once"),
        ({"order": torch.tensor([0, 1, 2, 3, 4, 6])}, "name each choice once"),
        ({"weights": torch.zeros(3, 2).half()}, "weights of torch.float16"),
        ({"weights": torch.zeros(6)}, r"weights \(6,\)"),
        ({"y": torch.zeros(6, 8).double()}, "not for float64"),
    ],
)
def test_rows_and_their_order(changed, message):
    arguments = {
        "y": torch.zeros(6, 8),
        "order": torch.arange(6),
        "weights": torch.zeros(3, 2),
    }
    with pytest.raises(ShapeError, match=message):
        kernel_moe_combine(*(arguments | changed).values())


# The contracts are true.


def run_layer(x, logits, gate_up, down):
    """Run a layer of experts on operators."""
    weights, experts = kernel_topk_softmax(logits, 2, True)
    order, offsets = kernel_moe_permute(experts, logits.shape[1])
    inside = kernel_grouped_linear(x.index_select(0, order // 2), gate_up, offsets)
    y = kernel_grouped_linear(inside.relu(), down, offsets)
    return kernel_moe_combine(y, order, weights)


SHAPES = ((3, 8), (3, 4), (4, 6, 8), (4, 8, 6))  # of its arguments


def layer_arguments():
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=numbers) for shape in SHAPES]


@needs_compiler
def test_torchs_own_checks_pass():
    x, logits, gate_up, _ = layer_arguments()
    weights, experts = kernel_topk_softmax(logits, 2, True)
    order, offsets = kernel_moe_permute(experts, 4)
    rows = x.index_select(0, order // 2)
    for operator, given in (
        (kernel_topk_softmax, (logits, 2, True)),
        (kernel_moe_permute, (experts, 4)),
        (kernel_grouped_linear, (rows, gate_up, offsets)),
        (kernel_moe_combine, (rows, order, weights)),
    ):
        verdicts = torch.library.opcheck(operator, given)
        assert set(verdicts.values()) == {"SUCCESS"}


@needs_compiler
def test_a_layer_compiles_into_one_graph():
    given = layer_arguments()
    compiled = torch.compile(run_layer, fullgraph=True, backend="aot_eager")
    assert compiled(*given).equal(run_layer(*given))


def test_a_layer_runs_on_a_gpu_that_is_not_there_and_asks_it_nothing():
    with FakeTensorMode():  # it refuses to say how many rows an expert has
        y = run_layer(*(torch.empty(shape, device="cuda") for shape in SHAPES))
        assert (y.shape, y.device.type) == ((3, 8), "cuda")


# The choice.


def test_on_the_cpu_kernels_are_emulated_only_if_forced(monkeypatch):
    for op, implementation in cuda_moe.KERNELS.items():
        monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
        verdicts = explain(op, "cpu", "float32")
        assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
        if why_not_emulated("cpu", "float32") is None:
            assert verdicts["emulated"] == "runs only if it is forced"
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "emulated")
            chosen = choose(op, "cpu", "float32").backend
            assert chosen.implementation is implementation


def test_on_a_gpu_the_kernels_are_chosen_if_they_can_run(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    sizes = {"hidden_size": 20, "intermediate_size": 12}
    for op, implementation in cuda_moe.KERNELS.items():
        backend = choose(op, "cuda", "float16", **sizes).backend
        assert (backend.name, backend.implementation) == ("cuda", implementation)


def test_torchs_grouped_product_comes_first_where_there_is_one():
    registry.load_backends()
    names = [backend.name for backend in OPS["grouped_linear"]]
    assert names.index("grouped_mm") < names.index("cuda") < names.index("torch")


def test_tensor_cores_are_for_numbers_of_16_bits(monkeypatch):
    cpu = torch.device("cpu")
    assert best_grouped_version(torch.float32, cpu) == "v3"
    assert best_grouped_version(torch.bfloat16, cpu) == "v4"
    monkeypatch.setattr(cuda_moe, "why_no_tensor_cores", lambda *given: "too old")
    assert best_grouped_version(torch.bfloat16, cpu) == "v3"


def test_the_module_is_known_to_the_registry():
    assert "minivllm.ops.cuda_moe" in registry.MODULES
