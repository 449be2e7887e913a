"""The choice of a token, in NumPy and in torch: by hand, and against each other."""

import math
import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.ops import draw as drawing
from minivllm.ops.registry import choose
from minivllm.reference import sampler as reference
from minivllm.runners.sampling_inputs import SamplingState
from minivllm.sampling import sampler
from minivllm.sampling.uniform import uniform
from tests.sampling_tools import (
    choices,
    edit_both,
    make_request,
    sample_both,
    sample_compiled,
    sample_numpy,
    sample_torch,
    tensor_inputs,
)

TENTHS = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
LARGEST = math.nextafter(1, 0)  # of all random numbers

# The hash is a standard, so these are the same wherever Python runs.
KNOWN = [0.0564663990004608, 0.44008326622012284, 0.5687207756392662]


def edited(logits, request):
    """Return one row after its edits."""
    return edit_both([logits], [request])[0].tolist()


def kept(logits, **params):
    """Return the tokens that can be drawn: the line is looked at in 1,000 places."""
    numbers = [(i + 0.5) / 1000 for i in range(1000)]
    return sorted(set(choices(logits, make_request(**params), numbers)))


# --- the draw ---


@pytest.mark.parametrize(
    ("number", "token_id"),
    [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3)],
)
def test_the_number_falls_on_the_stretch_of_a_token(number, token_id):
    assert choices(TENTHS, make_request(), [number]) == [token_id]


def test_the_temperature_divides_the_logits():
    # At 0.5 the shares are squared: 1, 4, 9, 16 of 30.
    numbers = [u / 30 for u in (0.9, 1.1, 4.9, 5.1, 13.9, 14.1)]
    request = make_request(temperature=0.5)
    assert choices(TENTHS, request, numbers) == [0, 1, 1, 2, 2, 3]


def test_temperature_zero_takes_the_first_of_the_best():
    request = make_request(temperature=0.0)
    assert choices([1, 5, 5, 2], request, [0.0, 0.99]) == [1, 1]


@pytest.mark.parametrize("temperature", [1e-300, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.5}])
def test_the_largest_number_takes_the_last_possible_token(temperature, cuts):
    request = make_request(temperature=temperature, **cuts)
    assert choices([0, 0, 0, -np.inf], request, [LARGEST]) == [2]


def test_the_largest_number_times_a_sum_is_less_than_the_sum():
    sums = np.random.default_rng(0).uniform(1, 4, 10_000)
    sums[:3] = 1, 2, np.nextafter(2, 4)
    assert (sums * LARGEST < sums).all()


def test_impossible_tokens_are_never_taken():
    numbers = [0, 0.4999, 0.5, 0.999, LARGEST]
    token_ids = choices([-np.inf, 1, -np.inf, 1, -np.inf], make_request(), numbers)
    assert token_ids == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 512, 600])
