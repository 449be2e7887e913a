"""Which queries of a step attend in one call."""

import numpy as np
import pytest

from minivllm.runners import attention_groups
from minivllm.runners.attention_groups import group_queries
from minivllm.runners.attention_metadata import AttentionMetadata, pad_block_ids


def metadata(*requests, block_size=4):
    """Describe a step by (queries, keys) of its requests, each with its own blocks."""
    lengths, seq_lens = np.array(requests).T
    block_ids, next_block = [], 0
    for num_keys in seq_lens.tolist():
        num_blocks = -(-num_keys // block_size)
        block_ids.append(list(range(next_block, next_block + num_blocks)))
        next_block += num_blocks
    return AttentionMetadata(
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_table=pad_block_ids(block_ids),
        slot_mapping=np.zeros(lengths.sum(), dtype=np.int64),
        block_size=block_size,
    )


def test_answers_are_one_group_in_the_order_of_the_batch():
    (group,), places = group_queries(metadata((1, 5), (1, 9), (1, 2)))
    assert group.rows.tolist() == [[0], [1], [2]]
    assert group.positions.tolist() == [[4], [8], [1]]
    # Padded with a request's own first block, which holds no foreign numbers.
    assert group.block_table.tolist() == [[0, 1, 0], [2, 3, 4], [5, 5, 5]]
    assert places.size == 0


def test_a_fresh_prompt_alone_reads_no_block():
    (group,), places = group_queries(metadata((3, 3)))
    assert group.is_fresh
    assert group.rows.tolist() == [[0, 1, 2]]
    assert places.size == 0


def test_a_shorter_piece_repeats_its_last_query():
    (group,), places = group_queries(metadata((2, 2), (4, 4)))
    assert group.rows.tolist() == [[0, 1, 1, 1], [2, 3, 4, 5]]
    # Of the repeated ones, the first is the query: the others see too many keys.
    assert places.tolist() == [0, 1, 4, 5, 6, 7]


def test_a_mixed_step_has_its_fresh_prompts_first():
    groups, places = group_queries(metadata((1, 6), (3, 3), (2, 7)))
    assert [group.is_fresh for group in groups] == [True, False, False]
    assert [group.rows.tolist() for group in groups] == [[[1, 2, 3]], [[0]], [[4, 5]]]
    assert groups[2].positions.tolist() == [[5, 6]]
    assert places.tolist() == [3, 0, 1, 2, 4, 5]


def test_a_long_chunk_is_cut_and_each_piece_sees_its_own_past(monkeypatch):
    monkeypatch.setattr(attention_groups, "MAX_QUERIES", 4)
    (single, pair), places = group_queries(metadata((9, 11)))
    assert pair.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pair.positions.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert single.rows.tolist() == [[8]]
    assert single.positions.tolist() == [[10]]
    assert places.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_short_and_long_contexts_are_kept_apart(monkeypatch):
    monkeypatch.setattr(attention_groups, "MAX_PADDED_KEYS", 50)
    groups, _ = group_queries(metadata((1, 100), (1, 8), (1, 90), (1, 7), (1, 60)))
    assert [g.rows.ravel().tolist() for g in groups] == [[0, 2, 4], [1, 3]]
    assert [g.block_table.shape for g in groups] == [(3, 25), (2, 2)]


def test_a_group_gathers_a_limited_number_of_keys(monkeypatch):
    monkeypatch.setattr(attention_groups, "MAX_KEYS", 20)
    groups, _ = group_queries(metadata(*[(1, 8)] * 5, (1, 30)))
    assert sorted(len(g.rows) for g in groups) == [1, 1, 2, 2]


@pytest.mark.parametrize("max_ragged", [0, 1, 8])
@pytest.mark.parametrize("seed", range(20))
def test_every_query_is_answered_once_with_its_own_position(
    seed, max_ragged, monkeypatch
):
    monkeypatch.setattr(attention_groups, "MAX_QUERIES", 8)
    monkeypatch.setattr(attention_groups, "MAX_PADDED_KEYS", 32)
    random = np.random.default_rng(seed)
    lengths = random.choice([1, 1, 2, 7, 19], size=6)
    past = random.choice([0, 1, 5, 40], size=6)
    step = metadata(*zip(lengths, lengths + past, strict=True))
    groups, places = group_queries(step, max_ragged)
    rows = np.concatenate([group.rows.ravel() for group in groups])
    positions = np.concatenate([group.positions.ravel() for group in groups])
    places = places if places.size else np.arange(len(rows))
    assert rows[places].tolist() == list(range(lengths.sum()))
    expected = [p + i for p, n in zip(past, lengths, strict=True) for i in range(n)]
    assert positions[places].tolist() == expected
    for group in groups:
        if max_ragged == 8:  # kernels read all keys from the cache
            assert not group.is_fresh
        last, first = group.positions[:, -1], group.positions[:, 0]
        if max_ragged and group.rows.shape[1] == 1 and not group.is_fresh:
            assert (last == first).all()  # pieces of one query, and only those
        keys_in_blocks = group.block_table.shape[1] * step.block_size
        assert group.is_fresh or keys_in_blocks > group.positions.max()


def test_ragged_answers_are_one_group_whatever_their_contexts(monkeypatch):
    monkeypatch.setattr(attention_groups, "MAX_PADDED_KEYS", 5)
    monkeypatch.setattr(attention_groups, "MAX_KEYS", 20)
    step = metadata((1, 100), (1, 8), (1, 90), (1, 7), (1, 60))
    assert len(group_queries(step)[0]) > 1
    (group,), places = group_queries(step, max_ragged=1)
    assert group.rows.ravel().tolist() == [0, 1, 2, 3, 4]
    assert group.positions.ravel().tolist() == [99, 7, 89, 6, 59]
    assert not places.size


def test_ragged_pieces_of_very_different_lengths_are_kept_apart():
    """Their results lie in a row each as long as the longest."""
    pieces = [(200, 300), *[(2, 50)] * 20, (1, 9)]
    groups, _ = group_queries(metadata(*pieces), attention_groups.MAX_QUERIES)
    assert sorted(group.rows.shape for group in groups) == [(1, 1), (1, 200), (20, 2)]
