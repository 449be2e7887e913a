"""Cases of the small kernels of a layer (appendix A18)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from minivllm.ops import cuda_layers, rungs
from tests.kernels.cases import (
    BLOCK_SIZES,
    HIDDEN_SIZES,
    Case,
    assert_rounded,
    to_numpy,
)

NUM_ROWS = [1, 3, 7]
ERFC = np.vectorize(math.erfc, otypes=[float])


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x times the probability that a normal random number is below x."""
    return 0.5 * x * ERFC(-x / math.sqrt(2))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Return what was used for gelu before erf was fast.

    Its 0.5 * (1 + tanh(z)) is exp(z) / (exp(z) + exp(-z)), which loses no digits.
    """
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * np.exp(z - np.logaddexp(z, -z))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}


@dataclass(frozen=True)
class RotaryCase(Case):
    """Heads of a batch; only the first are rotated."""

    version: str
    dtype: str
    head_dim: int
    num_rotated: int
    num_tokens: int
    file = "rotary.cu"
    versions = ("rotary_embedding",)
    compiled_for: ClassVar = {"head_dim": [30, 64]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return heads of packs and of single numbers, few and more than threads."""
        sizes = {"head_dim": [2, 30, 64, 80, 256], "num_rotated": [1, 5, 40]}
        return sizes | {"num_tokens": NUM_ROWS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "float16", 64, 5, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more heads than a block has threads for, and single numbers."""
        (version,) = cls.versions
        return [cls(version, "float32", 64, 40, 3), cls(version, "bfloat16", 30, 5, 2)]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return tokens of SmolLM2: nine queries and three keys."""
        return [cls(version, "float32", 64, 12, 32) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt."""
        return [cls("rotary_embedding", "bfloat16", 128, 40, 5000)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check that it turned these heads, and no others."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        # Rows with something behind the heads, as those of a merged product.
        shape = (self.num_tokens, self.num_rotated + 3, self.head_dim)
        wide = torch.randn(shape, generator=random).to(dtype)
        angles = torch.rand(
            self.num_tokens, 1, self.head_dim // 2, generator=random
        ).mul(100)
        cos, sin = angles.cos(), angles.sin()
        expected = to_numpy(wide)
        a, b = np.split(expected[:, : self.num_rotated].copy(), 2, axis=-1)
        turned = [a * to_numpy(cos) - b * to_numpy(sin)]
        turned += [b * to_numpy(cos) + a * to_numpy(sin)]
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

        ours = wide.to(device, copy=True)
        heads = ours[:, : self.num_rotated + 2]
        given = [cos.to(device), sin.to(device)]
        cuda_layers.launch_rotary_embedding(
            kernels, heads, self.num_rotated, *given, **options
        )
        assert_rounded(ours[:, : self.num_rotated], np.concatenate(turned, axis=-1))
        rest = slice(self.num_rotated, None)
        assert ours[:, rest].cpu().equal(wide[:, rest]), "another head was changed"
        assert given[0].cpu().equal(cos) and given[1].cpu().equal(sin)


@dataclass(frozen=True)
class ActivationCase(Case):
    """Rows of [gate, up]."""

    version: str
    dtype: str
    activation: str
    size: int
    num_rows: int
    file = "activations.cu"
    versions = ("act_and_mul",)
    compiled_for: ClassVar = {"activation": list(ACTIVATIONS), "size": HIDDEN_SIZES}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill packs and blocks, and sizes that do not."""
        sizes = {"size": HIDDEN_SIZES, "num_rows": NUM_ROWS}
        return {"activation": list(ACTIVATIONS)} | sizes

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "float16", "gelu", 576, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return each activation; several parts of a row, and single numbers."""
        (version,) = cls.versions
        return [
            cls(version, "float32", "silu", 2064, 3),
            cls(version, "float32", "gelu", 31, 3),
            cls(version, "float32", "gelu_tanh", 31, 3),
            cls(version, "float16", "gelu", 2064, 2),
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return as many numbers as chapter 6 does."""
        return [cls(version, "float32", "silu", 576, 32) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt of a large model."""
        return [cls("act_and_mul", "bfloat16", "gelu_tanh", 14_336, 3000)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check what it wrote, and that it wrote nothing else."""
        dtype = getattr(torch, self.dtype)
        shape = (self.num_rows, 2 * self.size)
        numbers = torch.randn(shape, generator=self.random()) * 2
        gate_up = numbers.to(dtype).to(device)
        before = gate_up.clone()
        shape = (self.num_rows, self.size)
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        cuda_layers.launch_act_and_mul(
            kernels, out, gate_up, self.activation, **options
        )
        gate, up = np.split(to_numpy(before), 2, axis=1)
        assert_rounded(out, ACTIVATIONS[self.activation](gate) * up, units=8)
        assert gate_up.equal(before), "an input was changed"


@dataclass(frozen=True)
class GatedMLPCase(Case):
    """A few rows, and a weight for gates and ups."""

    version: str
    dtype: str
    activation: str
    hidden: int
    size: int
    num_rows: int
    file = "gated_mlp.cu"
    versions = ("gated_mlp",)
    compiled_for: ClassVar = {
        "activation": ["silu"],
        "hidden": [31, 64],
        "num_rows": [1, 8],
    }

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return rows that fill a pass or not, and packs that fill a warp or not."""
        sizes = {"hidden": [1, 31, 64, 576], "size": [1, 4, 11]}
        sizes |= {"num_rows": [1, 2, 3, 7, 8, 19]}
        return {"activation": list(ACTIVATIONS)} | sizes

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no rows."""
        return cls(version, "float16", "gelu", 64, 11, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more packs than lanes, a pass that is not full, and several."""
        (version,) = cls.versions
        return [
            cls(version, "float32", "silu", 200, 11, 3),
            cls(version, "float32", "gelu", 31, 5, 11),
            cls(version, "float16", "gelu_tanh", 576, 4, 1),
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return a small batch, and a part of the columns of SmolLM2."""
        return [cls(version, "float32", "silu", 576, 96, 4) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a layer of a model of 8 billion, and more rows than one pass."""
        return [
            cls("gated_mlp", "bfloat16", "silu", 4096, 14_336, 8),
            cls("gated_mlp", "float16", "gelu_tanh", 576, 1536, 61),
        ]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        x = torch.randn(self.num_rows, self.hidden, generator=random).to(dtype)
        weight = torch.randn(2 * self.size, self.hidden, generator=random)
        weight = (2 * weight / math.sqrt(self.hidden)).to(dtype)
        both = to_numpy(x) @ to_numpy(weight).T
        gate, up = np.split(both, 2, axis=1)

        inputs = [x.to(device), weight.to(device)]
        before = [given.clone() for given in inputs]
        shape = (self.num_rows, self.size)
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        cuda_layers.launch_gated_mlp(kernels, out, *inputs, self.activation, **options)
        assert_rounded(out, ACTIVATIONS[self.activation](gate) * up)
        assert all(map(torch.equal, inputs, before)), "an input was changed"


@dataclass(frozen=True)
class EmbeddingCase(Case):
    """Token ids, some of them the same."""

    version: str
    dtype: str
    size: int
    num_tokens: int
    file = "embedding.cu"
    versions = ("embedding",)
    compiled_for: ClassVar = {"size": HIDDEN_SIZES}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return sizes that fill packs and blocks, and sizes that do not."""
        return {"size": HIDDEN_SIZES, "num_tokens": NUM_ROWS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "float16", 576, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return several parts of a row, and single numbers."""
        (version,) = cls.versions
        return [cls(version, "float32", 2064, 5), cls(version, "bfloat16", 31, 5)]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return rows of SmolLM2."""
        return [cls(version, "float32", 576, 32) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt."""
        return [cls("embedding", "bfloat16", 4096, 5000)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check what it wrote, and that it wrote nothing else."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        table = torch.randn(11, self.size, generator=random).to(dtype)
        token_ids = torch.randint(0, 11, (self.num_tokens,), generator=random)
        token_ids[:2] = torch.tensor([10, 0])[: self.num_tokens]
        expected = table[token_ids]
        inputs = [token_ids.to(device), table.to(device)]
        out = torch.full_like(expected, torch.nan, device=device)
        cuda_layers.launch_embedding(kernels, out, *inputs, **options)
        assert out.cpu().equal(expected), "other rows"
        for ours, given in zip(inputs, (token_ids, table), strict=True):
            assert ours.cpu().equal(given), "an input was changed"


@dataclass(frozen=True)
class CacheCase(Case):
    """Keys and values of new tokens; one of them is padding."""

    version: str
    dtype: str
    head_dim: int
    block_size: int
    num_kv_heads: int
    num_tokens: int
    file = "reshape_and_cache.cu"
    versions = ("reshape_and_cache",)
    compiled_for: ClassVar = {"head_dim": [30, 64]}

    @classmethod
    def factors(cls, version: str) -> dict[str, list[Any]]:
        """Return heads of packs and of single numbers, few and more than threads."""
        sizes = {"head_dim": [2, 30, 64, 80, 256], "block_size": BLOCK_SIZES}
        return sizes | {"num_kv_heads": [1, 3, 9], "num_tokens": NUM_ROWS}

    @classmethod
    def empty(cls, version: str) -> Self:
        """Return no tokens."""
        return cls(version, "float16", 64, 16, 3, 0)

    @classmethod
    def killers(cls) -> list[Self]:
        """Return more packs than threads, and single numbers."""
        (version,) = cls.versions
        return [
            cls(version, "float32", 256, 8, 9, 5),
            cls(version, "bfloat16", 30, 8, 3, 4),
        ]

    @classmethod
    def examples(cls) -> list[Self]:
        """Return tokens of SmolLM2."""
        return [cls(version, "float32", 64, 16, 3, 32) for version in cls.versions]

    @classmethod
    def large(cls) -> list[Self]:
        """Return a long prompt."""
        return [cls("reshape_and_cache", "bfloat16", 128, 16, 8, 5000)]

    def run(self, kernels: rungs.Kernels, device: str = "cpu", **options: Any) -> None:
        """Start the kernel and check every slot of the cache."""
        random, dtype = self.random(), getattr(torch, self.dtype)
        heads = (self.num_kv_heads, self.head_dim)
        # Keys have rows of their own; values lie behind nine queries and the keys.
        k = torch.randn(self.num_tokens, *heads, generator=random).to(dtype)
        wide = (self.num_tokens, 9 + 2 * self.num_kv_heads, self.head_dim)
        v = torch.randn(wide, generator=random).to(dtype)
        num_blocks = self.num_tokens // self.block_size + 3
        kv_cache = torch.randn(
            2, num_blocks, self.block_size, *heads, generator=random
        ).to(dtype)
        slots = torch.randperm(num_blocks * self.block_size - 1, generator=random) + 1
        slots = torch.cat([torch.zeros(1).long(), slots])[: self.num_tokens]
        if self.is_padded:
            slots[1] = -1
        expected = kv_cache.clone()
        self.put(k, v[:, -self.num_kv_heads :], expected, slots)

        given = [x.to(device, copy=True) for x in (k, v, kv_cache, slots)]
        ours, values, cache, places = given
        values = values[:, -self.num_kv_heads :]
        cuda_layers.launch_reshape_and_cache(
            kernels, ours, values, cache, places, **options
        )
        assert cache.cpu().equal(expected), "other slots, or other numbers"
        for x, y in zip(given, (k, v, expected, slots), strict=True):
            assert x.cpu().equal(y), "an input was changed"

    @property
    def is_padded(self) -> bool:
        """The table at the top of the file is about a full batch."""
        return 1 < self.num_tokens < 32

    def put(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Write key by key."""
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, self.block_size)
                kv_cache[0, block, offset] = k[token]
                kv_cache[1, block, offset] = v[token]
