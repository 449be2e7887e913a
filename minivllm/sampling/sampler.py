"""Choose the next tokens of a batch from their scores, on the device of the scores.

The same choice as `minivllm.reference.sampler`, for many rows, without waiting for the
device: what to do depends on shapes and arguments, never on a value.

In vLLM: vllm/v1/sample/sampler.py (Sampler).
Source: appendix A6, "The torch runner".
"""

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperatures: Tensor | None, uniforms: Tensor | None
) -> Tensor:
    """Return a token id for each row, [num_rows] int64.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.
        temperatures: [num_rows] float64; 0 takes the best token. None if all are 0.
        uniforms: A random number for each row, 0 <= u < 1, [num_rows] float64; None
            if all temperatures are 0.
    """
    best = logits.argmax(dim=-1)
    if temperatures is None:
        return best
    temperatures = temperatures.unsqueeze(-1)
    is_greedy = temperatures == 0
    shifted = (logits - logits.amax(dim=-1, keepdim=True)).double()
    shares = shifted.div_(temperatures.masked_fill(is_greedy, 1.0)).exp_()
    ends = shares.cumsum_(dim=-1)
    # A number of at most 1 - 2**-53 times the total is rounded to less than the total,
    # so there always is a token whose stretch ends behind the point.
    points = uniforms.unsqueeze(-1) * ends.narrow(1, ends.shape[1] - 1, 1)
    drawn = torch.searchsorted(ends, points, right=True).squeeze(-1)
    # Scores that are no numbers have no token: any id, the caller reports an error.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(is_greedy.squeeze(-1), best, drawn)
