"""What every rung has to compute, case by case, on the emulator and on a GPU alike.

A case knows its numbers, starts its rung as the engine does, and compares the result
with NumPy. Memory that a kernel has no business in is full of NaN. A kind of cases is a
class, and tells the tests all about itself; `kinds.py` has the list. Here are the kinds
of the ladders of chapter 6.
"""

import math
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import rungs
from minivllm.ops.emulate import EmulatedModule
from minivllm.ops.kernel_source import read_source
from minivllm.reference.attention import attention_weights, softmax

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
HEADERS = [
    "common.cuh",
    "reduce.cuh",
    "activations.cuh",
    "tokens.cuh",
    "delta_rule.cuh",
]
DTYPES = ["float32", "float16", "bfloat16"]
# The emulator's orders of the threads, with a seed.
ORDERS = [
    ("forward", 0),
    ("reverse", 0),
    ("round_robin", 0),
    ("random", 1),
    ("random", 2),
]
HIDDEN_SIZES = [1, 31, 576, 1000, 2064]  # the last: more packs than threads
HEAD_DIMS = [64, 80, 128, 256]
BLOCK_SIZES = [8, 16, 32]
HEADS = [(2, 2), (6, 2), (6, 3)]  # query heads and key heads
# Keys of the requests of a batch, and how many of them a query sees: with a split_size
# of 24, splits of v4 that end in the middle and at the end, and one without keys.
LENGTHS = [(37,), (1, 16, 48)]
WINDOWS = [None, 30]
EPS = 1e-3
# Rows of the batch that belong to requests of other groups.
OTHERS = 2


def to_numpy(x: Tensor) -> np.ndarray:
    """Return float64, on the CPU."""
    return x.double().cpu().numpy()


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to a type of 16 or 32 bits and back, to the nearest and ties to even."""
    return to_numpy(torch.from_numpy(x).to(getattr(torch, dtype)))


def assert_rounded(ours: Tensor, exact: np.ndarray, units: float = 32) -> None:
    """Demand what the exact result is, rounded to the type of ours.

    A sum in float32 may end on the other side of a middle between two neighbours: one
    number in fifty may be the neighbour. In float32 the sums themselves show: they may
    be off by some units in the last place of the largest number.
    """
    found, dtype = to_numpy(ours), str(ours.dtype).removeprefix("torch.")
    assert found.shape == exact.shape
    is_number = np.isfinite(exact)
    assert np.isnan(exact[~is_number]).all() and np.isnan(found[~is_number]).all()
    found, exact = found[is_number], exact[is_number]
    assert np.isfinite(found).all(), "NaN: something was not written, or read too far"
    if not exact.size:
        return
    difference = np.abs(found - rounded(exact, dtype))
    eps = torch.finfo(ours.dtype).eps
    allowed = (units if dtype == "float32" else 1) * eps * np.abs(exact).max()
    assert difference.max() <= allowed, f"off by {difference.max():.3g}"
    if dtype != "float32":
        num_wrong = np.count_nonzero(difference)
        assert num_wrong <= max(1, found.size // 50), f"{num_wrong} of {found.size}"


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Let torch fill the memory of new tensors with NaN: nobody is to read it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).new_empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Case:
    """One call of one rung.

    Attributes:
        file: Where its kernels are.
        versions: The rungs: rows of the table at the top of that file.
        dtypes: Types that each is for.
        compiled_for: The factors that are template arguments or decide on them, and
            those of their values that the gate compiles always.
        uses_tensor_cores: Whether it multiplies matrices on them.
        is_extreme: Whether the last digits are lost by design, which a GPU may do in
            another way than the emulator.
        version: Which rung.
    """

    file: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[list[str]] = DTYPES
    compiled_for: ClassVar[dict[str, list[Any]]] = {}
    uses_tensor_cores: ClassVar[bool] = False
    is_extreme: bool = False
    version: str

    @classmethod
    def dtypes_on(cls, arch: str) -> list[str]:
        """Return the types that it is for on a GPU of an architecture, "sm_75"."""
        is_older = int(arch.removeprefix("sm_")) < 80
        if cls.uses_tensor_cores and is_older:
            return [dtype for dtype in cls.dtypes if dtype != "bfloat16"]
        return cls.dtypes

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return what else the cases of a rung are made of: name, and values."""
        raise NotImplementedError

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case of one value of each factor."""
        return cls(version, dtype, **values)

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return a case in which there is nothing to do."""
        raise NotImplementedError

    @classmethod
    def killers(cls) -> list[Self]:
        """Return the cases that have to notice whatever is wrong with a kernel."""
        raise NotImplementedError

    @classmethod
    def examples(cls) -> list[Self]:
        """Return the cases that the table at the top of the file is about."""
        raise NotImplementedError

    @classmethod
    def large(cls) -> list[Self]:
        """Return cases that the emulator has no time for."""
        raise NotImplementedError

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        raise NotImplementedError

    def random(self) -> torch.Generator:
        """Return random numbers that are the same for the same case."""
        return torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in fields(self) if f.default is MISSING]
        return "-".join(map(str, values))


