"""Generation: naive on logits written by hand, faster ways on tiny random models."""

import numpy as np
import pytest

from minivllm.errors import MinivllmError, RequestError
from minivllm.generation import (
    generate_cached,
    generate_naive,
    generate_static_batch,
    stream_cached,
    stream_naive,
)
from minivllm.models.spec import ModelSpec, RopeSpec
from minivllm.reference.decoder import NumpyDecoder
from tests.tiny_decoders import numpy_decoder, torch_decoder

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


# With a cache, and in a static batch

PROMPTS = [[3, 1, 4, 15, 9], [7], [2, 6, 40, 11, 35, 26, 5]]


@pytest.fixture(params=[numpy_decoder, torch_decoder], ids=["numpy", "torch"])
def decoder(request):
    return request.param()


def test_cached_generation_gives_the_naive_tokens(decoder):
    naive = [generate_naive(decoder, prompt, 40) for prompt in PROMPTS]
    assert len({token_id for tokens in naive for token_id in tokens}) >= 10
    assert [generate_cached(decoder, prompt, 40) for prompt in PROMPTS] == naive


def test_cached_generation_draws_the_naive_tokens(decoder):
    options = {"temperature": 1.5, "seed": 4}
    tokens = generate_naive(decoder, PROMPTS[0], 20, **options)
    assert tokens != generate_naive(decoder, PROMPTS[0], 20)
    assert generate_cached(decoder, PROMPTS[0], 20, **options) == tokens


def test_cached_generation_ends_with_a_stop_token(decoder):
    tokens = generate_naive(decoder, PROMPTS[0], 20)
    stop = tokens[6]
    expected = tokens[: tokens.index(stop) + 1]
    assert generate_cached(decoder, PROMPTS[0], 20, stop_token_ids=[stop]) == expected


class Watched(NumpyDecoder):
    """Remembers how many rows each pass had, and the last context it made."""

    def forward(self, input_ids, positions, context):
        self.rows.append(len(input_ids))
        self.context = context
        return super().forward(input_ids, positions, context)


def watched():
    made = numpy_decoder()
    decoder = Watched(made.spec, made.weights)
    decoder.rows = []
    return decoder


def test_each_token_is_computed_once_with_a_cache():
    decoder = watched()
    generate_cached(decoder, PROMPTS[0], 4)
    assert decoder.rows == [5, 1, 1, 1]
    assert decoder.context.k_cache.shape[1] == decoder.context.num_tokens == 8


def test_an_abandoned_cached_stream_does_no_more_work():
    decoder = watched()
    stream = stream_cached(decoder, iter(PROMPTS[0]), 10)
    assert decoder.rows == []
    next(stream)
    assert decoder.rows == [5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_token_ids": []}, "the prompt has 0 tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_the_impossible_is_refused_before_a_cache_is_reserved(options, message):
    decoder = watched()
    decoder.cached_context = None  # calling it would be a TypeError
    arguments = {"prompt_token_ids": [1], "max_new_tokens": 1} | options
    with pytest.raises(RequestError, match=message):
        stream_cached(decoder, **arguments)


@pytest.mark.parametrize("limits", [[30, 30, 30], [1, 20, 6], [20, 1, 1]])
def test_a_static_batch_gives_each_text_its_own_tokens(decoder, limits):
    alone = [
        generate_naive(decoder, p, n) for p, n in zip(PROMPTS, limits, strict=True)
    ]
    assert len({token_id for tokens in alone for token_id in tokens}) >= 10
    assert generate_static_batch(decoder, PROMPTS, limits) == alone


def test_texts_of_a_static_batch_stop_one_by_one(decoder):
    alone = [generate_naive(decoder, prompt, 25) for prompt in PROMPTS]
    stop = {alone[0][3], alone[2][8]}
    expected = [
        generate_naive(decoder, prompt, 25, stop_token_ids=stop) for prompt in PROMPTS
    ]
    assert len({len(tokens) for tokens in expected}) > 1
    assert generate_static_batch(decoder, PROMPTS, 25, stop_token_ids=stop) == expected


def test_a_static_batch_computes_rows_for_those_that_are_done():
    decoder = watched()
    generate_static_batch(decoder, PROMPTS, [1, 4, 2])
    assert decoder.rows == [3 * 7, 3, 3, 3]


def test_a_batch_of_nothing_gives_nothing():
    assert generate_static_batch(numpy_decoder(), [], 5) == []
    assert generate_static_batch(numpy_decoder(), [], []) == []


@pytest.mark.parametrize(
    ("prompts", "limits", "message"),
    [
        ([[1], [2]], [3], "max_new_tokens has 1 numbers for 2 prompts"),
        ([[1], []], 3, "the prompt has 0 tokens"),
        ([[1], [2]], [3, 0], "max_new_tokens is 0"),
        ([[1]], 1.5, "max_new_tokens is 1.5"),
        ([[1], [50]], 3, "token id 50"),
    ],
)
def test_an_impossible_batch_is_refused_before_any_work(prompts, limits, message):
    decoder = watched()
    with pytest.raises(RequestError, match=message):
        generate_static_batch(decoder, prompts, limits)
    assert decoder.rows == []