def test_the_edges_of_pages_and_rows_are_drawn_right(vocab_size):
    # All alike: the number u falls on token u * vocab_size.
    places = sorted({0, 1, 254, vocab_size // 2, vocab_size - 1})
    numbers = [(place + part) / vocab_size for place in places for part in (0.1, 0.9)]
    token_ids = choices(np.zeros(vocab_size), make_request(), numbers)
    assert token_ids == [place for place in places for _ in (0.1, 0.9)]
    assert choices(np.zeros(vocab_size), make_request(), [0, LARGEST]) == [
        0,
        vocab_size - 1,
    ]


def test_a_page_without_a_possible_token_is_passed_over():
    logits = np.full(1024, -np.inf)
    logits[[300, 900]] = 0
    token_ids = choices(logits, make_request(), [0, 0.49, 0.51, LARGEST])
    assert token_ids == [300, 300, 900, 900]


def test_rounding_between_pages_and_tokens_reaches_no_impossible_token():
    # The numbers right before and behind the edges of pages whose sums are rounded.
    weights = np.random.default_rng(1).exponential(size=2048).astype(np.float32)
    logits = np.log(weights)
    logits[::2] = -np.inf
    sums = np.exp(logits).reshape(-1, 256).sum(axis=1).astype(float).cumsum()
    edges = sums / sums[-1]
    numbers = [np.nextafter(e, way) for e in edges[:-1] for way in (0, 1)]
    numbers += [*edges[:-1], 0.0, LARGEST]
    rows = np.tile(logits, (len(numbers), 1))
    requests = [make_request()] * len(numbers)
    for draw in (sample_numpy, sample_torch, sample_compiled):
        token_ids = np.array(draw(rows, requests, numbers))
        assert (token_ids % 2 == 1).all()
        # Each edge lies between the last tokens of one page and the first of the next.
        page = (token_ids[: 2 * len(edges) - 2] + 2) // 256
        assert (page == np.repeat(np.arange(1, len(edges)), 2)).all()


def test_what_is_left_of_a_number_lies_inside_the_stretch():
    # Points next to the edges, where start, width and quotient are all rounded.
    widths = torch.from_numpy(np.random.default_rng(2).random((5000, 8)))
    ends = widths.cumsum(-1)
    edges = (ends[:, 3] / ends[:, -1]).unsqueeze(-1)
    num_rounded_out = 0
    for away in (0, 1):
        fractions = edges.nextafter(torch.tensor(float(away), dtype=torch.float64))
        found, rest = drawing.stretch_at(fractions, widths)
        assert set(found.flatten().tolist()) <= {3, 4}
        assert ((rest >= 0) & (rest < 1)).all()
        points = fractions * ends[:, -1:]
        start = ends.gather(1, found) - widths.gather(1, found)
        quotients = (points - start) / widths.gather(1, found)
        num_rounded_out += ((quotients < 0) | (quotients >= 1)).sum().item()
    assert num_rounded_out > 20, "the points are not near enough to an edge"


def test_sums_over_many_tokens_are_as_exact_as_their_shares():
    # Of these draws, sums in float32 would move one in two hundred.
    chance = np.random.default_rng(5)
    scores = np.sort(chance.normal(size=(1, 2**17)).astype(np.float32))[:, ::-1].copy()
    numbers = chance.random(2000)
    ends = np.exp(scores[0].astype(float)).cumsum()
    expected = np.searchsorted(ends, numbers * ends[-1], side="right")
    shares = torch.from_numpy(scores).exp().expand(2000, -1)
    token_ids = drawing.draw_from(shares, torch.from_numpy(numbers)).numpy()
    assert (token_ids != expected).sum() <= 3
    best = torch.from_numpy(scores)
    columns = [
        best[:, :1],
        torch.ones(1, 1),
        drawing.page_sums(best.sub(best[:, :1]).exp()),
    ]
    columns[2] = columns[2].sum(dim=-1, keepdim=True)
    wrong = 0
    for number in numbers[:100].tolist():
        min_p, top_k, top_p = (torch.tensor([[x]]) for x in (0.0, 2**17, number))
        rules = drawing.Rules(*columns, min_p.double(), top_k, top_p.double())
        lowest = drawing.cuts_among(best, rules, 2**17).lowest
        kept = np.searchsorted(ends, number * ends[-1])
        wrong += lowest.item() != scores[0, kept]
    assert wrong <= 2


def test_a_tiny_temperature_is_greedy_and_large_scores_do_not_overflow():
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for temperature in (1e-300, 1e-30, 1e-4, 1.0):
            for cuts in ({}, {"min_p": 0.1, "top_k": 2, "top_p": 0.9}):
                request = make_request(temperature=temperature, **cuts)
                assert choices([-3e38, 1e38, 3e38], request, [0, 0.999]) == [2, 2]


def test_rows_that_are_no_numbers_do_not_disturb_the_others():
    logits = np.tile(TENTHS, (7, 1))
    logits[1] = np.nan
    logits[3] = -np.inf
    logits[5, 2] = np.inf
    for params in ({}, {"top_p": 0.99}, {"top_k": 4}, {"min_p": 0.01}):
        requests = [make_request(**params)] * 7
        for draw in (sample_numpy, sample_torch, sample_compiled):
            token_ids = draw(logits, requests, [0.5] * 7)
            assert token_ids[::2] == [2] * 4
            assert all(0 <= token_id < 4 for token_id in token_ids)


# --- top_p, top_k, min_p ---


def test_top_p_keeps_the_best_up_to_the_sum():
    # The famous mistake: sums of unnormalised exponentials would keep one token.
    assert kept(TENTHS, top_p=0.6) == [2, 3]
    # 0.4 and 0.3 become 4/7 and 3/7.
    request = make_request(top_p=0.6)
    assert choices(TENTHS, request, [0.42, 0.44]) == [2, 3]


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(1.0, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3]), (0.75, [1, 2, 3]), (0.3, [3])],
)
def test_top_p_keeps_tokens_while_those_before_are_below_it(top_p, tokens):
    assert kept(TENTHS, top_p=top_p) == tokens


