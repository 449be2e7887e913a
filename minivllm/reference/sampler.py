"""Choose tokens from their scores, in NumPy, the way the definition is written.

Source: appendix A5, "Records".
"""

import numpy as np


def token_probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return softmax(logits / temperature), float64, [vocab_size]; temperature > 0."""
    # Shifted before the division: the best token stays at 0, however cold it is.
    shifted = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # -inf is right: exp(-inf) is 0
        shares = np.exp(shifted / temperature)
    return shares / shares.sum()


def sample_token(logits: np.ndarray, temperature: float, uniform: float) -> int:
    """Return the best token at temperature 0, else draw one.

    The probabilities laid end to end fill the line from 0 to 1; the token is the one
    on whose stretch the random number falls (inverse transform sampling).

    Args:
        logits: [vocab_size].
        temperature: At least 0.
        uniform: The random number, 0 <= uniform < 1.
    """
    # Scores that are no numbers have no token: any id, the caller reports an error.
    if temperature == 0 or not np.isfinite(logits.max()):
        return int(logits.argmax())
    ends = token_probabilities(logits, temperature).cumsum()
    # The rounded shares may end a little before or behind 1, hence the product.
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))


def sample(
    logits: np.ndarray, temperatures: np.ndarray, uniforms: np.ndarray
) -> np.ndarray:
    """Return a token id for each row of scores, [num_rows] int64.

    Args:
        logits: [num_rows, vocab_size].
        temperatures: [num_rows].
        uniforms: A random number for each row, [num_rows].
    """
    rows = zip(logits, temperatures, uniforms, strict=True)
    return np.array([sample_token(*row) for row in rows], dtype=np.int64)
