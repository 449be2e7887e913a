"""What a running engine does, step by step, for whoever watches.

    engine's thread                               event loop
    step --> record --> LiveView --> a box for each watcher --> looked into now and then

Invariant: a watcher sees counts, times and names of requests, nothing of what users
write; no watcher makes a step wait, however slow it is; while nobody watches, no record
is made. Called by the route `/trace`.

In vLLM: no counterpart.
Source: appendix A33, "A page to look inside".
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import LLMEngine
from minivllm.engine.trace import begin_record, describe_engine
from minivllm.errors import EngineClosing, EngineDead, EngineOverloaded
from minivllm.request import SchedulerOutput
from minivllm.server.errors import error_of
from minivllm.server.stream import event

MAX_REQUESTS = 64  # that are told of one by one, so that no event is long
MAX_WAITING = 32


def live_event(
    record: Mapping[str, Any], num_prompt_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return what a watcher may know of a step.

    Args:
        record: Of a trace, as the listeners of an engine get it.
        num_prompt_tokens: Of the requests that run.

    Returns:
        Times in seconds; `num_prefill_tokens` and `num_decode_tokens` of this step;
        `running`, the first `MAX_REQUESTS`; the blocks of the pool, of which `num_kept`
        are free with a content that may be used again.
    """
    requests = describe_requests(record, num_prompt_tokens)
    num_tokens = sum(record["num_scheduled_tokens"].values())
    num_prefill = sum(
        prefill_tokens(record, name, num_prompt_tokens)
        for name in record["num_scheduled_tokens"]
    )
    used = set().union(*record["block_ids"].values())
    num_cached_and_used = len(used - set(record["uncached_block_ids"]))
    return {
        "step": record["step"],
        "start_s": round(record["start_s"], 6),
        "duration_s": round(record["end_s"] - record["start_s"], 6),
        "num_prefill_tokens": num_prefill,
        "num_decode_tokens": num_tokens - num_prefill,
        "num_preempted": len(record["preempted"]),
        "num_running": len(record["running"]),
        "num_waiting": len(record["waiting"]),
        "running": requests,
        "waiting": record["waiting"][:MAX_WAITING],
        "num_used": len(used),
        "num_free": record["num_free_blocks"],
        "num_kept": record["num_cached_blocks"] - num_cached_and_used,
    }


def other_pools(manager: BlockManager) -> list[dict[str, Any]]:
    """Tell of what a hybrid model has beside its blocks, if this is one."""
    pools = []
    if windows := getattr(manager, "windows", None):
        num_used = windows.num_blocks - windows.num_free_blocks
        pools.append(("blocks of windows", num_used, windows.num_blocks))
    if states := getattr(manager, "states", None):
        pools.append(("states", len(states.slots), states.num_slots))
        num_kept = states.num_kept - len(states.free_kept)
        pools.append(("kept states", num_kept, states.num_kept))
    names = ("name", "num_used", "num_total")
    return [dict(zip(names, pool, strict=True)) for pool in pools]


def prefill_tokens(
    record: Mapping[str, Any], name: str, num_prompt_tokens: Mapping[str, int]
) -> int:
    """Return how many tokens of a prompt a request computes in a step."""
    computed = record["num_computed_tokens"].get(name, 0)
    left = num_prompt_tokens.get(name, 0) - computed
    return min(max(0, left), record["num_scheduled_tokens"].get(name, 0))