def test_top_p_keeps_no_token_behind_one_that_reaches_it():
    # Halves and quarters are exact: 0.5 reaches 0.5, so the next token is left out.
    logits = np.log2([0.5, 0.25, 0.25]) * math.log(2)
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.5001) == [0, 1]


def test_top_p_of_1_leaves_out_nothing():
    # The second token has a share of exp(-16), one in nine million.
    for params in ({"top_k": 2}, {"min_p": 1e-9}):
        request = make_request(top_p=1.0, **params)
        assert choices([0, -16, -90], request, [0.0, 1 - 5e-8, LARGEST]) == [0, 1, 1]


def test_top_p_keeps_at_least_one_token():
    assert kept(TENTHS, top_p=1e-300) == [3]
    assert kept([0, 0, 0], top_p=1e-9) == [0]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 5, 10**18])
def test_top_k_is_off_at_0_and_minus_1_and_above_the_vocabulary(top_k):
    assert kept(TENTHS, top_k=top_k) == [0, 1, 2, 3]


@pytest.mark.parametrize(("top_k", "tokens"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3])])
def test_top_k_keeps_so_many(top_k, tokens):
    assert kept(TENTHS, top_k=top_k) == tokens


def test_top_k_of_1_is_greedy():
    logits = np.random.default_rng(0).normal(size=50).round(1)
    logits[[3, 40]] = 7
    assert kept(logits, top_k=1, temperature=5.0) == [3]


def test_equal_scores_are_kept_in_the_order_of_their_ids():
    # 5 first, then the first of the ones; -inf never.
    logits = [1, -np.inf, 1, 5, 1, 0, 1]
    assert kept(logits, top_k=1) == [3]
    assert kept(logits, top_k=3, temperature=9.0) == [0, 2, 3]
    assert kept(logits, top_k=5, temperature=9.0) == [0, 2, 3, 4, 6]
    # At this temperature all are nearly alike: sixths, of which 0.4 takes three.
    assert kept(logits, top_p=0.4, temperature=1e6) == [0, 2, 3]


def test_scores_are_ordered_even_where_their_shares_are_equal():
    # A difference of 1 vanishes in a share at temperature 1e6, but not in the order.
    logits = 1000 + np.arange(4) * 2.0**-13
    assert kept(logits, top_k=2, temperature=1e6) == [2, 3]
    assert kept(logits, top_p=0.5, temperature=1e6) == [2, 3]


@pytest.mark.parametrize(
    ("min_p", "tokens"),
    [
        (0.0, [0, 1, 2, 3]),
        (0.24, [0, 1, 2, 3]),
        (0.26, [1, 2, 3]),
        (0.6, [2, 3]),
        (0.76, [3]),
        (1.0, [3]),
    ],
)
def test_min_p_is_a_share_of_the_best_probability(min_p, tokens):
    assert kept(TENTHS, min_p=min_p) == tokens


def test_min_p_of_1_keeps_all_of_the_best():
    assert kept([2, 5, 5, 1], min_p=1.0) == [1, 2]


def test_min_p_looks_at_probabilities_after_the_temperature():
    # At temperature 0.5 the shares are 1, 4, 9, 16 of 16.
    assert kept(TENTHS, min_p=0.3, temperature=0.5) == [2, 3]
    assert kept(TENTHS, min_p=0.3, temperature=1.0) == [1, 2, 3]


def test_top_p_is_a_share_of_what_min_p_leaves():
    # 3/7 and 4/7 are left; 4/7 is less than 0.6, but of all it would be 0.4.
    assert kept(TENTHS, min_p=0.6, top_p=0.55) == [3]
    assert kept(TENTHS, top_p=0.55) == [2, 3]


