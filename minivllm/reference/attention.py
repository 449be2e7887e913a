"""Attention in NumPy, float32, the way the formula is written.

Source: chapter 1, "Naive generation"; chapter 2, "The KV cache"; chapter 7, "One
    decoder, many families"; appendix A24, "Windows"; chapter 8, "Hybrid attention".
"""

from collections.abc import Sequence

import numpy as np

from minivllm.models.context import check_room, first_key_of
from minivllm.models.spec import ModelSpec
from minivllm.reference.gated_delta_net import RecurrentStates


def softmax(scores: np.ndarray) -> np.ndarray:
    """Turn scores into shares with sum one, over the last axis."""
    # Without the shift exp() overflows at 89; the quotient stays the same.
    shares = scores - scores.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)  # in place: a new array costs more than its numbers
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def attention_weights(
    q: np.ndarray, k: np.ndarray, scale: float, window: int | None = None
) -> np.ndarray:
    """Return how much each query looks at each key, causally.

    A query sees the keys up to its own position. There may be fewer queries than keys:
    then they belong to the last tokens.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim]; each head serves a group of queries.
        scale: Factor on the products.
        window: How many keys a query sees, its own the last; None for all.

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
    distances = query_positions[:, None] - np.arange(num_keys)
    is_hidden = distances < 0
    if window is not None:
        is_hidden |= distances >= window
    scores[:, is_hidden] = -np.inf
    return softmax(scores)


def causal_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None = None,
) -> np.ndarray:
    """Mix the values by the attention weights.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim].
        v: Like k.
        scale: Factor on the products.
        window: How many keys a query sees, its own the last; None for all.

    Returns:
        [num_queries, num_heads, head_dim].
    """
    v = v.repeat(q.shape[1] // v.shape[1], axis=1)
    # [heads, queries, keys] @ [heads, keys, dim] -> [heads, queries, dim]
    mixed = attention_weights(q, k, scale, window) @ v.transpose(1, 0, 2)
    return mixed.transpose(1, 0, 2)


class DenseContext:
    """The simplest context: the tokens given are the whole text."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.scale = spec.attention_scale

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Attend causally among the given tokens."""
        return causal_attention(q, k, v, self.scale, self.spec.window_of(layer))

    def convolve(self, layer: int, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Convolve the given tokens, before which there is nothing."""
        return RecurrentStates(self.spec.delta_net, 1).convolve(layer, 0, x, weight)

    def mix(self, layer: int, *rows: np.ndarray) -> np.ndarray:
        """Run the delta rule over the given tokens, from nothing on."""
        return RecurrentStates(self.spec.delta_net, 1).mix(layer, 0, *rows)


