"""The kinds of cases for attention of prompts."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import cuda_prefill, rungs
from tests.kernels.cases import (
    BLOCK_SIZES,
    HEAD_DIMS,
    HEADS,
    OTHERS,
    HeadsCase,
    assert_rounded,
    new_memory_is_nan,
    to_numpy,
)

# Of each request, the cached keys and the queries: more than a tile has, and one.
PIECES = [((20, 18),), ((7, 1), (0, 26), (40, 12))]
WINDOWS = [None, 9]
Attended = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class PrefillCase(HeadsCase):
    """Many queries per request, behind cached keys, in blocks that lie anywhere."""

    version: str
    dtype: str
    head_dim: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    pieces: tuple[tuple[int, int], ...]
    window: int | None
    shift: float = 0.0  # added to all scores, which changes no share
    file = "prefill_attention.cu"
    versions = ("v1", "v2", "v3")

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return shapes of caches and of batches."""
        sizes = {"head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "heads": HEADS}
        return sizes | {"pieces": PIECES, "window": WINDOWS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no requests."""
        return cls(version, "bfloat16", 64, 16, 2, 2, (), None)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return windows, scores that overflow, and large heads."""
        widest = cls.dtypes[0]  # what is lost in sums shows best
        return [
            case
            for version in cls.versions
            for case in (
                cls(version, widest, 80, 8, 4, 2, ((10, 25), (0, 1), (41, 7)), 30),
                cls(version, "float16", 64, 16, 2, 2, ((3, 65),), 5),
                cls(version, "bfloat16", 64, 8, 6, 3, ((0, 34),), None, shift=150.0),
                cls(version, widest, 128, 8, 6, 2, ((40, 6),), None, shift=-150.0),
                cls(version, widest, 256, 16, 2, 1, ((3, 20),), None),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a chunk of a prompt, in a type that every rung takes."""
        chunk = ("float16", 64, 16, 2, 1, ((32, 32),), None)
        return [cls(version, *chunk) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return long prompts beside short ones."""
        pieces = ((3000, 256), (0, 777), (1500, 1))
        return [
            cls("v3", "float32", 64, 16, 9, 3, pieces, None),
            cls("v3", "bfloat16", 128, 16, 32, 8, pieces, 512),
        ]

    @property
    def is_extreme(self) -> bool:
        """Large scores lose digits in their sums."""
        return self.shift != 0

    @property
    def scale(self) -> float:
        """Not head_dim ** -0.5, so that the argument counts."""
        return 1.5 / math.sqrt(self.head_dim)

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        kv_cache, block_table = self.cache(random)
        # Before the rows of each request are some that belong to others.
        lengths = torch.tensor([length for _, length in self.pieces], dtype=torch.int32)
        ends = torch.cumsum(lengths + OTHERS, 0, dtype=torch.int32)
        starts = ends - lengths
        is_ours = torch.zeros(int(lengths.sum()) + OTHERS * len(lengths), dtype=bool)
        for start, end in zip(starts, ends, strict=True):
            is_ours[start:end] = True
        # Views of rows that also hold the keys.
        num_heads = self.num_heads + 2 * self.num_kv_heads
        shape = (len(is_ours), num_heads, self.head_dim)
        wide = torch.randn(shape, generator=random)
        if self.shift:
            wide[:, :, 0] = 8
            kv_cache[0, ..., 0] = self.shift / self.scale / 8
        wide[~is_ours] = wide[:, self.num_heads :] = torch.nan
        wide, kv_cache = wide.to(dtype), kv_cache.to(dtype)
        expected = self.expected(wide[is_ours], kv_cache, block_table)

        seq_lens = torch.tensor([sum(p) for p in self.pieces], dtype=torch.int32)
        given = [wide, kv_cache, starts, ends, block_table, seq_lens]
        wide, *inputs = (x.to(device) for x in given)
        before = [x.clone() for x in inputs]
        q = wide[:, : self.num_heads]
        out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
        limits = (int(lengths.max()) if len(lengths) else 0, self.scale, self.window)
        arguments = (kernels, self.version, out, q, *inputs, *limits)
        with new_memory_is_nan():
            cuda_prefill.prefill_attention(*arguments, **options)
        out = out.cpu()
        self.check(out[is_ours], *expected)
        assert out[~is_ours].isnan().all(), "a row of others was written"
        for x, y in zip(inputs, before, strict=True):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), "an input was changed"

    def check(self, ours: Tensor, exact: np.ndarray, magnitude: np.ndarray) -> None:
        """Demand the exact result, rounded."""
        assert_rounded(ours, exact, units=32 + 4 * abs(self.shift))

    def cache(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a cache with NaN wherever no query looks, and its block table."""
        seq_lens = [sum(piece) for piece in self.pieces]
        num_blocks = [-(-num_keys // self.block_size) for num_keys in seq_lens]
        total, width = sum(num_blocks) + 3, max(num_blocks, default=1) + 1
        shape = (2, total, self.block_size, self.num_kv_heads, self.head_dim)
        kv_cache = torch.full(shape, torch.nan)
        # No block has the number that pads the table.
        block_table = torch.full((len(num_blocks), width), 10**6, dtype=torch.int32)
        free = torch.randperm(total, generator=random).int()
        for request, (num_cached, length) in enumerate(self.pieces):
            count, num_keys = num_blocks[request], num_cached + length
            block_ids, free = free[:count], free[count:]
            block_table[request, :count] = block_ids
            first = max(0, num_cached + 1 - (self.window or num_keys))
            keys = torch.arange(first, num_keys)
            where = block_ids[keys // self.block_size].long(), keys % self.block_size
            values = torch.randn(2, len(keys), *shape[3:], generator=random)
            kv_cache[:, *where] = values
        return kv_cache, block_table

    def expected(self, q: Tensor, kv_cache: Tensor, block_table: Tensor) -> Attended:
        """Attend in float64, request by request; and to the values without signs."""
        q, cache = to_numpy(q[:, : self.num_heads]), to_numpy(kv_cache)
        mixed, magnitude = np.empty(q.shape), np.empty(q.shape)
        row, group = 0, self.num_heads // self.num_kv_heads
        for request, (num_cached, length) in enumerate(self.pieces):
            num_keys = num_cached + length
            block_ids = block_table[request, : -(-num_keys // self.block_size)]
            blocks = cache[:, block_ids.numpy()]
            keys, values = blocks.reshape(2, -1, *blocks.shape[3:])[:, :num_keys]
            keys, values = (x.repeat(group, axis=1) for x in (keys, values))
            for query in range(length):
                end = num_cached + query + 1
                seen = slice(max(0, end - (self.window or end)), end)
                scores = np.einsum("hd,khd->hk", q[row], keys[seen]) * self.scale
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                shares /= shares.sum(axis=1, keepdims=True)
                mixed[row] = np.einsum("hk,khd->hd", shares, values[seen])
                magnitude[row] = np.einsum("hk,khd->hd", shares, np.abs(values[seen]))
                row += 1
        return mixed, magnitude


@dataclass(frozen=True)
class TensorCoreCase(PrefillCase):
    """The same by tensor cores, which take shares of 16 bits."""

    versions = ("v4",)
    dtypes: ClassVar = ["float16", "bfloat16"]
    uses_tensor_cores = True

    @classmethod
    def large(cls) -> list[Self]:
        """Return long prompts beside short ones."""
        pieces = ((3000, 256), (0, 777), (1500, 1))
        return [
            cls("v4", "float16", 64, 16, 9, 3, pieces, None),
            cls("v4", "float16", 128, 16, 32, 8, pieces, 512),
            cls("v4", "float16", 256, 32, 16, 2, pieces, None),
        ]

    def check(self, ours: Tensor, exact: np.ndarray, magnitude: np.ndarray) -> None:
        """Demand what is left if each share, and then the result, is rounded."""
        found = to_numpy(ours)
        assert found.shape == exact.shape
        assert np.isfinite(found).all(), "NaN: not written, or read too far"
        unit = torch.finfo(ours.dtype).eps / 2
        # Of a share, and of the sum of them that divides it; of the result.
        allowed = 2 * unit * magnitude + unit * np.abs(exact)
        # Sums in float32, and shares of float16 that are too small to be normal.
        allowed += 1e-6 * (1 + abs(self.shift))
        worst = (np.abs(found - exact) / allowed).max(initial=0)
        assert worst <= 1, f"off by {worst:.3g} times what rounding explains"
