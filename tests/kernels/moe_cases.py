"""What the kernels of experts have to compute (appendix A26)."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import cuda_moe, rungs
from tests.kernels.cases import (
    HIDDEN_SIZES,
    Case,
    assert_rounded,
    new_memory_is_nan,
    rows_for,
    to_numpy,
)

# Experts, and how many of them a token chooses: few and all; more than lanes.
CHOICES = [(4, 2), (1, 1), (33, 32), (60, 4), (128, 8), (300, 10)]
MORE_CHOICES = [*CHOICES, (40, 36)]  # than lanes remember
# Rows of each expert: one has none, one has several tiles of any height.
COUNTS = [(5,), (0, 3, 17, 0, 1), (16, 0, 131, 0)]


def best_experts(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Return the experts with the best scores, NaN above all; of equal ones the first.

    Args:
        scores: [num_tokens, num_experts].
        top_k: How many.
    """
    is_number = ~np.isnan(scores)
    ranks = np.where(is_number, -scores, 0)
    return np.lexsort((ranks, is_number), axis=-1)[:, :top_k]


@dataclass(frozen=True)
class TopkCase(Case):
    """Scores of experts: with ties, far apart, some without a sum."""

    version: str
    dtype: str
    num_experts: int
    top_k: int
    num_tokens: int
    renormalize: bool
    file = "topk_softmax.cu"
    versions = ("v1", "v2")
    # Templates differ in how many experts a lane has.
    compiled_for: ClassVar = {"choices": CHOICES}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return experts that fill warps, and experts that do not."""
        choices = MORE_CHOICES if version == "v1" else CHOICES
        sizes = {"choices": choices, "num_tokens": rows_for(version)}
        return sizes | {"renormalize": [False, True]}

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case; experts, and how many are chosen, are one factor."""
        num_experts, top_k = values.pop("choices")
        return cls(version, dtype, num_experts, top_k, **values)

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "bfloat16", 128, 8, 0, True)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return experts that fill lanes or not, and more tokens than threads."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("float32", 60, 4, 300, False),
                ("bfloat16", 100, 32, 9, True),
                ("float32", 5, 5, 7, True),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return tokens of Qwen3-30B-A3B."""
        return [cls(version, "float32", 128, 8, 32, True) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt."""
        return [
            cls("v2", "float32", 128, 8, 8000, True),
            cls("v2", "bfloat16", 512, 10, 3000, False),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        x = torch.randn(self.num_tokens, self.num_experts, generator=self.random()) * 3
        x += torch.linspace(-200, 200, self.num_tokens).unsqueeze(-1)  # exp overflows
        if self.num_tokens > 6:  # rows that an order of numbers may get wrong
            x[:3] = x[:3].round()
            x[1, 1:] = -torch.inf
            x[2], x[2, -1] = 0, 2.0**-20
            x[3] = -torch.inf
            x[4, -1], x[5, self.num_experts // 2] = torch.nan, torch.inf
        logits = x.to(getattr(torch, self.dtype)).to(device)
        before, shape = logits.clone(), (self.num_tokens, self.top_k)
        weights = torch.full(shape, -7.0, device=device)
        experts = torch.full(shape, -7, device=device)
        given = (weights, experts, logits, self.renormalize)
        cuda_moe.topk_softmax(kernels, self.version, *given, **options)

        scores = to_numpy(logits)
        expected = best_experts(scores, self.top_k)
        assert experts.cpu().equal(torch.from_numpy(expected)), "other experts"
        with np.errstate(invalid="ignore"):  # rows without a sum
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            chosen = np.take_along_axis(shares, expected, axis=-1)
            of = chosen if self.renormalize else shares
            chosen /= of.sum(axis=-1, keepdims=True)
        assert_rounded(weights, chosen)
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "input changed"


def draw_choices(
    kind: str, num_tokens: int, top_k: int, num_experts: int, random: torch.Generator
) -> Tensor:
    """Return experts, [num_tokens, top_k]: all alike, only the last, or few of many."""
    shape = (num_tokens, top_k)
    if kind == "last":
        return torch.full(shape, num_experts - 1)
    if kind == "even":
        return torch.randint(0, num_experts, shape, generator=random)
    return (torch.rand(shape, generator=random) ** 4 * num_experts).long()


@dataclass(frozen=True)
class PermuteCase(Case):
    """Choices of a batch; experts that nobody or everybody has chosen."""

    version: str
    dtype: str
    num_experts: int
    num_tokens: int
    top_k: int
    kind: str
    part_size: int
    file = "moe_permute.cu"
    versions = ("v1", "v2", "v3")
    dtypes: ClassVar = ["int64"]
    compiled_for: ClassVar = {"tokens": [(300, 3), (1, 1)]}  # with one part v3 is v2

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return choices and experts that fill blocks, and that do not."""
        sizes = {"num_experts": [4, 1, 128, 300], "part_size": [100, 256, 700]}
        tokens = [(300, 3), (1, 1), (3, 2), (64, 4)]
        return sizes | {"tokens": tokens, "kind": ["even", "skewed", "last"]}

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case; tokens and choices of each are one factor."""
        num_tokens, top_k = values.pop("tokens")
        return cls(version, dtype, num_tokens=num_tokens, top_k=top_k, **values)

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "int64", 4, 0, 2, "even", 100)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more experts and more choices than threads, in parts."""
        return [
            cls(version, "int64", *values)
            for version in cls.versions
            for values in ((300, 350, 2, "skewed", 300), (5, 129, 4, "even", 257))
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return tokens of Qwen3-30B-A3B."""
        return [cls(v, "int64", 128, 256, 8, "even", 512) for v in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt, and one whose tokens agree."""
        size = cuda_moe.PART_SIZE
        return [
            cls("v3", "int64", 128, 16_000, 8, "even", size),
            cls("v3", "int64", 512, 8000, 10, "last", size),
            cls("v2", "int64", 512, 2000, 10, "skewed", size),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        sizes = (self.num_tokens, self.top_k, self.num_experts)
        chosen = draw_choices(self.kind, *sizes, self.random())
        experts = chosen.to(device)
        order = torch.full((chosen.numel(),), -7, device=device)
        offsets = torch.full((self.num_experts + 1,), -7, device=device).int()
        given = (order, offsets, experts, self.part_size)
        with new_memory_is_nan():
            cuda_moe.moe_permute(kernels, self.version, *given, **options)
        flat = chosen.flatten().numpy()
        expected = np.argsort(flat, kind="stable")
        assert order.tolist() == expected.tolist(), "another order"
        ends = np.bincount(flat, minlength=self.num_experts).cumsum()
        assert offsets.tolist() == [0, *ends.tolist()], "other offsets"
        assert experts.cpu().equal(chosen), "an input was changed"


@dataclass(frozen=True)
class GroupedCase(Case):
    """Rows of experts, some of which have none: their weights are NaN."""

    version: str
    dtype: str
    in_size: int
    out_size: int
    counts: tuple[int, ...]
    file = "grouped_linear.cu"
    versions = ("v1", "v2")
    # Numbers that packs divide, and that they do not.
    compiled_for: ClassVar = {"in_size": [64, 31]}
    height: ClassVar[int | None] = None

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill tiles, and sizes that do not."""
        sizes = {"in_size": [64, 31, 200], "out_size": [64, 1, 130]}
        return sizes | {"counts": COUNTS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "float16", 64, 130, (0, 0))

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more packs than lanes, more columns and more experts than threads."""
        counts = [0] * 300
        counts[3], counts[140], counts[270], counts[299] = 1, 11, 1, 2
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("float32", 200, 270, (9, 0, 3)),
                ("bfloat16", 31, 5, tuple(counts)),
                ("float16", 520, 6, (3, 8)),
                ("bfloat16", 40, 5, (15,)),  # as many tiles as the host allows
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a batch of 16 tokens that choose 2 of 4 experts."""
        return [cls(v, "float16", 128, 128, (9, 0, 20, 3)) for v in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a small batch, and a layer of Qwen3-30B-A3B."""
        return [cls("v2", "bfloat16", 2048, 1536, (1, 0, 5) * 42)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        num_rows, num_experts = sum(self.counts), len(self.counts)
        x = torch.randn(num_rows, self.in_size, generator=random).to(dtype)
        weight = torch.randn(
            num_experts, self.out_size, self.in_size, generator=random
        ).div(math.sqrt(self.in_size))
        weight[[count == 0 for count in self.counts]] = torch.nan
        weight = weight.to(dtype)
        expected = np.empty((num_rows, self.out_size))
        offsets = [0, *np.cumsum(self.counts).tolist()]
        for expert, (start, end) in enumerate(pairwise(offsets)):
            matrix = to_numpy(weight[expert]).T
            expected[start:end] = to_numpy(x[start:end]) @ matrix

        given = [x, weight, torch.tensor(offsets, dtype=torch.int32)]
        inputs = [x.to(device) for x in given]
        before = [x.clone() for x in inputs]
        shape = (num_rows, self.out_size)
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        options |= {"height": self.height}
        cuda_moe.grouped_linear(kernels, self.version, out, *inputs, **options)
        assert_rounded(out, expected)
        for x, y in zip(inputs, before, strict=True):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), "an input was changed"


@dataclass(frozen=True)
class TileCase(GroupedCase):
    """The same in tiles of a certain height."""

    height: int
    versions = ("v3",)
    compiled_for: ClassVar = {"in_size": [64, 31], "height": list(cuda_moe.HEIGHTS)}

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case."""
        return cls(version, dtype, **values)

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return the same with both heights."""
        return super().factors(version) | {"height": list(cuda_moe.HEIGHTS)}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "float16", 64, 130, (0, 0), 16)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return several tiles in each direction, and experts in three rounds."""
        counts = [0] * 300
        counts[3], counts[140], counts[270], counts[299] = 1, 18, 1, 2
        widest = cls.dtypes[0]  # what is lost in sums shows best
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                (widest, 200, 130, (17, 0, 33), 16),
                ("bfloat16", 31, 5, tuple(counts), 16),
                (widest, 70, 64, (65, 3), 64),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a batch of 16 tokens that choose 2 of 4 experts."""
        return [cls(v, "float16", 128, 128, (9, 0, 20, 3), 16) for v in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a small batch and a prompt, in layers of Qwen3-30B-A3B."""
        (version,), widest = cls.versions, cls.dtypes[0]
        return [
            cls(version, widest, 2048, 1536, (1, 0, 5) * 42, 16),
            cls(version, "bfloat16", 768, 2048, (70, 0, 31) * 42, 64),
        ]


@dataclass(frozen=True)
class TensorTileCase(TileCase):
    """The same by tensor cores."""

    versions = ("v4",)
    dtypes: ClassVar = ["float16", "bfloat16"]
    uses_tensor_cores = True


@dataclass(frozen=True)
class CombineCase(Case):
    """Rows in any order, and the weights of their choices."""

    version: str
    dtype: str
    size: int
    num_tokens: int
    top_k: int
    file = "moe_combine.cu"
    versions = ("v1", "v2")
    compiled_for: ClassVar = {"size": HIDDEN_SIZES}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill packs and threads, and sizes that do not."""
        tokens = [(1, 1), (3, 2), (40, 8)]
        return {"size": HIDDEN_SIZES, "tokens": tokens}

    @classmethod
    def of(cls, version: str, dtype: str, **values: Any) -> Self:
        """Make a case; tokens and choices of each are one factor."""
        num_tokens, top_k = values.pop("tokens")
        return cls(version, dtype, num_tokens=num_tokens, top_k=top_k, **values)

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "bfloat16", 576, 0, 2)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more packs than threads, single numbers, and many rows."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (("bfloat16", 2064, 3, 4), ("float32", 31, 90, 3))
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return tokens that choose as those of Qwen3-30B-A3B."""
        return [cls(version, "float32", 256, 32, 8) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a small batch, and a long prompt."""
        return [
            cls("v1", "bfloat16", 2048, 16, 8),
            cls("v2", "bfloat16", 2048, 5000, 8),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        num_choices = self.num_tokens * self.top_k
        y = torch.randn(num_choices, self.size, generator=random).to(dtype)
        order = torch.randperm(num_choices, generator=random)
        weights = torch.rand(self.num_tokens, self.top_k, generator=random)
        said = np.empty((num_choices, self.size))
        said[order.numpy()] = to_numpy(y)
        said = said.reshape(self.num_tokens, self.top_k, self.size)
        expected = (said * to_numpy(weights)[..., None]).sum(axis=1)

        inputs = [x.to(device) for x in (y, order, weights)]
        before = [x.clone() for x in inputs]
        shape = (self.num_tokens, self.size)
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        with new_memory_is_nan():
            cuda_moe.moe_combine(kernels, self.version, out, *inputs, **options)
        assert_rounded(out, expected)
        assert all(map(torch.equal, inputs, before)), "an input was changed"
