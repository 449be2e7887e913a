"""The kernels that choose tokens, as operators and as backends, without a GPU."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ShapeError
from minivllm.ops import cuda, cuda_sampling, registry
from minivllm.ops.cuda import why_not_emulated
from minivllm.ops.cuda_sampling import kernel_argmax, kernel_draw
from minivllm.ops.draw import draw as draw_in_torch
from minivllm.ops.reference import argmax as argmax_in_torch
from minivllm.ops.registry import choose, explain
from minivllm.sampling import sampler
from tests.kernels.cases import Names
from tests.op_tools import needs_compiler
from tests.sampling_tools import make_request, sample_numpy, tensor_inputs
from tests.test_sampler import (
    LARGEST,
    TENTHS,
    count_same,
    edit_both,
    random_logits,
    random_request,
)


def sample_emulated(logits, requests, numbers=None):
    """Choose tokens with both kernels, for edited scores."""
    inputs = tensor_inputs(requests, logits.shape[1])
    if numbers is not None:
        inputs.uniforms[:] = torch.tensor(numbers).double()[inputs.sampled_rows]
    scores = torch.from_numpy(np.asarray(logits, dtype=np.float32))
    largest, token_ids = sampler.sample(scores, inputs, kernel_argmax, kernel_draw)
    torch.testing.assert_close(largest, scores.amax(-1), equal_nan=True)
    return token_ids.tolist()


def kept(logits, **params):
    """Return the tokens that can be drawn: the line is looked at in 40 places."""
    numbers = [(i + 0.5) / 40 for i in range(40)]
    rows = np.tile(np.asarray(logits, dtype=np.float32), (40, 1))
    requests = [make_request(**params)] * 40
    token_ids = sample_emulated(rows, requests, numbers)
    assert token_ids == sample_numpy(rows, requests, numbers)
    return sorted(set(token_ids))


def draw_arguments(num_rows=3, size=40, **changed):
    """Return arguments of `draw`: all rows draw, two of them from a part."""
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0))
    arguments = {
        "logits": logits,
        "largest": logits.amax(-1),
        "rows": torch.arange(num_rows).flip(0),
        "temperatures": torch.ones(num_rows, dtype=torch.float64),
        "uniforms": torch.linspace(0.1, 0.9, num_rows, dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.1], dtype=torch.float64),
        "top_k": torch.tensor([size, 5]),
        "top_p": torch.tensor([0.5, 1.0], dtype=torch.float64),
    }
    return arguments | changed


# The same token as everywhere else.


@needs_compiler
@pytest.mark.parametrize("round_", range(2))
def test_random_batches_agree_row_by_row(round_):
    chance = np.random.default_rng(round_)
    num_compared = num_rows = num_drawn = 0
    for _ in range(12):
        vocab_size = int(chance.choice([1, 2, 7, 50, 256, 257, 600, 1300]))
        size = chance.integers(1, 13)
        logits = np.stack([random_logits(chance, vocab_size) for _ in range(size)])
        requests = [random_request(chance, vocab_size) for _ in range(size)]
        rows = edit_both(logits, requests)
        token_ids = sample_emulated(rows, requests)
        num_rows += size
        num_compared += count_same(logits, rows, requests, token_ids)
        num_drawn += sum(r.sampling_params.temperature > 0 for r in requests)
    assert num_compared > 0.97 * num_rows
    assert num_drawn > 0.8 * num_rows > 40


@needs_compiler
def test_torch_and_the_kernels_draw_the_same_tokens():
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 3000, generator=random) * 3
    num_cut = 16
    draws = {
        "rows": torch.randperm(24, generator=random),
        "temperatures": torch.rand(24, generator=random).double() + 0.3,
        "uniforms": torch.rand(24, generator=random, dtype=torch.float64),
        "min_p": torch.rand(num_cut, generator=random).double() / 50,
        "top_k": torch.randint(1, 3000, (num_cut,), generator=random),
        "top_p": torch.rand(num_cut, generator=random).double(),
    }
    largest, ids = kernel_argmax(logits)
    their_largest, their_ids = argmax_in_torch(logits)
    assert largest.equal(their_largest) and ids.equal(their_ids)
    ours = kernel_draw(logits, largest, **draws)
    theirs = draw_in_torch(logits, largest, **draws)
    assert ours.equal(theirs)
    assert len(set(ours.tolist())) > 12


@needs_compiler
def test_cuts_by_hand():
    assert kept(TENTHS, top_p=0.6) == [2, 3]
    assert kept(TENTHS, top_p=1e-300) == [3]
    assert kept(TENTHS, top_k=2) == [2, 3]
    assert kept(TENTHS, min_p=0.6) == [2, 3]
    assert kept(TENTHS, min_p=0.6, top_p=0.55) == [3]  # of what is left, 4/7
    assert kept(TENTHS, top_k=3, top_p=0.42) == [3]
    # 5 first, then the first of the ones; -inf never.
    logits = [1, -np.inf, 1, 5, 1, 0, 1]
    assert kept(logits, top_k=3, temperature=9.0) == [0, 2, 3]
    assert kept(logits, top_p=0.4, temperature=1e6) == [0, 2, 3]
    # A difference of 1 vanishes in a share at temperature 1e6, but not in the order.
    near = 1000 + np.arange(4) * 2.0**-13
    assert kept(near, top_k=2, temperature=1e6) == [2, 3]


@needs_compiler
@pytest.mark.parametrize("temperature", [1e-300, 1.0, 1e6])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.5}])
def test_the_largest_number_takes_the_last_possible_token(temperature, cuts):
    request = make_request(temperature=temperature, **cuts)
    assert sample_emulated(np.array([[0, 0, 0, -np.inf]]), [request], [LARGEST]) == [2]


@needs_compiler
def test_a_request_gets_the_same_token_alone_and_in_any_batch():
    """Exactly: its masses are whole numbers, and no neighbour adds to them."""
    arguments = draw_arguments(num_rows=7, size=900)
    whole = kernel_draw(**arguments).tolist()
    rest = ("rows", "temperatures", "uniforms")
    cuts = ("min_p", "top_k", "top_p")
    for i in range(7):
        alone = arguments | {name: arguments[name][i : i + 1] for name in rest}
        alone |= {name: arguments[name][i : i + 1] for name in cuts}
        assert kernel_draw(**alone).tolist() == whole[i : i + 1]


@needs_compiler
def test_rows_that_are_no_numbers_do_not_disturb_the_others():
    logits = np.tile(TENTHS, (7, 1))
    logits[1], logits[3], logits[5, 2] = np.nan, -np.inf, np.inf
    for params in ({}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.01}):
        token_ids = sample_emulated(logits, [make_request(**params)] * 7, [0.5] * 7)
        assert token_ids[::2] == [2] * 4
        assert all(0 <= token_id < 4 for token_id in token_ids)


@needs_compiler
def test_rows_may_be_a_part_of_wider_ones():
    arguments = draw_arguments()
    wide = torch.full((3, 64), torch.nan)
    wide[:, :40] = arguments["logits"]
    assert kernel_draw(**arguments | {"logits": wide[:, :40]}).equal(
        kernel_draw(**arguments)
    )
    assert kernel_argmax(wide[:, :40])[1].equal(kernel_argmax(arguments["logits"])[1])


# What does not fit.


@needs_compiler
def test_nothing_to_do_is_no_launch():
    largest, ids = kernel_argmax(torch.zeros(0, 40))
    assert largest.shape == ids.shape == (0,)
    none = {n: x[:0] for n, x in draw_arguments().items() if n not in ("logits",)}
    arguments = draw_arguments() | none | {"largest": draw_arguments()["largest"]}
    assert kernel_draw(**arguments).shape == (0,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(3, 0)}, r"\(3, 0\), but the kernels take"),
        ({"logits": torch.zeros(40)}, r"logits are \(40,\)"),
        ({"logits": torch.zeros(3, 80)[:, ::2]}, "lie 2 apart"),
        ({"logits": torch.zeros(3, 40).double()}, "largest is torch.float32"),
        ({"largest": torch.zeros(4)}, "largest is"),
        ({"largest": torch.zeros(6)[::2]}, "contiguous"),
        ({"rows": torch.tensor([0, 1, 3])}, "rows has numbers from 0 to 3"),
        ({"rows": torch.tensor([0, 1, -1])}, "rows has numbers from -1 to 1"),
        ({"rows": torch.tensor([0, 1, 2]).int()}, "rows is torch.int32"),
        ({"temperatures": torch.ones(3)}, "temperatures is torch.float32"),
        ({"uniforms": torch.ones(2).double()}, "uniforms is"),
        ({"top_k": torch.tensor([0, 5])}, "top_k has numbers from 0 to 5"),
        ({"top_k": torch.tensor([41, 5])}, "top_k has numbers from 5 to 41"),
        ({"top_k": torch.tensor([1])}, "min_p is"),
        ({"min_p": torch.zeros(2)}, "min_p is torch.float32"),
        ({"top_p": torch.ones(3).double()}, "top_p is"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ShapeError, match=message):
        kernel_draw(**draw_arguments(**changed))


def test_more_cuts_than_requests_are_refused():
    cuts = {"min_p": torch.zeros(4).double(), "top_p": torch.ones(4).double()}
    with pytest.raises(ShapeError, match="rows is"):
        kernel_draw(**draw_arguments(**cuts, top_k=torch.ones(4).long()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(3, 2**19 + 1)}, "1 to 524,288 tokens"),
        ({"logits": torch.zeros(3, 40).double()}, "largest is"),
        ({"ids": torch.zeros(3).int()}, "ids is torch.int32"),
        ({"part_size": 0}, "part_size is 0"),
    ],
)
def test_an_argmax_that_does_not_fit_is_refused(changed, message):
    names = Names()
    arguments = {"largest": torch.zeros(3), "ids": torch.zeros(3).long()}
    arguments |= {"logits": torch.zeros(3, 40)} | changed
    with pytest.raises(ShapeError, match=message):
        cuda_sampling.argmax(names, "v3", **arguments)
    assert not names.asked


def test_types_that_no_kernel_is_for_are_refused():
    logits = torch.zeros(3, 40).double()
    with pytest.raises(ShapeError, match="not for float64"):
        kernel_argmax(logits)


def test_ids_that_lead_out_of_a_row_are_refused():
    arguments = draw_arguments()
    for name in ("min_p", "top_k", "top_p"):
        del arguments[name]
    arguments |= {"drawn": torch.zeros(3).long(), "last_ids": torch.tensor([0, 40])}
    names = Names()
    with pytest.raises(ShapeError, match="last_ids has numbers from 0 to 40"):
        cuda_sampling.draw(names, "v3", **arguments)
    assert not names.asked


# The contracts are true.


@needs_compiler
def test_torchs_own_checks_pass():
    arguments = draw_arguments()
    for operator, given in (
        (kernel_argmax, (arguments["logits"],)),
        (kernel_draw, tuple(arguments.values())),
    ):
        verdicts = torch.library.opcheck(operator, given)
        assert set(verdicts.values()) == {"SUCCESS"}


def choose_tokens(logits, temperatures, uniforms, rows):
    """Take the best of some rows, and draw from the others."""
    scores = logits * 2
    largest, ids = kernel_argmax(scores)
    none = temperatures.new_empty(0)
    cuts = (none, none.long(), none)
    drawn = kernel_draw(scores, largest, rows, temperatures, uniforms, *cuts)
    return ids.index_copy(0, rows, drawn)


@needs_compiler
def test_a_sampler_compiles_into_one_graph():
    arguments = draw_arguments()
    given = [arguments[n] for n in ("logits", "temperatures", "uniforms", "rows")]
    compiled = torch.compile(choose_tokens, fullgraph=True, backend="aot_eager")
    assert compiled(*given).equal(choose_tokens(*given))


def test_operators_run_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        logits = torch.empty(3, 40, device="cuda")
        largest, ids = kernel_argmax(logits)
        assert (largest.dtype, ids.dtype) == (torch.float32, torch.int64)
        rows, top_k = (
            torch.empty(num, dtype=torch.int64, device="cuda") for num in (2, 1)
        )
        column, part = (
            torch.empty(num, dtype=torch.float64, device="cuda") for num in (2, 1)
        )
        draws = (rows, column, column, part, top_k, part)
        drawn = kernel_draw(logits, largest, *draws)
        assert (drawn.shape, drawn.device.type) == ((2,), "cuda")


# The choice.


def test_on_the_cpu_kernels_are_emulated_only_if_forced(monkeypatch):
    for op, implementation in cuda_sampling.KERNELS.items():
        monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
        verdicts = explain(op, "cpu", "float16")
        assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
        assert verdicts["torch"] == "chosen"
        if why_not_emulated("cpu", "float32") is None:
            assert verdicts["emulated"] == "runs only if it is forced"
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "emulated")
            chosen = choose(op, "cpu", "float32").backend
            assert chosen.implementation is implementation


def test_on_a_gpu_the_kernels_are_chosen_if_they_can_run(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    for op, implementation in cuda_sampling.KERNELS.items():
        backend = choose(op, "cuda", "float32").backend
        assert (backend.name, backend.implementation) == ("cuda", implementation)


def test_the_module_is_known_to_the_registry():
    assert "minivllm.ops.cuda_sampling" in registry.MODULES
