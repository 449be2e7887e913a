"""The seam between a decoder and the place where keys and values are kept.

A layer hands its new queries, keys and values to the context and gets the attended
values back. It never knows whether the keys of earlier tokens were recomputed, cached
in one strip, or scattered over blocks: chapters 2 and 3 change the context only.

In vLLM: vllm/model_executor/layers/attention/attention.py (Attention), whose metadata
travels in a global (vllm/forward_context.py); here it is an argument.
Source: chapter 1, "Naive generation".
"""

from typing import Protocol, TypeVar

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
