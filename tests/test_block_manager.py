"""The books of the block pool, by hand and under random use."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.engine.block_manager import BlockKey, BlockManager
from minivllm.errors import ConfigError
from tests.engine_tools import assert_books_balance


def hold(manager, request_id, token_ids, salt=None, *, commit=True):
    """Allocate and cache a whole text as a step would; return the tokens it shares."""
    prefix = manager.find_cached_prefix(token_ids, salt)
    assert manager.allocate_slots(request_id, len(token_ids), prefix)
    manager.cache_full_blocks(request_id, token_ids, len(token_ids), salt)
    if commit:
        manager.commit()
    assert_books_balance(manager)
    return len(prefix) * manager.block_size


# --- Taking and giving back ---


def test_a_new_pool_is_all_free_and_hands_out_blocks_in_order():
    manager = BlockManager(num_blocks=3, block_size=4)
    assert manager.num_free_blocks == 3
    assert manager.allocate_slots("a", 9)
    assert manager.block_ids["a"] == [0, 1, 2]
    assert manager.num_free_blocks == 0
    assert_books_balance(manager)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)]
)
def test_a_text_takes_its_length_over_the_block_size_rounded_up(num_tokens, num_blocks):
    manager = BlockManager(num_blocks=3, block_size=4)
    assert manager.num_blocks_for(num_tokens) == num_blocks
    assert manager.allocate_slots("a", num_tokens)
    assert len(manager.block_ids["a"]) == num_blocks


def test_growing_from_3_to_4_takes_no_block_and_from_4_to_5_takes_one():
    manager = BlockManager(num_blocks=8, block_size=4)
    free = []
    for num_tokens in (3, 4, 5, 8, 9):
        assert manager.allocate_slots("a", num_tokens)
        free.append(manager.num_free_blocks)
    assert free == [7, 7, 6, 6, 5]


def test_growing_keeps_the_blocks_and_their_order():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate_slots("a", 4)
    manager.allocate_slots("b", 4)
    manager.allocate_slots("a", 5)
    assert manager.block_ids == {"a": [0, 2], "b": [1]}


def test_asking_for_less_than_is_held_changes_nothing():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate_slots("a", 12)
    assert manager.allocate_slots("a", 4)
    assert manager.block_ids["a"] == [0, 1, 2]
    assert_books_balance(manager)


def snapshot(manager):
    return (
        list(manager.ref_cnt),
        list(manager.free_blocks),
        {r: list(ids) for r, ids in manager.block_ids.items()},
        {r: list(keys) for r, keys in manager.keys.items()},
        dict(manager.cached_blocks),
        set(manager.promised),
    )


def test_a_refused_allocation_changes_nothing():
    manager = BlockManager(num_blocks=3, block_size=4)
    manager.allocate_slots("a", 8)
    before = snapshot(manager)
    assert not manager.allocate_slots("a", 13)
    assert not manager.allocate_slots("b", 5)
    assert snapshot(manager) == before
    assert manager.allocate_slots("b", 4), "what is left may still be taken"


def test_a_refused_allocation_with_hits_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=2)
    hold(manager, "a", [1, 2, 3, 4])
    manager.free("a")  # both blocks are free and cached
    manager.allocate_slots("b", 4)  # takes the two that were never used
    before = snapshot(manager)
    prefix = manager.find_cached_prefix([1, 2, 3, 4, 5])
    assert len(prefix) == 2
    # One new block is needed, and two free ones are left: but those are the hits.
    assert not manager.allocate_slots("c", 5, prefix)
    assert snapshot(manager) == before


def test_hits_that_somebody_reads_do_not_count_as_taken_twice():
    manager = BlockManager(num_blocks=3, block_size=2)
    hold(manager, "a", [1, 2, 3, 4])
    prefix = manager.find_cached_prefix([1, 2, 3, 4, 5])
    assert manager.allocate_slots("b", 5, prefix)  # two shared, the last one new
    assert manager.block_ids["b"] == [0, 1, 2]
    assert manager.ref_cnt == [2, 2, 1]


def test_freeing_gives_all_back_and_twice_is_harmless():
    manager = BlockManager(num_blocks=3, block_size=4)
    manager.allocate_slots("a", 12)
    manager.free("a")
    manager.free("a")
    manager.free("nobody")
    assert manager.num_free_blocks == 3
    assert manager.block_ids == {} and manager.keys == {}
    assert_books_balance(manager)


def test_a_shared_block_is_free_when_the_last_reader_goes():
    manager = BlockManager(num_blocks=5, block_size=2)
    hold(manager, "a", [1, 2, 3])
    assert hold(manager, "b", [1, 2, 4]) == 2
    assert manager.ref_cnt[0] == 2
    manager.free("a")
    assert manager.ref_cnt[0] == 1 and 0 not in manager.free_blocks
    manager.free("b")
    assert manager.num_free_blocks == 5


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_a_pool_without_blocks_or_slots_is_refused_with_the_value(value):
    with pytest.raises(ConfigError, match=f"num_blocks is {value}"):
        BlockManager(value, 4)
    with pytest.raises(ConfigError, match=f"block_size is {value}"):
        BlockManager(4, value)


# --- Sharing ---


def test_only_full_blocks_are_shared():
    manager = BlockManager(num_blocks=9, block_size=4)
    hold(manager, "a", [1, 2, 3, 4, 5, 6, 9])
    assert hold(manager, "b", [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert manager.block_ids["b"][0] == manager.block_ids["a"][0]
    assert manager.block_ids["b"][1] != manager.block_ids["a"][1]


@pytest.mark.parametrize(("length", "num_hits"), [(3, 0), (4, 0), (5, 4), (8, 4)])
def test_at_least_one_token_is_computed(length, num_hits):
    manager = BlockManager(num_blocks=9, block_size=4)
    hold(manager, "a", range(8))
    assert hold(manager, "b", range(length)) == num_hits


def test_the_second_block_is_no_hit_after_another_first_one():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3, 4, 5])
    assert hold(manager, "b", [9, 9, 3, 4, 5]) == 0


def test_the_same_block_at_another_depth_is_no_hit():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [7, 7, 7, 7])
    assert manager.find_cached_prefix([7, 7, 7, 7, 7, 7, 1]) == manager.keys["a"]


def test_a_hole_in_the_middle_ends_the_prefix():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3, 4, 5, 6, 7])
    manager._forget(manager.block_ids["a"][1])
    assert len(manager.find_cached_prefix([1, 2, 3, 4, 5, 6, 7])) == 1


def test_salts_keep_requests_apart():
    manager = BlockManager(num_blocks=20, block_size=2)
    hold(manager, "a", [1, 2, 3], salt="red")
    assert hold(manager, "b", [1, 2, 3], salt="blue") == 0
    assert hold(manager, "c", [1, 2, 3]) == 0
    assert hold(manager, "d", [1, 2, 3], salt="red") == 2
    assert hold(manager, "e", [1, 2, 3], salt="") == 0


def test_nothing_is_shared_if_caching_is_off():
    manager = BlockManager(num_blocks=9, block_size=2, enable_prefix_caching=False)
    hold(manager, "a", [1, 2, 3])
    assert hold(manager, "b", [1, 2, 3]) == 0
    assert not manager.cached_blocks


def test_the_first_block_with_a_content_keeps_it():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2])
    hold(manager, "b", [1, 2])  # its only block had to be computed again
    assert manager.block_ids == {"a": [0], "b": [1]}
    assert list(manager.cached_blocks.values()) == [0]
    manager.free("b")
    assert hold(manager, "c", [1, 2, 3]) == 2
    assert manager.block_ids["c"][0] == 0


def test_a_block_is_offered_once_it_is_full_and_not_before():
    manager = BlockManager(num_blocks=9, block_size=4)
    manager.allocate_slots("a", 4)
    manager.cache_full_blocks("a", [1, 2, 3, 4], 3)
    assert not manager.cached_blocks
    manager.cache_full_blocks("a", [1, 2, 3, 4], 4)
    assert list(manager.cached_blocks.values()) == [0]


def test_a_chain_goes_on_through_a_parent_that_was_evicted_and_came_back():
    manager = BlockManager(num_blocks=4, block_size=2)
    hold(manager, "a", [1, 2])  # block 0 has the key of (1, 2)
    hold(manager, "b", [1, 2])  # block 1 has the same content, and no key
    manager.allocate_slots("b", 4)
    manager.cache_full_blocks("b", [1, 2, 3, 4], 4)  # block 2: (3, 4) after (1, 2)
    manager.commit()
    manager.free("a")
    manager.allocate_slots("c", 4)  # blocks 3 and 0: (1, 2) is forgotten
    assert 0 not in manager.key_of and 2 in manager.key_of
    assert manager.find_cached_prefix([1, 2, 3, 4, 5]) == []
    manager.free("c")
    hold(manager, "d", [1, 2])
    prefix = manager.find_cached_prefix([1, 2, 3, 4, 5])
    assert [manager.cached_blocks[key] for key in prefix][1:] == [2]
    assert_books_balance(manager)


def constant(value):
    return 7


TEXTS = {
    "other tokens": ([1, 2, 5], [1, 3, 5]),
    "other parent": ([1, 2, 3, 4, 5], [6, 6, 3, 4, 5]),
    "other grandparent": ([1, 2, 3, 4, 5, 6, 7], [9, 9, 3, 4, 5, 6, 7]),
    "one level deeper": ([3, 4, 5], [1, 2, 3, 4, 5]),
    "one level higher": ([1, 2, 3, 4, 5], [3, 4, 5]),
    "the same block repeated": ([7, 7, 7], [8, 8, 7, 7, 7]),
    "order of blocks": ([1, 2, 3, 4, 5], [3, 4, 1, 2, 5]),
    "order within a block": ([1, 2, 5], [2, 1, 5]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_equal_hashes_share_nothing_wrongly(name):
    first, second = TEXTS[name]
    manager = BlockManager(num_blocks=20, block_size=2, hash_function=constant)
    hold(manager, "a", first)
    assert hold(manager, "b", second) == 0
    assert hold(manager, "c", first) == (len(first) - 1) // 2 * 2
    assert hold(manager, "d", second) == (len(second) - 1) // 2 * 2
    assert manager.block_ids["c"][:-1] == manager.block_ids["a"][:-1]
    assert manager.block_ids["d"][:-1] == manager.block_ids["b"][:-1]


def test_equal_hashes_share_nothing_across_salts():
    manager = BlockManager(num_blocks=20, block_size=2, hash_function=constant)
    hold(manager, "a", [1, 2, 3], salt="red")
    assert hold(manager, "b", [1, 2, 3], salt="blue") == 0
    assert hold(manager, "c", [1, 2, 3], salt="red") == 2


def test_keys_are_equal_if_their_whole_chains_are():
    def chain(*blocks, salt=None, hash_function=constant):
        key = None
        for block in blocks:
            key = BlockKey(key, block, salt, hash_function)
        return key

    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))
    assert chain((1, 2), (3, 4)) != chain((1, 5), (3, 4))
    assert chain((3, 4)) != chain((1, 2), (3, 4))
    assert chain((1, 2), (3, 4)) != chain((3, 4))
    assert chain((1, 2)) != chain((1, 2), salt="x")
    assert chain((1, 2)) != (1, 2)
    assert chain((1, 2), hash_function=hash).block_hash != chain((1, 3)).block_hash


def test_the_hash_depends_on_parent_tokens_and_salt():
    parent = BlockKey(None, (1, 2))
    hashes = {
        BlockKey(None, (3, 4)).block_hash,
        BlockKey(parent, (3, 4)).block_hash,
        BlockKey(parent, (4, 3)).block_hash,
        BlockKey(parent, (3, 4), "salt").block_hash,
    }
    assert len(hashes) == 4
    assert BlockKey(parent, (3, 4)).block_hash in hashes


# --- Eviction ---


def test_the_blocks_that_nobody_used_for_the_longest_time_go_first():
    manager = BlockManager(num_blocks=4, block_size=2)
    hold(manager, "a", [1, 2])
    hold(manager, "b", [3, 4])
    manager.free("b")
    manager.free("a")
    assert list(manager.free_blocks) == [2, 3, 1, 0]
    manager.allocate_slots("c", 6)  # two blocks that hold nothing, then that of b
    assert manager.find_cached_prefix([3, 4, 5]) == []
    assert len(manager.find_cached_prefix([1, 2, 5])) == 1


def test_the_end_of_a_text_is_evicted_before_its_beginning():
    manager = BlockManager(num_blocks=3, block_size=2)
    hold(manager, "a", [1, 2, 3, 4, 5, 6])
    manager.free("a")
    assert list(manager.free_blocks) == [2, 1, 0]
    manager.allocate_slots("b", 2)
    assert len(manager.find_cached_prefix([1, 2, 3, 4, 5, 6, 7])) == 2


def test_a_hit_is_taken_out_of_the_queue_and_later_goes_to_its_end():
    manager = BlockManager(num_blocks=3, block_size=2)
    hold(manager, "a", [1, 2])
    manager.free("a")
    hold(manager, "b", [3, 4])
    manager.free("b")
    assert list(manager.free_blocks) == [2, 0, 1]
    hold(manager, "c", [1, 2, 9])  # revives block 0 and takes block 2
    assert list(manager.free_blocks) == [1]
    manager.free("c")
    assert list(manager.free_blocks) == [1, 2, 0]


def test_revived_hits_are_not_evicted_by_the_same_allocation():
    manager = BlockManager(num_blocks=3, block_size=2)
    hold(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    manager.allocate_slots("filler", 2)  # the block that was never used
    manager.free("filler")
    # The hits are now the next two to be handed out, and one more block is needed.
    assert list(manager.free_blocks) == [1, 0, 2]
    assert hold(manager, "b", [1, 2, 3, 4, 5]) == 4
    assert manager.block_ids["b"] == [0, 1, 2]


def test_a_block_that_is_handed_out_again_is_forgotten():
    manager = BlockManager(num_blocks=1, block_size=2)
    hold(manager, "a", [1, 2])
    manager.free("a")
    assert manager.cached_blocks
    manager.allocate_slots("b", 1)
    assert not manager.cached_blocks and not manager.key_of


# --- Promises ---


def test_what_is_promised_is_shared_within_the_step():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3], commit=False)
    assert manager.promised == {0}
    assert hold(manager, "b", [1, 2, 4], commit=False) == 2


def test_a_commit_keeps_what_was_promised():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3], commit=False)
    manager.commit()
    assert not manager.promised
    manager.free("a")
    assert len(manager.find_cached_prefix([1, 2, 3])) == 1


def test_a_rollback_forgets_what_was_promised_and_only_that():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3])
    hold(manager, "b", [5, 6, 7, 8], commit=False)
    manager.rollback()
    assert not manager.promised
    assert_books_balance(manager)
    assert manager.find_cached_prefix([5, 6, 7]) == []
    assert len(manager.find_cached_prefix([1, 2, 3])) == 1


def test_a_rollback_keeps_what_the_step_only_shared():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3])
    hold(manager, "b", [1, 2, 4, 5], commit=False)
    assert len(manager.promised) == 1
    manager.rollback()
    assert len(manager.find_cached_prefix([1, 2, 9])) == 1


def test_a_promise_of_a_request_that_leaves_is_forgotten():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3], commit=False)
    manager.free("a")
    assert not manager.promised and not manager.cached_blocks
    assert_books_balance(manager)


def test_a_promise_that_another_request_reads_outlives_its_maker():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3], commit=False)
    hold(manager, "b", [1, 2, 4], commit=False)
    manager.free("a")
    assert manager.promised == {0}
    manager.rollback()
    assert not manager.cached_blocks
    assert_books_balance(manager)


def test_a_reset_forgets_all_content():
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3])
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.find_cached_prefix([1, 2, 3]) == []
    assert_books_balance(manager)


def test_a_reset_is_refused_while_a_request_holds_blocks():
    # What the request computes next rests on old blocks, and would be cached again.
    manager = BlockManager(num_blocks=9, block_size=2)
    hold(manager, "a", [1, 2, 3])
    before = snapshot(manager)
    assert not manager.reset_prefix_cache()
    assert snapshot(manager) == before


def test_a_long_text_is_looked_up_and_let_go():
    manager = BlockManager(num_blocks=20_001, block_size=1)
    text = list(range(20_000))
    hold(manager, "a", text)
    assert hold(manager, "b", text) == 19_999
    manager.free("a")
    manager.free("b")
    manager.reset_prefix_cache()
    assert not manager.cached_blocks


# --- Random use ---


class BlockMachine(RuleBasedStateMachine):
    """Random calls, beside a model that remembers every block's text."""

    num_calls = 0

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 3),
        is_constant=st.booleans(),
    )
    def start(self, num_blocks, block_size, is_constant):
        self.manager = BlockManager(
            num_blocks,
            block_size,
            hash_function=constant if is_constant else hash,
        )
        self.texts = {}  # request id: (salt, tokens, how many have slots)
        self.content = {}  # block id: (salt, the text up to its end), when full
        self.unsure = set()  # blocks whose content is a promise
        self.count = 0

    def check_hits(self, salt, tokens, prefix):
        size = self.manager.block_size
        assert len(prefix) * size < len(tokens)
        for index, key in enumerate(prefix):
            block_id = self.manager.cached_blocks[key]
            assert self.content[block_id] == (salt, tokens[: (index + 1) * size])

    def fill(self, request_id):
        salt, tokens, num_tokens = self.texts[request_id]
        size = self.manager.block_size
        self.manager.cache_full_blocks(request_id, tokens, num_tokens, salt)
        for index in range(num_tokens // size):
            block_id = self.manager.block_ids[request_id][index]
            content = (salt, tokens[: (index + 1) * size])
            if self.content.get(block_id) != content:
                assert self.manager.ref_cnt[block_id] == 1, "a shared block is written"
                self.unsure.add(block_id)
            self.content[block_id] = content

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        part=st.integers(1, 10),
        salt=st.sampled_from([None, "x"]),
    )
    def admit(self, tokens, part, salt):
        tokens = tuple(tokens)
        prefix = self.manager.find_cached_prefix(tokens, salt)
        self.check_hits(salt, tokens, prefix)
        num_hits = len(prefix) * self.manager.block_size
        num_tokens = min(len(tokens), num_hits + part)
        request_id = str(self.count)
        before = snapshot(self.manager)
        if not self.manager.allocate_slots(request_id, num_tokens, prefix):
            assert snapshot(self.manager) == before
            return
        self.count += 1
        self.texts[request_id] = (salt, tokens, num_tokens)
        new = self.manager.block_ids[request_id][len(prefix) :]
        for block_id in new:
            self.content.pop(block_id, None)
        self.fill(request_id)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data, tokens):
        request_id = data.draw(st.sampled_from(sorted(self.texts)))
        salt, text, _ = self.texts[request_id]
        text = (*text, *tokens)
        held = len(self.manager.block_ids[request_id])
        before = snapshot(self.manager)
        if not self.manager.allocate_slots(request_id, len(text)):
            assert snapshot(self.manager) == before
            assert self.manager.num_free_blocks < (
                self.manager.num_blocks_for(len(text)) - held
            )
            return
        for block_id in self.manager.block_ids[request_id][held:]:
            self.content.pop(block_id, None)
        self.texts[request_id] = (salt, text, len(text))
        self.fill(request_id)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[request_id]
        self.manager.free(request_id)

    @rule()
    def commit(self):
        self.manager.commit()
        self.unsure.clear()

    @rule()
    def rollback(self):
        self.manager.rollback()
        assert not self.unsure & self.manager.key_of.keys(), "a promise was kept"
        for request_id in list(self.texts):  # as the scheduler does
            self.manager.free(request_id)
        self.texts.clear()
        self.unsure.clear()

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.texts)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        BlockMachine.num_calls += 1
        assert_books_balance(self.manager)
        assert self.manager.block_ids.keys() == self.texts.keys()
        for block_id, key in self.manager.key_of.items():
            tokens = ()
            salt = key.salt
            while key is not None:
                tokens, key = key.token_ids + tokens, key.parent
            assert self.content[block_id] == (salt, tokens)

    def teardown(self):
        for request_id in self.texts if hasattr(self, "texts") else ():
            self.manager.free(request_id)
        if hasattr(self, "manager"):
            assert self.manager.num_free_blocks == self.manager.num_blocks


def test_the_books_balance_after_every_call_of_a_thousand():
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            derandomize=True,
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert BlockMachine.num_calls > 1000
