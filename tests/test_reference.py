"""The parts of the NumPy decoder by hand, and their invariants."""

import numpy as np
import pytest

from minivllm.errors import WeightMismatch
from minivllm.models.rotary import inverse_frequencies
from minivllm.models.spec import RopeFactors, RopeSpec
from minivllm.reference.attention import attention_weights, causal_attention, softmax
from minivllm.reference.decoder import NumpyDecoder, apply_rope, rms_norm, silu
from tests.test_generation import SPEC


@pytest.fixture
def decoder():
    random = np.random.default_rng(0)
    shapes = SPEC.weight_shapes().items()
    return NumpyDecoder(
        SPEC, {k: random.normal(size=s).astype(np.float32) for k, s in shapes}
    )


def test_rms_norm_by_hand():
    x = np.array([[3.0, 4.0], [30.0, 40.0]], dtype=np.float32)
    normed = rms_norm(x, np.array([1, 2], dtype=np.float32), eps=0.0)
    expected = [[3 / 12.5**0.5, 8 / 12.5**0.5]] * 2  # each row by its own size
    np.testing.assert_allclose(normed, expected, rtol=1e-6)
    np.testing.assert_array_equal(x, [[3, 4], [30, 40]])  # not written into


def test_silu_is_right_for_large_numbers_of_either_sign():
    x = np.array([-1000.0, -1.0, 0.0, 1.0, 1000.0], dtype=np.float32)
    expected = [0, -1 / (1 + np.e), 0, 1 / (1 + 1 / np.e), 1000]
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(silu(x), expected, rtol=1e-6)


def test_softmax_does_not_overflow():
    shares = softmax(np.array([[1000.0, 1000.0], [-np.inf, 0.0]]))
    np.testing.assert_array_equal(shares, [[0.5, 0.5], [0, 1]])


def test_a_quarter_turn_of_a_pair():
    x = np.array([1.0, 2.0, 30.0, 40.0])[None, None]  # pairs (1, 30) and (2, 40)
    cos, sin = np.array([[[0.0, 1.0]]]), np.array([[[1.0, 0.0]]])
    turned = apply_rope(x, cos, sin)[0, 0]
    np.testing.assert_array_equal(turned, [-30, 2, 1, 40])


def test_the_first_pair_turns_one_radian_a_position():
    frequencies = inverse_frequencies(4, RopeSpec(theta=10_000.0))
    np.testing.assert_allclose(frequencies, [1, 0.01], rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_rope_factors_divide_the_frequencies():
    scaling = RopeFactors(factors=(1.0, 2.0))
    frequencies = inverse_frequencies(4, RopeSpec(theta=10_000.0, scaling=scaling))
    np.testing.assert_allclose(frequencies, [1, 0.005], rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_a_query_sees_itself_and_what_came_before():
    q = np.zeros((2, 1, 2))  # looks at all it sees alike
    k = np.zeros((5, 1, 2))
    weights = attention_weights(q, k, scale=1.0)
    # Two queries for five keys are the last two.
    expected = [[0.25, 0.25, 0.25, 0.25, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]
    np.testing.assert_allclose(weights[0], expected)


def test_what_is_masked_gets_nothing_however_well_it_fits():
    q = np.array([[[1.0]], [[1.0]]])
    k = np.array([[[-2e4]], [[2e4]]])  # the second fits far better, but comes later
    np.testing.assert_array_equal(attention_weights(q, k, 1.0)[0], [[1, 0], [0, 1]])


def test_there_cannot_be_more_queries_than_keys():
    with pytest.raises(AssertionError, match="3 queries for 2 keys"):
        attention_weights(np.zeros((3, 1, 2)), np.zeros((2, 1, 2)), 1.0)


def test_softmax_shifts_each_row_by_its_own_maximum():
    scores = np.array([[0.0, 1.0], [1000.0, 1001.0]])
    shares = softmax(scores)
    np.testing.assert_allclose(shares[0], shares[1])


def test_weights_of_other_types_are_computed_in_float32(decoder):
    halves = {name: w.astype(np.float16) for name, w in decoder.weights.items()}
    widened = {name: w.astype(np.float32) for name, w in halves.items()}
    logits = NumpyDecoder(SPEC, halves).next_token_logits([1, 2])
    assert logits.dtype == np.float32
    expected = NumpyDecoder(SPEC, widened).next_token_logits([1, 2])
    np.testing.assert_array_equal(logits, expected)


def test_query_heads_share_key_heads_in_groups():
    q, k = np.zeros((1, 6, 2)), np.zeros((1, 2, 2))
    v = np.array([[[1.0, 1.0], [2.0, 2.0]]])
    assert causal_attention(q, k, v, 1.0)[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_more_text_leaves_earlier_tokens_alone(decoder):
    ids, positions = np.array([1, 2, 3, 4, 5]), np.arange(5)
    whole = decoder.forward(ids, positions, decoder.dense_context())
    for length in range(1, 5):
        part = decoder.forward(
            ids[:length], positions[:length], decoder.dense_context()
        )
        np.testing.assert_allclose(whole[:length], part, rtol=1e-4, atol=1e-5)


def test_the_same_text_elsewhere_gives_the_same_logits(decoder):
    # Rope makes only distances count, and nothing else reads the position.
    ids = np.array([1, 2, 3])
    here = decoder.forward(ids, np.arange(3), decoder.dense_context())
    there = decoder.forward(ids, np.arange(3) + 7, decoder.dense_context())
    apart = decoder.forward(ids, np.array([0, 1, 5]), decoder.dense_context())
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
    assert np.abs(here - apart).max() > 1e-2


def test_forward_changes_neither_weights_nor_input(decoder):
    before = {name: array.copy() for name, array in decoder.weights.items()}
    ids = [3, 1, 4]
    decoder.next_token_logits(ids)
    assert ids == [3, 1, 4]
    for name, array in decoder.weights.items():
        np.testing.assert_array_equal(array, before[name])


def test_weights_of_another_model_are_refused(decoder):
    with pytest.raises(WeightMismatch, match=r"missing: norm\.weight"):
        NumpyDecoder(
            SPEC, {k: v for k, v in decoder.weights.items() if k != "norm.weight"}
        )
