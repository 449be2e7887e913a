"""The choice of a token, in NumPy and in torch."""

import numpy as np
import pytest
import torch

from minivllm.reference import sampler as reference
from minivllm.sampling.sampler import sample
from minivllm.sampling.uniform import uniform

LOGITS = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], dtype=np.float32))

# The hash is a standard, so these are the same wherever Python runs.
KNOWN = [0.0564663990004608, 0.44008326622012284, 0.5687207756392662]


def both(logits, temperatures, uniforms):
    """Sample with either implementation, which must agree, and return the ids."""
    logits = np.asarray(logits, dtype=np.float32)
    temperatures = np.broadcast_to(np.asarray(temperatures, float), len(logits))
    uniforms = np.broadcast_to(np.asarray(uniforms, float), len(logits))
    numpy_ids = reference.sample(logits, temperatures, uniforms).tolist()
    arrays = [torch.from_numpy(a.copy()) for a in (logits, temperatures, uniforms)]
    assert sample(*arrays).tolist() == numpy_ids
    assert arrays[0].numpy().tolist() == logits.tolist()
    return numpy_ids


@pytest.mark.parametrize(
    ("number", "token_id"),
    [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3)],
)
def test_the_number_falls_on_the_stretch_of_a_token(number, token_id):
    assert both(LOGITS, 1.0, number) == [token_id]


def test_the_temperature_divides_the_logits():
    # At 0.5 the shares are squared: 1, 4, 9, 16 of 30.
    ids = [both(LOGITS, 0.5, u / 30)[0] for u in (0.9, 1.1, 4.9, 5.1, 13.9, 14.1)]
    assert ids == [0, 1, 1, 2, 2, 3]


def test_temperature_zero_takes_the_first_of_the_best():
    assert both([[1, 5, 5, 2]], 0, 0.99) == [1]


def test_greedy_rows_and_drawn_rows_share_a_batch():
    logits = np.repeat(LOGITS, 4, axis=0)
    assert both(logits, [0, 1, 0, 1], [0.05, 0.05, 0.5, 0.5]) == [3, 0, 3, 2]


def test_a_batch_without_temperatures_is_greedy():
    assert sample(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), None, None).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-300, 0.01, 1.0, 1e6])
def test_the_largest_number_takes_the_last_possible_token(temperature):
    largest = np.nextafter(1, 0)
    assert both([[0, 0, 0, -np.inf]], temperature, largest) == [2]


def test_the_largest_number_times_a_sum_is_less_than_the_sum():
    sums = np.random.default_rng(0).uniform(1, 4, 10_000)
    sums[:3] = 1, 2, np.nextafter(2, 4)
    assert (sums * np.nextafter(1, 0) < sums).all()


def test_impossible_tokens_are_never_taken():
    ids = [both([[-np.inf, 1, -np.inf, 1]], 1.0, u)[0] for u in (0, 0.4999, 0.5, 0.999)]
    assert ids == [1, 1, 3, 3]


def test_a_tiny_temperature_is_greedy_and_large_scores_do_not_overflow():
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert both([[3e38, -3e38, 1e38]], 1e-300, 0.999) == [0]
        assert both([[3e38, -3e38, 1e38]], 1.0, 0.999) == [0]


def test_rows_that_are_no_numbers_do_not_disturb_the_others():
    logits = np.repeat(LOGITS, 3, axis=0)
    logits[1] = np.nan
    arrays = logits, np.ones(3), np.full(3, 0.5)
    assert reference.sample(*arrays)[[0, 2]].tolist() == [2, 2]
    ids = sample(*(torch.from_numpy(a) for a in arrays))
    assert ids[[0, 2]].tolist() == [2, 2]


def test_both_agree_on_large_vocabularies():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(64, 5000)).astype(np.float32) * 3
    ids = both(logits, generator.uniform(0.2, 2, 64), generator.uniform(size=64))
    assert len(set(ids)) > 30


def test_the_draws_follow_the_softmax():
    temperature, num_draws = 1.5, 4000
    logits = np.array([2.0, 0.0, -1.0, 1.0, 0.5], dtype=np.float32)
    weights = np.exp(logits.astype(float) / temperature)
    expected = num_draws * weights / weights.sum()
    uniforms = [uniform(7, position) for position in range(num_draws)]
    ids = both(np.tile(logits, (num_draws, 1)), temperature, uniforms)
    seen = np.bincount(ids, minlength=5)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand


def test_the_number_is_the_same_on_every_machine():
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 0)] == KNOWN


def test_seed_and_position_both_count():
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


def test_the_numbers_fill_the_line_evenly():
    counts = np.histogram([uniform(3, i) for i in range(4000)], 10, (0, 1))[0]
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 27.9  # 9 degrees of freedom: exceeded once in a thousand
