"""Keep the books of the paged KV cache: which block belongs to which request.

The cache is cut into `num_blocks` blocks of `block_size` token slots. Only block ids
live here, never a tensor. A block is always in exactly one state:

    in use   ref_cnt >= 1   read by that many requests (a shared one counts for each)
    free     ref_cnt == 0   queued in `free_blocks`, the next to be handed out first

A full block may be *cached*, in use or free: its content is known under a key, so that
a later request with the same beginning takes it as it is. A cached free block is
forgotten when it is handed out again, the least recently used one first.

Called by the scheduler; the runners see the ids as rows of `block_table`.

In vLLM: vllm/v1/core/kv_cache_manager.py, vllm/v1/core/block_pool.py.
Source: chapter 3, "Paging"; appendix A14, "One prompt, many answers"; chapter 8,
    "Hybrid attention".
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from minivllm.errors import ConfigError


class BlockKey:
    """What a full block holds: its tokens, after all the tokens before them.

    Keys and values depend on the whole text up to their token, so a key does too. Its
    hash is chained, cheap and made once; equality compares the token ids, so that two
    texts whose hashes agree by chance or by malice are still two texts.
    """

    __slots__ = ("block_hash", "parent", "salt", "token_ids")

    def __init__(
        self,
        parent: "BlockKey | None",
        token_ids: tuple[int, ...],
        salt: str | None = None,
        hash_function: Callable[[Hashable], int] = hash,
    ) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.salt = salt
        parent_hash = parent.block_hash if parent else None
        self.block_hash = hash_function((parent_hash, token_ids, salt))

    def __hash__(self) -> int:
        return self.block_hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        ours, theirs = self, other
        while ours is not theirs:  # back to where the two chains are one object
            if ours is None or theirs is None:
                return False
            if ours.token_ids != theirs.token_ids or ours.salt != theirs.salt:
                return False
            ours, theirs = ours.parent, theirs.parent
        return True


class BlockManager:
    """Hands out the blocks of the KV cache and takes them back.

    Attributes:
        window: How many tokens a query sees, its own the last; None for all. With a
            window, blocks that no later token sees are given back by `release`.
    """

    window: int | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[Hashable], int] = hash,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}, but the KV cache needs an integer of at "
                    "least 1: give it more memory, or lower block_size"
                )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self.ref_cnt = [0] * num_blocks
        # An ordered set. In a plain dict, what was removed from the front leaves holes,
        # and whoever looks for the first walks over them.
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))
        self.block_ids: dict[str, list[int]] = {}  # request id: blocks in token order
        self.keys: dict[str, list[BlockKey]] = {}  # request id: keys of its full blocks
        self.cached_blocks: dict[BlockKey, int] = {}
        self.key_of: dict[int, BlockKey] = {}  # the same, the other way round
        self.promised: set[int] = set()  # cached, but computed only by this step
        self.half_full: set[int] = set()  # shared by a fork before they were full
        # Request id: a block and the one that this step copies it to, for the request.
        self.copies: dict[str, tuple[int, int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request reads, cached ones included."""
        return len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(
        self, token_ids: Sequence[int], salt: str | None = None
    ) -> list[BlockKey]:
        """Return the keys of the longest cached beginning of a text, full blocks only.

        At least one token is left out: the last one must be computed in any case,
        since its hidden state tells what comes next.
        """
        keys: list[BlockKey] = []
        if not self.enable_prefix_caching:
            return keys
        parent = None
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            key = self._make_key(parent, token_ids, start, salt)
            block_id = self.cached_blocks.get(key)
            if block_id is None:
                break
            parent = self.key_of[block_id]  # one object for all: equal at a glance
            keys.append(parent)
        return keys

    def _make_key(
        self,
        parent: BlockKey | None,
        token_ids: Sequence[int],
        start: int,
        salt: str | None,
    ) -> BlockKey:
        tokens = tuple(token_ids[start : start + self.block_size])
        return BlockKey(parent, tokens, salt, self.hash_function)

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return behind how many blocks of a text all is cached that is still read."""
        num_blocks = len(keys)
        while num_blocks:
            first = self.first_block(num_blocks * self.block_size)
            missing = (
                i for i in range(first, num_blocks) if keys[i] not in self.cached_blocks
            )
            hole = next(missing, None)
            if hole is None:
                break
            num_blocks = hole  # whoever begins behind it reads it, too
        return num_blocks

    def has_room(
        self, request_id: str, num_tokens: int, cached_prefix: Sequence[BlockKey] = ()
    ) -> bool:
        """Tell whether `allocate_slots` with the same arguments would succeed."""
        held = self.block_ids.get(request_id, [])
        num_new = self.num_blocks_for(num_tokens) - len(held) - len(cached_prefix)
        num_new += bool(held) and self._must_copy(held[-1])
        num_revived = sum(self.ref_cnt[b] == 0 for b in self._hits(cached_prefix))
        return max(0, num_new) + num_revived <= len(self.free_blocks)

    def _hits(self, cached_prefix: Sequence[BlockKey]) -> list[int]:
        """Return the cached blocks of a beginning that are still read."""
        first = self.first_block(len(cached_prefix) * self.block_size)
        return [self.cached_blocks[key] for key in cached_prefix[first:]]

    def allocate_slots(
        self, request_id: str, num_tokens: int, cached_prefix: Sequence[BlockKey] = ()
    ) -> bool:
        """Make room for the first `num_tokens` tokens of a request.

        Args:
            request_id: A new request, or one that holds blocks already.
            num_tokens: In all, those that have room already included.
            cached_prefix: From find_cached_prefix; for a request without blocks.

        Returns:
            False if free blocks run short. Nothing has changed then, so the caller can
            preempt another request and try again.
        """
        held = self.block_ids.get(request_id, [])
        assert not (held and cached_prefix), f"{request_id} holds {len(held)} blocks"
        must_copy = bool(held) and self._must_copy(held[-1])
        num_new = self.num_blocks_for(num_tokens) - len(held) - len(cached_prefix)
        num_new += must_copy
        if held and num_new <= 0:
            return True  # the last block has room: what happens most often
        if not self.has_room(request_id, num_tokens, cached_prefix):
            return False
        hits = self._hits(cached_prefix)
        for block_id in hits:  # before new blocks are taken, which could evict a hit
            self.free_blocks.pop(block_id, None)
            self.ref_cnt[block_id] += 1
        new_blocks = [self._take_free_block() for _ in range(num_new)]
        if must_copy:  # the first of the new blocks takes the place of the shared one
            *held, shared = held
            self.ref_cnt[shared] -= 1
            self.copies[request_id] = shared, new_blocks[0]
        unread = [NO_BLOCK] * (len(cached_prefix) - len(hits))
        self.block_ids[request_id] = [*held, *unread, *hits, *new_blocks]
        self.keys.setdefault(request_id, []).extend(cached_prefix)
        return True

    def _take_free_block(self) -> int:
        block_id = next(iter(self.free_blocks))
        del self.free_blocks[block_id]
        self._forget(block_id)  # the old content is about to be overwritten
        self.ref_cnt[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        key = self.key_of.pop(block_id, None)
        if key is not None:
            del self.cached_blocks[key]
        self.promised.discard(block_id)

    def cache_full_blocks(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str | None = None,
    ) -> None:
        """Offer the blocks that this step fills, so that even its other requests share.

        Every layer writes all keys and values of a step before any query reads them,
        so a block may be read in the very step that fills it. Until `commit`, it is a
        promise.

        Args:
            request_id: The request.
            token_ids: Its tokens.
            num_tokens: How many of them have keys and values after the step.
            salt: Only requests with the same salt share blocks.
        """
        if not self.enable_prefix_caching:
            return
        keys = self.keys[request_id]
        for index in range(len(keys), num_tokens // self.block_size):
            parent = keys[-1] if keys else None
            key = self._make_key(parent, token_ids, index * self.block_size, salt)
            keys.append(self._offer(request_id, index, key))

    def commit(self) -> None:
        """Take note that the step was computed: what it promised to cache is there."""
        self.promised.clear()
        self.copies.clear()

    def rollback(self) -> None:
        """Take note that the step was not computed: forget what it promised."""
        for block_id in list(self.promised):
            self._forget(block_id)
        self.copies.clear()

    def cache_blocks_as(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Offer the blocks of a request under keys that another manager has made."""
        own = self.keys[request_id]
        for index in range(len(own), len(keys)):
            own.append(self._offer(request_id, index, keys[index]))

    def _offer(self, request_id: str, index: int, key: BlockKey) -> BlockKey:
        """Cache a block of a request, unless another holds the same; return its key."""
        block_id = self.block_ids[request_id][index]
        if self.cached_blocks.setdefault(key, block_id) == block_id:
            self.key_of[block_id] = key
            self.promised.add(block_id)
        return self.key_of[self.cached_blocks[key]]

    def free(self, request_id: str) -> None:
        """Give back every block of a request; harmless if it holds none."""
        # Last block first: the beginning of a text, which others may share, is
        # handed out last.
        for block_id in reversed(self.block_ids.pop(request_id, [])):
            if block_id != NO_BLOCK:
                self._drop(block_id)
        self.keys.pop(request_id, None)
        self.copies.pop(request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, for example when the weights change.

        Returns:
            False while a request holds blocks, and nothing has changed then: what it
            computes next would rest on the old ones, and be cached again.
        """
        if self.block_ids:
            return False
        for block_id in list(self.key_of):
            self._forget(block_id)
        return True

    def fork(self, request_id: str, fork_id: str, num_tokens: int) -> None:
        """Let a new request begin with all the tokens of another, sharing its blocks.

        Nothing is copied yet. If the last block has room, both will write into it:
        whoever comes first gets a copy (copy on write), see `copies`.

        Args:
            request_id: Who has computed the tokens.
            fork_id: Who has the same tokens, and no blocks.
            num_tokens: How many tokens that is.
        """
        block_ids = self.block_ids[request_id]
        assert len(block_ids) == self.num_blocks_for(num_tokens)
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                self.ref_cnt[block_id] += 1
        self.block_ids[fork_id] = list(block_ids)
        self.keys[fork_id] = list(self.keys[request_id])
        if num_tokens % self.block_size:
            self.half_full.add(block_ids[-1])

    def _must_copy(self, block_id: int) -> bool:
        """Tell whether others read the block that a request is about to write into."""
        if block_id not in self.half_full:
            return False
        if self.ref_cnt[block_id] > 1:
            return True
        self.half_full.remove(block_id)  # the others have their copies, or are gone
        return False

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that a text's tokens behind so many read."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // self.block_size

    def release(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that no token behind the first `num_tokens` reads."""
        block_ids = self.block_ids[request_id]
        index = self.first_block(num_tokens) - 1
        while index >= 0 and block_ids[index] != NO_BLOCK:
            self._drop(block_ids[index])
            block_ids[index] = NO_BLOCK
            index -= 1

    def _drop(self, block_id: int) -> None:
        """Take note that one request fewer reads a block."""
        self.ref_cnt[block_id] -= 1
        if self.ref_cnt[block_id] == 0:
            self.free_blocks[block_id] = None
            self.half_full.discard(block_id)
            if block_id in self.promised:
                self._forget(block_id)

    def prepare_fork(self, request_id: str, fork_id: str) -> None:
        """Get ready in a step for a `fork` after it: blocks need nothing."""

    def chunk_end(
        self, token_ids: Sequence[int], start: int, end: int, salt: str | None = None
    ) -> int:
        """Return where a chunk that could be tokens `start` to `end` is to stop.

        Args:
            token_ids: Of the request.
            start: Its first token that is not computed yet.
            end: Behind the last that this step has room for.
            salt: Only requests with the same salt share blocks.
        """
        return end

    def extra_plan(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """Return what a step needs to know beside block ids, as `SchedulerOutput`."""
        return {}


NO_BLOCK = -1  # in the place of a block that was given back
