"""What the kernels that choose tokens have to compute.

Another last digit of an exponential may move a border by some 10^-7 of the whole. So a
case accepts what NumPy finds with any border within `SLACK` of its own. Where all
shares are 0 or 1 nothing is rounded, and so nothing else is allowed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import cuda_sampling, rungs
from tests.kernels.cases import (
    HIDDEN_SIZES,
    Case,
    new_memory_is_nan,
    rows_for,
    to_numpy,
)

SLACK = 2e-6
UNIT = 2.0**-44  # the smallest share that counts
BELOW_ONE = 1 - 2**-53
GAP = 8  # between rows, full of NaN
OTHERS = 2  # rows of requests that take the best token
KINDS_OF_SCORES = ["normal", "ties", "flat"]
TEMPERATURES = [0.7, 1.0, 3.0, 1e-300, 1e30]
# min_p, top_k (0 is all), top_p; one after the other for the rows of a batch.
CUTS = [
    (0.0, 0, 0.75),
    (0.0, 5, 1.0),
    (0.02, 0, 1.0),
    (0.0, 40, 0.5),
    (0.001, 300, 0.9),
    (0.0, 0, 1.0),
    (1.0, 3, 0.75),
    (0.0, 1, 1.0),
    (0.0, 0, 0.0),
]


def spread(rows: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """Copy rows to where NaN lies between them."""
    num_rows, size = rows.shape
    wide = torch.full((num_rows, size + GAP), torch.nan, dtype=dtype, device=device)
    wide[:, :size] = rows
    return wide[:, :size]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Tell whether two tensors are equal, NaN included."""
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.nan_to_num(7), theirs.nan_to_num(7)
    )


