"""The seam between a decoder and the place where keys and values are kept.

A layer hands its new queries, keys and values to the context and gets the attended
values back. It never knows whether the keys of earlier tokens were recomputed, cached
in one strip, or scattered over blocks: chapters 2 and 3 change the context only.

In vLLM: vllm/model_executor/layers/attention/attention.py (Attention), whose metadata
travels in a global (vllm/forward_context.py); here it is an argument.
Source: chapter 1, "Naive generation"; chapter 2, "The KV cache"; appendix A24,
    "Windows"; chapter 8, "Hybrid attention".
"""

from typing import Protocol, TypeVar

from minivllm.errors import ShapeError

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor


class AttentionContext(Protocol[Array]):
    """What a decoder's forward() needs from its caller."""

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Let each new token attend to itself and every token before it.

        Args:
            layer: Index of the calling layer.
            q: Queries after rope, [num_tokens, num_heads, head_dim].
            k: Keys after rope, [num_tokens, num_kv_heads, head_dim].
            v: Values, [num_tokens, num_kv_heads, head_dim].

        Returns:
            The mixed values, [num_tokens, num_heads, head_dim].
        """
        ...

    def convolve(self, layer: int, x: Array, weight: Array) -> Array:
        """Let each channel of each new token see itself and a few tokens before.

        Args:
            layer: Index of the calling layer.
            x: [num_tokens, conv_size].
            weight: The factor of each token in sight, its own the last,
                [conv_size, conv_kernel_size].

        Returns:
            silu of the weighted sums, like x.
        """
        ...

    def mix(
        self, layer: int, q: Array, k: Array, v: Array, log_decay: Array, beta: Array
    ) -> Array:
        """Run the gated delta rule, token after token, and keep the states.

        Args:
            layer: Index of the calling layer.
            q: [num_tokens, num_key_heads, key_head_dim], of any length: the rule
                brings queries and keys to the length of one.
            k: Like q.
            v: [num_tokens, num_value_heads, value_head_dim].
            log_decay: At most 0, [num_tokens, num_value_heads], float32.
            beta: From 0 to 1, like log_decay.

        Returns:
            What the queries read, like v.
        """
        ...


def check_room(num_tokens: int, num_new: int, max_tokens: int) -> None:
    """Refuse new tokens that do not fit behind those in a cache.

    Raises:
        ShapeError: Before anything is written.
    """
    # Not left to the arrays: past the end, a slice is empty and takes a row silently.
    if num_tokens + num_new > max_tokens:
        raise ShapeError(
            f"the cache holds {num_tokens} tokens and {num_new} more would make "
            f"{num_tokens + num_new}, but it was made for {max_tokens}: make a larger "
            "one, or generate fewer tokens"
        )


class CachingContext(AttentionContext[Array], Protocol[Array]):
    """A context that keeps what it is given, so that a text can grow in it."""

    num_tokens: int

    def positions(self, num_new: int) -> Array:
        """Return the positions of the next tokens, one per row of the next pass."""
        ...

    def advance(self, num_new: int) -> None:
        """Count the rows that all layers have written; call it once per pass."""
        ...


def first_key_of(position: int, window: int | None) -> int:
    """Return the first key that the query at a position sees.

    Args:
        position: Of the query in its text, from 0.
        window: How many keys it sees, its own the last; None for all.
    """
    return 0 if window is None else max(0, position + 1 - window)
