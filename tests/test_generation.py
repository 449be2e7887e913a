"""Naive generation, on a model whose logits are written by hand."""

import numpy as np
import pytest

from minivllm.errors import MinivllmError, RequestError
from minivllm.generation import generate_naive, stream_naive
from minivllm.models.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0),
)


class Counting:
    """Prefers the token after the last one; remembers what it was asked."""

    spec = SPEC

    def __init__(self):
        self.asked = []

    def next_token_logits(self, token_ids):
        self.asked.append(list(token_ids))
        logits = np.zeros(8, dtype=np.float32)
        logits[(token_ids[-1] + 1) % 8] = 2.0
        return logits


def test_each_step_recomputes_the_whole_text():
    model = Counting()
    assert generate_naive(model, [0, 3], 3) == [4, 5, 6]
    assert model.asked == [[0, 3], [0, 3, 4], [0, 3, 4, 5]]


def test_generation_ends_with_the_stop_token_and_includes_it():
    assert generate_naive(Counting(), [0], 10, stop_token_ids={3, 7}) == [1, 2, 3]


def test_exactly_max_new_tokens_are_generated():
    for count in (1, 5, 15):
        assert len(generate_naive(Counting(), [0], count)) == count


def test_the_prompt_is_not_changed():
    prompt = [1, 2]
    generate_naive(Counting(), prompt, 4)
    assert prompt == [1, 2]


def test_an_abandoned_stream_does_no_more_work():
    model = Counting()
    stream = stream_naive(model, [0], 10)
    assert model.asked == []
    assert next(stream) == 1
    assert len(model.asked) == 1


def test_a_seed_makes_the_choices_repeatable():
    def draw(seed):
        return generate_naive(Counting(), [0], 15, temperature=2.0, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


class Even(Counting):
    """Finds all tokens equally good, but for token 1, which is a little better."""

    def next_token_logits(self, token_ids):
        return np.array([0, 0.05, 0, 0, 0, 0, 0, 0], dtype=np.float32)


def test_each_token_of_a_text_is_a_new_draw():
    tokens = generate_naive(Even(), [0], 15, temperature=1.0, seed=3)
    assert len(set(tokens)) > 4


def test_without_a_seed_two_texts_differ():
    texts = {tuple(generate_naive(Even(), [0], 15, temperature=1e6)) for _ in range(3)}
    assert len(texts) == 3


def test_a_low_temperature_is_not_yet_greedy():
    tokens = [
        generate_naive(Even(), [0], 1, temperature=0.1, seed=seed)[0]
        for seed in range(50)
    ]
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_never_a_token(value, temperature):
    class Broken(Counting):
        def next_token_logits(self, token_ids):
            return np.full(8, value, dtype=np.float32)

    with pytest.raises(MinivllmError, match="must be finite"):
        generate_naive(Broken(), [0], 1, temperature=temperature)


@pytest.mark.parametrize("kind", [np.array, tuple, iter, lambda p: map(np.uint8, p)])
def test_any_sequence_of_integers_is_a_prompt(kind):
    model = Counting()
    assert generate_naive(model, kind([0, 3]), 2) == [4, 5]
    assert all(type(token_id) is int for token_id in model.asked[-1])


def test_sampling_follows_the_softmax_of_logits_over_temperature():
    temperature = 1.5
    weights = np.exp(np.array([2.0] + [0.0] * 7) / temperature)
    expected = 2000 * weights / weights.sum()
    seen = np.zeros(8)
    for seed in range(2000):
        (token_id,) = generate_naive(
            Counting(), [7], 1, temperature=temperature, seed=seed
        )
        seen[token_id] += 1
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    with np.errstate(all="raise"):
        tokens = generate_naive(Counting(), [0], 5, temperature=1e-300, seed=0)
    assert tokens == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "message"),
    [
        ([], 1, 0.0, "the prompt has 0 tokens"),
        ([0, 8], 1, 0.0, "token id 8, but the model knows 0 to 7"),
        ([-1], 1, 0.0, "token id -1"),
        ([2**63], 1, 0.0, "token id 9223372036854775808"),
        ([1.0], 1, 0.0, "holds 1.0, but token ids are integers"),
        ([True], 1, 0.0, "holds True"),
        ("sky", 1, 0.0, "holds 's'"),
        ([[0, 1]], 1, 0.0, r"holds \[0, 1\]"),
        (np.zeros((2, 2), dtype=int), 1, 0.0, "holds array"),
        ([0], 0, 0.0, "max_new_tokens is 0"),
        ([0], 2.5, 0.0, "max_new_tokens is 2.5"),
        ([0], 20, 0.0, "trained for 16: ask for at most 15 new ones$"),
        (
            [0] * 10,
            7,
            0.0,
            "10 prompt tokens and 7 new ones are 17, .* 16: shorten the prompt to 9 "
            "tokens or ask for at most 6 new ones$",
        ),
        ([0], 1, -0.5, "temperature is -0.5"),
        ([0], 1, float("nan"), "temperature is nan"),
        ([0], 1, float("inf"), "temperature is inf"),
        ([0], 1, 10**400, "temperature is 1000"),
        ([0], 1, "hot", "temperature is 'hot'"),
    ],
)
def test_the_impossible_is_refused_at_the_call(prompt, count, temperature, message):
    with pytest.raises(RequestError, match=message):
        stream_naive(Counting(), prompt, count, temperature=temperature)


@pytest.mark.parametrize("seed", [-1, 1.5, "x"])
def test_a_seed_that_is_none_is_refused_at_the_call(seed):
    with pytest.raises(RequestError, match="seed is"):
        stream_naive(Counting(), [0], 1, temperature=1.0, seed=seed)