def test_top_p_is_a_share_of_what_top_k_leaves():
    # 2/9, 3/9 and 4/9: 4/9 is more than 0.42.
    assert kept(TENTHS, top_k=3, top_p=0.42) == [3]
    assert kept(TENTHS, top_p=0.42) == [2, 3]


def test_cuts_differ_from_row_to_row():
    params = [
        {"top_k": 1},
        {},
        {"top_p": 0.6},
        {"temperature": 0.0},
        {"min_p": 0.9},
        {"top_k": -1},
        {"temperature": 0.5, "top_k": 2},
        {"top_p": 0.75, "top_k": 10**18},
    ]
    # At 0, the first token that is kept.
    expected = [3, 0, 2, 3, 3, 0, 2, 1]
    for order in (range(8), range(7, -1, -1), [3, 6, 0, 5, 2, 7, 1, 4]):
        requests = [make_request(**params[i]) for i in order]
        token_ids = sample_both(np.tile(TENTHS, (8, 1)), requests, [0.0] * 8)
        assert token_ids == [expected[i] for i in order]


def test_many_more_tokens_than_candidates_may_be_kept(monkeypatch):
    monkeypatch.setattr(drawing, "NUM_CANDIDATES", 10)
    logits = np.linspace(1, 0, 500)
    for params in ({"top_k": 9}, {"top_k": 10}, {"top_k": 11}, {"top_k": 400}):
        assert kept(logits, **params) == list(range(params["top_k"]))
    assert kept(np.zeros(500), top_p=0.5) == list(range(250))
    assert kept(np.zeros(500), top_k=100, top_p=0.5) == list(range(50))
    # Shares from 1 to e: those above e / 2 are the first log(2) of the line.
    assert kept(logits, min_p=0.5) == list(range(math.ceil(math.log(2) * 499)))
    # e - 1 is the whole mass, and e - e**(1 - x) the mass up to x: half at 0.38.
    assert kept(logits, top_p=0.5)[-1] in (189, 190)


# --- edits ---


def test_only_allowed_tokens_keep_their_scores():
    request = make_request(allowed_token_ids=[3, 1, 3])
    assert edited([1, 2, 3, 4], request) == [-np.inf, 2, -np.inf, 4]


def test_a_bad_word_of_one_token_is_banned_always():
    for output in ([], [2], [1, 2]):
        request = make_request(output, bad_words=[[2], [0]])
        assert edited([1, 2, 3, 4], request) == [-np.inf, 2, -np.inf, 4]


