"""How probable the model held a token: the same as `minivllm.reference.logprobs`.

For all rows at once, on the device of the scores. Called by the torch runner.

In vLLM: vllm/v1/sample/sampler.py (Sampler.gather_logprobs).
Source: appendix A12, "A sampler for a whole batch".
"""

import torch
from torch import Tensor


def order_keys(logits: Tensor) -> Tensor:
    """Return a number for each score, int64: the better the token, the larger.

    Args:
        logits: float32, [num_rows, vocab_size].
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)


def logprobs_of(
    logits: Tensor, token_ids: Tensor, num_best: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of a token and of the best tokens, row by row.

    Args:
        logits: float32, [num_rows, vocab_size].
        token_ids: One for each row, [num_rows] int64.
        num_best: How many of the best; no more than these are sorted.

    Returns:
        Token ids, log-probabilities (float32) and ranks, all [num_rows, 1 + num_best]:
        first the token, then the best ones.
    """
    keys = order_keys(logits)
    token_ids = token_ids.unsqueeze(-1)
    rank = 1 + (keys > keys.gather(1, token_ids)).sum(dim=-1, keepdim=True)
    best = keys.topk(min(num_best, logits.shape[1])).indices
    ids = torch.cat([token_ids, best], dim=1)
    places = torch.arange(1, 1 + best.shape[1], device=logits.device)
    ranks = torch.cat([rank, places.expand(len(rank), -1)], dim=1)
    log_sums = torch.logsumexp(logits, dim=-1, keepdim=True)
    return ids, logits.gather(1, ids) - log_sums, ranks
