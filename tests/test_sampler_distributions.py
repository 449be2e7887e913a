"""Draws follow the distribution that each parameter defines, in NumPy and in torch.

Each test draws 4,000 tokens, every one with a seed of its own, and compares how often
each came with the probabilities written here. The distance is chi-square; a right
sampler exceeds the bound with one choice of seeds in a thousand, and the seeds are
fixed.
"""

import dataclasses

import numpy as np
import pytest

from minivllm.sampling.uniform import uniform
from tests.sampling_tools import (
    make_request,
    sample_compiled,
    sample_numpy,
    sample_torch,
)

NUM_DRAWS = 4000
TENTHS = np.log([0.1, 0.2, 0.3, 0.4])
# Degrees of freedom -> the distance that is exceeded once in a thousand.
BOUNDS = {1: 10.83, 2: 13.82, 3: 16.27, 7: 24.32, 9: 27.88}

# Parameters -> the weights of the tokens that they leave, by hand.
CASES = {
    "nothing": ({}, [1, 2, 3, 4]),
    # At 0.5 the probabilities are squared.
    "temperature": ({"temperature": 0.5}, [1, 4, 9, 16]),
    "high temperature": ({"temperature": 2.0}, np.sqrt([1, 2, 3, 4])),
    # 0.4 < 0.6, and 0.4 + 0.3 is not.
    "top_p": ({"top_p": 0.6}, [0, 0, 3, 4]),
    "top_k": ({"top_k": 3}, [0, 2, 3, 4]),
    # 0.6 of 0.4 is 0.24.
    "min_p": ({"min_p": 0.6}, [0, 0, 3, 4]),
    # The output has 3 twice and 1 once; each log(2) halves a probability.
    "presence_penalty": (
        {"output": [3, 3, 1], "presence_penalty": np.log(2)},
        [1, 1, 3, 2],
    ),
    "frequency_penalty": (
        {"output": [3, 3, 1], "frequency_penalty": np.log(2)},
        [1, 1, 3, 1],
    ),
    # Twice a negative logit: the square of the probability.
    "repetition_penalty": (
        {"prompt": [2], "output": [3], "repetition_penalty": 2.0},
        [0.1, 0.2, 0.09, 0.16],
    ),
    "logit_bias": ({"logit_bias": {0: np.log(2), 2: -100}}, [2, 2, 0, 4]),
    "bad_words": ({"bad_words": [[3], [1, 0]], "output": [1]}, [0, 2, 3, 0]),
    "allowed_token_ids": ({"allowed_token_ids": [2, 0]}, [1, 0, 3, 0]),
    "min_tokens": ({"min_tokens": 2, "stop_token_ids": [3], "output": [0]}, [1, 2, 3]),
    "min_tokens reached": (
        {"min_tokens": 1, "stop_token_ids": [3], "output": [0]},
        [1, 2, 3, 4],
    ),
    # Squares 1, 4, 9, 16, min_p leaves those of 1.6 or more, top_k two of them; of 25,
    # the first has 0.64.
    "all": (
        {"temperature": 0.5, "min_p": 0.1, "top_k": 2, "top_p": 0.7},
        [0, 0, 9, 16],
    ),
    # The same, but 0.64 is enough.
    "all, less": (
        {"temperature": 0.5, "min_p": 0.1, "top_k": 2, "top_p": 0.6},
        [0] * 4,
    ),
}
CASES["all, less"][1][3] = 1


def requests_of(options, seeds=range(NUM_DRAWS)):
    request = make_request(**options)
    return [dataclasses.replace(request, seed=seed) for seed in seeds]


def assert_follows(token_ids, weights):
    weights = np.pad(np.asarray(weights, float), (0, 4 - len(weights)))
    expected = len(token_ids) * weights / weights.sum()
    seen = np.bincount(token_ids, minlength=4)
    is_possible = expected > 0
    assert seen[~is_possible].sum() == 0
    distance = (seen - expected)[is_possible] ** 2 / expected[is_possible]
    freedom = is_possible.sum() - 1
    assert distance.sum() <= BOUNDS.get(freedom, 0)


@pytest.mark.parametrize("draw", [sample_numpy, sample_torch, sample_compiled])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_weights(case, draw):
    options, weights = CASES[case]
    logits = np.tile(TENTHS.astype(np.float32), (NUM_DRAWS, 1))
    assert_follows(draw(logits, requests_of(options)), weights)


@pytest.mark.parametrize("draw", [sample_numpy, sample_torch, sample_compiled])
def test_draws_of_mixed_rows_follow_the_weights_of_each(draw):
    num_rows = 500 * len(CASES)
    columns = [
        requests_of(options, range(i, num_rows, len(CASES)))
        for i, (options, _) in enumerate(CASES.values())
    ]
    requests = [request for batch in zip(*columns, strict=True) for request in batch]
    logits = np.tile(TENTHS.astype(np.float32), (num_rows, 1))
    token_ids = np.array(draw(logits, requests))
    for i, (_, weights) in enumerate(CASES.values()):
        assert_follows(token_ids[i :: len(CASES)], weights)


def test_the_distance_tells_a_wrong_weight():
    logits = np.tile(TENTHS.astype(np.float32), (NUM_DRAWS, 1))
    token_ids = sample_torch(logits, requests_of({}))
    with pytest.raises(AssertionError):
        assert_follows(token_ids, [1, 2, 3, 4.6])


@pytest.mark.parametrize("draw", [sample_numpy, sample_torch, sample_compiled])
def test_draws_spread_over_a_large_vocabulary(draw):
    # Ten stretches of 100 tokens, with weights 1 to 10, over several pages.
    weights = np.repeat(np.arange(1, 11), 100)
    logits = np.tile(np.log(weights).astype(np.float32), (NUM_DRAWS, 1))
    seen = np.bincount(np.array(draw(logits, requests_of({}))) // 100, minlength=10)
    expected = NUM_DRAWS * np.arange(1, 11) / 55
    assert ((seen - expected) ** 2 / expected).sum() <= BOUNDS[9]
    # Within the last stretch, all are alike: eighths of it, over the edge of a page.
    ids = [i for i in draw(logits, requests_of({})) if i >= 900]
    seen = np.bincount((np.array(ids) - 900) * 8 // 100, minlength=8)
    expected = len(ids) * np.array([13, 12, 13, 12, 13, 12, 13, 12]) / 100
    assert ((seen - expected) ** 2 / expected).sum() <= BOUNDS[7]


@pytest.mark.parametrize("draw", [sample_numpy, sample_torch, sample_compiled])
def test_the_places_of_one_answer_are_drawn_independently(draw):
    # One seed, 3,000 places: pairs of neighbours, [2, 2], have 3 degrees of freedom.
    requests = [
        make_request([0] * length, seed=7, frequency_penalty=0)
        for length in range(3000)
    ]
    ids = np.array(draw(np.zeros((3000, 2), dtype=np.float32), requests))
    seen = np.bincount(2 * ids[:-1:2] + ids[1::2], minlength=4)
    assert ((seen - 375) ** 2 / 375).sum() <= BOUNDS[3]


def test_the_numbers_fill_the_line_evenly():
    counts = np.histogram([uniform(3, i) for i in range(4000)], 10, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() <= BOUNDS[9]
