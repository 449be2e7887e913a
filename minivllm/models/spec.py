"""Describe a decoder as data: what it computes, and what its callers must know of it.

A family file turns a checkpoint's `config.json` into a `ModelSpec`; the loader and
both decoders read the spec and never the config, so no decoder asks for a family.

In vLLM: vllm/config/model.py (ModelConfig), read by one model file per family.
Source: chapter 1, "Naive generation".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from minivllm.errors import ConfigError, WeightMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """The rope scaling of Llama 3.1: slow frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFactors:
    """One divisor per frequency, as a GGUF file stores any scaling (`rope_freqs`)."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles."""

    theta: float
    scaling: Llama3Scaling | RopeFactors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The knobs of a decoder; sizes in elements, positions in tokens.

    `dtype` is what the makers of the checkpoint computed in, None if they do not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}, but must be an integer of at least 1: "
                    "mend config.json"
                )
        if self.num_layers > 10_000:
            raise ConfigError(
                f"num_layers is {self.num_layers}, but 10,000 is the limit: mend "
                "config.json"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key "
                "heads evenly: num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}, but rope rotates pairs: it must be even"
            )
        scaling = self.rope.scaling
        if isinstance(scaling, RopeFactors):
            if len(scaling.factors) != self.head_dim // 2 or min(scaling.factors) <= 0:
                raise ConfigError(
                    f"rope has {len(scaling.factors)} factors, the smallest "
                    f"{min(scaling.factors, default=None)}, but there must be "
                    f"{self.head_dim // 2} (head_dim / 2), all positive"
                )

    @property
    def attention_scale(self) -> float:
        """What a query-key product is multiplied with before the softmax."""
        return self.head_dim**-0.5

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that the decoder needs."""
        hidden, intermediate = self.hidden_size, self.intermediate_size
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        linears = {  # name: (rows, columns, has a bias)
            "self_attn.q_proj": (q_size, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, self.o_bias),
            "mlp.gate_proj": (intermediate, hidden, self.mlp_bias),
            "mlp.up_proj": (intermediate, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, intermediate, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"layers.{layer}.{norm}.weight"] = (hidden,)
            for name, (rows, columns, has_bias) in linears.items():
                shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"layers.{layer}.{name}.bias"] = (rows,)
        shapes["norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied matrix counted once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def check_weights(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the shapes of a checkpoint with what the decoder needs.

        Args:
            found: Name and shape of each tensor, under the decoder's names.

        Raises:
            WeightMismatch: Listing every missing, unexpected or misshapen tensor.
        """
        needed = self.weight_shapes()
        problems = [f"missing: {name} {needed[name]}" for name in needed.keys() - found]
        problems += [f"unexpected: {name}" for name in found.keys() - needed.keys()]
        problems += [
            f"shape: {name} is {tuple(found[name])}, needed {shape}"
            for name, shape in needed.items()
            if name in found and tuple(found[name]) != shape
        ]
        if problems:
            shown = sorted(problems)[:20]
            if len(problems) > len(shown):
                shown.append(f"and {len(problems) - len(shown)} more")
            raise WeightMismatch(
                f"{len(problems)} tensors do not fit the {len(needed)} of "
                f"{self.architecture}: config.json belongs to another model, or the "
                "weights are incomplete (fetch both again)\n  " + "\n  ".join(shown)
            )
