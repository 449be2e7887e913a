"""Attention through a block table equals attention over the keys in a row."""

import numpy as np
import pytest

from minivllm.reference.attention import causal_attention
from minivllm.reference.paged_attention import (
    gather_blocks,
    online_attention,
    paged_attention,
    reshape_and_cache,
)

BLOCK_SIZE, NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 4, 7, 2, 8
SCALE = HEAD_DIM**-0.5


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def kv_cache():
    """A cache full of what must never be read."""
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return np.full(shape, np.nan, dtype=np.float32)


def draw(random, *shape):
    return random.standard_normal(shape, dtype=np.float32)


def slots_of(block_ids, positions):
    blocks = np.array(block_ids)[np.asarray(positions) // BLOCK_SIZE]
    return blocks * BLOCK_SIZE + np.asarray(positions) % BLOCK_SIZE


def fill(kv_cache, random, block_ids, num_tokens):
    """Write a text into its blocks; return its keys and values in a row."""
    k, v = draw(random, 2, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    reshape_and_cache(k, v, kv_cache, slots_of(block_ids, range(num_tokens)))
    return k, v


def test_a_token_is_written_to_its_slot_and_nowhere_else(kv_cache, random):
    k, v = draw(random, 2, 2, NUM_KV_HEADS, HEAD_DIM)
    reshape_and_cache(k, v, kv_cache, np.array([9, 2]))
    np.testing.assert_array_equal(kv_cache[0, 2, 1], k[0])
    np.testing.assert_array_equal(kv_cache[1, 2, 1], v[0])
    np.testing.assert_array_equal(kv_cache[0, 0, 2], k[1])
    assert np.isfinite(kv_cache).sum() == 2 * 2 * NUM_KV_HEADS * HEAD_DIM


def test_slot_minus_one_is_skipped(kv_cache, random):
    k, v = draw(random, 2, 3, NUM_KV_HEADS, HEAD_DIM)
    reshape_and_cache(k, v, kv_cache, np.array([-1, 5, -1]))
    np.testing.assert_array_equal(kv_cache[0, 1, 1], k[1])
    assert np.isnan(kv_cache[0, -1, -1]).all(), "-1 is no slot from the end"
    assert np.isfinite(kv_cache).sum() == 2 * NUM_KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 11])
def test_gathered_blocks_are_the_text_in_order(kv_cache, random, num_tokens):
    block_ids = [5, 0, 3]
    k, v = fill(kv_cache, random, block_ids, num_tokens)
    keys, values = gather_blocks(kv_cache, np.array([*block_ids, -1]), num_tokens)
    np.testing.assert_array_equal(keys, k)
    np.testing.assert_array_equal(values, v)


@pytest.mark.parametrize("num_heads", [2, 6])
def test_a_batch_attends_request_by_request(kv_cache, random, num_heads):
    texts = {5: ([6, 1], 3), 9: ([0, 4, 2], 1), 4: ([5], 4)}  # length: blocks, queries
    k, v = zip(
        *(fill(kv_cache, random, ids, n) for n, (ids, _) in texts.items()), strict=True
    )
    q = draw(random, 8, num_heads, HEAD_DIM)
    mixed = paged_attention(
        q,
        kv_cache,
        query_start_loc=np.array([0, 3, 4, 8], dtype=np.int32),
        seq_lens=np.array([5, 9, 4], dtype=np.int32),
        block_table=np.array([[6, 1, -1], [0, 4, 2], [5, -1, -1]], dtype=np.int32),
        scale=SCALE,
    )
    start = 0
    for index, (_, num_queries) in enumerate(texts.values()):
        rows = slice(start, start + num_queries)
        expected = causal_attention(q[rows], k[index], v[index], SCALE)
        np.testing.assert_array_equal(mixed[rows], expected)
        start += num_queries


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("size", [1.0, 200.0])
def test_one_block_at_a_time_gives_the_same(
    kv_cache, random, num_heads, num_tokens, size
):
    # Scores near 200 squared overflow exp() unless the largest is subtracted.
    block_ids = [3, 6, 1]
    k, v = fill(kv_cache, random, block_ids, num_tokens)
    kv_cache[0] *= size
    q = size * draw(random, num_heads, HEAD_DIM)
    with np.errstate(over="raise", invalid="raise"):
        mixed = online_attention(q, kv_cache, np.array(block_ids), num_tokens, SCALE)
    (expected,) = causal_attention(q[None], k * np.float32(size), v, SCALE)
    np.testing.assert_allclose(mixed, expected, rtol=2e-5, atol=2e-6)


def test_the_largest_score_may_come_in_any_block(kv_cache):
    # One head dimension carries the score, one the position that it belongs to.
    kv_cache[:] = 0
    for top in range(10):
        kv_cache[0] = 0
        slots = slots_of([2, 5, 0], range(10))
        keys = kv_cache[0].reshape(-1, NUM_KV_HEADS, HEAD_DIM)
        values = kv_cache[1].reshape(-1, NUM_KV_HEADS, HEAD_DIM)
        keys[slots[top], :, 0] = 50.0
        values[slots, :, 1] = np.arange(10, dtype=np.float32)[:, None]
        q = np.zeros((2, HEAD_DIM), dtype=np.float32)
        q[:, 0] = 1.0
        mixed = online_attention(q, kv_cache, np.array([2, 5, 0]), 10, scale=1.0)
        np.testing.assert_allclose(mixed[:, 1], top, atol=1e-5)


def test_reading_changes_neither_queries_nor_cache(kv_cache, random):
    fill(kv_cache, random, [1], 4)
    q = draw(random, 1, 2, HEAD_DIM)
    before = q.copy(), kv_cache.copy()
    arguments = np.array([0, 1]), np.array([4]), np.array([[1]])
    paged_attention(q, kv_cache, *arguments, SCALE)
    online_attention(q[0], kv_cache, np.array([1]), 4, SCALE)
    np.testing.assert_array_equal(q, before[0])
    np.testing.assert_array_equal(kv_cache, before[1])
