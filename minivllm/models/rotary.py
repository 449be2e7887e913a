"""Turn positions into angles: rotary position embedding (RoPE, Su et al. 2021).

Everything here is NumPy in float32, so that both decoders rotate by the same angles,
whatever type they compute in.

In vLLM: vllm/model_executor/layers/rotary_embedding/.
Source: chapter 1, "Naive generation".
"""

import math

import numpy as np

from minivllm.models.spec import Llama3Scaling, RopeFactors, RopeSpec


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return theta ** (-2 i / head_dim) for each pair i, float32, [head_dim // 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, rounded once: an error here grows with the position.
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


def inverse_frequencies(head_dim: int, rope: RopeSpec) -> np.ndarray:
    """Return the angle per position of each pair of dimensions, scaled as asked.

    Returns:
        float32 radians, [head_dim // 2].
    """
    frequencies = rope_frequencies(head_dim, rope.theta)
    if isinstance(rope.scaling, Llama3Scaling):
        return scale_llama3(frequencies, rope.scaling)
    if isinstance(rope.scaling, RopeFactors):
        return frequencies / np.asarray(rope.scaling.factors, dtype=np.float32)
    return frequencies


def scale_llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Slow down the slow frequencies, keep the fast ones, blend in between.

    A pair that makes fewer than `low_freq_factor` turns within the trained context
    (`original_max_position_embeddings`) is slowed down by `factor`, so that a longer
    text shows the model no angle it has never seen.
    """
    context = scaling.original_max_position_embeddings
    # Reciprocals where torch, the reference for released weights, takes them too.
    wavelengths = np.float32(2 * math.pi) * (1 / frequencies)  # in positions
    turns = np.float32(context) * (1 / wavelengths)
    blend = turns - np.float32(scaling.low_freq_factor)
    blend /= np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    factor = np.float32(scaling.factor)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slow = wavelengths > context / scaling.low_freq_factor
    fast = wavelengths < context / scaling.high_freq_factor
    return np.where(slow, frequencies / factor, np.where(fast, frequencies, blended))
