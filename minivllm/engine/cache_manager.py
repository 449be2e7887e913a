"""Blocks of all tokens, blocks of tokens in windows, and states, kept as one.

A request gets all three or nothing. It may begin behind a cached prefix only where all
three know the text: the blocks of all tokens up to there, the blocks that the windows
still read, and the state.

Called by the scheduler, as a `BlockManager`.

In vLLM: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator).
Source: chapter 8, "Hybrid attention".
"""

from collections.abc import Sequence
from typing import Any

from minivllm.engine.block_manager import BlockKey, BlockManager
from minivllm.engine.state_pool import StatePool
from minivllm.runners.base import CacheLayout


class CacheManager(BlockManager):
    """A block manager with the books of a hybrid model beside its own."""

    def __init__(
        self, num_blocks: int, block_size: int, layout: CacheLayout, **options: Any
    ) -> None:
        """Open the books.

        Args:
            num_blocks: As for `BlockManager`, as are the next and the options.
            block_size: Of all blocks.
            layout: What there is beside the blocks of all tokens.
            options: Of both managers of blocks.
        """
        super().__init__(num_blocks, block_size, **options)
        self.windows: BlockManager | None = None
        if layout.num_window_blocks:
            self.windows = BlockManager(layout.num_window_blocks, block_size, **options)
            self.windows.window = layout.window
        self.states: StatePool | None = None
        if layout.num_states:
            self.states = StatePool(layout.num_states, layout.num_kept_states)

    def find_cached_prefix(
        self, token_ids: Sequence[int], salt: str | None = None
    ) -> list[BlockKey]:
        """Return the keys of the longest beginning that all three books know."""
        keys = super().find_cached_prefix(token_ids, salt)
        while keys:
            num_blocks = len(keys)
            if self.windows:
                del keys[self.windows.longest_prefix(keys) :]
            if self.states:
                del keys[self.states.longest_prefix(keys) :]
            if len(keys) == num_blocks:
                break
        return keys

    def allocate_slots(
        self, request_id: str, num_tokens: int, cached_prefix: Sequence[BlockKey] = ()
    ) -> bool:
        """Make room for the first `num_tokens` tokens of a request, in all books."""
        states, windows = self.states, self.windows
        if states and request_id not in states.slots and not states.free_slots:
            return False
        if windows and not windows.has_room(request_id, num_tokens, cached_prefix):
            return False
        if not super().allocate_slots(request_id, num_tokens, cached_prefix):
            return False
        if windows:
            windows.allocate_slots(request_id, num_tokens, cached_prefix)
        if states:
            states.allocate(request_id, cached_prefix[-1] if cached_prefix else None)
        return True

    def cache_full_blocks(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str | None = None,
    ) -> None:
        """Offer what this step fills, and the state if a chunk ends with a block."""
        super().cache_full_blocks(request_id, token_ids, num_tokens, salt)
        if not self.enable_prefix_caching:
            return
        keys = self.keys[request_id]
        if self.windows:
            self.windows.cache_blocks_as(request_id, keys)
        is_edge = num_tokens % self.block_size == 0 and num_tokens < len(token_ids)
        if self.states and is_edge:
            self.states.save(request_id, keys[-1])

    def chunk_end(
        self, token_ids: Sequence[int], start: int, end: int, salt: str | None = None
    ) -> int:
        """Return where a chunk is to stop, so that a state can be kept there.

        At the last edge of a block in the text: the same prompt may come again. And
        where the blocks end that others have filled: if two share a beginning, so may
        a third.
        """
        is_kept = self.states and self.states.num_kept and self.enable_prefix_caching
        if not is_kept or start + 1 >= len(token_ids):
            return end
        num_shared = len(super().find_cached_prefix(token_ids, salt))
        num_full = (len(token_ids) - 1) // self.block_size
        stops = [num * self.block_size for num in (num_shared, num_full)]
        return min((stop for stop in stops if start < stop < end), default=end)

    def commit(self) -> None:
        """Take note that the step was computed."""
        super().commit()
        if self.windows:
            self.windows.commit()
        if self.states:
            self.states.commit()

    def rollback(self) -> None:
        """Take note that the step was not computed."""
        super().rollback()
        if self.windows:
            self.windows.rollback()
        if self.states:
            self.states.rollback()

    def release(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that have left the window."""
        if self.windows:
            self.windows.release(request_id, num_tokens)

    def free(self, request_id: str) -> None:
        """Give back all that a request holds; harmless if it holds nothing."""
        super().free(request_id)
        if self.windows:
            self.windows.free(request_id)
        if self.states:
            self.states.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is kept; False while a request holds blocks."""
        if not super().reset_prefix_cache():
            return False
        if self.windows:
            self.windows.reset_prefix_cache()
        if self.states:
            self.states.forget()
        return True

    def prepare_fork(self, request_id: str, fork_id: str) -> None:
        """Get ready in a step for a `fork` after it: the state is copied then."""
        if self.states:
            self.states.fork(request_id, fork_id)

    def fork(self, request_id: str, fork_id: str, num_tokens: int) -> None:
        """Let a new request begin with all the tokens of another."""
        super().fork(request_id, fork_id, num_tokens)
        if self.windows:
            self.windows.fork(request_id, fork_id, num_tokens)

    def extra_plan(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """Return what a step needs to know beside block ids, as `SchedulerOutput`."""
        plan: dict[str, Any] = {}
        if self.windows:
            block_ids = self.windows.block_ids
            plan["window_block_ids"] = {r: block_ids[r] for r in request_ids}
            plan["window_block_copies"] = list(self.windows.copies.values())
        if self.states:
            plan["state_slots"] = {r: self.states.slots[r] for r in request_ids}
            plan["state_loads"] = list(self.states.loads)
            plan["state_saves"] = list(self.states.saves)
        return plan
