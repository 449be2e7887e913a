"""The flat batch of a step, by hand."""

import numpy as np
import pytest

from minivllm.request import SchedulerOutput
from minivllm.runners.attention_metadata import make_batch, pad_block_ids
from tests.engine_tools import make_request


def make_step(*entries):
    """Plan a step of (name, token ids, computed, new, block ids)."""
    requests = []
    for name, token_ids, computed, *_ in entries:
        requests.append(make_request(name, token_ids))
        requests[-1].num_computed_tokens = computed
    return SchedulerOutput(
        requests=requests,
        num_scheduled_tokens={name: new for name, _, _, new, _ in entries},
        block_ids={name: ids for name, *_, ids in entries},
    )


STEP = make_step(
    ("a", range(100, 109), 5, 3, [7, 2]),  # tokens 5 to 7 of 9: a chunk
    ("b", range(200, 210), 9, 1, [0, 4, 3]),  # the last of 10: an answer
    ("c", range(300, 304), 0, 4, [5]),  # all 4: a prompt
)


@pytest.fixture(scope="module")
def batch():
    return make_batch(STEP, block_size=4)


def test_the_tokens_lie_in_one_row_without_padding(batch):
    expected = [105, 106, 107, 209, 300, 301, 302, 303]
    assert batch.input_ids.tolist() == expected
    assert batch.input_ids.dtype == np.int64


def test_the_nth_token_of_a_text_has_position_n_minus_one(batch):
    assert batch.positions.tolist() == [5, 6, 7, 9, 0, 1, 2, 3]
    assert batch.positions.dtype == np.int64


def test_query_start_loc_marks_the_first_row_of_each_request(batch):
    assert batch.attention.query_start_loc.tolist() == [0, 3, 4, 8]
    assert batch.attention.query_start_loc.dtype == np.int32


def test_seq_lens_count_what_is_in_the_cache_after_the_step(batch):
    assert batch.attention.seq_lens.tolist() == [8, 10, 4]
    assert batch.attention.seq_lens.dtype == np.int32


def test_the_block_table_is_padded_with_minus_one(batch):
    assert batch.attention.block_table.tolist() == [[7, 2, -1], [0, 4, 3], [5, -1, -1]]
    assert batch.attention.block_table.dtype == np.int32


def test_a_slot_is_the_block_times_its_size_plus_the_offset(batch):
    expected = [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 3 * 4 + 1, 20, 21, 22, 23]
    assert batch.attention.slot_mapping.tolist() == expected
    assert batch.attention.slot_mapping.dtype == np.int64
    assert batch.attention.block_size == 4


def test_position_25_with_blocks_of_16_is_block_1_offset_9():
    step = make_step(("a", range(26), 25, 1, [8, 3]))
    assert make_batch(step, 16).attention.slot_mapping.tolist() == [3 * 16 + 9]


def test_only_requests_that_have_caught_up_are_sampled_at_their_last_row(batch):
    assert batch.sampled.tolist() == [1, 2]
    assert batch.logits_indices.tolist() == [3, 7]


def test_a_step_may_sample_nothing():
    batch = make_batch(make_step(("a", range(9), 0, 3, [0])), 4)
    assert batch.sampled.tolist() == [] and batch.logits_indices.tolist() == []


def test_large_slots_do_not_overflow():
    step = make_step(("a", range(3), 2, 1, [2**30]))
    assert make_batch(step, 4).attention.slot_mapping.tolist() == [2**32 + 2]


def test_making_a_batch_changes_no_request():
    before = [list(request.token_ids) for request in STEP.requests]
    make_batch(STEP, 4)
    assert [list(request.token_ids) for request in STEP.requests] == before
    assert [request.num_computed_tokens for request in STEP.requests] == [5, 9, 0]


def test_tables_of_equal_length_need_no_padding():
    assert pad_block_ids([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
