"""The decoder in NumPy: float32, every intermediate array printable.

It is the oracle: whatever a faster decoder computes is compared with this one. It
never imports torch.

In vLLM: vllm/model_executor/models/llama.py.
Source: chapter 1, "Naive generation"; chapter 2, "The KV cache"; chapter 7, "One
    decoder, many families"; appendix A25, "Experts in the engine"; chapter 8, "Hybrid
    attention".
"""

import math
from collections.abc import Sequence

import numpy as np

from minivllm.errors import ConfigError
from minivllm.models.context import AttentionContext, CachingContext
from minivllm.models.expert_counts import ExpertCounts
from minivllm.models.rotary import attention_factor, inverse_frequencies
from minivllm.models.spec import ModelSpec
from minivllm.reference.attention import CachedContext, DenseContext, StaticBatchContext
from minivllm.reference.gated_delta_net import sigmoid, softplus
from minivllm.reference.moe import route


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale each row to a root mean square of one, then each column by its weight."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate pair (i, i + rope_dim / 2) of each head by its angle.

    Args:
        x: [num_tokens, num_heads, head_dim]; dimensions from rope_dim on stay.
        cos: [num_tokens, 1, rope_dim // 2].
        sin: Like cos.
    """
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
    )


def silu(x: np.ndarray) -> np.ndarray:
    """Return x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp(-x) may be inf: the quotient is then -0
        return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x times the share of a normal distribution below x."""
    erf = np.vectorize(math.erf, otypes=[np.float32])
    return x * (1 + erf(x / np.float32(math.sqrt(2)))) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Return nearly the same, in the form that was cheaper once."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return x * (1 + np.tanh(inner)) / 2


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


class NumpyDecoder:
    """A decoder with its weights as a dictionary of arrays."""

    def __init__(self, spec: ModelSpec, weights: dict[str, np.ndarray]) -> None:
        """Take the weights; those in another type than float32 are converted.

        Args:
            spec: What to compute.
            weights: Names and shapes of `spec.weight_shapes()`.

        Raises:
            WeightMismatch: Names or shapes differ.
        """
        spec.check_weights({name: array.shape for name, array in weights.items()})
        self.spec = spec
        self.weights = {k: np.asarray(w, np.float32) for k, w in weights.items()}
        self.activation = ACTIVATIONS[spec.hidden_act]
        self.frequencies = [
            inverse_frequencies(spec.rope_dim, rope) for rope in spec.ropes
        ]
        # Of each expert, in the layers where somebody counts.
        self.num_rows: dict[int, np.ndarray] = {}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return x times the transposed weight, plus the bias where there is one."""
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Normalise the rows of x with the named weight."""
        weight = self.weights[f"{name}.weight"]
        if self.spec.norm_plus_one:
            weight = 1 + weight
        return rms_norm(x, weight, self.spec.rms_norm_eps)

    def attention(
        self,
        layer: int,
        x: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        context: AttentionContext[np.ndarray],
    ) -> np.ndarray:
        """Mix the tokens: [num_tokens, hidden_size] in and out."""
        name = f"layers.{layer}.self_attn"
        heads = (len(x), -1, self.spec.head_dim)
        q = self.linear(f"{name}.q_proj", x)
        gate = None
        if self.spec.attention_gate:  # in each head, its query and then its gate
            q, gate = np.split(q.reshape(len(x), self.spec.num_heads, -1), 2, axis=-1)
        q = q.reshape(heads)
        k = self.linear(f"{name}.k_proj", x).reshape(heads)
        v = self.linear(f"{name}.v_proj", x).reshape(heads)
        if self.spec.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        mixed = context.attend(layer, q, k, v)
        if gate is not None:
            mixed = mixed * sigmoid(gate)
        return self.linear(f"{name}.o_proj", mixed.reshape(len(x), -1))

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Transform each token alone: [num_tokens, hidden_size] in and out."""
        if self.spec.has_experts(layer):
            return self.experts(layer, x)
        return self.gated(f"layers.{layer}.mlp", x)

    def run_layer(
        self,
        layer: int,
        hidden_states: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        context: AttentionContext[np.ndarray],
    ) -> np.ndarray:
        """Add what attention, then the MLP, have to say: [num_tokens, hidden_size]."""
        name = f"layers.{layer}"
        normed = self.norm(f"{name}.input_layernorm", hidden_states)
        if self.spec.is_recurrent(layer):
            mixed = self.delta_net(layer, normed, context)
        else:
            mixed = self.attention(layer, normed, cos, sin, context)
        if self.spec.post_norms:
            mixed = self.norm(f"{name}.post_attention_layernorm", mixed)
        hidden_states = hidden_states + mixed
        normed = self.norm(f"{name}.{self.spec.mlp_norm}", hidden_states)
        transformed = self.mlp(layer, normed)
        if self.spec.post_norms:
            transformed = self.norm(f"{name}.post_feedforward_layernorm", transformed)
        return hidden_states + transformed

    def rope_tables(self, positions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return cosines and sines of each rope, [num_tokens, 1, head_dim // 2]."""
        tables = []
        for rope, frequencies in zip(self.spec.ropes, self.frequencies, strict=True):
            angles = positions.astype(np.float32)[:, None, None] * frequencies
            factor = np.float32(attention_factor(rope))
            tables.append((np.cos(angles) * factor, np.sin(angles) * factor))
        return tables

    def forward(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        context: AttentionContext[np.ndarray],
    ) -> np.ndarray:
        """Run the tokens through every layer.

        Args:
            input_ids: [num_tokens] integers.
            positions: [num_tokens], place of each token in its own text, from 0.
            context: Where the keys and values of earlier tokens are.

        Returns:
            The normalised hidden states, [num_tokens, hidden_size].
        """
        hidden_states = self.weights["embed_tokens.weight"][input_ids]
        hidden_states = hidden_states * np.float32(self.spec.embedding_scale)
        tables = self.rope_tables(positions)
        for layer in range(self.spec.num_layers):
            cos, sin = tables[self.spec.rope_index(layer)]
            hidden_states = self.run_layer(layer, hidden_states, cos, sin, context)
        return self.norm("norm", hidden_states)

    def compute_logits(self, hidden_states: np.ndarray) -> np.ndarray:
        """Score every token of the vocabulary as the next one, [..., vocab_size]."""
        is_tied = self.spec.tie_word_embeddings
        name = "embed_tokens.weight" if is_tied else "lm_head.weight"
        return hidden_states @ self.weights[name].T

    def dense_context(self) -> DenseContext:
        """Return a context for one whole text."""
        return DenseContext(self.spec)

    def next_token_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Recompute the whole text and score what follows it, [vocab_size]."""
        hidden_states = self.forward(
            np.asarray(token_ids), np.arange(len(token_ids)), self.dense_context()
        )
        return self.compute_logits(hidden_states[-1])

    def cached_context(self, max_tokens: int) -> CachedContext:
        """Return an empty cache for one text of at most `max_tokens` tokens."""
        return CachedContext(self.spec, max_tokens)

    def extend(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        context: CachingContext[np.ndarray],
    ) -> np.ndarray:
        """Add new tokens to the text in a context and score what follows.

        Args:
            token_ids: The new tokens, [num_new], or those of several texts,
                [batch_size, num_new].
            context: What it holds need not be computed again; it grows by `num_new`.

        Returns:
            [vocab_size], or [batch_size, vocab_size].

        Raises:
            ShapeError: They do not fit; the context is as before.
        """
        input_ids = np.asarray(token_ids)
        num_new = input_ids.shape[-1]
        positions = context.positions(num_new)
        hidden_states = self.forward(input_ids.ravel(), positions, context)
        context.advance(num_new)
        last = hidden_states.reshape(*input_ids.shape, -1)[..., -1, :]
        return self.compute_logits(last)

    def static_batch_context(
        self, lengths: Sequence[int], max_tokens: int
    ) -> StaticBatchContext:
        """Return an empty cache for prompts of these lengths, padded on the left."""
        return StaticBatchContext(self.spec, lengths, max_tokens)

    def gated(self, name: str, x: np.ndarray) -> np.ndarray:
        """Run the gated unit of a name: [num_tokens, hidden_size] in and out."""
        gate = self.activation(self.linear(f"{name}.gate_proj", x))
        up = self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate * up)

    def experts(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Send each token to its experts: [num_tokens, hidden_size] in and out."""
        moe = self.spec.moe
        assert moe is not None
        name = f"layers.{layer}.mlp"
        logits = self.linear(f"{name}.gate", x)
        shares, experts = route(logits, moe.top_k, moe.norm_topk_prob)
        if layer in self.num_rows:
            counts = np.bincount(experts.ravel(), minlength=moe.num_experts)
            self.num_rows[layer] += counts
        y = np.zeros_like(x)
        for token, chosen in enumerate(experts):
            for share, expert in zip(shares[token], chosen, strict=True):
                row = self.gated(f"{name}.experts.{expert}", x[token : token + 1])
                y[token] += share * row[0]
        if moe.shared_intermediate_size:
            gate = self.linear(f"{name}.shared_expert_gate", x)
            sigmoid = np.exp(-np.logaddexp(0, -gate))  # without overflow
            y += sigmoid * self.gated(f"{name}.shared_expert", x)
        return y

    def count_experts(self) -> ExpertCounts:
        """Count from now on how many tokens each expert gets.

        Raises:
            ConfigError: The model has no experts.
        """
        moe = self.spec.moe
        if moe is None:
            raise ConfigError(
                f"{self.spec.architecture} has no experts to count: choose a model "
                "that has"
            )
        num_rows = np.zeros((len(moe.layers), moe.num_experts), dtype=np.int64)
        self.num_rows = dict(zip(moe.layers, num_rows, strict=True))
        return ExpertCounts(moe.layers, num_rows)

    def delta_net(
        self, layer: int, x: np.ndarray, context: AttentionContext[np.ndarray]
    ) -> np.ndarray:
        """Mix the tokens through a state: [num_tokens, hidden_size] in and out."""
        net = self.spec.delta_net
        assert net is not None
        name, num_tokens = f"layers.{layer}.linear_attn", len(x)
        kernel = self.weights[f"{name}.conv1d.weight"][:, 0]
        qkv = context.convolve(layer, self.linear(f"{name}.in_proj_qkv", x), kernel)
        q, k, v = np.split(qkv, [net.key_size, 2 * net.key_size], axis=1)
        q, k = (part.reshape(num_tokens, net.num_key_heads, -1) for part in (q, k))
        v = v.reshape(num_tokens, net.num_value_heads, -1)
        beta = sigmoid(self.linear(f"{name}.in_proj_b", x))
        speed = softplus(
            self.linear(f"{name}.in_proj_a", x) + self.weights[f"{name}.dt_bias"]
        )
        log_decay = -np.exp(self.weights[f"{name}.A_log"]) * speed
        read = context.mix(layer, q, k, v, log_decay, beta)
        z = self.linear(f"{name}.in_proj_z", x).reshape(read.shape)
        # The weight of this norm is plain, whatever those of the other norms are.
        weight = self.weights[f"{name}.norm.weight"]
        gated = rms_norm(read, weight, self.spec.rms_norm_eps) * (z * sigmoid(z))
        return self.linear(f"{name}.out_proj", gated.reshape(num_tokens, -1))
