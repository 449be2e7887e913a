"""Experts in NumPy, float32: which ones a token goes to, and what they say.

In vLLM: vllm/model_executor/layers/fused_moe/ (fused_topk).
Source: chapter 7, "One decoder, many families".
"""

import numpy as np

from minivllm.reference.attention import softmax


def route(
    logits: np.ndarray, top_k: int, renormalize: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the experts of each token, and what share each of them has.

    The shares are a softmax over all experts, chosen or not.

    Args:
        logits: The scores of all experts, [num_tokens, num_experts].
        top_k: How many are chosen; of equal ones the first.
        renormalize: Whether the shares of the chosen are made to sum to one.

    Returns:
        Shares, float32, and experts, int64, both [num_tokens, top_k], largest first.
    """
    shares = softmax(logits)
    experts = np.argsort(-shares, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(shares, experts, axis=-1)
    if renormalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    return chosen, experts