@dataclass(frozen=True)
class ArgmaxCase(Case):
    """Rows with ties, some with NaN, infinities, or both zeros."""

    version: str
    dtype: str
    size: int
    num_rows: int
    part_size: int = 100
    file = "argmax.cu"
    versions = ("v1", "v2", "v3")
    # With one part v3 is v2.
    compiled_for: ClassVar = {"size": [HIDDEN_SIZES[0], HIDDEN_SIZES[-1]]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill threads and parts, and sizes that do not."""
        return {"size": HIDDEN_SIZES, "num_rows": rows_for(version)}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "bfloat16", 2064, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more scores than threads, more parts than a warp, and many rows."""
        return [
            case
            for version in cls.versions
            for case in (
                cls(version, "float32", 1000, 7, part_size=3),
                cls(version, "bfloat16", 31, 300, part_size=30),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a few long rows, in parts as they are by default."""
        size = cuda_sampling.PART_SIZE
        return [cls(v, "float32", 8192, 4, part_size=size) for v in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return the scores of vocabularies."""
        return [
            cls("v2", "float32", 49_152, 300, part_size=2048),
            cls("v3", "float32", 128_256, 9, part_size=2048),
            cls("v3", "bfloat16", 49_151, 1, part_size=2048),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        x = torch.randn(self.num_rows, self.size, generator=self.random()) * 4
        x = x.round()
        for row, values in zip(x, special_rows(self.size), strict=False):
            row[:] = values
        logits = spread(x.flip(0), getattr(torch, self.dtype), device)
        before = logits.clone()
        largest = torch.full_like(before[:, 0], -7)
        ids = torch.full((self.num_rows,), -7, device=device)
        with new_memory_is_nan():
            cuda_sampling.argmax(
                kernels, self.version, largest, ids, logits, self.part_size, **options
            )
        expected = torch.from_numpy(to_numpy(logits).argmax(axis=-1))
        assert ids.cpu().equal(expected), f"{ids.tolist()}, not {expected.tolist()}"
        assert same(largest, before.gather(1, ids.unsqueeze(-1)).squeeze(-1))
        assert same(logits, before), "an input was changed"


def special_rows(size: int) -> Iterator[Tensor]:
    """Yield rows in which an order of numbers may go wrong."""
    middle, last = size // 2, size - 1
    yield torch.full((size,), -torch.inf)
    row = torch.zeros(size)
    row[last], row[middle] = torch.inf, -torch.nan
    yield row
    row[middle // 2] = torch.nan
    yield row
    row = torch.full((size,), -1.0)
    row[middle:] = 0.0
    row[middle] = -0.0
    yield row
    row = torch.zeros(size)
    row[middle] = 2.0**-24  # the smallest of all that float16 has
    yield row
    row = torch.ones(size)
    row[last] += 2.0**-23  # the next number in float32
    yield row


def draw_scores(kind: str, num_rows: int, size: int, random: torch.Generator) -> Tensor:
    """Return scores; where there are many rows, the first two have no best score."""
    x = torch.randn(num_rows, size, generator=random) * 4
    if kind == "ties":
        x = (x / 2).round()
    x[:, 1::7] -= 50  # at no usual temperature a share
    if kind == "flat":
        x[:] = 3
    if num_rows > 3 + OTHERS:
        x[0], x[1, -1] = -torch.inf, torch.nan
        if kind == "normal":
            x[2, size // 2] = torch.finfo(torch.float32).max
    return x


def best_first(scores: np.ndarray) -> np.ndarray:
    """Return the tokens from the best score to the worst, equal ones by id."""
    return np.argsort(-scores, kind="stable")


def masses_of(scores: np.ndarray, temperature: float, slack: float) -> np.ndarray:
    """Return shares, those that are too small as 0, [size] float64."""
    temperature = max(temperature, 2.0**-126)
    with np.errstate(over="ignore"):
        shares = np.exp((scores - scores.max()) / temperature)
    return np.floor(shares * (1 + slack) / UNIT) * UNIT


def slacks_for(scores: np.ndarray, temperature: float) -> tuple[float, ...]:
    """Return how far borders may move: not at all if no share has to be rounded."""
    is_exact = np.isin(masses_of(scores, temperature, 0), (0, 1)).all()
    return (0,) if is_exact else (0, SLACK, -SLACK)


def kept_by_cuts(
    scores: np.ndarray,
    temperature: float,
    cut: tuple[float, int, float],
    slack: float,
) -> int:
    """Return how many tokens, from the best on, the cuts keep.

    Args:
        scores: Of a row.
        temperature: Of a request.
        cut: min_p, top_k and top_p.
        slack: All borders are moved by this share of them.
    """
    min_p, top_k, top_p = cut
    masses = masses_of(scores, temperature, slack)[best_first(scores)]
    num = np.count_nonzero((masses > 0) & (masses >= min_p * (1 + slack)))
    num = max(1, min(num, top_k))
    ends = masses[:num].cumsum()
    part = top_p if top_p == 1 else min(1, top_p * (1 + slack))
    return min(num, 1 + int(np.searchsorted(ends, part * ends[-1])))


def drawn_from(
    scores: np.ndarray, temperature: float, uniform: float, num_kept: int, slack: float
) -> int:
    """Return the token on whose stretch a number falls.

    Args:
        scores: Of a row.
        temperature: Of a request.
        uniform: The number.
        num_kept: How many tokens are kept, from the best on.
        slack: The number is moved by this.
    """
    masses = masses_of(scores, temperature, 0)
    masses[best_first(scores)[num_kept:]] = 0
    ends = masses.cumsum()
    point = min(max(uniform + slack, 0), BELOW_ONE) * ends[-1]
    return int(np.searchsorted(ends, point, side="right"))


@dataclass(frozen=True)
class RequestsCase(Case):
    """Requests that draw from rows, in an order of their own."""

    version: str
    dtype: str
    size: int
    num_requests: int
    scores: str
    versions = ("v1", "v2", "v3")
    compiled_for: ClassVar = {"size": HIDDEN_SIZES[:1]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill threads, and sizes that do not."""
        requests = [1, 3, 40] if version == "v1" else [1, 3, 12]
        sizes = {"size": HIDDEN_SIZES, "num_requests": requests}
        return sizes | {"scores": KINDS_OF_SCORES}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no requests."""
        return cls(version, "bfloat16", 2064, 0, "normal")

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more scores than threads or a crowd; of v1, many requests."""
        many = [(40, 300, "ties"), (100, 12, "normal"), (64, 9, "flat")]
        long = [(2304, 12, "normal"), (768, 9, "flat"), (300, 12, "ties")]
        types = ["bfloat16", "float32", "float32"]
        return [
            cls(version, dtype, *values)
            for version in cls.versions
            for dtype, values in zip(
                types, many if version == "v1" else long, strict=True
            )
        ]

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and their largest scores, rows and temperatures."""
        random, num = self.random(), self.num_requests
        x = draw_scores(self.scores, num + OTHERS, self.size, random)
        logits = x.to(getattr(torch, self.dtype))
        order = torch.arange(num + OTHERS)
        if num == 1:  # it has the last row, behind which there is nothing
            order = order.flip(0)
        if num > 3:  # those that have no best score are among the requests
            order[OTHERS + 2 :] = order[OTHERS + 2 :].flip(0)
        rows = order[:num].flip(0)
        largest = logits.max(dim=-1).values
        largest[order[num:]] = torch.nan
        temperatures = torch.tensor(TEMPERATURES).double().repeat(num)[:num]
        temperatures[temperatures < 1e-30] = 1e-300  # float32 has no such number
        return logits, [largest, rows, temperatures]

    def rows_of_numbers(
        self, logits: Tensor, rows: Tensor
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the requests that have a best score, each with its row."""
        for request, row in enumerate(rows.tolist()):
            scores = to_numpy(logits[row])
            if math.isfinite(scores.max()):
                yield request, scores


def check_ids(ours: Tensor, allowed: dict[int, set[int]]) -> None:
    """Demand an id that is allowed; 0 where there is nothing to choose."""
    num_open = sum(len(ids) > 1 for ids in allowed.values())
    assert num_open <= 1 + len(allowed) // 10, "the case decides too little"
    for request, found in enumerate(ours.tolist()):
        expected = allowed.get(request, {0})
        assert found in expected, f"request {request}: {found}, not {expected}"


@dataclass(frozen=True)
class CutCase(RequestsCase):
    """Requests with cuts of all kinds."""

    file = "cut.cu"

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a few requests."""
        return [cls(version, "float32", 512, 3, "normal") for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return the scores of vocabularies."""
        return [
            cls(version, "float32", size, 40, scores)
            for version in ("v2", "v3")
            for size, scores in ((49_152, "normal"), (128_256, "ties"))
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        logits, requests = self.inputs()
        num = self.num_requests
        cuts = [
            (min_p, top_k if 0 < top_k < self.size else self.size, top_p)
            for min_p, top_k, top_p in (CUTS * num)[:num]
        ]
        columns = torch.tensor(cuts, dtype=torch.float64).view(-1, 3).unbind(-1)
        min_p, top_k, top_p = (column.contiguous() for column in columns)
        _, rows, temperatures = requests
        allowed = {}
        for request, scores in self.rows_of_numbers(logits, rows):
            order, cut = best_first(scores), cuts[request]
            temperature = float(temperatures[request])
            allowed[request] = {
                int(order[kept_by_cuts(scores, temperature, cut, slack) - 1])
                for slack in slacks_for(scores, temperature)
            }

        given = [*requests, min_p, top_k.long(), top_p]
        scores = spread(logits, logits.dtype, device)
        inputs = [scores, *(x.to(device) for x in given)]
        before = [x.clone() for x in inputs]
        last_ids = torch.full((num,), -7, device=device)
        cuda_sampling.cut(kernels, self.version, last_ids, *inputs, **options)
        check_ids(last_ids, allowed)
        assert all(map(same, inputs, before)), "an input was changed"


@dataclass(frozen=True)
class DrawCase(RequestsCase):
    """Requests that draw, the first of them from a part of the tokens."""

    file = "draw.cu"

    @classmethod
    def killers(cls) -> list[Self]:
        """Return also more pages than threads."""
        return [*super().killers(), cls("v3", "float32", 66_000, 1, "flat")]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a few requests."""
        return [cls(version, "float32", 4096, 3, "normal") for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return the scores of vocabularies."""
        return [
            cls(version, "float32", size, 40, scores)
            for version in cls.versions
            for size, scores in ((49_152, "normal"), (128_256, "ties"))
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        logits, requests = self.inputs()
        num, num_cut = self.num_requests, self.num_requests * 2 // 3
        _, rows, temperatures = requests
        # As many tokens as a power of two: their stretches begin at exact numbers.
        num_kept = [2 ** (i % self.size.bit_length()) for i in range(num)]
        num_kept[num_cut:] = [self.size] * (num - num_cut)
        uniforms = torch.rand(num, generator=self.random(), dtype=torch.float64)
        for request in range(num_cut):
            # Right where a stretch begins, or right before it.
            uniforms[request] = (uniforms[request] * num_kept[request]).floor()
            uniforms[request] /= num_kept[request]
            if request % 2:
                uniforms[request] = np.nextafter(float(uniforms[request]), 0)
        uniforms[-2:-1], uniforms[-1:] = 0, BELOW_ONE
        last_ids = torch.zeros(num, dtype=torch.int64)
        allowed = {}
        for request, scores in self.rows_of_numbers(logits, rows):
            last_ids[request] = int(best_first(scores)[num_kept[request] - 1])
            temperature, number = float(temperatures[request]), float(uniforms[request])
            allowed[request] = {
                drawn_from(scores, temperature, number, num_kept[request], slack)
                for slack in slacks_for(scores, temperature)
            }

        scores = spread(logits, logits.dtype, device)
        given = [*requests, uniforms, last_ids[:num_cut]]
        inputs = [scores, *(x.to(device) for x in given)]
        before = [x.clone() for x in inputs]
        drawn = torch.full((num,), -7, device=device)
        with new_memory_is_nan():
            cuda_sampling.draw(kernels, self.version, drawn, *inputs, **options)
        check_ids(drawn, allowed)
        assert all(map(same, inputs, before)), "an input was changed"
