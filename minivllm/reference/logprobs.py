"""How probable the model held a token, in NumPy, the way the definition is written.

Source: chapter 5, "Sampling".
"""

import numpy as np


def order_keys(logits: np.ndarray) -> np.ndarray:
    """Return a number for each score, int64: the better the token, the larger.

    Of equal scores the first is the better, so no two numbers of a row are equal. The
    bits of a float32 are in the order of their values, but for negative ones, whose
    order is the reverse.

    Args:
        logits: float32, [..., vocab_size].
    """
    bits = (logits + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (ordered.astype(np.int64) << 32) - np.arange(logits.shape[-1])


def logprobs_of(
    logits: np.ndarray, token_ids: np.ndarray, num_best: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log-probability of a token and of the best tokens, row by row.

    Args:
        logits: float32, [num_rows, vocab_size].
        token_ids: One for each row, [num_rows] int64.
        num_best: How many of the best; no more than these are sorted.

    Returns:
        Token ids, log-probabilities (float32) and ranks, all [num_rows, 1 + num_best]:
        first the token, then the best ones.
    """
    num_best = min(num_best, logits.shape[1])
    shape = len(logits), 1 + num_best
    ids, ranks = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    logprobs = np.empty(shape, dtype=np.float32)
    for row, token_id in enumerate(token_ids):
        keys = order_keys(logits[row])
        best = np.argpartition(-keys, max(0, num_best - 1))[:num_best]
        ids[row, 0], ids[row, 1:] = token_id, best[np.argsort(-keys[best])]
        ranks[row] = [1 + (keys > keys[token_id]).sum(), *range(1, 1 + num_best)]
        shifted = logits[row].astype(np.float64) - logits[row].max()
        logprobs[row] = shifted[ids[row]] - np.log(np.exp(shifted).sum())
    return ids, logprobs, ranks
