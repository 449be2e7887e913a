"""What the threads of a launch did, and what it would have cost a GPU.

A GPU runs a warp in step: a load of 32 lanes is one instruction, and memory answers it
in pieces of 32 bytes, the sectors. Shared memory has 32 banks of 4 bytes, each of which
serves one word at a time. So it matters which lanes do something together: the accesses
of a warp that come from the same address of code, each lane's k-th there, are taken for
one instruction.

Invariant: the order of `accesses` is that in which they happened.

Made by `EmulatedKernel.trace`.

In vLLM: none; NVIDIA's Nsight Compute counts the same on a GPU.
Source: appendix A15, "A GPU in one header".
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minivllm.errors import KernelError

WARP = 32
SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4
READ, WRITE, ATOMIC = range(3)  # kinds
KINDS = ("read", "write", "atomic")

# One load or store; the emulator writes them in this form.
ACCESS = np.dtype(
    [
        ("offset", np.uint64),
        ("block", np.uint32),
        ("code", np.uint32),
        ("bytes", np.uint32),
        ("thread", np.uint16),
        ("memory", np.int16),
        ("kind", np.uint16),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Memory:
    """An argument of a launch or a variable in shared memory.

    Attributes:
        name: Of the parameter or variable; of all parameters, if their arrays overlap.
        is_shared: Whether each block has its own.
        shift: Where it begins within a sector; a view may begin anywhere.
    """

    name: str
    is_shared: bool
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one thread did from when it was picked until it stopped.

    Attributes:
        block: Number of its block.
        thread: Number of the thread in it.
        stopped_in: The function that it waits in, such as "__syncthreads"; "" if it
            has returned.
        place: File and line of that call.
        num_accesses: Accesses that all threads had made by then.
    """

    block: int
    thread: int
    stopped_in: str
    place: str
    num_accesses: int


