"""Keep the books of recurrent states: which slot belongs to which request.

Slots 0 to `num_slots` - 1 are for running requests, one each. Behind them come those
that keep a state as it was at the edge of a block, for later requests with the same
beginning. Only slot numbers live here, never a tensor; the runner is told what to copy:
`loads` before a step, `saves` after it. A request that has computed nothing begins with
zeros, which is the runner's business.

Called by the cache manager.

In vLLM: vllm/v1/core/single_type_kv_cache_manager.py (MambaManager).
Source: chapter 8, "Hybrid attention".
"""

from collections import OrderedDict
from collections.abc import Sequence

from minivllm.engine.block_manager import BlockKey


class StatePool:
    """Hands out the slots and takes them back."""

    def __init__(self, num_slots: int, num_kept: int = 0) -> None:
        """Let all slots be free.

        Args:
            num_slots: Requests that may run.
            num_kept: States that are kept for others.
        """
        self.num_slots = num_slots
        self.num_kept = num_kept
        self.slots: dict[str, int] = {}
        self.free_slots = list(reversed(range(num_slots)))
        # The state after the block of a key; the one used longest ago comes first.
        self.kept: OrderedDict[BlockKey, int] = OrderedDict()
        self.free_kept = list(range(num_slots, num_slots + num_kept))
        self.promised: set[BlockKey] = set()  # computed only by this step
        self.forked: list[str] = []  # requests that get their state in this step
        self.loads: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return after how many blocks of a text there is a state, at most all."""
        for num_blocks in range(len(keys), 0, -1):
            key = keys[num_blocks - 1]
            if key in self.kept and key not in self.promised:
                return num_blocks
        return 0

    def allocate(self, request_id: str, key: BlockKey | None = None) -> bool:
        """Give a request a slot, unless it has one.

        Args:
            request_id: The request.
            key: Of the block behind which it begins; None at the start of a text.

        Returns:
            False if no slot is free; nothing has changed then.
        """
        if request_id in self.slots:
            return True
        if not self.free_slots:
            return False
        slot = self.slots[request_id] = self.free_slots.pop()
        if key is not None:
            self.kept.move_to_end(key)
            self.loads.append((self.kept[key], slot))
        return True

    def save(self, request_id: str, key: BlockKey) -> None:
        """Keep what a request's state will be after this step, if there is room."""
        if key in self.kept:
            self.kept.move_to_end(key)
            return
        if not self.free_kept:
            oldest = next((k for k in self.kept if k not in self.promised), None)
            if oldest is None:
                return
            # Who begins with this one in this very step has a copy before it goes.
            self.free_kept.append(self.kept.pop(oldest))
        slot = self.kept[key] = self.free_kept.pop()
        self.promised.add(key)
        self.saves.append((self.slots[request_id], slot))

    def fork(self, request_id: str, fork_id: str) -> None:
        """Give a new request a slot, with the state that another has after the step."""
        assert self.allocate(fork_id), f"no slot for {fork_id}"
        self.forked.append(fork_id)
        self.saves.append((self.slots[request_id], self.slots[fork_id]))

    def free(self, request_id: str) -> None:
        """Give back the slot of a request; harmless if it has none."""
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self.free_slots.append(slot)

    def commit(self) -> None:
        """Take note that the step was computed: what it promised to keep is there."""
        self.promised.clear()
        self.forked.clear()
        self.loads.clear()
        self.saves.clear()

    def rollback(self) -> None:
        """Take note that the step was not computed."""
        for key in self.promised:
            self.free_kept.append(self.kept.pop(key))
        for request_id in self.forked:
            self.free(request_id)
        self.commit()

    def forget(self) -> None:
        """Keep no state any longer, for example when the weights change."""
        self.free_kept += self.kept.values()
        self.kept.clear()
