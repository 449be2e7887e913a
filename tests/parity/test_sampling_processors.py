"""Our steps of sampling against the logits processors of `transformers`."""

import numpy as np
import pytest
import torch
from transformers import generation

from minivllm.reference.sampler import (
    best_first,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    token_probabilities,
)

random = np.random.default_rng(0)
ROWS = (random.normal(size=(40, 300)) * random.uniform(0.5, 4, (40, 1))).astype("f4")


def theirs(processor, logits, token_ids=(0,)):
    """Return the probabilities after a processor of `transformers`, float64."""
    scores = processor(torch.tensor([list(token_ids)]), torch.tensor(logits[None]))
    return torch.softmax(scores[0].double(), dim=-1).numpy()


def rescaled(probabilities):
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_temperature(temperature):
    processor = generation.TemperatureLogitsWarper(temperature)
    for logits in ROWS:
        ours = token_probabilities(logits, temperature)
        np.testing.assert_allclose(ours, theirs(processor, logits), atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 50, 300])
def test_top_k(top_k):
    processor = generation.TopKLogitsWarper(top_k)
    for logits in ROWS:
        ours = keep_top_k(token_probabilities(logits, 1.0), best_first(logits), top_k)
        np.testing.assert_allclose(rescaled(ours), theirs(processor, logits), atol=1e-6)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99])
def test_top_p(top_p):
    processor = generation.TopPLogitsWarper(top_p)
    for logits in ROWS:
        ours = keep_top_p(token_probabilities(logits, 1.0), best_first(logits), top_p)
        np.testing.assert_allclose(rescaled(ours), theirs(processor, logits), atol=1e-6)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p(min_p):
    processor = generation.MinPLogitsWarper(min_p)
    for logits in ROWS:
        ours = keep_min_p(token_probabilities(logits, 1.0), min_p)
        np.testing.assert_allclose(rescaled(ours), theirs(processor, logits), atol=1e-6)


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty(penalty):
    processor = generation.RepetitionPenaltyLogitsProcessor(penalty)
    for logits in ROWS:
        token_ids = random.integers(300, size=30).tolist()
        ours = penalise_repetition(logits, token_ids, penalty)
        np.testing.assert_allclose(
            token_probabilities(ours, 1.0), theirs(processor, logits, token_ids),
            atol=1e-6,
        )  # fmt: skip


def test_equal_scores_are_where_we_differ():
    # transformers keeps all that are as good as the last one: our 2 are 2.
    logits = np.array([1.0, 3.0, 3.0, 3.0], dtype=np.float32)
    others = theirs(generation.TopKLogitsWarper(2), logits)
    ours = keep_top_k(token_probabilities(logits, 1.0), best_first(logits), 2)
    assert (others > 0).tolist() == [False, True, True, True]
    assert (ours > 0).tolist() == [False, True, True, False]