@pytest.mark.parametrize(
    ("output", "is_banned"),
    [
        ([], False),
        ([1], False),
        ([2], False),
        ([1, 2], True),
        ([2, 1], False),
        ([1, 2, 1], False),
        ([1, 2, 1, 2], True),
        ([1, 1, 2], True),
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_banned(output, is_banned):
    request = make_request(output, prompt=[1, 2], bad_words=[[1, 2, 3]])
    assert (edited([0, 0, 0, 0], request)[3] == -np.inf) == is_banned


def test_a_bad_word_must_lie_in_the_output_as_a_whole():
    request = make_request([2], prompt=[0, 1], bad_words=[[1, 2, 3], [0, 1, 2, 0]])
    assert edited([0, 0, 0, 0], request) == [0, 0, 0, 0]


@pytest.mark.parametrize(("num_output", "banned"), [(0, 1), (2, 1), (3, 0), (4, 0)])
def test_stop_tokens_are_banned_below_min_tokens(num_output, banned):
    request = make_request([0] * num_output, min_tokens=3, stop_token_ids=[1, 2])
    low = -np.inf if banned else 0
    assert edited([0, 0, 0], request) == [0, low, low]


def test_stop_tokens_that_the_tokenizer_does_not_know_are_ignored():
    request = make_request(min_tokens=1, stop_token_ids=[1, 3, 99])
    assert edited([0, 0, 0], request) == [0, -np.inf, 0]


def test_biases_are_added():
    request = make_request(logit_bias={2: -0.5, 0: 100})
    assert edited([1, 2, 3], request) == [101, 2, 2.5]


def test_a_bias_revives_no_banned_token():
    request = make_request(logit_bias={1: 100, 2: 1}, bad_words=[[1]])
    assert edited([0, 0, 0], request) == [0, -np.inf, 1]


def test_the_repetition_penalty_counts_prompt_and_output():
    # Positive scores are divided, others multiplied: both become lower.
    request = make_request([3, 3], prompt=[1, 2, 2], repetition_penalty=2.0)
    assert edited([5, 4, -4, 1, 0], request) == [5, 2, -8, 0.5, 0]
    request = make_request([3, 3], prompt=[1, 2, 2], repetition_penalty=0.5)
    assert edited([5, 4, -4, 1, 0], request) == [5, 8, -2, 2, 0]


def test_presence_and_frequency_count_the_output_only():
    request = make_request([3, 1, 3], prompt=[0, 1, 1], presence_penalty=0.5)
    assert edited([0, 0, 0, 0], request) == [0, -0.5, 0, -0.5]
    request = make_request([3, 1, 3], prompt=[0, 1, 1], frequency_penalty=0.5)
    assert edited([0, 0, 0, 0], request) == [0, -0.5, 0, -1]
    request = make_request([3, 3], presence_penalty=-1, frequency_penalty=-0.25)
    assert edited([0, 0, 0, 0], request) == [0, 0, 0, 1.5]


def test_edits_come_in_the_documented_order():
    request = make_request(
        [2, 2],
        prompt=[1],
        allowed_token_ids=[0, 1, 2],
        bad_words=[[0]],
        logit_bias={0: 9, 1: 3, 2: 3, 3: 9},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    # 1: (-1 + 3) / 2. 2: (1 + 3) / 2 - 2 * 0.5 - 0.25.
    assert edited([7, -1, 1, 7], request) == [-np.inf, 1, 0.75, -np.inf]


def test_edits_come_before_the_greedy_choice():
    request = make_request([1], temperature=0.0, frequency_penalty=2.0)
    assert sample_both([[0, 1, 0.5]], [request]) == [2]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: 5.0}},
        {"bad_words": [[1]]},
        {"allowed_token_ids": [1]},
        {"min_tokens": 9, "stop_token_ids": [1]},
    ],
)
def test_an_edit_of_one_row_changes_no_other(options, is_first):
    requests = [make_request([1, 1]), make_request([1, 1], **options)]
    if is_first:
        requests.reverse()
    rows = edit_both([[1, 2, 3], [1, 2, 3]], requests).tolist()
    plain, changed = reversed(rows) if is_first else rows
    assert plain == [1, 2, 3]
    assert changed != [1, 2, 3]


def test_an_edit_costs_no_copy():
    logits = torch.zeros(2, 4)
    inputs = tensor_inputs([make_request(top_k=2), make_request([1])], 4)
    with sampler.edited(logits, inputs) as edited:
        assert edited is logits
    request = make_request([1], allowed_token_ids=[2, 3], logit_bias={3: 1.0})
    with sampler.edited(logits, tensor_inputs([request] * 2, 4)) as edited:
        assert edited is logits
        assert edited[1].tolist() == [-math.inf, -math.inf, 0, 1]
    assert not logits.any()


def test_the_scores_are_put_back_whatever_happens_within_the_block():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    request = make_request([1], frequency_penalty=1.0, bad_words=[[2]])
    edited = sampler.edited(logits, tensor_inputs([request], 3))
    with pytest.raises(RuntimeError), edited:
        assert logits.tolist() != [[1, 2, 3]]
        raise RuntimeError
    assert logits.tolist() == [[1, 2, 3]]


def test_columns_of_tokens_that_the_tokenizer_does_not_know_may_lie_between_rows():
    # The runner hands in a narrow view: its rows are not next to each other.
    wide = torch.tensor([[1.0, 2.0, 3.0, 99.0], [3.0, 2.0, 1.0, 99.0]])
    request = make_request([1], frequency_penalty=1.0, logit_bias={0: 1.0})
    inputs = tensor_inputs([request] * 2, 3)
    before = wide.clone()
    with sampler.edited(wide.narrow(1, 0, 3), inputs) as rows:
        assert rows.tolist() == [[2, 1, 3], [4, 1, 1]]
    assert torch.equal(wide, before)


# --- batches, seeds ---


def test_the_number_is_the_same_on_every_machine():
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 0)] == KNOWN


