"""Attention of prompts as an operator of torch and as a backend, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import BackendUnavailable, ShapeError
from minivllm.ops import cuda, cuda_prefill
from minivllm.ops.cuda import why_not_emulated
from minivllm.ops.cuda_prefill import (
    PREFILL_ATTENTION,
    KernelPrefill,
    best_version,
    prefill_attention,
    prefill_attention_of,
    why_no_tensor_cores,
    why_not_version,
)
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.registry import choose, explain
from tests.kernels.cases import Names
from tests.kernels.prefill_cases import PrefillCase, TensorCoreCase
from tests.op_tools import DTYPES, needs_compiler

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def pieces_of(numbers, dtype=torch.float32, num_pieces=3, head_dim=16):
    """Return what both attentions take: q, kv_cache, rows, positions, block_table."""
    kv_cache = torch.randn(2, 40, 4, 2, head_dim, generator=numbers).to(dtype)
    lengths = torch.tensor([[2], [9], [1]])[:num_pieces]
    num_keys = torch.tensor([[11], [9], [20]])[:num_pieces]
    steps = torch.minimum(torch.arange(int(lengths.max())), lengths - 1)
    starts = torch.tensor([[1], [5], [15]])[:num_pieces]
    block_table = torch.randperm(40, generator=numbers)[: 5 * num_pieces].view(-1, 5)
    # The queries are the first heads of wider rows, some of which are of others.
    wide = torch.randn(17, 10, head_dim, generator=numbers).to(dtype)
    rows, positions = starts + steps, num_keys - lengths + steps
    return wide[:, :6], kv_cache, rows, positions, block_table


def whole_batch(**changed):
    """Return arguments of a batch of two requests that fit, but for the given ones."""
    arguments = {
        "out": torch.zeros(6, 4, 64),
        "q": torch.zeros(6, 4, 64),
        "kv_cache": torch.zeros(2, 5, 16, 2, 64),
        "starts": [0, 2],
        "ends": [2, 6],
        "block_table": [[0, 1, 2], [3, 4, 0]],
        "seq_lens": [2, 33],
        "max_query_len": 4,
        "scale": 0.3,
    }
    arguments |= changed
    return {
        name: torch.tensor(value).int() if isinstance(value, list) else value
        for name, value in arguments.items()
    }


# It does what the reference does.


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_pieces_of_different_length(num_pieces, dtype, numbers):
    q, kv_cache, *tables = pieces_of(numbers, dtype, num_pieces)
    ours, theirs = (
        kind(*tables, kv_cache, 3).attend(q, kv_cache, 0.3)
        for kind in (KernelPrefill, PaddedAttention)
    )
    assert ours.shape == theirs.shape and ours.dtype == dtype
    allowed = 8 * torch.finfo(dtype).eps * theirs.abs().max()
    assert (ours.float() - theirs.float()).abs().max() <= allowed


@needs_compiler
def test_a_flat_batch_is_told_by_query_start_loc(numbers):
    q = torch.randn(6, 4, 16, generator=numbers)
    kv_cache = torch.randn(2, 6, 4, 2, 16, generator=numbers)
    query_start_loc = torch.tensor([0, 2, 6]).int()
    tables = (torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([5, 8]).int())
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    ours = prefill_attention_of(q, kv_cache, starts, ends, *tables, 4, 0.3)
    for (start, end), table, num_keys in zip([(0, 2), (2, 6)], *tables, strict=True):
        rows = torch.arange(start, end)[None]
        positions = torch.arange(num_keys - (end - start), num_keys)[None]
        one = PaddedAttention(rows, positions, table[None].long(), kv_cache, 2)
        expected = one.attend(q, kv_cache, 0.3)
        assert torch.allclose(ours[start:end], expected, atol=1e-6)


@needs_compiler
def test_an_empty_batch_is_an_empty_result(numbers):
    q, kv_cache, *tables = pieces_of(numbers)
    attention = KernelPrefill(*(table[:0] for table in tables), kv_cache, 3)
    assert attention.attend(q, kv_cache, 0.3).shape == (0, 6, 16)


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_without_queries_nothing_is_started(version):
    names, q = Names(), torch.zeros(6, 4, 64).half()
    arguments = whole_batch(out=q, q=q, kv_cache=torch.zeros(2, 5, 16, 2, 64).half())
    arguments |= {"ends": arguments["starts"], "max_query_len": 0}
    prefill_attention(names, version, **arguments)
    assert not names.asked


@needs_compiler
def test_a_request_without_queries_is_passed_by():
    arguments = whole_batch(ends=[2, 2], seq_lens=[2, 7])
    arguments["out"] = torch.full((6, 4, 64), 5.0)
    prefill_attention(PREFILL_ATTENTION, "v3", **arguments)
    assert arguments["out"][:2].eq(0).all() and arguments["out"][2:].eq(5).all()


@needs_compiler
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_large_scores_do_not_overflow(version):
    kv_cache = torch.ones(2, 2, 16, 1, 64).half()
    kv_cache[1, 1, 1] = 3
    kv_cache[0, 1, 1] *= 2  # the key in slot 17 has the largest score
    q = torch.full((20, 2, 64), 1e4).half()
    tables = {"starts": [0], "ends": [20], "block_table": [[0, 1]], "seq_lens": [32]}
    arguments = whole_batch(out=torch.zeros_like(q), q=q, kv_cache=kv_cache, **tables)
    arguments |= {"max_query_len": 20, "scale": 1.0}
    prefill_attention(PREFILL_ATTENTION, version, **arguments)
    # Queries at positions 12 to 16 see ones, the others the three.
    assert arguments["out"][:5].eq(1).all() and arguments["out"][5:].eq(3).all()


# What does not fit is refused before anything starts.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(6, 4, 32)}, "queries of"),
        ({"q": torch.zeros(5, 4, 64)}, "queries of"),
        ({"q": torch.zeros(6, 4, 128)[..., ::2]}, "queries of"),
        ({"q": torch.zeros(6, 4, 64).half()}, "float16 queries"),
        ({"q": torch.zeros(6 * 256 + 1)[1:].view(6, 4, 64)}, "multiples of 16 bytes"),
        ({"q": torch.zeros(6, 256)}, r"\[3, 2, 5, 1, 1, 2, 1\] dimensions"),
        ({"out": torch.zeros(4, 6, 64).transpose(0, 1)}, "not contiguous"),
        ({"kv_cache": torch.zeros(2, 5, 16, 3, 64)}, "3 key heads"),
        ({"kv_cache": torch.zeros(2, 5, 16, 0, 64)}, "0 key heads"),
        ({"kv_cache": torch.zeros(2, 5, 16, 2, 80)}, "a cache of"),
        ({"kv_cache": torch.zeros(1, 5, 16, 2, 64)}, "a cache of"),
        ({"kv_cache": torch.zeros(2, 10, 16, 2, 64)[:, ::2]}, "contiguous"),
        ({"seq_lens": torch.tensor([2, 33])}, "int32"),
        ({"seq_lens": [2]}, "tables of 2, 2, 2, 1 requests"),
        ({"window": 0}, "window is 0"),
        ({"starts": [-1, 2]}, "starts: there are numbers from -1 to 2"),
        ({"ends": [2, 7]}, "ends: there are numbers from 2 to 7, but 0 to 6"),
        ({"ends": [2, 1]}, "number of queries: there are numbers from -1 to 2"),
        ({"max_query_len": 3}, "number of queries: there are numbers from 2 to 4"),
        ({"seq_lens": [1, 33]}, "before the queries: there are numbers from -1 to 29"),
        (
            {"seq_lens": [2, 49]},
            "seq_lens: .* from 2 to 49, but 0 to 48",
        ),
        ({"block_table": [[0, 1, 2], [3, 5, 0]]}, "block_table: .* from 0 to 5, but"),
        ({"block_table": [[-1, 1, 2], [3, 4, 0]]}, "block_table: .* from -1 to 4"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    names = Names()
    with pytest.raises(ShapeError, match=message):
        prefill_attention(names, "v3", **whole_batch(**changed))
    assert not names.asked


def test_blocks_that_nobody_looks_at_may_be_anything():
    names = Names()
    table = [
        [0, -1, 99],
        [-1, 4, 0],
    ]  # the first query of the second sees keys 25 to 29
    prefill_attention(names, "v3", **whole_batch(block_table=table, window=5))
    assert len(names.asked) == 1


@pytest.mark.parametrize(
    ("version", "head_dim", "dtype", "message"),
    [
        ("v4", 64, torch.float32, "16 bits, not torch.float32"),
        ("v4", 72, torch.float16, "16, 32, ... 256 numbers"),
        ("v4", 512, torch.float16, "16, 32, ... 256 numbers"),
        ("v3", 512, torch.float32, "at most 1024 bytes, not 2048"),
        ("v2", 512, torch.float32, "at most 1024 bytes, not 2048"),
        ("v3", 30, torch.float32, "16 bytes at once, and a head has 120"),
    ],
)
def test_heads_that_a_rung_does_not_take_are_refused(version, head_dim, dtype, message):
    names, q = Names(), torch.zeros(6, 4, head_dim, dtype=dtype)
    cache = torch.zeros(2, 5, 16, 2, head_dim, dtype=dtype)
    arguments = whole_batch(out=torch.zeros_like(q), q=q, kv_cache=cache)
    with pytest.raises(ShapeError, match=message):
        prefill_attention(names, version, **arguments)
    assert not names.asked
    best = best_version(head_dim, dtype, CPU)
    assert best < version and why_not_version(best, head_dim, dtype) is None
    prefill_attention(names, best, **arguments)
    assert len(names.asked) == 1


def test_a_tile_of_the_host_is_that_of_the_kernel():
    """Otherwise blocks would be missing or too many."""
    grids = {}

    class Grids(Names):
        def __getitem__(self, name):
            return lambda grid, block, *rest, **options: grids.update({name: grid})

    for version, kind, dtype in (
        ("v1", PrefillCase, "float32"),
        ("v2", PrefillCase, "float32"),
        ("v3", PrefillCase, "float16"),
        ("v4", TensorCoreCase, "float16"),
    ):
        case = kind(version, dtype, 256, 16, 4, 2, ((0, 40),), None)
        with pytest.raises(AssertionError):
            case.run(Grids())
    assert list(grids.values()) == [(40, 4, 1), (5, 4, 1), (3, 2, 1), (3, 2, 1)]


# The operator's contract is true.


@needs_compiler
def test_torchs_own_checks_pass(numbers):
    q = torch.randn(6, 4, 16, generator=numbers)
    kv_cache = torch.randn(2, 6, 4, 2, 16, generator=numbers)
    tables = whole_batch(block_table=[[0, 1], [2, 3]], seq_lens=[5, 8])
    names = ("starts", "ends", "block_table", "seq_lens")
    arguments = (q, kv_cache, *(tables[name] for name in names), 4, 0.3, 3)
    verdicts = torch.library.opcheck(prefill_attention_of, arguments)
    assert set(verdicts.values()) == {"SUCCESS"}


@needs_compiler
def test_a_model_compiles_into_one_graph(numbers):
    q, kv_cache, *tables = pieces_of(numbers)
    attention = KernelPrefill(*tables, kv_cache, 3)

    def model(q):
        return attention.attend(q * 2, kv_cache, 0.3).relu()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q), model(q))


def test_it_runs_on_a_gpu_that_is_not_there():
    with FakeTensorMode(), torch.device("cuda"):
        q, kv_cache = torch.empty(9, 2, 16), torch.empty(2, 9, 4, 1, 16)
        tables = torch.empty(3, 3, dtype=torch.int64)
        attention = KernelPrefill(tables, tables, tables, kv_cache, 2)
        out = attention.attend(q, kv_cache, 0.3)
        assert (out.shape, out.device.type) == ((9, 2, 16), "cuda")


# The choice.


def test_the_best_rung_that_can_run_runs(monkeypatch):
    monkeypatch.setattr(cuda_prefill, "why_no_mma", lambda major: None)
    capability = [(9, 0)]
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: capability[0]
    )
    for has, expected in (
        ((9, 0), ["v3", "v4", "v4"]),
        ((8, 0), ["v3", "v4", "v4"]),
        ((7, 5), ["v3", "v4", "v3"]),
    ):
        capability[0] = has
        why_no_tensor_cores.cache_clear()
        assert [best_version(64, dtype, GPU) for dtype in DTYPES] == expected
    monkeypatch.setattr(cuda_prefill, "why_no_mma", lambda major: "no header")
    why_no_tensor_cores.cache_clear()
    assert best_version(64, torch.float16, GPU) == "v3"
    assert best_version(64, torch.float16, CPU) == "v4"
    why_no_tensor_cores.cache_clear()


def test_on_the_cpu_it_is_emulated_only_if_forced(monkeypatch):
    monkeypatch.delenv("MINIVLLM_OP_PREFILL_ATTENTION", raising=False)
    verdicts = explain("prefill_attention", "cpu", "float16", head_dim=64)
    assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
    assert verdicts["torch"] == "chosen"
    monkeypatch.setenv("MINIVLLM_OP_PREFILL_ATTENTION", "cuda")
    with pytest.raises(BackendUnavailable, match="runs on a GPU, not on cpu"):
        choose("prefill_attention", "cpu", "bfloat16", head_dim=64)
    if why_not_emulated("cpu", "float16") is None:
        assert verdicts["emulated"] == "runs only if it is forced"
        monkeypatch.setenv("MINIVLLM_OP_PREFILL_ATTENTION", "emulated")
        chosen = choose("prefill_attention", "cpu", "float32", head_dim=64).backend
        assert chosen.implementation is KernelPrefill


def test_on_a_gpu_it_is_chosen(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    choice = choose("prefill_attention", "cuda", "bfloat16", head_dim=64)
    assert choice.backend.name == "cuda"
    assert choice.backend.implementation is KernelPrefill
