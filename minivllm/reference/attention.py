"""Attention in NumPy, float32, the way the formula is written.

Source: chapter 1, "Naive generation".
"""

import numpy as np

from minivllm.models.spec import ModelSpec


def softmax(scores: np.ndarray) -> np.ndarray:
    """Turn scores into shares with sum one, over the last axis."""
    # Without the shift exp() overflows at 89; the quotient stays the same.
    shares = scores - scores.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)  # in place: a new array costs more than its numbers
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def attention_weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Return how much each query looks at each key, causally.

    A query sees the keys up to its own position. There may be fewer queries than keys:
    then they belong to the last tokens.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim]; each head serves a group of queries.
        scale: Factor on the products.

    Returns:
        [num_heads, num_queries, num_keys]; every row sums to one.
    """
    num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    assert num_queries <= num_keys, f"{num_queries} queries for {num_keys} keys"
    k = k.repeat(num_heads // num_kv_heads, axis=1)
    # [heads, queries, dim] @ [heads, dim, keys] -> [heads, queries, keys]
    scores = (q * np.float32(scale)).transpose(1, 0, 2) @ k.transpose(1, 2, 0)
    query_positions = np.arange(num_keys - num_queries, num_keys)
    is_ahead = np.arange(num_keys) > query_positions[:, None]
    scores[:, is_ahead] = -np.inf
    return softmax(scores)


def causal_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> np.ndarray:
    """Mix the values by the attention weights.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim].
        v: Like k.
        scale: Factor on the products.

    Returns:
        [num_queries, num_heads, head_dim].
    """
    v = v.repeat(q.shape[1] // v.shape[1], axis=1)
    # [heads, queries, keys] @ [heads, keys, dim] -> [heads, queries, dim]
    mixed = attention_weights(q, k, scale) @ v.transpose(1, 0, 2)
    return mixed.transpose(1, 0, 2)


class DenseContext:
    """The simplest context: the tokens given are the whole text."""

    def __init__(self, spec: ModelSpec) -> None:
        self.scale = spec.attention_scale

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Attend causally among the given tokens."""
        return causal_attention(q, k, v, self.scale)