class CachedContext:
    """Keeps the keys and values of one text, one row per token in each layer.

    The first `num_tokens` rows are filled. In a pass every layer writes its new rows
    behind them, all at the same place; `advance` then ends the pass.
    """

    def __init__(self, spec: ModelSpec, max_tokens: int) -> None:
        """Reserve room for a text of `max_tokens` tokens, all at once."""
        shape = (spec.num_layers, max_tokens, spec.num_kv_heads, spec.head_dim)
        self.k_cache = np.zeros(shape, dtype=np.float32)
        self.v_cache = np.zeros(shape, dtype=np.float32)
        self.num_tokens = 0
        self.spec = spec
        self.states = RecurrentStates(spec.delta_net, 1) if spec.delta_net else None

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Store the new keys and values, and attend to those in the window.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        keys, values = self.k_cache[layer], self.v_cache[layer]
        check_room(self.num_tokens, len(k), len(keys))
        end = self.num_tokens + len(k)
        keys[self.num_tokens : end] = k
        values[self.num_tokens : end] = v
        window = self.spec.window_of(layer)
        seen = slice(first_key_of(self.num_tokens, window), end)
        scale = self.spec.attention_scale
        return causal_attention(q, keys[seen], values[seen], scale, window)

    def positions(self, num_new: int) -> np.ndarray:
        """Return the positions of the next tokens, [num_new]."""
        return np.arange(self.num_tokens, self.num_tokens + num_new)

    def advance(self, num_new: int) -> None:
        """Count the rows that all layers have written; call it once per pass."""
        self.num_tokens += num_new

    def convolve(self, layer: int, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Convolve the new tokens, behind those before.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        check_room(self.num_tokens, len(x), self.k_cache.shape[1])
        return self.states.convolve(layer, 0, x, weight)

    def mix(self, layer: int, *rows: np.ndarray) -> np.ndarray:
        """Run the delta rule over the new tokens, from the state on."""
        return self.states.mix(layer, 0, *rows)


class StaticBatchContext:
    """Keeps the keys and values of several texts that grow in step.

    The texts are the lines of a rectangle, padded on the left: text i begins in column
    `num_padding[i]`. `num_tokens` columns are filled. A pass gives the new columns of
    all texts in flat rows, text after text. Rows of padding get zeros back, and nobody
    attends to them.
    """

    def __init__(
        self, spec: ModelSpec, lengths: Sequence[int], max_tokens: int
    ) -> None:
        """Reserve `max_tokens` columns for prompts of the given lengths."""
        self.num_padding = max(lengths) - np.array(lengths)
        shape = (spec.num_layers, len(lengths), max_tokens)
        heads = (spec.num_kv_heads, spec.head_dim)
        self.k_cache = np.zeros(shape + heads, dtype=np.float32)
        self.v_cache = np.zeros(shape + heads, dtype=np.float32)
        self.num_tokens = 0
        self.spec = spec
        net = spec.delta_net
        self.states = RecurrentStates(net, len(lengths)) if net else None

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Store the new columns, and attend within each text.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        q, k, v = (
            x.reshape(len(self.num_padding), -1, *x.shape[1:]) for x in (q, k, v)
        )
        keys, values = self.k_cache[layer], self.v_cache[layer]
        start, num_new = self.num_tokens, k.shape[1]
        check_room(start, num_new, keys.shape[1])
        end = start + num_new
        keys[:, start:end] = k
        values[:, start:end] = v
        window, scale = self.spec.window_of(layer), self.spec.attention_scale
        mixed = np.zeros_like(q)
        for text, first in enumerate(self.num_padding):
            if first < end:  # else nothing but padding so far
                new = max(first, start)
                rows = (text, slice(new - start, None))
                seen = (text, slice(max(first, first_key_of(new, window)), end))
                mixed[rows] = causal_attention(
                    q[rows], keys[seen], values[seen], scale, window
                )
        return mixed.reshape(-1, *q.shape[2:])

    def positions(self, num_new: int) -> np.ndarray:
        """Return the positions of the next columns, text after text, padding at 0."""
        columns = np.arange(self.num_tokens, self.num_tokens + num_new)
        return np.maximum(columns - self.num_padding[:, None], 0).ravel()

    def advance(self, num_new: int) -> None:
        """Count the columns that all layers have written; call it once per pass."""
        self.num_tokens += num_new

    def convolve(self, layer: int, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Convolve the new columns, each text behind its own.

        Raises:
            ShapeError: The cache is full; nothing is written.
        """
        num_new = len(x) // len(self.num_padding)
        check_room(self.num_tokens, num_new, self.k_cache.shape[2])
        y = np.zeros_like(x)
        for text, rows in enumerate(self._texts(num_new)):
            y[rows] = self.states.convolve(layer, text, x[rows], weight)
        return y

    def mix(self, layer: int, *rows: np.ndarray) -> np.ndarray:
        """Run the delta rule over the new columns, each text from its state on."""
        read = np.zeros_like(rows[2])
        num_new = len(read) // len(self.num_padding)
        for text, own in enumerate(self._texts(num_new)):
            read[own] = self.states.mix(layer, text, *(x[own] for x in rows))
        return read

    def _texts(self, num_new: int) -> list[slice]:
        """Return the flat rows of each text in the new columns, without padding."""
        starts = np.clip(self.num_padding - self.num_tokens, 0, num_new)
        return [
            slice(text * num_new + start, (text + 1) * num_new)
            for text, start in enumerate(starts)
        ]