def test_seed_and_position_both_count():
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


def test_the_number_of_a_row_is_that_of_its_seed_and_length():
    # Uniform over 1,000 tokens, so the token tells the number: KNOWN[1] is 0.4400.
    requests = [make_request([5], prompt=[1, 2]), make_request(), make_request([5])]
    assert sample_both(np.zeros((3, 1000)), requests) == [440, 56, 440]


def test_a_seeded_row_is_the_same_alone_and_in_any_batch():
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(20, 3000)).astype(np.float32) * 2
    cuts = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"temperature": 0.0}]
    requests = [
        make_request([1, 2] * i, seed=i, **cuts[i % 5], frequency_penalty=0.1)
        for i in range(20)
    ]
    alone = [sample_both(logits[i : i + 1], requests[i : i + 1])[0] for i in range(20)]
    assert len(set(alone)) >= 15
    for _ in range(5):
        order = generator.permutation(20)[: generator.integers(2, 21)]
        token_ids = sample_both(logits[order], [requests[i] for i in order])
        assert token_ids == [alone[i] for i in order]


# --- both implementations agree ---


def random_logits(chance, vocab_size):
    logits = chance.normal(size=vocab_size) * chance.choice([0.3, 2, 8])
    if chance.random() < 0.4:
        logits = logits.round(1 if chance.random() < 0.5 else 0)  # many ties
    if chance.random() < 0.3:
        logits[chance.random(vocab_size) < chance.random()] = -np.inf
        logits[chance.integers(vocab_size)] = 0
    return logits.astype(np.float32)