def describe_requests(
    record: Mapping[str, Any], num_prompt_tokens: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Tell of each running request; `num_own_blocks` are those it shares with none."""
    names = record["running"][:MAX_REQUESTS]
    tables = {name: record["block_ids"].get(name, ()) for name in names}
    num_owners = Counter(chain.from_iterable(tables.values()))
    shared = {block for block, count in num_owners.items() if count > 1}
    described = []
    for name, table in tables.items():
        num_prompt = num_prompt_tokens.get(name, 0)
        is_prefill = record["num_computed_tokens"][name] < num_prompt
        described.append(
            {
                "request_id": name,
                "phase": "prefill" if is_prefill else "decode",
                "num_prompt_tokens": num_prompt,
                "num_tokens": record["num_tokens"][name],
                "num_computed_tokens": record["num_computed_tokens"][name],
                "num_scheduled_tokens": record["num_scheduled_tokens"].get(name, 0),
                "num_blocks": len(table),
                "num_own_blocks": len(table) - len(shared.intersection(table)),
                "finish_reason": record["finished"].get(name),
            }
        )
    return described


MAX_WATCHERS = 64
NUM_PLACES = 32  # steps that a watcher may be behind
LOOK_S = 0.05  # between two looks into a box
QUIET_S = 0.25  # without a step: ask the engine how it is
STILL_HERE_S = 5.0  # without anything: tell that the line is alive
STILL_HERE = b": still here\n\n"  # a comment, which no client takes for an event
NOTHING = SchedulerOutput(requests=[], num_scheduled_tokens={}, block_ids={})


class Watcher:
    """The box of somebody who watches; the oldest event makes room for a new one."""

    def __init__(self) -> None:
        self.box: deque[bytes] = deque(maxlen=NUM_PLACES)

    def take(self) -> bytes:
        """Empty the box."""
        events = [self.box.popleft() for _ in range(len(self.box))]
        return b"".join(events)


class LiveView:
    """Tells any number of watchers about the steps of one engine."""

    def __init__(self, llm: AsyncLLM, model: str | None = None) -> None:
        """Do nothing until somebody watches.

        Args:
            llm: The engine; whoever made it closes it.
            model: What its model is called.
        """
        self.llm = llm
        self.model = model
        self.watchers: tuple[Watcher, ...] = ()  # replaced as a whole, never changed
        self._turn = threading.Lock()  # guards who comes and goes
        self._is_idle = False  # and was told to be
        self._is_asked = False
        # Of the engine's thread, while somebody watches:
        self._manager: BlockManager | None = None
        self._num_prompt_tokens: dict[str, int] = {}

    def watch(self) -> Watcher:
        """Begin to watch; whoever calls must `leave`.

        Raises:
            EngineOverloaded: Too many watch already.
            MinivllmError: The engine is closed or dead.
        """
        with self._turn:
            if len(self.watchers) >= MAX_WATCHERS:
                raise EngineOverloaded(
                    f"{len(self.watchers)} watch the engine, but at most "
                    f"{MAX_WATCHERS} may: close another page, or try again later",
                    retry_after_s=10,
                )
            if not self.watchers:
                self.llm.call_in_engine(self._attach)
            self.llm.call_in_engine(self._tell_state)
            watcher = Watcher()
            self.watchers = (*self.watchers, watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Watch no more; a second call is harmless."""
        with self._turn:
            if watcher not in self.watchers:
                return
            self.watchers = tuple(w for w in self.watchers if w is not watcher)
            if not self.watchers:
                with suppress(EngineClosing, EngineDead):
                    self.llm.call_in_engine(self._detach)

    def _attach(self, engine: LLMEngine) -> None:
        scheduler = engine.scheduler
        self._manager = scheduler.block_manager
        requests = [*scheduler.running, *scheduler.waiting]
        self._num_prompt_tokens = {r.request_id: r.num_prompt_tokens for r in requests}
        engine.listeners.append(self._listen)

    def _detach(self, engine: LLMEngine) -> None:
        engine.listeners.remove(self._listen)
        self._num_prompt_tokens = {}

    def _listen(self, record: dict[str, Any]) -> None:
        """Tell everybody of a step; the engine calls this."""
        self._is_idle = False
        num_prompt_tokens = self._num_prompt_tokens
        for request in record["added"]:
            num_prompt_tokens[request["request_id"]] = len(request["prompt_token_ids"])
        self._tell(record)
        present = {*record["waiting"], *record["running"]} - record["finished"].keys()
        for name in (*record["aborted"], *record["finished"]):
            if name not in present:  # an aborted name may have come again
                num_prompt_tokens.pop(name, None)

    def _tell_state(self, engine: LLMEngine) -> None:
        """Tell everybody how the engine is between two steps."""
        self._is_asked = False
        record = begin_record(engine, NOTHING)
        self._is_idle = not (record["running"] or record["waiting"])
        self._tell(record | {"step": None, "end_s": record["start_s"], "finished": {}})

    def _tell(self, record: Mapping[str, Any]) -> None:
        told = live_event(record, self._num_prompt_tokens)
        data = event(told | {"other_pools": other_pools(self._manager)})
        for watcher in self.watchers:
            watcher.box.append(data)  # written once, for all of them

    def _ask(self) -> None:
        """Have the engine tell its state, unless it is known or on its way."""
        if not (self._is_idle or self._is_asked):
            self._is_asked = True
            self.llm.call_in_engine(self._tell_state)

    async def events(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Yield what the engine is, and then what it does, until it stops."""
        yield event({"engine": describe_engine(self.llm.engine, self.model)})
        last_news = last_word = time.monotonic()
        with suppress(EngineClosing, EngineDead):
            while not self.llm.has_stopped:
                now = time.monotonic()
                if news := watcher.take():
                    last_news = last_word = now
                    yield news
                elif now - last_word > STILL_HERE_S:
                    last_word = now
                    yield STILL_HERE
                if now - last_news > QUIET_S:
                    self._ask()
                await asyncio.sleep(LOOK_S)
        if self.llm.error is not None:
            yield event(error_of(EngineDead(*self.llm.error.args)).body())
