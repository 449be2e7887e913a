"""A trace as the script of the page wants it: requests by number, and only changes.

A record of a trace is complete: it repeats every block table in every step. Between
two steps little of it changes, so the page gets the difference, and folds it up again
to the step that is looked at.

Called by the page and by the figures of the book.

In vLLM: there is no such viewer.
Source: appendix A8, "Traces".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError
from minivllm.viewer.style import letter

Record = Mapping[str, Any]


class Frames:
    """Folds records into steps of changes; requests are numbered as they appear.

    A step has these entries, those without content left out:

    - t: its start and its end, in seconds from the first step on
    - a, x: requests that arrived and that were aborted since the step before
    - w, r: the waiting and the running requests, if that queue changed
    - n, k: [request, count] of its tokens, and of the computed ones, where they are not
      what the step before has made of them
    - b: [request, kept, *block ids]: how much of a block table stays, what follows
    - c, u: blocks that the prefix cache has come to know, and has forgotten
    - s, h: [request, count] of tokens to compute, and found in the prefix cache
    - p: requests that were preempted
    - o: [request, token id] of the new tokens
    - f: [request, reason] of those that finished
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.names: list[str] = []
        self.num_prompt_tokens: list[int | None] = []  # None: it came before the trace
        self.steps: list[dict[str, Any]] = []
        self._number: dict[str, int] = {}  # of the unfinished request of that name
        self._queues: dict[str, list[int]] = {"w": [], "r": []}
        self._num_tokens: list[int] = []
        self._num_computed: list[int] = []
        self._tables: dict[int, list[int]] = {}
        self._cached: set[int] = set()
        self._broken_promises: set[int] = set()  # cached by a step that then failed
        self._start_s = 0.0

    def add(self, record: Record) -> None:
        """Append a step."""
        if not self.steps:
            self._start_s = record["start_s"]
        times = (record["start_s"], record["end_s"])
        step: dict[str, Any] = {"t": [round(t - self._start_s, 6) for t in times]}
        step["a"], step["x"] = self._come_and_go(record)
        step |= self._queue_changes(record)
        step["n"] = self._corrections(self._num_tokens, record["num_tokens"])
        step["k"] = self._corrections(self._num_computed, record["num_computed_tokens"])
        step["b"] = self._table_changes(record["block_ids"])
        step["c"], step["u"] = self._cache_changes(record)
        step["s"] = self._pairs(record["num_scheduled_tokens"])
        step["h"] = [pair for pair in self._pairs(record["num_prefix_hits"]) if pair[1]]
        step["p"] = [self._find(name) for name in record["preempted"]]
        sampled = self._pairs(record["sampled_token_ids"])
        step["o"] = [[number, token] for number, ids in sampled for token in ids]
        step["f"] = self._pairs(record["finished"])
        for number, count in step["s"]:
            self._num_computed[number] += count
        for number, _ in step["o"]:
            self._num_tokens[number] += 1
        for name in record["finished"]:
            del self._number[name]
        self.steps.append({k: v for k, v in step.items() if v or k in ("w", "r")})

    def _new(self, name: str, num_prompt_tokens: int | None) -> int:
        self._number[name] = len(self.names)
        self.names.append(name)
        self.num_prompt_tokens.append(num_prompt_tokens)
        self._num_tokens.append(num_prompt_tokens or 0)
        self._num_computed.append(0)
        return self._number[name]

    def _find(self, name: str) -> int:
        return self._number[name] if name in self._number else self._new(name, None)

    def _pairs(self, values: Mapping[str, Any]) -> list[list[Any]]:
        return [[self._find(name), value] for name, value in values.items()]

    def _come_and_go(self, record: Record) -> tuple[list[int], list[int]]:
        """Number the new requests; a name may be aborted and used again at once."""
        present = {*record["waiting"], *record["running"]}
        gone = [self._number.pop(n) for n in record["aborted"] if n in self._number]
        arrived = []
        for request in record["added"]:
            name = request["request_id"]
            if name in self._number:
                gone.append(self._number[name])
            arrived.append(self._new(name, len(request["prompt_token_ids"])))
        for name in record["aborted"]:
            if name in self._number and name not in present:
                gone.append(self._number.pop(name))
        return arrived, gone

    def _queue_changes(self, record: Record) -> dict[str, list[int]]:
        changes = {}
        for key, name in (("w", "waiting"), ("r", "running")):
            queue = [self._find(request_id) for request_id in record[name]]
            if queue != self._queues[key]:
                changes[key] = self._queues[key] = queue
        return changes

    def _corrections(
        self, expected: list[int], found: Mapping[str, int]
    ) -> list[list[int]]:
        corrections = [
            [number, count]
            for number, count in self._pairs(found)
            if expected[number] != count
        ]
        for number, count in corrections:
            expected[number] = count
        return corrections

    def _table_changes(self, block_ids: Mapping[str, list[int]]) -> list[list[int]]:
        tables = dict(self._pairs(block_ids))
        changes = []
        for number in {**self._tables, **tables}:
            old, new = self._tables.get(number, []), tables.get(number, [])
            if old != new:
                kept = num_equal(old, new)
                changes.append([number, kept, *new[kept:]])
        self._tables = tables
        return changes

    def _cache_changes(self, record: Record) -> tuple[list[int], list[int]]:
        used = {block for table in self._tables.values() for block in table}
        known = used - set(record["uncached_block_ids"])
        carried = self._cached - used
        if len(known | carried) > record["num_cached_blocks"]:
            carried -= self._broken_promises
        if len(known | carried) > record["num_cached_blocks"]:
            carried = set()  # the cache was reset
        known |= carried
        new, forgotten = known - self._cached, self._cached - known
        self._cached = known
        reasons = {record["finished"].get(n) for n in record["num_scheduled_tokens"]}
        self._broken_promises = self._filled(record) if reasons == {"error"} else set()
        return sorted(new), sorted(forgotten)

    def _filled(self, record: Record) -> set[int]:
        """Return the blocks that a step was to fill to the last slot."""
        filled = set()
        for name, count in record["num_scheduled_tokens"].items():
            first = record["num_computed_tokens"][name]
            end = (first + count) // self.block_size
            filled.update(record["block_ids"][name][first // self.block_size : end])
        return filled


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many numbers at the beginning of two lists agree."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def viewer_data(
    header: Mapping[str, Any],
    records: Iterable[Record],
    token_texts: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return what the script of the page needs, plain and small.

    Args:
        header: Of the trace; of a list of records, `block_size` is enough.
        records: Its steps, at least one.
        token_texts: How to show new tokens, where not as ids.

    Raises:
        RequestError: There is no step.
    """
    records = list(records)
    if not records:
        raise RequestError(
            "the trace has 0 steps, so there is nothing to show: let the engine run "
            "while it is recorded"
        )
    frames = Frames(header["block_size"])
    for record in records:
        frames.add(record)
    frames.add(after(records[-1]))
    return {
        "names": frames.names,
        "letters": "".join(map(letter, frames.names)),
        "prompts": frames.num_prompt_tokens,
        "blockSize": frames.block_size,
        "numBlocks": num_blocks_of(records[0]),
        "texts": {str(k): v for k, v in (token_texts or {}).items()},
        "steps": frames.steps,
    }


def num_blocks_of(record: Record) -> int:
    """Return the size of the pool: its blocks are free, or in a block table."""
    used = {block for ids in record["block_ids"].values() for block in ids}
    return record["num_free_blocks"] + len(used)


def after(record: Record) -> dict[str, Any]:
    """Return a record of the moment after a step, when nothing is scheduled yet."""
    finished = record["finished"]
    tables = {k: ids for k, ids in record["block_ids"].items() if k not in finished}
    used = {block for ids in tables.values() for block in ids}
    lists = ("added", "aborted", "preempted")
    counts = ("num_tokens", "num_computed_tokens", "num_scheduled_tokens")
    others = ("num_prefix_hits", "sampled_token_ids", "finished")
    return {
        **{name: [] for name in lists},
        **{name: {} for name in (*counts, *others)},
        "start_s": record["end_s"],
        "end_s": record["end_s"],
        "waiting": record["waiting"],
        "running": [name for name in record["running"] if name not in finished],
        "block_ids": tables,
        "uncached_block_ids": used & set(record["uncached_block_ids"]),
        "num_cached_blocks": record["num_cached_blocks"],
    }
