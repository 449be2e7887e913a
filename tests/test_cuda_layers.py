"""The small kernels as operators of torch and as backends, without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import BackendUnavailable, ConfigError, ShapeError
from minivllm.ops import cuda, cuda_layers, reference, registry
from minivllm.ops.cuda import why_not_emulated
from minivllm.ops.cuda_layers import (
    embedding,
    gated_mlp,
    gelu_and_mul,
    gelu_tanh_and_mul,
    reshape_and_cache,
    rotary_embedding,
    silu_and_mul,
)
from minivllm.ops.registry import choose, explain
from tests.op_tools import DTYPES, assert_close, needs_compiler


def angles_of(num_tokens, head_dim, numbers):
    """Return cos and sin as a decoder makes them."""
    angles = torch.rand(num_tokens, 1, head_dim // 2, generator=numbers) * 100
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


# The implementations do what the references do.


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 24, 64])
def test_rotations_leave_the_last_heads_alone(head_dim, dtype, numbers):
    heads = torch.randn(3, 5, head_dim, generator=numbers).to(dtype)
    cos, sin = angles_of(3, head_dim, numbers)
    ours = heads.clone()
    result = cuda_layers.rotated(ours, 4, cos, sin)
    assert result.data_ptr() == ours.data_ptr()
    assert_close(result, reference.rotary_embedding(heads, 4, cos, sin))
    assert ours[:, 4].equal(heads[:, 4])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 512])
def test_gates(size, dtype, numbers):
    gate_up = (torch.randn(3, 2 * size, generator=numbers) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert_close(gelu_and_mul(gate_up), (F.gelu(gate) * up).to(dtype))
    expected = F.gelu(gate, approximate="tanh") * up
    assert_close(gelu_tanh_and_mul(gate_up), expected.to(dtype))


@needs_compiler
@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul, gelu_tanh_and_mul])
def test_gates_far_out_are_zero_or_linear(op):
    gates = torch.tensor([-3e38, -1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30])
    y = op(torch.cat([gates, torch.ones(8)])[None])
    assert torch.allclose(y[0], gates.clamp(min=0), rtol=1e-6, atol=1e-30)
    y = op(torch.tensor([[torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0]]))
    assert y[0, 0] == torch.inf and y.isnan().tolist() == [[False, True, False]]


@needs_compiler
def test_gelu_keeps_its_digits_where_it_is_small():
    x = torch.linspace(-9, -4, 64, dtype=torch.float64)
    exact = 0.5 * x * torch.erfc(-x / 2**0.5)
    y = gelu_and_mul(torch.cat([x, torch.ones(64)]).float()[None])[0].double()
    assert (y / exact - 1).abs().max() < 1e-4
    by_torch = F.gelu(x.float()).double()
    assert (by_torch / exact - 1).abs().max() > 0.5, "torch has learned it"


@needs_compiler
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_a_gated_mlp_is_a_product_and_an_activation(
    num_rows, dtype, activation, numbers
):
    x = torch.randn(num_rows, 72, generator=numbers).to(dtype)
    weight = torch.randn(2 * 10, 72, generator=numbers).to(dtype)
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=1)
    expected = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    }[activation](gate)
    assert_close(gated_mlp(x, weight, activation), (expected * up).to(dtype), units=8)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_go_to_their_slots(dtype, numbers):
    heads = torch.randn(7, 5, 16, generator=numbers).to(dtype)
    k, v = heads[:, 1:3], heads[:, 3:]
    ours, theirs = torch.zeros(2, 2, 6, 4, 2, 16, dtype=dtype)
    slots = torch.randperm(24, generator=numbers)[:7]
    reshape_and_cache(k, v, ours, slots)
    reference.reshape_and_cache(k, v, theirs, slots)
    assert ours.equal(theirs)


@needs_compiler
def test_padding_is_written_nowhere():
    kv_cache = torch.zeros(2, 2, 4, 1, 16)
    k = v = torch.ones(2, 1, 16)
    reshape_and_cache(k, v, kv_cache, torch.tensor([-1, 5]))
    assert kv_cache.flatten(1, 2).sum(dim=(0, 2, 3)).nonzero().tolist() == [[5]]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table(dtype, numbers):
    table = torch.randn(9, 24, generator=numbers).to(dtype)
    token_ids = torch.tensor([8, 0, 8, 3])
    ours, theirs = (of(token_ids, table) for of in (embedding, reference.embedding))
    assert ours.equal(theirs)


@needs_compiler
def test_an_empty_batch_is_an_empty_result():
    none = torch.zeros(0, 1, 16)
    assert cuda_layers.rotated(none, 1, none, none).shape == (0, 1, 16)
    assert silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert gated_mlp(torch.zeros(0, 8), torch.zeros(6, 8)).shape == (0, 3)
    no_ids = torch.zeros(0, dtype=torch.int64)
    assert embedding(no_ids, torch.zeros(3, 8)).shape == (0, 8)
    reshape_and_cache(none, none, torch.zeros(2, 1, 4, 1, 16), no_ids)


# What does not fit is refused.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": torch.zeros(2, 3, 15)}, "heads of"),
        ({"heads": torch.zeros(2, 8, 3).transpose(1, 2)}, "heads of"),
        ({"heads": torch.zeros(2, 3 * 8)}, "heads of"),
        ({"num_rotated": 4}, "4 of 3 heads"),
        ({"num_rotated": -1}, "-1 of 3 heads"),
        ({"cos": torch.zeros(2, 1, 4)}, "angles of"),
        ({"sin": torch.zeros(2, 1, 8).half()}, "angles of"),
        ({"sin": torch.zeros(1, 1, 8).expand(2, 1, 8)}, "angles of"),
        ({"heads": torch.zeros(2, 3, 8).double()}, "float64"),
    ],
)
def test_heads_and_angles(changed, message):
    arguments = {
        "heads": torch.zeros(2, 3, 8),
        "num_rotated": 2,
        "cos": torch.zeros(2, 1, 8),
        "sin": torch.zeros(2, 1, 8),
    }
    with pytest.raises(ShapeError, match=message):
        rotary_embedding(*(arguments | changed).values())


def test_heads_of_more_single_numbers_than_threads_are_refused():
    heads, angles = torch.zeros(1, 1, 1026), torch.zeros(1, 1, 1026)
    with pytest.raises(ShapeError, match="513 packs of half a head"):
        rotary_embedding(heads, 1, angles, angles)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: silu_and_mul(torch.zeros(2, 7)), "rows of"),
        (lambda: silu_and_mul(torch.zeros(8, 2).T), "not contiguous"),
        (lambda: gelu_and_mul(torch.zeros(2, 8).double()), "float64"),
        (lambda: gated_mlp(torch.zeros(2, 8), torch.zeros(6, 9)), "a weight of"),
        (lambda: gated_mlp(torch.zeros(2, 8), torch.zeros(7, 8)), "a weight of"),
        (lambda: gated_mlp(torch.zeros(2, 8), torch.zeros(6, 8).half()), "float16"),
        (lambda: gated_mlp(torch.zeros(8, 2).T, torch.zeros(6, 8)), "contiguous"),
        (lambda: gated_mlp(torch.zeros(2, 3, 8), torch.zeros(6, 8)), "rows of"),
    ],
)
def test_rows(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_an_unknown_activation_is_named():
    with pytest.raises(ConfigError, match="'relu' is unknown: use one of silu, gelu"):
        gated_mlp(torch.zeros(2, 8), torch.zeros(6, 8), "relu")


@pytest.mark.parametrize(
    ("token_ids", "table", "message"),
    [
        (torch.tensor([0, 9]), torch.zeros(9, 8), "from 0 to 9, but 0 to 8 fit"),
        (torch.tensor([-1, 3]), torch.zeros(9, 8), "from -1 to 3, but 0 to 8 fit"),
        (torch.tensor([0]), torch.zeros(0, 8), "from 0 to 0, but 0 to -1 fit"),
        (torch.tensor([0, 3]).int(), torch.zeros(9, 8), "int32"),
        (torch.tensor([[0, 3]]), torch.zeros(9, 8), "a table of|token ids of"),
        (torch.tensor([0, 3]), torch.zeros(8, 9).T, "not contiguous"),
    ],
)
def test_token_ids(token_ids, table, message):
    with pytest.raises(ShapeError, match=message):
        embedding(token_ids, table)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": torch.tensor([0, 8])}, "slots has numbers from 0 to 8, but -1 to 7"),
        ({"slots": torch.tensor([0, -2])}, "slots has numbers from -2 to 0"),
        ({"slots": torch.tensor([0, 1]).int()}, "slots of torch.int32"),
        ({"slots": torch.tensor([0])}, "slots of"),
        ({"slots": torch.tensor([0, 5, 1, 5])[::2]}, "slots that are not contiguous"),
        ({"k": torch.zeros(2, 3, 8)}, "keys of"),
        ({"k": torch.zeros(2, 8, 2).transpose(1, 2)}, "heads that lie"),
        ({"kv_cache": torch.zeros(2, 2, 4, 3, 8)}, "a cache of"),
        ({"kv_cache": torch.zeros(2, 2, 4, 2, 9)}, "a cache of"),
        ({"kv_cache": torch.zeros(3, 2, 4, 2, 8)}, "a cache of"),
        ({"kv_cache": torch.zeros(2, 4, 4, 2, 8)[:, ::2]}, "a cache of"),
        ({"kv_cache": torch.zeros(2, 2, 4, 2, 8).half()}, "a torch.float16 cache"),
    ],
)
def test_slots(changed, message):
    arguments = {
        "k": torch.zeros(2, 2, 8),
        "v": torch.zeros(2, 2, 8),
        "kv_cache": torch.zeros(2, 2, 4, 2, 8),
        "slots": torch.tensor([0, 5]),
    }
    with pytest.raises(ShapeError, match=message):
        reshape_and_cache(*(arguments | changed).values())


def test_rows_at_odd_addresses_are_moved_one_by_one():
    odd = torch.zeros(9 * 8 + 1)[1:].view(9, 8)
    for table, width in ((odd, 1), (odd.clone(), 4)):
        started = Started()
        token_ids = torch.tensor([0, 3])
        cuda_layers.launch_embedding(started, torch.zeros(2, 8), token_ids, table)
        assert started.names == [f"embedding<float, {width}>"]


def test_angles_at_odd_addresses_are_loaded_one_by_one():
    heads, angles = torch.zeros(2, 3, 8), torch.zeros(2, 1, 8)
    odd = torch.zeros(17)[1:].view(2, 1, 8)
    for sin, width in ((odd, 1), (angles, 4)):
        started = Started()
        cuda_layers.launch_rotary_embedding(started, heads, 3, angles, sin)
        assert started.names == [f"rotary_embedding<float, {width}>"]


def test_a_product_takes_as_many_rows_at_once_as_it_needs():
    for num_rows, at_once in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 8), (64, 8)):
        started = Started()
        tensors = torch.zeros(num_rows, 5), torch.zeros(num_rows, 8), torch.zeros(10, 8)
        cuda_layers.launch_gated_mlp(started, *tensors, "silu")
        assert started.names == [f"gated_mlp<Silu, float, 4, {at_once}>"]
        assert started.grids == [(2, -(-num_rows // at_once))]


class Started:
    """Stands for kernels, and notes which are started."""

    def __init__(self):
        self.names, self.grids = [], []

    def __getitem__(self, name):
        self.names.append(name)
        return lambda grid, *arguments: self.grids.append(grid)


# The contracts are true.


def operators(numbers):
    """Return each operator with arguments."""
    rows, weight = torch.randn(3, 32, generator=numbers), torch.ones(10, 32)
    heads = torch.randn(3, 8, 16, generator=numbers)
    k, v = heads[:, 2:5], heads[:, 5:]
    kv_cache = torch.randn(2, 4, 4, 3, 16, generator=numbers)
    slots = torch.tensor([3, -1, 9])
    return {
        rotary_embedding: (heads.clone(), 5, *angles_of(3, 16, numbers)),
        silu_and_mul: (rows,),
        gelu_and_mul: (rows,),
        gelu_tanh_and_mul: (rows,),
        gated_mlp: (rows, weight, "gelu"),
        embedding: (torch.tensor([1, 8, 0]), torch.randn(9, 16, generator=numbers)),
        reshape_and_cache: (k, v, kv_cache, slots),
    }


@needs_compiler
@pytest.mark.parametrize("index", range(7))
def test_torchs_own_checks_pass(index, numbers):
    operator, arguments = list(operators(numbers).items())[index]
    verdicts = torch.library.opcheck(operator, arguments)
    assert set(verdicts.values()) == {"SUCCESS"}


def part_of_a_layer(token_ids, table, weight, kv_cache, slots, cos, sin):
    """Use operators between operations that a compiler likes to rearrange."""
    x = embedding(token_ids, table).relu()
    heads = x.view(len(x), -1, cos.shape[-1]) + 1
    q = cuda_layers.rotated(heads, 2, cos, sin)
    reshape_and_cache(q[:, 1:], heads[:, 2:], kv_cache, slots)
    return gated_mlp(q.flatten(1) * 2, weight) + silu_and_mul(x)[:, :5], kv_cache


@needs_compiler
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_layer_compiles_into_one_graph(backend, numbers):
    arguments = [
        torch.tensor([1, 8, 0]),
        torch.randn(9, 48, generator=numbers),
        torch.randn(10, 32, generator=numbers),
        torch.zeros(2, 3, 4, 1, 16),
        torch.tensor([3, -1, 9]),
        *angles_of(3, 16, numbers),
    ]
    compiled = torch.compile(part_of_a_layer, fullgraph=True, backend=backend)
    results = [
        of(*(x.clone() for x in arguments)) for of in (compiled, part_of_a_layer)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)
    assert results[0][1].count_nonzero() == 2 * 2 * 16


def test_operators_run_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        heads = torch.empty(3, 5, 16, device="cuda")
        angles = torch.empty(3, 1, 16, device="cuda")
        rotated = cuda_layers.rotated(heads, 4, angles, angles)
        assert (rotated.shape, rotated.device.type) == ((3, 4, 16), "cuda")
        rows = torch.empty(3, 32, device="cuda")
        assert silu_and_mul(rows).shape == (3, 16)
        assert gated_mlp(rows, torch.empty(10, 32, device="cuda")).shape == (3, 5)
        ids = torch.empty(3, dtype=torch.int64, device="cuda")
        assert embedding(ids, rows).shape == (3, 32)
        kv_cache = torch.empty(2, 4, 4, 5, 16, device="cuda")
        assert reshape_and_cache(heads, heads, kv_cache, ids) is None


# The choice.


def test_on_the_cpu_kernels_are_emulated_only_if_forced(monkeypatch):
    for op, implementation in cuda_layers.KERNELS.items():
        monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
        verdicts = explain(op, "cpu", "float16", head_dim=64)
        assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
        assert verdicts["torch"] == "chosen"
        if why_not_emulated("cpu", "float16") is None:
            assert verdicts["emulated"] == "runs only if it is forced"
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "emulated")
            chosen = choose(op, "cpu", "float16").backend
            assert chosen.implementation is implementation


def test_forced_onto_a_cpu_the_gpus_backend_is_an_error(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_EMBEDDING", "cuda")
    with pytest.raises(BackendUnavailable, match="runs on a GPU, not on cpu"):
        choose("embedding", "cpu", "bfloat16")


def test_on_a_gpu_the_kernels_are_chosen_for_heads_of_any_size(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    for op, implementation in cuda_layers.KERNELS.items():
        choice = choose(op, "cuda", "bfloat16", head_dim=20)
        assert choice.backend.name == "cuda"
        assert choice.backend.implementation is implementation
    monkeypatch.setattr(cuda, "why_no_launch", lambda: "there is no compiler")
    choice = choose("silu_and_mul", "cuda", "bfloat16")
    assert choice.backend.name == "torch"
    assert choice.passed_over["cuda"] == "there is no compiler"


def test_the_module_is_known_to_the_registry():
    assert "minivllm.ops.cuda_layers" in registry.MODULES
