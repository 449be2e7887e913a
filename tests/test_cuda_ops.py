"""The kernels as operators of torch and as backends, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import BackendUnavailable, ShapeError
from minivllm.ops import cuda, registry, rungs
from minivllm.ops.cuda import (
    KernelAttention,
    KernelRMSNorm,
    fused_add_rms_norm,
    paged_attention,
    rms_norm,
    softmax,
    why_not_cuda,
    why_not_emulated,
)
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.reference import TorchRMSNorm
from minivllm.ops.registry import choose, explain
from tests.op_tools import DTYPES, assert_close, needs_compiler

EPS = 1e-5


def attention_inputs(numbers, dtype=torch.float32, num_reqs=3, head_dim=16):
    """Return what both attentions take: q, kv_cache, rows, positions, block_table."""
    kv_cache = torch.randn(2, 30, 4, 2, head_dim, generator=numbers).to(dtype)
    positions = torch.randint(0, 20, (num_reqs, 1), generator=numbers)
    block_table = torch.randperm(30, generator=numbers)[: 5 * num_reqs].view(-1, 5)
    # The queries are the first heads of wider rows, in another order.
    wide = torch.randn(num_reqs + 2, 10, head_dim, generator=numbers).to(dtype)
    rows = torch.randperm(num_reqs + 2, generator=numbers)[:num_reqs, None]
    return wide[:, :6], kv_cache, rows, positions, block_table


# The implementations do what the references do.


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 31), (2, 576)])
def test_norms(shape, dtype, numbers):
    x, added = torch.randn(2, *shape, generator=numbers).to(dtype)
    weight = torch.randn(shape[1], generator=numbers).to(dtype)
    ours, theirs = KernelRMSNorm(weight, EPS), TorchRMSNorm(weight, EPS)
    before = x.clone()
    assert_close(ours(x), theirs(x))
    assert x.equal(before)
    our_sum, their_sum = x.clone(), x.clone()
    assert_close(ours(our_sum, added), theirs(their_sum, added))
    assert our_sum.equal(their_sum)


@needs_compiler
def test_the_epsilon_and_the_one_of_a_norm_count():
    x, weight = torch.full((1, 8), 1e-3), torch.rand(8)
    assert_close(rms_norm(x, weight, 1e-2), TorchRMSNorm(weight, 1e-2)(x))
    expected = TorchRMSNorm(weight + 1, 1e-2)(x)
    assert_close(rms_norm(x, weight, 1e-2, True), expected)
    summed = fused_add_rms_norm(x / 2, x / 2, weight, 1e-2, True)
    assert_close(summed, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_shares(dtype, numbers):
    x = (4 * torch.randn(3, 70, generator=numbers)).to(dtype)
    assert_close(softmax(x), torch.softmax(x, dim=-1))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 3])
def test_attention(num_reqs, dtype, numbers):
    q, kv_cache, *tables = attention_inputs(numbers, dtype, num_reqs)
    ours, theirs = (
        cls(*tables, kv_cache, 3).attend(q, kv_cache, 0.3)
        for cls in (KernelAttention, PaddedAttention)
    )
    assert_close(ours, theirs, units=8)


@needs_compiler
def test_an_empty_batch_is_an_empty_result(numbers):
    q, kv_cache, rows, positions, block_table = attention_inputs(numbers)
    tables = (rows[:0], positions[:0], block_table[:0])
    attention = KernelAttention(*tables, kv_cache, 3)
    assert attention.attend(q, kv_cache, 0.3).shape == (0, 6, 16)


@needs_compiler
def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="weight"):
        rms_norm(torch.ones(2, 8), torch.ones(9), EPS)
    with pytest.raises(ShapeError, match="contiguous"):
        rms_norm(torch.ones(8, 2).T, torch.ones(8), EPS)
    with pytest.raises(ShapeError, match="weight lie 2 apart"):
        rms_norm(torch.ones(2, 8), torch.ones(16)[::2], EPS)


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [0, 5]}, "has 0 keys"),
        ({"seq_lens": [9, 5]}, "seq_lens has numbers from 5 to 9, but 0 to 8"),
        ({"rows": [0, 3]}, "rows has numbers from 0 to 3, but 0 to 2"),
        ({"rows": [-1, 0]}, "rows has numbers from -1 to 0, but 0 to 2"),
        ({"block_table": [[0, 6], [2, 3]]}, "block_table has numbers from 0 to 6"),
        ({"block_table": [[], []]}, "seq_lens has numbers from 5 to 8, but 0 to 0"),
        ({"rows": [[0], [1]]}, r"\[3, 3, 5, 2, 2, 1\] dimensions"),
        ({"q": (3, 64)}, r"\[2, 2, 5, 1, 2, 1\] dimensions"),
        ({"q": (3, 0, 16)}, "0 heads"),
        ({"kv_cache": (2, 6, 4, 0, 16)}, "0 key heads"),
        ({"kv_cache": (2, 6, 4, 3, 16)}, "3 key heads"),
        ({"kv_cache": (2, 0, 4, 2, 16)}, "block_table has numbers from 0 to 3"),
    ],
)
def test_tables_that_lead_out_of_their_tensors_are_refused(change, message):
    shapes = {"q": (3, 4, 16), "kv_cache": (2, 6, 4, 2, 16)}
    tables = {"rows": [0, 2], "block_table": [[0, 1], [2, 3]], "seq_lens": [5, 8]}
    inputs = [torch.ones(change.get(name, shape)) for name, shape in shapes.items()]
    inputs += [torch.tensor(change.get(n, t)).int() for n, t in tables.items()]
    with pytest.raises(ShapeError, match=message):
        paged_attention(*inputs, 0.3)


@needs_compiler
def test_blocks_that_nobody_looks_at_may_be_anything(numbers):
    q, kv_cache = torch.randn(1, 2, 16), torch.randn(2, 3, 4, 1, 16, generator=numbers)
    rows, seq_lens = torch.zeros(1).int(), torch.full((1,), 7).int()
    outs = [torch.empty(1, 2, 16) for _ in range(2)]
    for out, unseen in zip(outs, (2, -1), strict=True):
        table = torch.tensor([[unseen, 1, unseen]]).int()  # the last 3 keys: one block
        tables = (rows, table, seq_lens)
        kernels = cuda.PAGED_ATTENTION
        rungs.paged_attention(kernels, "v3", out, q, kv_cache, *tables, 0.3, window=3)
    assert outs[0].equal(outs[1])


@needs_compiler
def test_a_derivative_is_refused_where_it_is_asked_for():
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"torch\.inference_mode"):
        softmax(x).sum().backward()
    with torch.inference_mode():
        assert softmax(x).sum() == 2


# The contracts are true.


def operators(numbers):
    """Return each operator with arguments."""
    x, weight = torch.randn(3, 32, generator=numbers), torch.ones(32)
    q, kv_cache, rows, positions, block_table = attention_inputs(numbers)
    attention = KernelAttention(rows, positions, block_table, kv_cache, 3)
    tables = (attention.rows, attention.block_table, attention.seq_lens)
    return {
        rms_norm: (x, weight, EPS),
        fused_add_rms_norm: (x, x.clone(), weight, EPS, True),
        softmax: (x,),
        paged_attention: (q, kv_cache, *tables, 0.3),
    }


@needs_compiler
@pytest.mark.parametrize("index", range(4))
def test_torchs_own_checks_pass(index, numbers):
    operator, arguments = list(operators(numbers).items())[index]
    verdicts = torch.library.opcheck(operator, arguments)
    assert set(verdicts.values()) == {"SUCCESS"}


def norms_and_shares(x, added, weight):
    """Use operators between operations that a compiler likes to rearrange."""
    y = rms_norm(x * 2, weight, EPS)
    z = fused_add_rms_norm(y, added.sin(), weight, EPS)
    return softmax(y.relu() + z), y


@needs_compiler
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_model_compiles_into_one_graph(backend, numbers):
    x, added = torch.randn(2, 3, 32, generator=numbers)
    weight = torch.randn(32, generator=numbers)
    compiled = torch.compile(norms_and_shares, fullgraph=True, backend=backend)
    results = compiled(x, added, weight), norms_and_shares(x, added, weight)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


def test_operators_run_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        x = torch.empty(3, 32, device="cuda")
        weight = torch.empty(32, device="cuda")
        normed = KernelRMSNorm(weight, EPS)(x, x.clone())
        assert (normed.shape, normed.device.type) == ((3, 32), "cuda")
        q, kv_cache = x.view(3, 2, 16), torch.empty(2, 9, 4, 1, 16, device="cuda")
        tables = torch.empty(3, 1, dtype=torch.int64, device="cuda")
        attention = KernelAttention(tables, tables, tables, kv_cache, 2)
        assert attention.attend(q, kv_cache, 0.3).shape == (3, 2, 16)


# The choice.


def test_on_the_cpu_kernels_are_emulated_only_if_forced(monkeypatch):
    for op in ("rms_norm", "paged_attention"):
        monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
        # No other backend is for float16, so it would be the first that can run.
        verdicts = explain(op, "cpu", "float16", head_dim=64)
        assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
        assert verdicts["torch"] == "chosen"
        if why_not_emulated("cpu", "float16") is None:
            assert verdicts["emulated"] == "runs only if it is forced"
    if why_not_emulated("cpu", "float32") is None:
        monkeypatch.setenv("MINIVLLM_OP_RMS_NORM", "emulated")
        chosen = choose("rms_norm", "cpu", "float32").backend
        assert chosen.implementation is KernelRMSNorm


def test_forced_onto_a_cpu_the_gpus_backend_is_an_error(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_PAGED_ATTENTION", "cuda")
    with pytest.raises(BackendUnavailable, match="runs on a GPU, not on cpu"):
        choose("paged_attention", "cpu", "bfloat16", head_dim=64)


def test_on_a_gpu_the_kernels_are_chosen_if_they_can_run(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    for op, implementation in cuda.KERNELS.items():
        choice = choose(op, "cuda", "bfloat16", head_dim=64)
        assert choice.backend.name == "cuda"
        assert choice.backend.implementation is implementation
    monkeypatch.setattr(cuda, "why_no_launch", lambda: "there is no compiler")
    choice = choose("rms_norm", "cuda", "bfloat16")
    assert choice.backend.name == "torch"
    assert choice.passed_over["cuda"] == "there is no compiler"


@pytest.mark.parametrize("why_not", [why_not_cuda, why_not_emulated])
def test_types_and_heads_that_no_kernel_is_for_are_named(why_not, monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    device = "cuda" if why_not is why_not_cuda else "cpu"
    assert "not for float64" in why_not(device, "float64")
    assert "a head has 40" in why_not(device, "bfloat16", head_dim=20)


def test_without_a_compiler_nothing_is_emulated(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' is not found" in why_not_emulated("cpu", "float32")


def test_the_module_is_known_to_the_registry():
    assert "minivllm.ops.cuda" in registry.MODULES
