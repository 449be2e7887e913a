"""What the kernels of gated delta nets have to compute (appendix A29)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import cuda_delta_net, rungs
from minivllm.reference import gated_delta_net as reference
from tests.kernels.cases import Case, assert_rounded, to_numpy

OTHERS = 2  # slots of texts that are not in the batch


def assert_same_bits(x: Tensor, y: Tensor, what: str) -> None:
    """Demand that nothing was changed, NaN included."""
    same = x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))
    assert same, f"{what} changed"


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    """Return query_start_loc."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def beside_nan(rows: Tensor, device: str) -> Tensor:
    """Return rows that lie apart on a device, with NaN between them."""
    size = rows[0].numel()
    wide = torch.full((len(rows), size + 3), torch.nan, dtype=rows.dtype)
    wide[:, :size] = rows.flatten(1)
    return wide.to(device)[:, :size].unflatten(1, rows.shape[1:])


def slots_of(num_texts: int, random: torch.Generator) -> Tensor:
    """Return a slot for each text: not the first ones, and in no order."""
    return torch.randperm(num_texts + OTHERS, generator=random)[:num_texts]


def check_others(states: Tensor, before: Tensor, slots: Tensor) -> None:
    """Demand that the slots of other texts are as they were, bit by bit."""
    others = [slot for slot in range(len(states)) if slot not in slots]
    assert_same_bits(states.cpu()[others], before[others], "the state of another text")


