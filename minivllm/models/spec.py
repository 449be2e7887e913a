"""Describe a decoder as data: what it computes, and what its callers must know of it.

A family file turns a checkpoint's `config.json` into a `ModelSpec`; the loader and
both decoders read the spec and never the config, so no decoder asks for a family.

In vLLM: vllm/config/model.py (ModelConfig), read by one model file per family.
Source: chapter 1, "Naive generation"; chapter 7, "One decoder, many families"; chapter
    8, "Hybrid attention".
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
class LinearScaling:
    """All frequencies are divided by `factor`, as if positions lay closer together."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): slow frequencies are divided, fast ones kept.

    A pair that makes more than `beta_fast` turns within the trained context is kept,
    one of fewer than `beta_slow` divided by `factor`. `attention_factor` multiplies
    cosines and sines, and so the scores by its square.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles."""

    theta: float
    scaling: Llama3Scaling | RopeFactors | LinearScaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The experts of a model (mixture of experts); sizes in elements.

    Attributes:
        layers: Which layers have experts; the others have an MLP for all tokens.
        num_experts: Of each of these layers.
        top_k: Experts that a token goes to.
        intermediate_size: Of each expert.
        norm_topk_prob: Whether the shares of the chosen experts are made to sum to one.
        shared_intermediate_size: Of an expert that every token goes to; 0 for none.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """The layers that keep a state in place of keys and values; sizes in elements.

    Attributes:
        layers: Which layers are such; the others attend.
        num_key_heads: Heads of queries, and of keys.
        num_value_heads: Heads of values, each with a state of its own; a multiple of
            `num_key_heads`.
        key_head_dim: Of a query or key; the rows of a state.
        value_head_dim: Of a value; the columns of a state.
        conv_kernel_size: How many tokens the convolution looks at, the last its own.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int

    @property
    def key_size(self) -> int:
        """All keys of a token together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """All values of a token together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values of a token."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """What the convolution of a layer keeps of a text: its last inputs."""
        return self.conv_size, self.conv_kernel_size - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The matrices that a layer keeps of a text, one for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The knobs of a decoder; sizes in elements, positions in tokens.

    Attributes:
        dtype: What the makers of the checkpoint computed in, None if they do not say.
        hidden_act: "silu", "gelu" or "gelu_tanh".
        qk_norm: Whether each head of queries and keys is normalised, before rope.
        norm_plus_one: Whether a norm with the weight w multiplies by 1 + w.
        post_norms: Whether what attention and MLP say is normalised once more before
            it is added: four norms in a layer, not two.
        embedding_scale: Multiplies the rows of the embedding; rounded to the type of
            the weights.
        query_pre_attn_scalar: Takes the place of head_dim in the attention scale.
        windows: For each layer, how many of the last tokens a query sees, its own
            among them, or None for all; empty if all layers see all.
        local_rope: Of the layers with a window, if not that of the others.
        moe: The experts, if there are any.
        rotary_dim: How many of the dimensions of a head rope rotates, the first ones;
            None for all.
        attention_gate: Whether what attention says is multiplied by a gate, which
            comes with the queries.
        delta_net: The layers that do not attend, if there are any.
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

    qk_norm: bool = False
    norm_plus_one: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    windows: tuple[int | None, ...] = ()
    local_rope: RopeSpec | None = None
    moe: MoeSpec | None = None

    rotary_dim: int | None = None
    attention_gate: bool = False
    delta_net: DeltaNetSpec | None = None

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
            check_size(name, getattr(self, name))
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
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            raise ConfigError(
                f"rope rotates {self.rope_dim} dimensions of a head of "
                f"{self.head_dim}, but it must be an even number from 2 to head_dim: "
                "mend partial_rotary_factor in config.json"
            )
        if self.hidden_act not in ("silu", "gelu", "gelu_tanh"):
            raise ConfigError(
                f"hidden_act is {self.hidden_act!r}, but silu, gelu and gelu_tanh are "
                "supported: choose another model"
            )
        for rope in self.ropes:
            check_rope(rope, self.rope_dim)
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"there are {len(self.windows)} windows for {self.num_layers} layers: "
                "give one for each, None where all tokens are seen"
            )
        for window in self.windows:
            if window is not None:
                check_size("a window", window)
        if self.moe is not None:
            check_experts(self.moe, self.num_layers)
        if self.delta_net is not None:
            check_delta_net(self.delta_net, self.num_layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotations that there are: one, or those of all layers and of windows."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_index(self, layer: int) -> int:
        """Return which of `ropes` a layer has."""
        return int(self.local_rope is not None and self.window_of(layer) is not None)

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query of a layer sees, None for all."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer has experts in place of one MLP."""
        return self.moe is not None and layer in self.moe.layers

    @property
    def mlp_norm(self) -> str:
        """The norm before the MLP, whose usual name is another's where four are."""
        if self.post_norms:
            return "pre_feedforward_layernorm"
        return "post_attention_layernorm"

    @property
    def attention_scale(self) -> float:
        """What a query-key product is multiplied with before the softmax."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def rope_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def is_recurrent(self, layer: int) -> bool:
        """Tell whether a layer keeps a state, in place of keys and values."""
        return self.delta_net is not None and layer in self.delta_net.layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens."""
        layers = range(self.num_layers)
        return tuple(
            layer
            for layer in layers
            if not self.is_recurrent(layer) and self.window_of(layer) is None
        )

    @property
    def window_layers(self) -> tuple[int, ...]:
        """The layers that attend to the tokens in a window."""
        layers = range(self.num_layers)
        return tuple(
            layer
            for layer in layers
            if not self.is_recurrent(layer) and self.window_of(layer) is not None
        )

    @property
    def max_window(self) -> int | None:
        """The largest window of a layer; None if no layer has one."""
        sizes = [self.window_of(layer) or 0 for layer in self.window_layers]
        return max(sizes, default=None)

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer's attention, without `layers.N.self_attn`."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        q_rows = 2 * q_size if self.attention_gate else q_size
        for name, size in (("q", q_rows), ("k", kv_size), ("v", kv_size)):
            shapes[f"{name}_proj.weight"] = (size, self.hidden_size)
            if self.qkv_bias:
                shapes[f"{name}_proj.bias"] = (size,)
        shapes["o_proj.weight"] = (self.hidden_size, q_size)
        if self.o_bias:
            shapes["o_proj.bias"] = (self.hidden_size,)
        if self.qk_norm:
            shapes["q_norm.weight"] = shapes["k_norm.weight"] = (self.head_dim,)
        return shapes

    def mlp_shapes(self, size: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a gated unit, `size` numbers wide inside."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            rows, columns = size, self.hidden_size
            if name == "down_proj":
                rows, columns = columns, rows
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def moe_shapes(self, moe: MoeSpec) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer's experts, without `layers.N.mlp`."""
        shapes: dict[str, tuple[int, ...]] = {
            "gate.weight": (moe.num_experts, self.hidden_size)
        }
        expert = self.mlp_shapes(moe.intermediate_size, has_bias=False)
        for index in range(moe.num_experts):
            shapes |= {f"experts.{index}.{name}": expert[name] for name in expert}
        if moe.shared_intermediate_size:
            shared = self.mlp_shapes(moe.shared_intermediate_size, has_bias=False)
            shapes |= {f"shared_expert.{name}": shared[name] for name in shared}
            shapes["shared_expert_gate.weight"] = (1, self.hidden_size)
        return shapes

    def delta_net_shapes(self, net: DeltaNetSpec) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a delta net, without `layers.N.linear_attn`."""
        return {
            "in_proj_qkv.weight": (net.conv_size, self.hidden_size),
            "in_proj_z.weight": (net.value_size, self.hidden_size),
            "in_proj_b.weight": (net.num_value_heads, self.hidden_size),
            "in_proj_a.weight": (net.num_value_heads, self.hidden_size),
            "conv1d.weight": (net.conv_size, 1, net.conv_kernel_size),
            "dt_bias": (net.num_value_heads,),
            "A_log": (net.num_value_heads,),
            "norm.weight": (net.value_head_dim,),
            "out_proj.weight": (self.hidden_size, net.value_size),
        }

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer, without `layers.N`."""
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes: dict[str, tuple[int, ...]] = {
            f"{norm}.weight": (self.hidden_size,) for norm in norms
        }
        if self.delta_net is not None and layer in self.delta_net.layers:
            parts = {"linear_attn": self.delta_net_shapes(self.delta_net)}
        else:
            parts = {"self_attn": self.attention_shapes()}
        if self.moe is not None and layer in self.moe.layers:
            parts["mlp"] = self.moe_shapes(self.moe)
        else:
            parts["mlp"] = self.mlp_shapes(self.intermediate_size, self.mlp_bias)
        for part, tensors in parts.items():
            shapes |= {f"{part}.{name}": tensors[name] for name in tensors}
        return shapes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that the decoder needs."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table}
        for layer in range(self.num_layers):
            tensors = self.layer_shapes(layer)
            shapes |= {f"layers.{layer}.{name}": tensors[name] for name in tensors}
        shapes["norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = table
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


def check_size(name: str, value: object) -> None:
    """Refuse what is no size.

    Raises:
        ConfigError: It is no integer, or less than 1.
    """
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{name} is {value!r}, but must be an integer of at least 1: mend "
            "config.json"
        )


def check_rope(rope: RopeSpec, head_dim: int) -> None:
    """Refuse factors that are not one for each pair of dimensions.

    Raises:
        ConfigError: There are more or fewer, or one is not positive.
    """
    scaling = rope.scaling
    if isinstance(scaling, RopeFactors):
        if len(scaling.factors) != head_dim // 2 or min(scaling.factors) <= 0:
            raise ConfigError(
                f"rope has {len(scaling.factors)} factors, the smallest "
                f"{min(scaling.factors, default=None)}, but there must be "
                f"{head_dim // 2} (head_dim / 2), all positive"
            )


def check_experts(moe: MoeSpec, num_layers: int) -> None:
    """Refuse experts that cannot be.

    Raises:
        ConfigError: A size is impossible, or a layer is not there.
    """
    for name in ("num_experts", "top_k", "intermediate_size"):
        check_size(f"{name} of the experts", getattr(moe, name))
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"a token goes to {moe.top_k} of {moe.num_experts} experts: top_k must not "
            "be more than num_experts"
        )
    if not all(0 <= layer < num_layers for layer in moe.layers):
        raise ConfigError(
            f"layers {moe.layers} have experts, but there are {num_layers} layers"
        )


def check_delta_net(net: DeltaNetSpec, num_layers: int) -> None:
    """Refuse sizes that cannot be.

    Raises:
        ConfigError: A size is impossible, or a layer is not there.
    """
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        check_size(f"{name} of the delta net", getattr(net, name))
    if net.num_value_heads % net.num_key_heads:
        raise ConfigError(
            f"{net.num_value_heads} value heads cannot share {net.num_key_heads} key "
            "heads evenly: num_value_heads must be a multiple of num_key_heads"
        )
    size = net.conv_kernel_size
    if type(size) is not int or size < 2:
        raise ConfigError(
            f"conv_kernel_size is {size!r}, but must be an integer of at least 2: the "
            "token itself and one before it"
        )
    if not all(0 <= layer < num_layers for layer in net.layers):
        raise ConfigError(
            f"layers {net.layers} are delta nets, but there are {num_layers} layers"
        )
