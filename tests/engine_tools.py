"""What the tests of the engine share: books, requests, and a runner that checks."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minivllm.engine.block_manager import NO_BLOCK, BlockManager
from minivllm.engine.cache_manager import CacheManager
from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.state_pool import StatePool
from minivllm.outputs import RequestOutput
from minivllm.request import ModelOutput, Request, RequestStatus, SchedulerOutput
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams


def assert_books_balance(manager: BlockManager) -> None:
    """Check what must hold between any two calls of the block manager."""
    tables = {
        request_id: [block for block in ids if block != NO_BLOCK]
        for request_id, ids in manager.block_ids.items()
    }
    held = Counter(block for ids in tables.values() for block in ids)
    for ids in tables.values():
        assert len(ids) == len(set(ids)), f"a request holds a block twice: {ids}"
    for block_id, ref_cnt in enumerate(manager.ref_cnt):
        assert ref_cnt == held[block_id]
        assert (ref_cnt == 0) == (block_id in manager.free_blocks)
    assert manager.num_free_blocks + len(held) == manager.num_blocks
    assert {b: k for k, b in manager.cached_blocks.items()} == manager.key_of
    assert len(manager.cached_blocks) == len(manager.key_of)
    assert manager.promised <= manager.key_of.keys()
    for block_id in manager.promised:
        assert manager.ref_cnt[block_id] >= 1, "nobody computes what was promised"
    assert manager.keys.keys() == manager.block_ids.keys()
    last_blocks = {ids[-1] for ids in manager.block_ids.values() if ids}
    assert manager.half_full <= last_blocks, "a forked block is not where it ends"
    assert not manager.half_full & manager.key_of.keys(), "half a block is cached"
    for request_id, (_, copy) in manager.copies.items():
        assert copy in manager.block_ids[request_id], "a copy that nobody reads"
    for request_id, keys in manager.keys.items():
        assert len(keys) <= len(manager.block_ids[request_id])
        parent = None
        for key in keys:
            assert len(key.token_ids) == manager.block_size
            assert key.parent == parent, "a key belongs to another text"
            parent = key
    if manager.window is None:
        assert tables == manager.block_ids, "a block is gone that is still read"
    if isinstance(manager, CacheManager):
        assert_hybrid_books_balance(manager)


def assert_hybrid_books_balance(manager: CacheManager) -> None:
    """Check that the three books of a hybrid model agree."""
    if windows := manager.windows:
        assert_books_balance(windows)
        assert windows.block_ids.keys() == manager.block_ids.keys()
        for request_id, ids in windows.block_ids.items():
            assert len(ids) == len(manager.block_ids[request_id])
            is_hole = [block == NO_BLOCK for block in ids]
            assert is_hole == sorted(is_hole, reverse=True), "a hole in the window"
        num_held = windows.num_blocks - windows.num_free_blocks
        assert num_held <= manager.num_blocks - manager.num_free_blocks
    if states := manager.states:
        assert_states_balance(states)
        assert states.slots.keys() >= manager.block_ids.keys()
        extra = states.slots.keys() - manager.block_ids.keys()
        assert extra <= set(states.forked), "a slot without a request"


def assert_states_balance(states: StatePool) -> None:
    """Check what must hold between any two calls of the pool of states."""
    used = [*states.slots.values(), *states.free_slots]
    assert sorted(used) == list(range(states.num_slots))
    kept = [*states.kept.values(), *states.free_kept]
    assert sorted(kept) == [states.num_slots + i for i in range(states.num_kept)]
    assert states.promised <= states.kept.keys()
    targets = [target for _, target in states.saves]
    assert len(targets) == len(set(targets)), "two states in one slot"


def assert_queues_are_right(scheduler: Scheduler) -> None:
    """Check what must hold between two steps of the scheduler."""
    manager = scheduler.block_manager
    assert_books_balance(manager)
    assert not manager.promised, "a promise outlived its step"
    assert not manager.copies, "a copy outlived its step"
    if isinstance(manager, CacheManager) and (states := manager.states):
        assert not (states.promised or states.loads or states.saves or states.forked)
    queued = [*scheduler.waiting, *scheduler.running]
    assert len(queued) == len({request.request_id for request in queued})
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        num_blocks = len(manager.block_ids[request.request_id])
        assert num_blocks == manager.num_blocks_for(request.num_computed_tokens)
        assert request.num_computed_tokens < request.num_tokens
    for request in scheduler.waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert request.num_computed_tokens == 0
    if scheduler.policy.is_steady:
        keys = [scheduler.policy.order(request, 0.0) for request in scheduler.waiting]
        assert keys == sorted(keys), "somebody waits in the wrong place"
    running = {request.request_id for request in scheduler.running}
    assert manager.block_ids.keys() == running, "only running requests hold blocks"


def make_request(
    request_id: str,
    token_ids: Iterable[int],
    max_tokens: int = 100,
    *,
    arrival: int | None = None,
    **options: object,
) -> Request:
    """Make a request by hand; one named after a letter arrives in that order."""
    token_ids = list(token_ids)
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams().filled({}),
        max_tokens=max_tokens,
        arrival=ord(request_id[0]) if arrival is None else arrival,
        **options,
    )


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    enable_prefix_caching: bool = True,
    **options: object,
) -> Scheduler:
    """Make a scheduler with a small pool."""
    manager = BlockManager(
        num_blocks, block_size, enable_prefix_caching=enable_prefix_caching
    )
    return Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )


def take_step(scheduler: Scheduler, now: float = 0.0) -> SchedulerOutput:
    """Plan a step and answer it: who has caught up gets its length as a token."""
    plan = scheduler.schedule(now)
    assert_books_balance(scheduler.block_manager)
    sampled = {
        request.request_id: [request.num_tokens] for _, request in plan.sampled()
    }
    scheduler.update(plan, ModelOutput(sampled_token_ids=sampled))
    assert_queues_are_right(scheduler)
    return plan


def next_token(text: Sequence[int], vocab_size: int, index: int = 0) -> int:
    """Return the token that follows a text: any change of the text changes it.

    Continuations of the same prompt go different ways by their index.
    """
    # The hash of integers is always the same.
    return hash((*text, index) if index else tuple(text)) % vocab_size


def continuation(
    prompt: Sequence[int],
    max_tokens: int,
    stop_token_ids: Iterable[int] = (),
    vocab_size: int = 50,
    index: int = 0,
) -> list[int]:
    """Return the answer that `LedgerRunner` gives to a request that is alone."""
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens:
        text.append(next_token(text, vocab_size, index))
        if text[-1] in stop_token_ids:
            break
    return text[len(prompt) :]


class LedgerRunner(FakeRunner):
    """Keeps for every slot the text whose last token was written there.

    The keys and values of a token depend on the whole text before it. So a slot may be
    read as a token of a request only if it holds exactly that request's text up to
    there, under its salt. The answer is made of what the slots hold.
    """

    def __init__(self, *, vocab_size: int = 50, **options: object) -> None:
        super().__init__(vocab_size=vocab_size, **options)
        self.slots: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.error: BaseException | None = None  # raised once, by the next step ...
        self.error_after = 0.0  # ... after this share of its tokens
        self.plan: SchedulerOutput | None = None
        self.num_read = 0
        self.num_copies = 0

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        block_id = block_ids[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id * self.block_size + position % self.block_size

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Write all tokens of the step, then read all that each request attends to."""
        self.plan = step
        self.clock_s += self.cost(step)
        self._copy_blocks(step.block_copies)
        assert len(step.requests) == len({id(request) for request in step.requests})
        writes = []
        for request in step.requests:
            start = request.num_computed_tokens
            num_new = step.num_scheduled_tokens[request.request_id]
            assert 1 <= num_new <= request.num_tokens - start
            for position in range(start, start + num_new):
                slot = self._slot(step.block_ids[request.request_id], position)
                text = tuple(request.token_ids[: position + 1])
                writes.append((slot, (request.cache_salt, text)))
        slots = [slot for slot, _ in writes]
        assert len(slots) == len(set(slots)), "two tokens are written to one slot"
        if self.error is not None:
            error, self.error = self.error, None
            self.slots.update(writes[: round(self.error_after * len(writes))])
            raise error
        self.slots.update(writes)
        texts = [
            self._read(
                request,
                step.block_ids[request.request_id],
                request.num_computed_tokens
                + step.num_scheduled_tokens[request.request_id],
            )
            for request in step.requests
        ]
        sampled = {}
        for place, request in step.sampled():
            token_id = next_token(texts[place], self.vocab_size, request.index)
            sampled[request.request_id] = [token_id]
        return ModelOutput(sampled_token_ids=sampled)

    def _copy_blocks(self, block_copies: Sequence[tuple[int, int]]) -> None:
        old = dict(self.slots)
        copies = [copy for _, copy in block_copies]
        assert len(copies) == len(set(copies)), "two blocks are copied to one"
        for block_id, copy in block_copies:
            for offset in range(self.block_size):
                slot = block_id * self.block_size + offset
                target = copy * self.block_size + offset
                if slot in old:
                    self.slots[target] = old[slot]
        self.num_copies += len(copies)

    def _read(
        self, request: Request, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        for position in range(num_tokens):
            salt, text = self.slots[self._slot(block_ids, position)]
            assert salt == request.cache_salt, "read across salts"
            assert text == tuple(request.token_ids[: position + 1]), (
                f"{request.request_id} reads at {position} what belongs to {text}"
            )
        self.num_read += num_tokens
        return text


def run_all(engine: LLMEngine, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; return the last output of each request."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            assert_all_free(engine)
            return finished
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "a request ended twice"
                finished[output.request_id] = output
        assert_queues_are_right(engine.scheduler)
    raise AssertionError(f"unfinished after {max_steps} steps")


def assert_all_free(engine: LLMEngine) -> None:
    """Check that an idle engine holds nothing."""
    manager = engine.scheduler.block_manager
    assert_books_balance(manager)
    assert manager.num_free_blocks == manager.num_blocks
    assert manager.ref_cnt == [0] * manager.num_blocks
    assert not manager.block_ids and not manager.keys and not manager.promised
    assert not engine.scheduler.waiting and not engine.scheduler.running
    assert not engine.has_unfinished_requests()