@dataclass(frozen=True)
class ConvCase(Case):
    """Texts with and without tokens, convolved channel by channel."""

    version: str
    dtype: str
    conv_size: int
    kernel_size: int
    lengths: tuple[int, ...]
    kept_wide: bool  # in float32
    piece_size: int
    file = "causal_conv1d.cu"
    versions = ("v1", "v2", "v3")
    compiled_for: ClassVar = {"kernel_size": [4], "kept_wide": [True, False]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return texts that are longer than a piece, or shorter than what is kept."""
        sizes = [4, 2, 6] if version != "v1" else [4, 2, 1]
        return {
            "conv_size": [40, 1, 300],
            "kernel_size": sizes,
            "lengths": [(9,), (1, 1, 1), (2, 0, 21, 3)],
            "kept_wide": [True, False],
            "piece_size": [8, 5] if version == "v3" else [64],
        }

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return texts without tokens."""
        return cls(version, "bfloat16", 40, 4, (0, 0), True, 64)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return several blocks, pieces of all kinds, and more texts than tokens."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("float32", 300, 4, (0, 17, 1, 8, 0, 0, 2, 33), True, 8),
                ("bfloat16", 3, 3, (1, 4, 0, 2, 1, 1, 5), True, 2),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a prompt and two short texts, with the kernel of Qwen3.5."""
        lengths = (60, 1, 3)
        return [
            cls(version, "float32", 128, 4, lengths, True, 16)
            for version in cls.versions
        ]

    @classmethod
    def large(cls) -> list[Self]:
        """Return prompts beside a batch of decoding texts."""
        lengths = (3000, *[1] * 100, 77)
        return [
            cls(version, dtype, 6144, 4, lengths, True, cuda_delta_net.PIECE)
            for version in ("v2", "v3")
            for dtype in ("float32", "bfloat16")
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        num_texts, num_kept = len(self.lengths), self.kernel_size - 1
        x = torch.randn(sum(self.lengths), self.conv_size, generator=random).to(dtype)
        weight = torch.randn(self.conv_size, self.kernel_size, generator=random)
        weight = weight.to(dtype)
        slots = slots_of(num_texts, random)
        shape = (num_texts + OTHERS, self.conv_size, num_kept)
        states = torch.full(shape, torch.nan)
        states[slots] = torch.randn(num_texts, *shape[1:], generator=random)
        states = states if self.kept_wide else states.to(dtype)
        starts = starts_of(self.lengths)
        expected, kept = np.empty(x.shape), states.clone()
        for slot, (start, end) in zip(slots, pairwise(starts), strict=True):
            state = to_numpy(states[slot].to(dtype))
            given = (to_numpy(x[start:end]), to_numpy(weight), state)
            expected[start:end], state = reference.causal_conv1d(*given)
            if end > start:  # else it is not even rounded
                kept[slot] = torch.from_numpy(np.ascontiguousarray(state)).to(
                    states.dtype
                )

        before = states.clone()
        states = states.to(device)
        tables = [t.to(device) for t in (weight, slots, starts)]
        inputs = [beside_nan(x, device) if len(x) else x.to(device), *tables]
        copies = [t.clone() for t in inputs]
        y = torch.full(x.shape, torch.nan, dtype=dtype, device=device)
        given = (y, states, *inputs, self.piece_size)
        cuda_delta_net.causal_conv1d(kernels, self.version, *given, **options)
        assert_rounded(y, expected)
        check_others(states, before, slots)
        assert states[slots].cpu().equal(kept[slots]), "another state"
        for t, copy in zip(inputs, copies, strict=True):
            assert_same_bits(t, copy, "an input")


@dataclass(frozen=True)
class RuleCase(Case):
    """Heads of keys and values, and texts; some states are not of this batch."""

    version: str
    dtype: str
    key_head_dim: int
    value_head_dim: int
    heads: tuple[int, int]  # of keys, and of values for each
    lengths: tuple[int, ...]

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return heads that fill a warp, and heads that do not."""
        return {
            "key_head_dim": [16, 12, 128],
            "value_head_dim": [20, 128, 33],
            "heads": [(1, 1), (2, 2), (1, 4)],
            "lengths": cls.all_lengths(),
        }

    @classmethod
    def all_lengths(cls) -> list[tuple[int, ...]]:
        """Return tokens of texts."""
        raise NotImplementedError

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no texts."""
        return cls(version, "bfloat16", 16, 20, (1, 2), ())

    def numbers(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return what each token has, states, and the slots of the texts.

        One key is zero, one state does not fade, one fades away at once.
        """
        random, dtype = self.random(), getattr(torch, self.dtype)
        num_tokens, num_texts = sum(self.lengths), len(self.lengths)
        num_key_heads, num_heads = self.heads[0], self.heads[0] * self.heads[1]
        shapes = [(num_key_heads, self.key_head_dim)] * 2
        shapes.append((num_heads, self.value_head_dim))
        q, k, v = (
            torch.randn(num_tokens, *shape, generator=random) * scale
            for shape, scale in zip(shapes, (3.0, 0.7, 1.0), strict=True)
        )
        k += 0.3  # keys that have something to do with each other
        log_decay = -(torch.rand(num_tokens, num_heads, generator=random) ** 4) * 5
        beta = torch.rand(num_tokens, num_heads, generator=random)
        if num_tokens:
            k[num_tokens // 2], log_decay[num_tokens // 3] = 0, -200.0
            log_decay[-1], beta[0] = 0, 1
        slots = slots_of(num_texts, random)
        shape = (num_texts + OTHERS, num_heads, self.key_head_dim, self.value_head_dim)
        states = torch.full(shape, torch.nan)
        states[slots] = torch.randn(num_texts, *shape[1:], generator=random)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        return [q, k, v, log_decay, beta], states, slots

    def expected(
        self, rows: list[Tensor], states: Tensor, slots: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the rule token after token, in float64."""
        q, k, v, log_decay, beta = map(to_numpy, rows)
        q, k = reference.prepare(q, k, v.shape[1])
        read, new_states = np.empty_like(v), []
        starts = starts_of(self.lengths)
        for slot, (start, end) in zip(slots, pairwise(starts), strict=True):
            part = slice(start, end)
            parts = (x[part] for x in (q, k, v, log_decay, beta))
            state = to_numpy(states[slot])
            read[part], state = reference.recurrent_delta_rule(*parts, state)
            new_states.append(state)
        return read, np.array(new_states).reshape(states[slots].shape)

    def start(self, kernels: rungs.Kernels, *given: Any, **options: Any) -> None:
        """Start the rung."""
        raise NotImplementedError

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the rung and check what it wrote, and that it wrote nothing else."""
        rows, states, slots = self.numbers()
        read, new_states = self.expected(rows, states, slots)
        inputs = [x.to(device) for x in (*rows, slots, starts_of(self.lengths))]
        if self.lengths:
            inputs[:3] = [beside_nan(x, device) for x in rows[:3]]
        copies, before = [x.clone() for x in inputs], states.clone()
        states = states.to(device)
        out = torch.full(read.shape, torch.nan, dtype=rows[0].dtype, device=device)
        self.start(kernels, out, states, *inputs, **options)
        # Of a text with many tokens, the roundings of each.
        units = 32 + max(self.lengths, default=0)
        assert_rounded(out, read, units)
        assert_rounded(states[slots], new_states, units)
        check_others(states, before, slots)
        for x, copy in zip(inputs, copies, strict=True):
            assert_same_bits(x, copy, "an input")
        for text, length in enumerate(self.lengths):
            if not length:
                same = (states[slots[text]].cpu(), before[slots[text]])
                assert_same_bits(*same, "the state of a text without tokens")


@dataclass(frozen=True)
class RecurrentCase(RuleCase):
    """One token of each text."""

    file = "recurrent_delta_rule.cu"
    versions = ("v1", "v2", "v3")
    compiled_for: ClassVar = {"key_head_dim": [128], "value_head_dim": [128]}

    @classmethod
    def all_lengths(cls) -> list[tuple[int, ...]]:
        """Return one text, and several."""
        return [(1,), (1, 1, 1)]

    @classmethod
    def killers(cls) -> list[Self]:
        """Return several blocks, and heads that are no multiple of anything."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("float32", 43, 36, (2, 3), (1, 1, 1)),
                ("float16", 70, 300, (1, 2), (1, 1)),
                ("bfloat16", 7, 5, (3, 1), (1,)),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return two texts, and two heads for one of keys, as large as Qwen3.5's."""
        return [
            cls(version, "float32", 128, 128, (1, 2), (1, 1))
            for version in cls.versions
        ]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a batch of Qwen3.5."""
        return [
            cls(version, "bfloat16", 128, 128, (16, 2), (1,) * 64)
            for version in cls.versions
        ]

    def start(self, kernels: rungs.Kernels, *given: Any, **options: Any) -> None:
        """Start the rung; each text has its row."""
        *given, _ = given
        cuda_delta_net.recurrent_delta_rule(kernels, self.version, *given, **options)


@dataclass(frozen=True)
class ChunkedCase(RuleCase):
    """Any number of tokens of each text."""

    file = "chunked_delta_rule.cu"
    versions = ("v1", "v2")
    compiled_for: ClassVar = {"key_head_dim": [128], "value_head_dim": [128]}

    @classmethod
    def all_lengths(cls) -> list[tuple[int, ...]]:
        """Return texts of a chunk of 16 tokens, one more and one less; and none."""
        return [(1,), (15, 0, 17), (16, 5)]

    @classmethod
    def killers(cls) -> list[Self]:
        """Return several blocks and chunks."""
        return [
            cls(version, *values)
            for version in cls.versions
            for values in (
                ("float32", 44, 5, (1, 2), (18,)),
                ("float32", 12, 68, (2, 3), (0, 35, 3)),
            )
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a short text, and two heads for one of keys, as large as Qwen3.5's."""
        return [
            cls(version, "float16", 128, 128, (1, 2), (20,)) for version in cls.versions
        ]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt beside short ones."""
        lengths = (1500, 1, 16, 333)
        return [
            cls(version, dtype, 128, 128, (4, 2), lengths)
            for version in cls.versions
            for dtype in ("float32", "bfloat16")
        ]

    def start(self, kernels: rungs.Kernels, *given: Any, **options: Any) -> None:
        """Start the rung."""
        cuda_delta_net.chunked_delta_rule(kernels, self.version, *given, **options)
