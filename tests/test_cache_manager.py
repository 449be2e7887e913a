"""The books of hybrid models: blocks, blocks of windows, and states, under random use.

The runner only pretends, so that thousands of steps are tried. After each of them the
three books must agree, and the blocks of windows must never be what a request waits
for: they were counted so that they suffice.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.cache_manager import CacheManager
from minivllm.engine.engine import LLMEngine
from minivllm.engine.state_pool import StatePool
from minivllm.models.spec import DeltaNetSpec
from minivllm.runners.base import CacheLayout
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.kv_cache import (
    CacheLimits,
    kv_bytes_per_token,
    layout_for,
    share_out,
    state_bytes,
)
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import assert_queues_are_right, assert_states_balance
from tests.tiny_decoders import SPEC

NET = DeltaNetSpec(
    layers=(1,),
    num_key_heads=1,
    num_value_heads=2,
    key_head_dim=3,
    value_head_dim=5,
    conv_kernel_size=4,
)
FULL = replace(SPEC, num_layers=4)
WINDOWS = replace(FULL, windows=(6, 6, None, 9))
STATES = replace(FULL, delta_net=NET)
BOTH = replace(WINDOWS, delta_net=NET)
ALL_WINDOWS = replace(FULL, windows=(6, 6, 7, 9))
ALL_STATES = replace(FULL, delta_net=replace(NET, layers=(0, 1, 2, 3)))
SPECS = [FULL, WINDOWS, STATES, BOTH, ALL_WINDOWS, ALL_STATES]


class WatchedManager(CacheManager):
    """Notes when the windows have no room where the other blocks have."""

    shortage = 0

    def allocate_slots(self, request_id, num_tokens, cached_prefix=()):
        if self.windows and not self.windows.has_room(
            request_id, num_tokens, cached_prefix
        ):
            self.shortage += self.has_room(request_id, num_tokens, cached_prefix)
        return super().allocate_slots(request_id, num_tokens, cached_prefix)


requests = st.tuples(
    st.integers(0, 2),  # steps before it comes
    st.integers(0, 3),  # which beginning it shares
    st.integers(1, 30),  # tokens of its prompt
    st.integers(1, 12),  # tokens of its answer
    st.sampled_from([1, 1, 1, 2, 3]),  # answers
    st.sampled_from([None, None, 2, 5]),  # steps until it is aborted
)


@settings(max_examples=120, deadline=None)
@given(
    spec=st.sampled_from(SPECS[1:]),
    arrivals=st.lists(requests, min_size=1, max_size=12),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(12, 60),
    budget=st.integers(3, 40),
    max_num_seqs=st.integers(1, 5),
    num_kept=st.integers(0, 4),
    caching=st.booleans(),
    policy=st.sampled_from(["mixed", "prefill_first", "shortest"]),
)
def test_the_books_agree_whatever_happens(
    spec,
    arrivals,
    block_size,
    num_blocks,
    budget,
    max_num_seqs,
    num_kept,
    caching,
    policy,
):
    limits = CacheLimits(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=64,
    )
    layout = layout_for(spec, num_blocks, limits)
    if layout.num_states:
        layout = replace(layout, num_kept_states=num_kept)
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, max_model_len=64)
    runner.layout = layout
    engine = LLMEngine(
        runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy
    )
    manager = engine.scheduler.block_manager = WatchedManager(
        num_blocks, block_size, layout, enable_prefix_caching=caching
    )
    finished, ends = set(), {}
    names = iter(range(len(arrivals)))
    pending = list(arrivals)
    wait = 0
    for step in range(3000):
        while pending and wait >= pending[0][0]:
            _, kind, num_prompt, num_answer, n, abort_in = pending.pop(0)
            name, wait = str(next(names)), 0
            prompt = [(kind * 7 + i // (8 + kind)) % 50 for i in range(num_prompt)]
            if num_prompt <= num_blocks * block_size:
                engine.add_request(
                    name, prompt, SamplingParams(max_tokens=num_answer, n=n)
                )
                if abort_in is not None:
                    ends[name] = step + abort_in
            else:
                finished.add(name)
        wait += 1
        for name in [name for name, end in ends.items() if end == step]:
            if engine.abort_request(name) is not None:
                finished.add(name)
        for output in engine.step():
            if output.finished:
                finished.add(output.request_id)
        assert_queues_are_right(engine.scheduler)
        if not pending and not engine.has_unfinished_requests():
            break
    assert len(finished) == len(arrivals), "a request was lost"
    assert manager.num_free_blocks == num_blocks
    assert not manager.shortage, "the windows had no room"
    if manager.windows:
        assert manager.windows.num_free_blocks == layout.num_window_blocks
    if manager.states:
        assert not manager.states.slots


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("memory_bytes", [0, 1_000, 20_000, 100_000, 10_000_000])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_a_budget_is_shared_out_and_not_exceeded(spec, memory_bytes, max_num_seqs):
    limits = CacheLimits(
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    num_blocks, layout = share_out(spec, memory_bytes, 4, limits)
    layer_bytes = 4 * 2 * spec.num_kv_heads * spec.head_dim * 4
    num_apart = len(spec.window_layers) if layout.num_window_blocks else 0
    num_slots = layout.num_states + layout.num_kept_states
    used = num_blocks * len(spec.full_layers) * layer_bytes
    used += layout.num_window_blocks * num_apart * layer_bytes
    used += num_slots * state_bytes(spec, 4)
    if spec.delta_net is None:
        assert used <= memory_bytes
    elif num_blocks:  # one slot is given, whatever it takes
        assert used <= max(memory_bytes, state_bytes(spec, 4))
    assert layout.num_window_blocks <= num_blocks
    if spec.window_layers and num_blocks:
        most = limits.max_window_blocks(spec.max_window)
        assert layout.num_window_blocks == min(num_blocks, most)
    if spec.delta_net:
        assert 1 <= layout.num_states <= max_num_seqs
    if memory_bytes == 10_000_000:
        assert layout.num_states in (0, max_num_seqs)
        assert num_blocks >= limits.max_full_blocks
        if spec.full_layers:  # nothing is left lying about
            left = memory_bytes - used
            assert left < len(spec.full_layers) * layer_bytes


def test_what_windows_do_not_need_is_for_the_other_layers():
    limits = CacheLimits(
        block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
    )
    num_windows = limits.max_window_blocks(9)
    assert num_windows == 2 * (3 + 1 + 1) + 4, "two windows, and a step of 16 tokens"
    layer = 4 * kv_bytes_per_token(replace(FULL, num_layers=1), 4)
    # Three layers have windows, one sees all; then a little more than they need.
    exactly = num_windows * 4 * layer
    for rest, num_blocks in ((-1, num_windows - 1), (0, num_windows)):
        assert share_out(WINDOWS, exactly + rest, 4, limits)[0] == num_blocks
    for memory, num_blocks in ((4 * layer, 1), (4 * layer - 1, 0)):
        found, layout = share_out(WINDOWS, memory, 4, limits)
        assert (found, layout.num_window_blocks) == (num_blocks, num_blocks)
    found, layout = share_out(WINDOWS, exactly + 2 * layer, 4, limits)
    assert (found, layout.num_window_blocks) == (num_windows + 2, num_windows)


def test_with_windows_only_there_are_as_many_blocks_as_texts_can_have():
    limits = CacheLimits(
        block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
    )
    num_blocks, layout = share_out(ALL_WINDOWS, 10**9, 4, limits)
    assert num_blocks == limits.max_full_blocks == 2 * 16
    assert layout.num_window_blocks == min(32, limits.max_window_blocks(9))


def test_windows_apart_make_room_for_more_tokens():
    limits = CacheLimits(
        block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
    )
    memory = 400 * 4 * kv_bytes_per_token(WINDOWS, 4)
    num_blocks, layout = share_out(WINDOWS, memory, 4, limits)
    assert share_out(FULL, memory, 4, limits)[0] == 400
    assert layout.num_window_blocks < 20
    assert num_blocks > 1500, "one layer of four sees all"


def test_a_pool_of_states_by_hand():
    pool = StatePool(2, 1)
    assert pool.allocate("a") and pool.allocate("b")
    assert pool.slots == {"a": 0, "b": 1}
    assert not pool.allocate("c")
    assert pool.allocate("a"), "it has one"
    pool.save("a", "key of a")
    assert pool.saves == [(0, 2)]
    assert pool.longest_prefix(["key of a"]) == 0, "not before it is computed"
    pool.commit()
    assert pool.longest_prefix(["key of a", "another"]) == 1
    pool.free("b")
    assert pool.allocate("c", "key of a")
    assert pool.loads == [(2, 1)]
    pool.save("a", "key 2 of a")
    assert pool.saves == [(0, 2)], "c has its copy before this"
    assert pool.longest_prefix(["key of a"]) == 0
    assert_states_balance(pool)
    pool.rollback()
    assert not pool.kept
    assert pool.free_kept == [2]
    assert_states_balance(pool)


def test_a_state_that_is_saved_again_stays_longest():
    pool = StatePool(1, 2)
    pool.allocate("a")
    for key in ("one", "two", "one", "three"):
        pool.save("a", key)
        pool.commit()
    assert list(pool.kept) == ["one", "three"]
    pool.forget()
    assert_states_balance(pool)
    assert sorted(pool.free_kept) == [1, 2]


def test_a_fork_that_is_not_computed_gives_its_slot_back():
    pool = StatePool(2)
    pool.allocate("a")
    pool.fork("a", "a-1")
    assert pool.saves == [(0, 1)]
    pool.rollback()
    assert pool.slots == {"a": 0}
    pool.fork("a", "a-1")
    pool.commit()
    assert pool.slots == {"a": 0, "a-1": 1}


@pytest.mark.parametrize(
    "layout",
    [CacheLayout(num_states=1), CacheLayout(window=64, num_window_blocks=2)],
)
def test_what_one_book_refuses_no_other_gives(layout):
    manager = CacheManager(8, 4, layout)
    assert manager.allocate_slots("a", 8)
    assert not manager.allocate_slots("b", 4)
    assert manager.block_ids.keys() == {"a"}
    assert manager.num_free_blocks == 6
    if manager.windows:
        assert not manager.allocate_slots("a", 9)
        assert len(manager.block_ids["a"]) == 2
    manager.free("a")
    assert manager.allocate_slots("b", 4)


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_chunk_stops_early_only_where_a_state_can_be_kept(num_kept):
    layout = CacheLayout(num_states=2, num_kept_states=num_kept)
    manager = CacheManager(8, 4, layout)
    text = list(range(11))
    assert manager.chunk_end(text, 0, 11) == (8 if num_kept else 11)
    assert manager.chunk_end(text, 8, 11) == 11
    assert manager.chunk_end(text, 10, 11) == 11, "an answer is not cut"
    plain = CacheManager(8, 4, layout, enable_prefix_caching=False)
    assert plain.chunk_end(text, 0, 11) == 11


def test_the_plainest_layout_is_a_plain_block_manager():
    engine = LLMEngine(FakeRunner())
    assert engine.runner.layout == CacheLayout()
    assert not isinstance(engine.scheduler.block_manager, CacheManager)


def test_no_more_requests_run_than_there_are_slots():
    runner = FakeRunner(num_blocks=64, block_size=4)
    runner.layout = CacheLayout(num_states=2)
    engine = LLMEngine(runner, max_num_seqs=8)
    for i in range(5):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=3))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, len(engine.scheduler.running))
        assert_queues_are_right(engine.scheduler)
    assert most == 2