class Trace:
    """Everything that a launch read and wrote.

    Attributes:
        accesses: One row for each load and store of a thread, with the fields
            `block`, `thread` (both numbers), `place` (index into `places`), `kind`
            (index into `KINDS`), `memory` (index into `memories`), `offset` and
            `bytes`.
        places: "file:line" of the sources.
        memories: Arguments first, then shared variables.
        turns: Which thread ran when.
    """

    def __init__(
        self,
        accesses: np.ndarray,
        places: dict[int, str],
        memories: list[Memory],
        num_arguments: int,
        turns: list[Turn],
    ) -> None:
        """Take what the emulator has recorded.

        Args:
            accesses: Of dtype ACCESS; `memory` -1 - n is shared variable n.
            places: Address of code -> file and line.
            memories: Arguments first, then shared variables.
            num_arguments: How many of them are arguments.
            turns: Which thread ran when.
        """
        self.memories = memories
        self.turns = turns
        self.places = sorted(set(places.values()))
        numbers = {place: number for number, place in enumerate(self.places)}
        codes, inverse = np.unique(accesses["code"], return_inverse=True)
        place_of = np.array([numbers[places[int(code)]] for code in codes], np.int64)
        memory = accesses["memory"].astype(np.int64)
        columns = {
            "block": accesses["block"].astype(np.int64),
            "thread": accesses["thread"].astype(np.int64),
            "place": place_of[inverse] if len(codes) else np.empty(0, np.int64),
            "kind": accesses["kind"].astype(np.int64),
            "memory": np.where(memory < 0, num_arguments - 1 - memory, memory),
            "offset": accesses["offset"].astype(np.int64),
            "bytes": accesses["bytes"].astype(np.int64),
        }
        self.accesses = np.rec.fromarrays(list(columns.values()), names=list(columns))
        self._codes = inverse.reshape(-1)

    def _of(self, name: str) -> np.ndarray:
        """Return which accesses are to a memory."""
        numbers = [
            number
            for number, memory in enumerate(self.memories)
            if name in memory.name.split("/")
        ]
        if not numbers:
            known = ", ".join(memory.name for memory in self.memories)
            raise KernelError(f"there is no memory {name!r}: use one of {known}")
        return np.isin(self.accesses.memory, numbers)

    def bytes_read(self, name: str | None = None) -> int:
        """Count the bytes that threads asked for.

        Args:
            name: Of an argument or shared variable; of all arguments if it is None.
        """
        return self._bytes(name, (READ, ATOMIC))

    def bytes_written(self, name: str | None = None) -> int:
        """Count the bytes that threads wrote; see `bytes_read`."""
        return self._bytes(name, (WRITE, ATOMIC))

    def _bytes(self, name: str | None, kinds: tuple[int, ...]) -> int:
        wanted = self._of(name) if name else ~self._is_shared
        wanted &= np.isin(self.accesses.kind, kinds)
        return int(self.accesses.bytes[wanted].sum())

    @cached_property
    def _is_shared(self) -> np.ndarray:
        shared = np.array([memory.is_shared for memory in self.memories], bool)
        return shared[self.accesses.memory]

    @cached_property
    def instructions(self) -> np.recarray:
        """The accesses as warps would have made them, one row for each instruction.

        Its fields are `block`, `warp`, `place`, `kind`, `memory`; `lanes` (how many
        took part), `bytes` (what they asked for); `sectors` (pieces of 32 bytes that
        an argument's memory moves; 0 for shared memory), and `passes` (how often
        shared memory has to be asked, and `ideal`, how often if no bank had two
        words to serve; 0 for an argument).
        """
        accesses = self.accesses
        if not len(accesses):
            names = "block warp place kind memory lanes bytes sectors passes ideal"
            return np.rec.fromarrays([np.empty(0, np.int64)] * 10, names=names.split())
        warp = accesses.thread // WARP
        number = _group([accesses.block, warp, self._codes, self._executions])
        order = np.argsort(number, kind="stable")
        starts = np.flatnonzero(np.diff(number[order], prepend=-1))
        first = order[starts]
        lanes = np.diff(starts, append=len(order))
        sectors = self._distinct_pieces(number, SECTOR_BYTES)
        passes, ideal = self._passes(number)
        columns = {
            "block": accesses.block[first],
            "warp": warp[first],
            "place": accesses.place[first],
            "kind": accesses.kind[first],
            "memory": accesses.memory[first],
            "lanes": lanes,
            "bytes": np.add.reduceat(accesses.bytes[order], starts),
            "sectors": np.where(self._is_shared[first], 0, sectors),
            "passes": np.where(self._is_shared[first], passes, 0),
            "ideal": np.where(self._is_shared[first], ideal, 0),
        }
        return np.rec.fromarrays(list(columns.values()), names=list(columns))

    @cached_property
    def _executions(self) -> np.ndarray:
        """How often the thread had been at the same address of code before."""
        who = _group([self.accesses.block, self.accesses.thread, self._codes])
        return _rank(who)

    def _distinct_pieces(self, number: np.ndarray, size: int) -> np.ndarray:
        """Count for each instruction the pieces of memory that its lanes touch."""
        shift = np.array([memory.shift for memory in self.memories])
        offset = self.accesses.offset + shift[self.accesses.memory]
        first = offset // size
        last = (offset + self.accesses.bytes - 1) // size
        which, piece = _spread(number, first, last)
        pairs = np.unique(_group([which, piece]), return_index=True)[1]
        return np.bincount(which[pairs], minlength=number.max() + 1)

    def _passes(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Count for each instruction how often the banks are asked, and at best."""
        accesses = self.accesses
        first = accesses.offset // BANK_BYTES
        last = (accesses.offset + accesses.bytes - 1) // BANK_BYTES
        # A lane with 8 or 16 bytes: half or a quarter of the warp is served at a time.
        together = WARP // np.maximum(last - first + 1, 1)
        lane = accesses.thread % WARP
        part = _group([number, lane // np.maximum(together, 1)])
        number_of_part = np.zeros(part.max() + 1, np.int64)
        number_of_part[part] = number
        which, word = _spread(part, first, last)
        unique = np.unique(_group([which, word]), return_index=True)[1]
        which, bank = which[unique], word[unique] % BANKS
        words_of_bank = np.bincount(
            which * BANKS + bank, minlength=len(number_of_part) * BANKS
        )
        asked = words_of_bank.reshape(-1, BANKS).max(axis=1)
        num = number.max() + 1
        passes = np.bincount(number_of_part, weights=asked, minlength=num)
        ideal = np.bincount(number_of_part, minlength=num)
        return passes.astype(np.int64), ideal

    def sectors(self, name: str | None = None) -> int:
        """Count the sectors that all instructions together move.

        Args:
            name: Of an argument; of all arguments if it is None.
        """
        return self._sum("sectors", name)

    def bank_conflicts(self, name: str | None = None) -> int:
        """Count how often shared memory is asked again because a bank was busy.

        Args:
            name: Of a shared variable; of all if it is None.
        """
        return self._sum("passes", name) - self._sum("ideal", name)

    def _sum(self, field: str, name: str | None) -> int:
        rows = self.instructions
        if name:
            self._of(name)  # is there such a memory?
            names = [memory.name.split("/") for memory in self.memories]
            rows = rows[np.array([name in names[m] for m in rows.memory], bool)]
        return int(rows[field].sum())

    def summary(self) -> list[dict[str, int | str]]:
        """Return one row for each place, kind and memory, in order of the places."""
        rows = self.instructions
        keys = sorted({(r.place, r.kind, r.memory) for r in rows})
        result = []
        for place, kind, memory in keys:
            here = rows[
                (rows.place == place) & (rows.kind == kind) & (rows.memory == memory)
            ]
            result.append(
                {
                    "place": self.places[place],
                    "kind": KINDS[kind],
                    "memory": self.memories[memory].name,
                    "instructions": len(here),
                    "bytes": int(here.bytes.sum()),
                    "sectors": int(here.sectors.sum()),
                    "passes": int(here.passes.sum()),
                    "ideal": int(here.ideal.sum()),
                }
            )
        return result


def _group(columns: list[np.ndarray]) -> np.ndarray:
    """Number the rows of a table so that equal rows, and only these, are equal."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values = np.unique(column, return_inverse=True)[1].reshape(-1)
        numbers = numbers * (values.max(initial=0) + 1) + values
        numbers = np.unique(numbers, return_inverse=True)[1].reshape(-1)
    return numbers


def _rank(groups: np.ndarray) -> np.ndarray:
    """Return for each element how many of its group come before it."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return ranks


def _spread(
    owner: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (owner, piece) for every piece from first to last."""
    counts = last - first + 1
    starts = np.cumsum(counts) - counts
    steps = np.arange(counts.sum()) - np.repeat(starts, counts)
    return np.repeat(owner, counts), np.repeat(first, counts) + steps
