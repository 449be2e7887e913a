"""The kernels of gated delta nets, as operators and as backends, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ShapeError
from minivllm.ops import cuda, cuda_delta_net, delta_net, registry
from minivllm.ops.cuda import why_not_emulated
from minivllm.ops.cuda_delta_net import (
    KERNELS,
    best_conv_version,
    best_recurrent_version,
    kernel_causal_conv1d,
    kernel_chunked_delta_rule,
    kernel_recurrent_delta_rule,
    without_lengths,
)
from minivllm.ops.registry import choose, explain
from tests.kernels.cases import Names, emulated
from tests.kernels.delta_net_cases import ChunkedCase, ConvCase, RecurrentCase
from tests.kernels.test_traffic import traced
from tests.op_tools import DTYPES, assert_close, needs_compiler


def starts_of(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def conv_inputs(lengths, dtype=torch.float32, kernel_size=4, kept=torch.float32):
    """Return what the convolution takes; inputs are a part of wider rows."""
    numbers, num_texts = torch.Generator().manual_seed(1), len(lengths)
    x = torch.randn(sum(lengths), 30, generator=numbers).to(dtype)[:, 4:24]
    weight = torch.randn(20, kernel_size, generator=numbers).to(dtype)
    states = torch.randn(num_texts + 2, 20, kernel_size - 1, generator=numbers)
    slots = torch.randperm(num_texts + 2, generator=numbers)[:num_texts]
    return x, weight, states.to(kept), slots, starts_of(*lengths)


def rule_inputs(num_tokens, num_texts, dtype=torch.float32, sizes=(2, 4, 12, 20)):
    """Return what both rules take; q, k and v are parts of the same rows."""
    num_key_heads, num_heads, key_dim, value_dim = sizes
    numbers = torch.Generator().manual_seed(2)
    widths = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    rows = torch.randn(num_tokens, sum(widths), generator=numbers).to(dtype)
    q, k, v = rows.split(widths, dim=1)
    q, k = (x.unflatten(1, (num_key_heads, key_dim)) for x in (q, k))
    v = v.unflatten(1, (num_heads, value_dim))
    log_decay = -torch.rand(num_tokens, num_heads, generator=numbers)
    beta = torch.rand(num_tokens, num_heads, generator=numbers)
    shape = (num_texts + 2, num_heads, key_dim, value_dim)
    states = torch.randn(shape, generator=numbers)
    slots = torch.randperm(num_texts + 2, generator=numbers)[:num_texts]
    return [q, k, v, log_decay, beta, states, slots]


def with_copy(given, states):
    """Return arguments with a copy of the states."""
    given = list(given)
    given[states] = given[states].clone()
    return given


def assert_same_as(ours, theirs, given, states):
    """Run both, each with states of its own, and compare results and states."""
    with_ours, with_theirs = with_copy(given, states), with_copy(given, states)
    y, expected = ours(*with_ours), theirs(*with_theirs)
    assert_close(y, expected, units=16)
    assert_close(with_ours[states], with_theirs[states], units=16)
    assert not with_ours[states].equal(given[states])


# The same as the references.


@needs_compiler
@pytest.mark.parametrize(
    ("kernel_size", "dtype"), [(1, DTYPES[2]), (4, DTYPES[0]), (18, DTYPES[1])]
)
def test_a_convolution(kernel_size, dtype):
    given = conv_inputs((1, 3, 70), dtype, kernel_size)
    if kernel_size == 1:  # nothing is kept
        ours, theirs = kernel_causal_conv1d(*given), delta_net.causal_conv1d(*given)
        assert_close(ours, theirs, units=16)
    else:
        assert_same_as(kernel_causal_conv1d, delta_net.causal_conv1d, given, 2)


@needs_compiler
def test_inputs_kept_in_their_own_type():
    given = conv_inputs((2, 9), torch.bfloat16, kept=torch.bfloat16)
    assert_same_as(kernel_causal_conv1d, delta_net.causal_conv1d, given, 2)


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2, 4, 12, 20), DTYPES[0]),
        ((2, 4, 12, 20), DTYPES[2]),
        ((1, 3, 260, 6), DTYPES[1]),
    ],
)
def test_a_token_of_each_text(sizes, dtype):
    given = rule_inputs(3, 3, dtype, sizes)
    assert best_recurrent_version(sizes[2]) == ("v3" if sizes[2] == 12 else "v1")
    assert_same_as(
        kernel_recurrent_delta_rule, delta_net.recurrent_delta_rule, given, 5
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_tokens_of_each_text(dtype):
    given = [*rule_inputs(83, 3, dtype), starts_of(1, 65, 17), [1, 65, 17]]
    assert_same_as(without_lengths, delta_net.chunked_delta_rule, given, 5)


@needs_compiler
def test_a_text_without_tokens_keeps_its_state():
    given = [*rule_inputs(5, 3), starts_of(0, 5, 0)]
    states, slots = given[5], given[6]
    before = states.clone()
    kernel_chunked_delta_rule(*given)
    unchanged = [slot for slot in range(5) if slot != slots[1]]
    assert states[unchanged].equal(before[unchanged])
    assert not states[slots[1]].equal(before[slots[1]])


@needs_compiler
def test_differences_of_decays_keep_their_digits():
    """After a token that wipes the state out, sums of decays are large."""
    given = [*rule_inputs(16, 1), starts_of(16)]
    given[3][2] = -1e6
    q, k, v, log_decay, beta, states, slots = (x.double() for x in given[:7])
    slots, state = slots.long(), states[slots.long()]
    q, k = (x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(2, dim=1) for x in (q * 12**-0.5, k))
    expected = []
    for t in range(16):
        state = state * log_decay[t].exp()[:, None, None]
        correction = beta[t, :, None] * (
            v[t] - torch.einsum("nhkv,hk->hv", state, k[t])
        )
        state = state + k[t, :, :, None] * correction[:, None]
        expected.append(torch.einsum("nhkv,hk->hv", state, q[t]))
    y = kernel_chunked_delta_rule(*given)
    assert_close(y, torch.stack(expected).float(), units=16)
    assert_close(given[5][slots], state.float(), units=16)


# A text's result does not depend on who else is there, nor on how it is cut.


@needs_compiler
def test_a_text_gets_the_same_bits_alone():
    lengths = (1, 20, 3)
    x, weight, kept, slots, starts = conv_inputs(lengths)
    *rows, states, _ = rule_inputs(24, 3)

    def run(rows, slots, starts):
        """Return results, and new states of the slots."""
        x, *rows = rows
        given = [kept.clone(), states.clone()]
        y = kernel_causal_conv1d(x, weight, given[0], slots, starts)
        read = kernel_chunked_delta_rule(*rows, given[1], slots, starts)
        return y, read, given[0][slots], given[1][slots]

    y, read, *new_states = run([x, *rows], slots, starts)
    for text, length in enumerate(lengths):
        part = slice(starts[text], starts[text + 1])
        mine = [tokens[part] for tokens in (x, *rows)]
        alone = run(mine, slots[text : text + 1], starts_of(length))
        in_batch = (
            y[part],
            read[part],
            *(state[text : text + 1] for state in new_states),
        )
        for ours, theirs in zip(alone, in_batch, strict=True):
            assert ours.equal(theirs)


@needs_compiler
def test_the_size_of_pieces_changes_no_bit():
    x, weight, states, slots, starts = conv_inputs((40, 2, 9))
    kernels = emulated([ConvCase("v3", "float32", 20, 4, (40, 2, 9), True, 3)])
    results, kept = torch.zeros(2, 51, 20), [states.clone(), states.clone()]
    for y, state, size in zip(results, kept, (3, 64), strict=True):
        given = (y, state, x, weight, slots, starts, size)
        cuda_delta_net.causal_conv1d(kernels, "v3", *given)
    assert results[0].equal(results[1]) and kept[0].equal(kept[1])
    assert results.count_nonzero() > 2000


@needs_compiler
def test_a_prompt_in_parts_is_the_prompt():
    *rows, states, slots = rule_inputs(40, 1)
    whole, states_in_parts = states.clone(), states.clone()
    y = kernel_chunked_delta_rule(*rows, whole, slots, starts_of(40))
    parts = []
    for start, end in ((0, 16), (16, 39)):
        part = [x[start:end] for x in rows]
        length = starts_of(end - start)
        parts.append(kernel_chunked_delta_rule(*part, states_in_parts, slots, length))
    last = [x[39:] for x in rows]
    parts.append(kernel_recurrent_delta_rule(*last, states_in_parts, slots))
    assert_close(torch.cat(parts), y, units=16)
    assert_close(states_in_parts, whole, units=16)


# What is read and written.


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        RecurrentCase("v2", "float32", 24, 32, (1, 2), (1, 1)),
        RecurrentCase("v3", "float32", 24, 32, (1, 2), (1, 1)),
        ChunkedCase("v1", "float16", 24, 32, (1, 2), (19, 1)),
        ChunkedCase("v2", "float16", 24, 32, (1, 2), (19, 1)),
    ],
    ids=str,
)
def test_a_state_is_read_once_and_written_once(case):
    (trace,) = traced(case)
    num_bytes = 2 * 2 * 24 * 32 * 4
    assert trace.bytes_read("states") == trace.bytes_written("states") == num_bytes
    if isinstance(case, RecurrentCase):
        assert trace.bank_conflicts() == 0


@needs_compiler
def test_an_input_is_read_once_but_for_those_before_a_piece():
    _, in_registers, in_pieces = ConvCase.examples()
    kept = (
        128 * 3 * (3 + 1 + 3)
    )  # inputs that the three texts keep, and of which tokens
    (trace,) = traced(in_registers)
    assert trace.bytes_read("x") == (64 * 128 + 128 * (3 + 1 + 3)) * 4
    (trace,) = traced(in_pieces)
    before = 3 * 3 * 128  # three pieces of the first text are not its first
    assert trace.bytes_read("x") == (64 * 128 + 128 * (3 + 1 + 3) + before) * 4
    assert kept == 2688


# What does not fit.


@needs_compiler
def test_nothing_to_do_is_no_launch():
    x, weight, states, *_ = conv_inputs((1,))
    none = torch.zeros(0, dtype=torch.int64)
    assert kernel_causal_conv1d(x[:0], weight, states, none, starts_of()).shape == (
        0,
        20,
    )
    *rows, states, _ = rule_inputs(1, 1)
    rows = [x[:0] for x in rows]
    assert kernel_recurrent_delta_rule(*rows, states, none).shape == (0, 4, 20)
    y = kernel_chunked_delta_rule(*rows, states, none, starts_of())
    assert y.shape == (0, 4, 20)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(4)}, r"inputs, factors and states of \(4,\)"),
        ({"x": torch.zeros(4, 40)[:, ::2]}, "inputs .* apart"),
        ({"x": torch.zeros(5, 20)}, "for 5 tokens"),
        ({"x": torch.zeros(4, 20).half()}, "factors of torch.float32"),
        ({"weight": torch.zeros(21, 4)}, "factors of"),
        ({"states": torch.zeros(4, 20, 4)}, "states of"),
        ({"states": torch.zeros(4, 20, 3).half()}, "states of torch.float16"),
        ({"states": torch.zeros(4, 3, 20).mT}, "not contiguous"),
        ({"slots": torch.tensor([1])}, "a query_start_loc of"),
        ({"slots": torch.tensor([1, 1])}, "a slot that two texts have"),
        ({"slots": torch.tensor([1, 4])}, "slots from 1 to 4, of 4"),
        ({"slots": torch.tensor([-1, 1])}, "slots from -1"),
        ({"slots": torch.tensor([0, 1]).int()}, "slots of torch.int32"),
        ({"query_start_loc": starts_of(1, 2)}, "for 4 tokens"),
        ({"query_start_loc": torch.tensor([0, 5, 4])}, r"\[0, 5, 4\]"),
    ],
)
def test_what_a_convolution_refuses(changed, message):
    given = {
        "x": torch.zeros(4, 20),
        "weight": torch.zeros(20, 4),
        "states": torch.zeros(4, 20, 3),
        "slots": torch.tensor([2, 0]),
        "query_start_loc": starts_of(1, 3),
    }
    with pytest.raises(ShapeError, match=message):
        kernel_causal_conv1d(*(given | changed).values())


@pytest.mark.parametrize("kernel_size", [1, 17])
def test_windows_that_registers_do_not_hold_are_left_to_the_first_rung(kernel_size):
    x, weight, states, slots, starts = conv_inputs((3,), kernel_size=kernel_size)
    given = (torch.zeros(3, 20), states, x, weight, slots, starts)
    with pytest.raises(ShapeError, match="v3 takes 2 to 16; v1 all"):
        cuda_delta_net.causal_conv1d(Names(), "v3", *given)
    assert best_conv_version(kernel_size) == "v1"


def test_pieces_are_not_shorter_than_what_is_kept():
    x, weight, states, slots, starts = conv_inputs((3,))
    given = (torch.zeros(3, 20), states, x, weight, slots, starts)
    with pytest.raises(ShapeError, match="pieces of 2 tokens"):
        cuda_delta_net.causal_conv1d(Names(), "v3", *given, piece_size=2)


@pytest.mark.parametrize(
    ("index", "changed", "message"),
    [
        (0, torch.zeros(3, 24), "q, k, v and states of"),
        (0, torch.zeros(3, 3, 12), "4 heads of values for 3 of keys"),
        (0, torch.zeros(3, 2, 12).half(), "q of torch.float16"),
        (1, torch.zeros(3, 2, 16), "q, k and v of"),
        (1, torch.zeros(3, 12, 2).mT, "k of torch.float32"),
        (2, torch.zeros(2, 4, 20), "q, k and v of"),
        (3, torch.zeros(3, 4).double(), "log_decay of torch.float64"),
        (4, torch.zeros(3, 2), "beta of"),
        (5, torch.zeros(5, 4, 12, 20).half(), "states of torch.float16"),
        (5, torch.zeros(5, 4, 20, 12), "states of"),
        (5, torch.zeros(5, 4, 20, 12).mT, "states of"),
        (6, torch.tensor([0, 1]), "slots of"),
        (6, torch.tensor([0, 1, 0]), "a slot that two texts have"),
    ],
)
def test_what_the_rules_refuse(index, changed, message):
    given = rule_inputs(3, 3)
    given[index] = changed
    with pytest.raises(ShapeError, match=message):
        kernel_recurrent_delta_rule(*given)
    with pytest.raises(
        ShapeError, match=message if index < 6 else "slot|query_start_loc"
    ):
        kernel_chunked_delta_rule(*given, starts_of(1, 1, 1))


def test_keys_that_are_too_long():
    given = rule_inputs(2, 2, sizes=(1, 1, 257, 4))
    with pytest.raises(ShapeError, match="takes keys of 256 numbers, not of 257"):
        kernel_chunked_delta_rule(*given, starts_of(1, 1))
    q, k, v, *factors, states, slots = given
    with pytest.raises(ShapeError, match="v3 takes 256 at most"):
        tensors = (torch.zeros_like(v), states, q, k, v, *factors, slots)
        cuda_delta_net.recurrent_delta_rule(Names(), "v3", *tensors)


def test_states_at_odd_addresses_are_loaded_one_by_one():
    q, k, v, *factors, states, slots = rule_inputs(2, 2)
    odd = torch.zeros(states.numel() + 1)[1:].view(states.shape)
    for place, width in ((odd, 1), (states, 4)):
        names = Names()
        tensors = (torch.zeros(v.shape), place, q, k, v, *factors, slots)
        cuda_delta_net.recurrent_delta_rule(names, "v3", *tensors)
        assert list(names) == [f"recurrent_delta_rule_v3<float, 2, {width}>"]


def test_there_are_blocks_for_every_way_to_cut_texts_into_pieces():
    grids = []

    class Started:
        def __getitem__(self, name):
            return lambda grid, *arguments: grids.append(grid)

    for lengths in ((1,), (8, 8, 8), (9, 9, 9), (1, 1, 1, 62)):
        x, weight, states, slots, starts = conv_inputs(lengths)
        given = (torch.zeros(x.shape), states, x, weight, slots, starts, 8)
        cuda_delta_net.causal_conv1d(Started(), "v3", *given)
        num_pieces = sum(-(-length // 8) for length in lengths)
        assert num_pieces <= grids[-1][0] <= num_pieces + len(lengths)


# The contracts are true.


@needs_compiler
def test_torchs_own_checks_pass():
    rule = rule_inputs(3, 3)
    for operator, given in (
        (kernel_causal_conv1d, conv_inputs((1, 2))),
        (kernel_recurrent_delta_rule, rule),
        (kernel_chunked_delta_rule, [*rule, starts_of(1, 1, 1)]),
    ):
        verdicts = torch.library.opcheck(operator, given)
        assert set(verdicts.values()) == {"SUCCESS"}


@needs_compiler
def test_a_step_compiles_into_one_graph():
    def step(x, weight, kept, slots, starts, *rest):
        y = kernel_causal_conv1d(x, weight, kept, slots, starts)
        return y.sum() + kernel_recurrent_delta_rule(*rest)

    conv, rule = conv_inputs((1, 1, 1)), rule_inputs(3, 3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    first, second = [*with_copy(conv, 2), *with_copy(rule, 5)], [*conv, *rule]
    assert compiled(*first).equal(step(*second))
    assert first[2].equal(second[2]) and first[10].equal(second[10])


def test_a_step_runs_on_a_gpu_that_is_not_there_and_asks_it_nothing():
    shapes = [(5, 2, 12)] * 2 + [(5, 4, 20)] + [(5, 4)] * 2 + [(3, 4, 12, 20)]
    with FakeTensorMode():
        rows = [torch.empty(shape, device="cuda") for shape in shapes]
        slots = torch.empty(2, dtype=torch.int64, device="cuda")
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        y = without_lengths(*rows, slots, starts, [2, 3])
        assert (y.shape, y.device.type) == ((5, 4, 20), "cuda")
        x, weight = (torch.empty(5, size, device="cuda") for size in (8, 4))
        kept = torch.empty(3, 8, 3, device="cuda")
        y = kernel_causal_conv1d(x, weight, kept, slots, starts)
        assert (y.shape, y.device.type) == ((5, 8), "cuda")


# The choice.


SIZES = {"key_head_dim": 128, "value_head_dim": 128, "group_size": 2}


def test_on_the_cpu_kernels_are_emulated_only_if_forced(monkeypatch):
    for op, implementation in KERNELS.items():
        monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
        verdicts = explain(op, "cpu", "float32")
        assert verdicts["cuda"] == "it runs on a GPU, not on cpu"
        if why_not_emulated("cpu", "float32") is None:
            assert verdicts["emulated"] == "runs only if it is forced"
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "emulated")
            chosen = choose(op, "cpu", "float32", **SIZES).backend
            assert chosen.implementation is implementation


def test_on_a_gpu_the_kernels_are_chosen_if_they_can_run(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    for op, implementation in KERNELS.items():
        for sizes in ({}, SIZES, {"conv_kernel_size": 40}):
            backend = choose(op, "cuda", "bfloat16", **sizes).backend
            assert (backend.name, backend.implementation) == ("cuda", implementation)


def test_keys_that_no_kernel_takes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    verdicts = explain("chunked_delta_rule", "cuda", "float32", key_head_dim=512)
    assert verdicts["cuda"] == "it takes keys of 256 numbers, not of 512"
    assert verdicts["torch"] == "chosen"
    choice = choose("recurrent_delta_rule", "cuda", "float32", key_head_dim=512)
    assert choice.backend.name == "cuda"


def test_the_module_is_known_to_the_registry():
    assert "minivllm.ops.cuda_delta_net" in registry.MODULES