def rows_for(version: str) -> list[int]:
    """Return numbers of rows: of v1, which has a thread for each, several blocks."""
    return [1, 3, 300] if version == "v1" else [1, 3, 7]


@dataclass(frozen=True)
class NormCase(Case):
    """Rows to normalise; with a residual in v5."""

    version: str
    dtype: str
    hidden: int
    num_rows: int
    plus_one: bool
    file = "rms_norm.cu"
    versions = ("v1", "v2", "v3", "v4", "v5")
    compiled_for: ClassVar = {"hidden": HIDDEN_SIZES}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill threads and packs, and sizes that do not."""
        rows = rows_for(version)
        return {"hidden": HIDDEN_SIZES, "num_rows": rows, "plus_one": [False, True]}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "bfloat16", 2064, 0, True)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more packs than threads, single numbers, and many rows."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("bfloat16", 2064, 3, False),
                ("float32", 31, 3, True),
                ("float16", 8, 300, True),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return rows of SmolLM2."""
        return [cls(version, "float32", 576, 32, False) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return many rows, and one that needs more shared memory than is usual."""
        return [
            cls("v4", "bfloat16", 4096, 5000, False),
            cls("v5", "float16", 4096, 5000, True),
            # 56 KiB of shared memory for a row: more than a block gets without asking.
            cls("v5", "float32", 14_336, 3, False),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        shape = (self.num_rows, self.hidden)
        # Small enough for eps to count.
        x, residual = (torch.randn(2, *shape, generator=random) * 0.05).to(dtype)
        weight = torch.randn(self.hidden, generator=random).to(dtype)
        summed = residual + x if self.version == "v5" else x
        expected = self.expected(summed, weight)

        inputs = [x.to(device), weight.to(device)]
        before = [given.clone() for given in inputs]
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        arguments = [*inputs, EPS, self.plus_one]
        if self.version == "v5":
            sums = residual.to(device, copy=True)
            rungs.fused_add_rms_norm(kernels, "v5", out, sums, *arguments, **options)
            assert sums.cpu().equal(summed), "the residual is not the sum"
        else:
            rungs.rms_norm(kernels, self.version, out, *arguments, **options)
        assert_rounded(out, expected)
        assert all(map(torch.equal, inputs, before)), "an input was changed"

    def expected(self, x: Tensor, weight: Tensor) -> np.ndarray:
        """Compute in float64, and round where the models do."""
        rows, scales = to_numpy(x), to_numpy(weight)
        mean_square = np.mean(rows * rows, axis=-1, keepdims=True)
        normed = rows / np.sqrt(mean_square + EPS)
        if self.plus_one:
            return normed * (1 + scales)
        return rounded(normed, self.dtype) * scales


@dataclass(frozen=True)
class SoftmaxCase(Case):
    """Rows of scores, some far out and some minus infinity."""

    version: str
    dtype: str
    size: int
    num_rows: int
    file = "softmax.cu"
    versions = ("v1", "v2", "v3", "v4")
    compiled_for: ClassVar = {"size": HIDDEN_SIZES[:1]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill threads, and sizes that do not."""
        return {"size": HIDDEN_SIZES, "num_rows": rows_for(version)}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "bfloat16", 2064, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more numbers than threads, and many rows."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (("float32", 1000, 7), ("bfloat16", 31, 300))
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return as many rows as for the norm."""
        return [cls(version, "float32", 576, 32) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return the scores of a vocabulary, and many short rows."""
        return [
            cls("v3", "float32", 128_256, 33),
            cls("v4", "float16", 64, 10_001),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        x = torch.randn(self.num_rows, self.size, generator=random) * 4
        x += torch.linspace(-200, 200, self.num_rows).unsqueeze(-1)  # exp overflows
        x[:, 1::7] = -torch.inf
        if self.num_rows > 3:  # rows in which no score may be missed, and an empty one
            x[0, 0] = x[1, -1] = 300
            x[2] = -torch.inf
        scores = x.to(dtype).to(device)
        before = scores.clone()
        out = torch.full_like(scores, torch.nan)
        rungs.softmax(kernels, self.version, out, scores, **options)
        with np.errstate(invalid="ignore"):  # the row without scores
            expected = softmax(to_numpy(scores))
        # In v1 one thread adds up a whole row, and each addition rounds.
        units = 32 + self.size / 16 if self.version == "v1" else 32
        assert_rounded(out, expected, units)
        assert scores.equal(before), "an input was changed"


class HeadsCase(Case):
    """What attends: heads of queries share heads of keys."""

    # Always: one size of blocks, and heads that fill lanes or do not.
    compiled_for: ClassVar = {"head_dim": [64, 80], "block_size": [16]}

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case; both numbers of heads are one factor."""
        num_heads, num_kv_heads = values.pop("heads")
        values |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        return cls(version, dtype, **values)


@dataclass(frozen=True)
class AttentionCase(HeadsCase):
    """One query per request, keys in blocks that lie anywhere."""

    version: str
    dtype: str
    head_dim: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    seq_lens: tuple[int, ...]
    window: int | None
    shift: float = 0.0  # added to all scores, which changes no share
    split_size: int = 24  # more keys than teams, and not in step with blocks
    file = "paged_attention.cu"
    versions = ("v1", "v2", "v3", "v4")

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return shapes of caches and of batches."""
        sizes = {"head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "heads": HEADS}
        return sizes | {"seq_lens": LENGTHS, "window": WINDOWS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no requests."""
        return cls(version, "float32", 64, 16, 2, 2, (), None)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return windows, scores that overflow, and large heads."""
        return [
            case
            for version in cls.versions
            for case in (
                cls(version, "float32", 80, 8, 6, 2, (1, 16, 53), 30),
                cls(version, "bfloat16", 64, 8, 6, 3, (48,), None, shift=150.0),
                cls(version, "float32", 80, 8, 6, 2, (50,), None, shift=-150.0),
                cls(version, "float16", 256, 16, 2, 1, (20,), None),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return one text that is split."""
        one_text = ("float32", 64, 16, 4, 2, (512,), None)
        options = {"split_size": rungs.SPLIT_SIZE}
        return [cls(version, *one_text, **options) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return long texts beside short ones."""
        lengths = (4000, 1, 777)
        return [
            cls("v3", "bfloat16", 128, 16, 32, 8, lengths, None),
            cls("v4", "float16", 128, 16, 32, 8, lengths, None),
            cls("v4", "float16", 256, 32, 16, 2, lengths, 512),
        ]

    @property
    def is_extreme(self) -> bool:
        """Large scores lose digits in their sums."""
        return self.shift != 0

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        num_reqs = len(self.seq_lens)
        kv_cache, block_table = self.cache(random)
        # Views of rows that also hold the keys, in an order of their own.
        wide = torch.randn(
            num_reqs + OTHERS,
            self.num_heads + 2 * self.num_kv_heads,
            self.head_dim,
            generator=random,
        )
        rows = torch.randperm(num_reqs + OTHERS, generator=random)[:num_reqs].int()
        wide[[row for row in range(len(wide)) if row not in rows]] = torch.nan
        wide[:, self.num_heads :] = torch.nan
        if self.shift:
            wide[:, :, 0] = 8
            kv_cache[0, ..., 0] = self.shift / self.scale / 8
        wide, kv_cache = wide.to(dtype), kv_cache.to(dtype)
        expected = self.expected(wide[rows, : self.num_heads], kv_cache, block_table)

        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        given = [wide, kv_cache, rows, block_table, seq_lens]
        wide, *inputs = (x.to(device) for x in given)
        before = [x.clone() for x in inputs]
        out = torch.full(
            (num_reqs, self.num_heads, self.head_dim),
            torch.nan,
            dtype=dtype,
            device=device,
        )
        options |= {"scale": self.scale, "window": self.window}
        options |= {"split_size": self.split_size}
        q = wide[:, : self.num_heads]
        with new_memory_is_nan():
            rungs.paged_attention(kernels, self.version, out, q, *inputs, **options)
        assert_rounded(out, expected, units=32 + 4 * abs(self.shift))
        for x, y in zip(inputs, before, strict=True):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), "an input was changed"

    @property
    def scale(self) -> float:
        """Not head_dim ** -0.5, so that the argument counts."""
        return 1.5 / math.sqrt(self.head_dim)

    def cache(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a cache with NaN wherever no query looks, and its block table."""
        num_blocks = [-(-num_keys // self.block_size) for num_keys in self.seq_lens]
        total, width = sum(num_blocks) + 3, max(num_blocks, default=1) + 1
        shape = (2, total, self.block_size, self.num_kv_heads, self.head_dim)
        kv_cache = torch.full(shape, torch.nan)
        # No block has the number that pads the table.
        block_table = torch.full((len(num_blocks), width), 10**6, dtype=torch.int32)
        free = torch.randperm(total, generator=random).int()
        for request, num_keys in enumerate(self.seq_lens):
            count = num_blocks[request]
            block_ids, free = free[:count], free[count:]
            block_table[request, :count] = block_ids
            first = max(0, num_keys - (self.window or num_keys))
            keys = torch.arange(first, num_keys)
            where = block_ids[keys // self.block_size].long(), keys % self.block_size
            values = torch.randn(2, len(keys), *shape[3:], generator=random)
            kv_cache[:, *where] = values
        return kv_cache, block_table

    def expected(self, q: Tensor, kv_cache: Tensor, block_table: Tensor) -> np.ndarray:
        """Attend in float64, request by request."""
        mixed = np.empty(q.shape)
        for request, num_keys in enumerate(self.seq_lens):
            block_ids = block_table[request, : -(-num_keys // self.block_size)].long()
            keys, values = kv_cache[:, block_ids].flatten(1, 2)[:, :num_keys]
            first = max(0, num_keys - (self.window or num_keys))
            query, keys, values = map(to_numpy, (q[request], keys, values))
            keys, values = keys[first:], values[first:]
            weights = attention_weights(query[None], keys, self.scale)
            values = values.repeat(self.num_heads // self.num_kv_heads, axis=1)
            mixed[request] = (weights @ values.swapaxes(0, 1))[:, 0]
        return mixed


@dataclass(frozen=True)
class VarianceCase(Case):
    """Two sums in a row, which the headers have to keep apart."""

    version: str
    dtype: str
    size: int
    num_rows: int
    file = "twice.cu"
    versions = ("v1",)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return rows of several warps."""
        return [cls("v1", "float32", 200, 2)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check what it wrote."""
        x = torch.randn(self.num_rows, self.size, generator=self.random())
        x = x.to(getattr(torch, self.dtype)).to(device)
        out = torch.full_like(x[:, 0], torch.nan)
        kernel = kernels[f"variance_{self.version}<{rungs.cuda_type(x)}>"]
        threads = rungs.threads_for(self.size)
        kernel(self.num_rows, threads, out, x, self.size, **options)
        assert_rounded(out, to_numpy(x).var(axis=-1))


class Names(Mapping):
    """Stands for kernels, and notes which are asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Callable[..., None]:
        self.asked[name] = None
        return lambda *arguments, **options: None

    def __iter__(self) -> Any:
        return iter(self.asked)

    def __len__(self) -> int:
        return len(self.asked)


def instances(cases: Sequence[Case]) -> list[str]:
    """Return the names of the kernels that some cases start."""
    names = Names()
    for case in cases:
        try:
            case.run(names)
        except AssertionError:
            continue  # nothing was computed
    return list(names)


def path_of(file: str) -> Path:
    """Return where a source lies: with the kernels, or here if it is for tests only."""
    return KERNELS / file if (KERNELS / file).exists() else HERE / file


def includes_of(file: str) -> list[str]:
    """Return the headers of ours that a source includes, also through others."""
    found = []
    for header in re.findall(r'#include "(.*)"', path_of(file).read_text()):
        found += [*includes_of(header), header]
    return list(dict.fromkeys(found))


def source_of(file: str, changed: Mapping[str, str] | None = None) -> str:
    """Return a source with its headers; files named in `changed` have that text."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*HEADERS, file):
            text = (changed or {}).get(name) or path_of(name).read_text()
            Path(folder, name).write_text(text)
        return read_source(Path(folder, file))


def emulated(cases: Sequence[Case], source: str | None = None) -> EmulatedModule:
    """Compile, in check mode, the kernels that cases of one file start."""
    (file,) = {case.file for case in cases}
    return EmulatedModule(source or source_of(file), instances(cases), check=True)
