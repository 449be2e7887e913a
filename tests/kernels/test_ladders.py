"""Every rung of every ladder computes what NumPy does, in every order of its threads.

Each runs in check mode, which also reports races, memory that is not its own, and
shared memory that nobody has written. A sample in which every pair of values occurs
runs always; all combinations run with `make test-kernels`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from minivllm.errors import ShapeError
from minivllm.ops import rungs
from minivllm.ops.emulate import EmulatedModule
from tests.kernels.cases import (
    DTYPES,
    KERNELS,
    ORDERS,
    AttentionCase,
    Case,
    Names,
    SoftmaxCase,
    VarianceCase,
    emulated,
)
from tests.kernels.kinds import FILES, RUNGS, factors_of, make
from tests.kernels.pairwise import all_combinations, pairs_of, pairwise
from tests.kernels.tools import needs_compiler


@cache
def module_of(kind: type[Case], version: str, is_full: bool) -> EmulatedModule:
    """Compile what the cases of a rung need, once."""
    choose = all_combinations if is_full else pairwise
    values = choose(factors_of(kind, version))
    return emulated(list(dict.fromkeys(make(kind, version, v)[0] for v in values)))


def sample() -> Iterator[Any]:
    """Yield a few cases of each rung."""
    for kind, version in RUNGS:
        for values in pairwise(factors_of(kind, version)):
            case, order = make(kind, version, values)
            name = f"{case.file.partition('.')[0]}-{case}-{'-'.join(map(str, order))}"
            yield pytest.param(case, *order, id=name.replace(" ", ""))


@needs_compiler
@pytest.mark.parametrize(("case", "order", "seed"), list(sample()))
def test_a_rung_computes_what_numpy_does(case, order, seed):
    module = module_of(type(case), case.version, is_full=False)
    case.run(module, order=order, seed=seed)


@pytest.mark.kernels
@needs_compiler
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(map(str, order)))
@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_every_combination(kind, version, order):
    module = module_of(kind, version, is_full=True)
    name, seed = order
    for values in all_combinations(factors_of(kind, version) | {"order": [order]}):
        case, _ = make(kind, version, values)
        try:
            case.run(module, order=name, seed=seed)
        except Exception as error:
            raise AssertionError(f"{case!r}: {error}") from error


@needs_compiler
@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_sums_in_a_row_do_not_mix(dtype, order, seed):
    case = VarianceCase("v1", dtype, 200, 3)
    case.run(emulated([case]), order=order, seed=seed)


def test_every_kernel_has_cases():
    assert {path.name for path in KERNELS.glob("*.cu")} == set(FILES)


def test_every_pair_of_values_occurs_in_the_sample():
    for kind, version in RUNGS:
        factors = factors_of(kind, version)
        every, sampled = all_combinations(factors), pairwise(factors)
        pairs, sampled_pairs = (
            set().union(*map(pairs_of, values)) for values in (every, sampled)
        )
        assert sampled_pairs == pairs
        assert len(sampled) < len(every) / 3


@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_an_empty_batch_starts_nothing(kind, version):
    names = Names()
    kind.empty(version).run(names)
    assert not names.asked


@needs_compiler
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_large_scores_do_not_overflow(version):
    kv_cache = torch.ones(2, 2, 16, 1, 64)
    kv_cache[1, 1, 1] = 3
    kv_cache[0, 1, 1] *= 2  # the key in slot 17 has the largest score, 1.28 million
    q = torch.full((1, 2, 64), 1e4)
    out = torch.full_like(q, torch.nan)
    rows, seq_lens = torch.tensor([[0], [32]], dtype=torch.int32)
    block_table = torch.tensor([[0, 1]], dtype=torch.int32)
    case = AttentionCase(version, "float32", 64, 16, 2, 1, (32,), None)
    arguments = [out, q, kv_cache, rows, block_table, seq_lens]
    options = {"scale": 1.0, "split_size": 16}
    rungs.paged_attention(emulated([case]), version, *arguments, **options)
    assert out.eq(3).all()


@needs_compiler
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_a_row_without_scores_has_no_shares(version):
    x = torch.zeros(3, 40)
    x[0], x[1, 3] = -torch.inf, torch.nan
    out = torch.zeros_like(x)
    module = emulated([SoftmaxCase(version, "float32", 40, 3)])
    rungs.softmax(module, version, out, x)
    assert out[:2].isnan().all(), "as torch.softmax has it"
    assert torch.allclose(out[2], torch.full((40,), 1 / 40))


@needs_compiler
def test_a_long_text_beside_short_ones():
    case = AttentionCase("v4", "float32", 64, 16, 9, 3, (300, 1, 17), None)
    case.run(emulated([case]))


def attention_arguments(**changed: Any) -> dict[str, Any]:
    """Return arguments that fit, but for those that are given."""
    arguments = {
        "out": torch.zeros(2, 4, 64),
        "q": torch.zeros(3, 4, 64),
        "kv_cache": torch.zeros(2, 5, 16, 2, 64),
        "rows": torch.tensor([2, 0], dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.tensor([1, 33], dtype=torch.int32),
        "scale": 1.0,
    }
    return arguments | changed


ODD_ADDRESS = torch.zeros(3 * 4 * 64 + 1)[1:].view(3, 4, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_lens": torch.tensor([5, 0], dtype=torch.int32)}, "has 0 keys"),
        ({"seq_lens": torch.tensor([5, 1])}, "int32"),
        ({"seq_lens": torch.tensor([5], dtype=torch.int32)}, "seq_lens"),
        ({"q": torch.zeros(3, 4, 32)}, "queries of"),
        ({"q": torch.zeros(3, 4, 128)[..., ::2]}, "queries of"),
        ({"q": torch.zeros(3, 4, 64).bfloat16()}, "bfloat16"),
        ({"q": ODD_ADDRESS}, "multiples of 16 bytes"),
        ({"kv_cache": torch.zeros(2, 5, 16, 3, 64)}, "3 key heads"),
        ({"kv_cache": torch.zeros(2, 5, 16, 2, 80)}, "a cache of"),
        ({"kv_cache": torch.zeros(2, 10, 16, 2, 64)[:, ::2]}, "contiguous"),
        ({"window": 0}, "window is 0"),
        ({"split_size": 0}, "split_size 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(changed, message):
    names = Names()
    with pytest.raises(ShapeError, match=message):
        rungs.paged_attention(names, "v4", **attention_arguments(**changed))
    assert not names.asked


def test_heads_that_packs_do_not_divide_are_left_to_the_second_rung():
    changed = {
        "out": torch.zeros(2, 4, 30),
        "q": torch.zeros(3, 4, 30),
        "kv_cache": torch.zeros(2, 5, 16, 2, 30),
    }
    with pytest.raises(ShapeError, match=r"16 bytes at once.*120; use v2"):
        rungs.paged_attention(Names(), "v3", **attention_arguments(**changed))
    rungs.paged_attention(Names(), "v2", **attention_arguments(**changed))


@pytest.mark.parametrize(
    ("out", "x", "weight", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 9), torch.zeros(9), "belong together"),
        (torch.zeros(2, 8), torch.zeros(2, 8).half(), torch.zeros(8), "belong"),
        (torch.zeros(2, 8), torch.zeros(2, 16)[:, ::2], torch.zeros(8), "contiguous"),
        (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(9), "does not fit rows"),
        (*torch.zeros(2, 2, 8).double(), torch.zeros(8).double(), "not for float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(out, x, weight, message):
    names = Names()
    with pytest.raises(ShapeError, match=message):
        rungs.rms_norm(names, "v4", out, x, weight, 1e-5)
    assert not names.asked


def test_rows_at_odd_addresses_are_loaded_one_by_one():
    names = Names()
    x = torch.zeros(2 * 8 + 1)[1:].view(2, 8)
    rungs.rms_norm(names, "v4", torch.zeros(2, 8), x, torch.zeros(8), 1e-5)
    rungs.rms_norm(names, "v4", torch.zeros(2, 8), x.clone(), torch.zeros(8), 1e-5)
    assert list(names) == ["rms_norm_v4<float, 1>", "rms_norm_v4<float, 4>"]
