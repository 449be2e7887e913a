"""Turn positions into angles: rotary position embedding (RoPE, Su et al. 2021).

Everything here is NumPy in float32, so that both decoders rotate by the same angles,
whatever type they compute in.

In vLLM: vllm/model_executor/layers/rotary_embedding/.
Source: chapter 1, "Naive generation"; chapter 7, "One decoder, many families".
"""

import math

import numpy as np

from minivllm.models.spec import (
    LinearScaling,
    Llama3Scaling,
    RopeFactors,
    RopeSpec,
    YarnScaling,
)


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
    scaling = rope.scaling
    if isinstance(scaling, Llama3Scaling):
        return scale_llama3(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return scale_yarn(frequencies, head_dim, rope, scaling)
    if isinstance(scaling, LinearScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, RopeFactors):
        return frequencies / np.asarray(scaling.factors, dtype=np.float32)
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


def scale_yarn(
    frequencies: np.ndarray, head_dim: int, rope: RopeSpec, scaling: YarnScaling
) -> np.ndarray:
    """Slow down the slow frequencies, keep the fast ones, blend by index in between."""

    def index_of(turns: float) -> float:
        """Return the pair that makes so many turns within the trained context."""
        context = scaling.original_max_position_embeddings
        ratio = math.log(context / (turns * 2 * math.pi)) / math.log(rope.theta)
        return head_dim / 2 * ratio

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    slowed = np.clip((pairs - low) / (high - low), 0, 1).astype(np.float32)
    return frequencies / np.float32(scaling.factor) * slowed + frequencies * (
        1 - slowed
    )


def attention_factor(rope: RopeSpec) -> float:
    """Return what cosines and sines are multiplied with."""
    scaling = rope.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