def random_request(chance, vocab_size):
    maybe = lambda make, other: make() if chance.random() < 0.35 else other  # noqa: E731
    ids = lambda most: chance.integers(vocab_size, size=most).tolist()  # noqa: E731
    output = ids(chance.integers(0, 30))
    bad_words = [ids(n) for n in chance.integers(1, 4, size=3)]
    bad_words += [[*output[-1:], *ids(1)]]
    return make_request(
        output,
        prompt=ids(chance.integers(1, 20)),
        seed=int(chance.integers(2**60)),
        temperature=maybe(lambda: chance.choice([0, 1e-3, 0.3, 3]).item(), 1.0),
        top_p=maybe(lambda: 1 - chance.random() ** 2, 1.0),
        top_k=maybe(lambda: int(chance.integers(-1, 2 * vocab_size)), 0),
        min_p=maybe(lambda: chance.random() ** 3, 0.0),
        presence_penalty=maybe(lambda: chance.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(lambda: chance.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(lambda: chance.uniform(0.5, 2), 1.0),
        logit_bias=maybe(lambda: {i: chance.uniform(-9, 9) for i in ids(5)}, None),
        bad_words=maybe(lambda: bad_words, []),
        allowed_token_ids=maybe(lambda: ids(1 + vocab_size // 2), None),
        min_tokens=maybe(lambda: int(chance.integers(16)), 0),
        stop_token_ids=ids(3),
    )


def decisive_gap(logits, params, number):
    """Return how near a choice comes to turning out otherwise, as a probability.

    Written apart from both samplers: a list of tokens, best first, that gets shorter.
    """
    if params.temperature == 0 or logits.max() == -np.inf:
        return 1.0
    logits = logits.astype(float)
    shares = np.exp(np.maximum((logits - logits.max()) / params.temperature, -800))
    gaps = [1.0]
    tokens = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.min_p:
        gaps.append(min(abs(shares - params.min_p)))
        tokens = [i for i in tokens if shares[i] >= params.min_p]
    if params.top_k > 0:
        tokens = tokens[: params.top_k]
    if params.top_p < 1:
        ends = np.cumsum(shares[tokens])
        gaps.append(min(abs(ends / ends[-1] - params.top_p)))
        tokens = tokens[: 1 + np.count_nonzero(ends < params.top_p * ends[-1])]
    ends = np.cumsum(shares[sorted(tokens)])
    gaps.append(min(abs(ends / ends[-1] - number)))
    return min(gaps)


def count_same(logits, rows, requests, token_ids) -> int:
    """Compare tokens with those of NumPy, where it is clear which; count these."""
    with np.errstate(all="raise", under="ignore"):
        expected = sample_numpy(logits, requests)
    num_clear = 0
    for row, request, *both in zip(rows, requests, expected, token_ids, strict=True):
        number = uniform(request.seed, request.num_output_tokens)
        # The shares are float32: nearer than this, the samplers may differ.
        if decisive_gap(row, request.sampling_params, number) > 1e-5:
            num_clear += 1
            assert both[0] == both[1]
        if row.max() > -np.inf:
            assert row[both[1]] > -np.inf
    return num_clear


@pytest.mark.parametrize("draw", ["on the CPU", "as on a GPU", "compiled"])
@pytest.mark.parametrize("round_", range(4))
def test_random_batches_agree_row_by_row(monkeypatch, draw, round_):
    chance = np.random.default_rng(round_)
    monkeypatch.setattr(drawing, "may_look_at", lambda x: draw == "on the CPU")
    sample = sample_compiled if draw == "compiled" else sample_torch
    num_compared = num_rows = num_drawn = 0
    for _ in range(40):
        if chance.random() < 0.5:
            monkeypatch.setattr(drawing, "NUM_CANDIDATES", int(chance.integers(1, 40)))
        monkeypatch.setattr(drawing, "PAGE_SIZE", int(chance.choice([4, 256])))
        vocab_size = int(chance.choice([1, 2, 3, 7, 50, 255, 256, 257, 600, 2600]))
        size = chance.integers(1, 21)
        logits = np.stack([random_logits(chance, vocab_size) for _ in range(size)])
        requests = [random_request(chance, vocab_size) for _ in range(size)]
        rows = edit_both(logits, requests)
        token_ids = sample(logits, requests)
        num_rows += size
        num_compared += count_same(logits, rows, requests, token_ids)
        num_drawn += sum(r.sampling_params.temperature > 0 for r in requests)
    assert num_compared > 0.97 * num_rows
    assert num_drawn > 0.8 * num_rows > 200


def test_both_agree_on_large_vocabularies():
    chance = np.random.default_rng(0)
    logits = chance.normal(size=(64, 5000)).astype(np.float32) * 3
    requests = [
        make_request(seed=i, temperature=chance.uniform(0.2, 2)) for i in range(64)
    ]
    assert len(set(sample_both(logits, requests))) > 30


def test_the_samplers_know_no_other_randomness():
    logits = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
    requests = [make_request(seed=i, top_p=0.9) for i in range(8)]
    first = sample_both(logits, requests)
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert sample_both(logits, requests) == first


# --- the device ---


@pytest.mark.parametrize("vocab_size", [512, 5000])
def test_nothing_waits_for_a_gpu(vocab_size):
    # Fake tensors have no numbers: to look at one raises.
    requests = [
        make_request(
            [1, 2],
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            frequency_penalty=1.0,
            logit_bias={1: 1.0},
            bad_words=[[1]],
            allowed_token_ids=[1, 2],
        ),
        make_request(temperature=0.0),
        make_request(),
    ]
    inputs = SamplingState(vocab_size).inputs(requests)
    with FakeTensorMode():
        tensors = [
            torch.empty(
                array.shape, dtype=getattr(torch, array.dtype.name), device="cuda"
            )
            for array in inputs.arrays()
        ]
        inputs = inputs.on(tensors)
        logits = torch.empty(3, vocab_size, device="cuda")
        with sampler.edited(logits, inputs) as edited:
            largest, token_ids = sampler.sample(edited, inputs)
    assert (largest.device.type, token_ids.device.type) == ("cuda", "cuda")
    assert (token_ids.shape, token_ids.dtype) == ((3,), torch.int64)


def test_the_argmax_of_the_runner_is_used():
    calls = []

    def argmax(logits):
        calls.append(logits)
        return logits.max(dim=-1)

    logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    inputs = tensor_inputs([make_request(temperature=0.0)] * 2, 2)
    largest, token_ids = sampler.sample(logits, inputs, argmax)
    assert (largest.tolist(), token_ids.tolist()) == ([3, 2], [1, 0])
    assert calls == [logits]


# --- the steps of the definition, one by one ---


def test_steps_of_the_reference_do_not_change_their_input():
    logits, probabilities = TENTHS.copy(), np.exp(TENTHS.astype(float))
    order = reference.best_first(logits)
    reference.allow_only(logits, [1])
    reference.ban(logits, [1])
    reference.add_bias(logits, {1: 1.0})
    reference.penalise_repetition(logits, [1], 2.0)
    reference.penalise_output(logits, [1], 1.0, 1.0)
    reference.keep_min_p(probabilities, 0.9)
    reference.keep_top_k(probabilities, order, 1)
    reference.keep_top_p(probabilities, order, 0.1)
    np.testing.assert_array_equal(logits, TENTHS)
    np.testing.assert_array_equal(probabilities, np.exp(TENTHS.astype(float)))
    assert order.tolist() == [3, 2, 1, 0]


def test_probabilities_add_up_to_1():
    for temperature in (1e-300, 0.5, 1e6):
        probabilities = reference.token_probabilities(TENTHS, temperature)
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert probabilities.dtype == np.float64


# --- the compiled op ---


@pytest.fixture
def compiled_draw():
    choice = choose("draw", "cpu", "float32")
    if choice.backend.name != "compiled":
        pytest.skip(choice.passed_over["compiled"])
    return choice.backend.implementation


def large_batch():
    chance = np.random.default_rng(0)
    logits = torch.from_numpy(chance.normal(size=(40, 9000)).astype(np.float32) * 3)
    requests = [
        make_request(
            seed=row,
            temperature=[0.5, 1.0, 3.0][row % 3],
            top_k=[0, 7, 3000][row % 3],
            top_p=[1.0, 0.9, 0.3, 0.999][row % 4],
            min_p=[0.0, 0.01][row % 2],
        )
        for row in range(40)
    ]
    return logits, tensor_inputs(requests, 9000)


def test_the_number_of_threads_changes_nothing(compiled_draw):
    logits, inputs = large_batch()
    expected = drawing.draw(*arguments_of(logits, inputs))
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found = compiled_draw(*arguments_of(logits, inputs))
            assert found.tolist() == expected.tolist(), num_threads
    finally:
        torch.set_num_threads(before)


def arguments_of(logits, inputs):
    return (
        logits, logits.amax(dim=-1), inputs.sampled_rows, inputs.temperatures,
        inputs.uniforms, inputs.min_p, inputs.top_k, inputs.top_p,
    )  # fmt: skip


def test_rows_may_be_a_part_of_wider_ones(compiled_draw):
    logits, inputs = large_batch()
    wide = torch.nn.functional.pad(logits, (0, 100), value=1e9)
    narrow = wide.narrow(1, 0, 9000)
    assert not narrow.is_contiguous()
    arguments = arguments_of(logits, inputs)
    expected = compiled_draw(*arguments)
    assert compiled_draw(narrow, *arguments[1:]).tolist() == expected.tolist()


def test_what_is_left_out_far_from_the_best_could_never_be_drawn(compiled_draw):
    # One token at distance 0, all others just out of sight: e**-63.94 each.
    logits = torch.full((1, 100_000), -63.94)
    logits[0, 50_000] = 0
    share = 99_999 * math.exp(-63.94)
    assert share < 2**-53
    for number in (0.0, 0.5, 1 - 2**-53):
        inputs = tensor_inputs([make_request()], 100_000)
        inputs.uniforms.fill_(number)
        assert compiled_draw(*arguments_of(logits, inputs)).tolist() == [50_000]


def test_wrong_arguments_never_reach_c(compiled_draw):
    logits, inputs = large_batch()
    good = arguments_of(logits, inputs)
    for place, bad in (
        (0, logits.double()),
        (0, logits.t()),
        (1, good[1][:3]),
        (2, good[2].int()),
        (3, good[3].float()),
        (4, good[4][:3]),
        (6, good[6].double()),
        (7, good[7][::2]),
    ):
        with pytest.raises(AssertionError):
            compiled_draw(*good[:place], bad, *good[place + 1 :])


def test_the_smallest_top_p_keeps_the_best_token():
    logits = np.log(np.array([[0.3, 0.4, 0.3]], dtype=np.float32))
    for params in ({}, {"top_k": 2}, {"min_p": 0.1}):
        request = make_request(top_p=5e-324, seed=1, **params)
        assert sample_both(logits, [request]) == [1]
