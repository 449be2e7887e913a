"""Choose the next tokens of a batch from their scores, on the device of the scores.

The same choice as `minivllm.reference.sampler`, for many rows at once, in float32.

Invariant: a row depends on nothing but itself, and nothing waits for the device: what
to do depends on shapes and arguments, never on a value.

Called by the torch runner.

In vLLM: vllm/v1/sample/sampler.py (Sampler).
Source: appendix A6, "The torch runner"; appendix A12, "A sampler for a whole batch".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minivllm.ops.draw import draw as draw_in_torch
from minivllm.sampling.inputs import SamplingInputs


def largest_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row, and where it first stands."""
    largest, token_ids = logits.max(dim=-1)
    return largest, token_ids


def sample(
    logits: Tensor,
    inputs: SamplingInputs,
    argmax: Callable[[Tensor], tuple[Tensor, Tensor]] = largest_of,
    draw: Callable[..., Tensor] = draw_in_torch,
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row.

    Args:
        logits: Edited already, float32, [num_rows, vocab_size]; not changed.
        inputs: On the same device.
        argmax: What finds the best tokens.
        draw: What draws tokens, a backend of the op.

    Returns:
        The largest score of each row, [num_rows] float32, and the token id, [num_rows]
        int64. If the largest is not finite, the id may be any.
    """
    largest, token_ids = argmax(logits)
    if not inputs.num_sampled:
        return largest, token_ids
    drawn = draw(
        logits,
        largest,
        inputs.sampled_rows,
        inputs.temperatures,
        inputs.uniforms,
        inputs.min_p,
        inputs.top_k,
        inputs.top_p,
    )
    return largest, token_ids.index_copy(0, inputs.sampled_rows, drawn)


@contextmanager
def edited(logits: Tensor, inputs: SamplingInputs) -> Iterator[Tensor]:
    """Give the scores as each request wants them, for as long as the block runs.

    Few of the scores change: they are kept aside and put back, which is faster than a
    copy of all. Only rows that do not lie next to each other are copied.

    Args:
        logits: float32, [num_rows, vocab_size]; within the block, not to be used.
        inputs: On the same device.
    """
    if not inputs.has_edits:
        yield logits
        return
    logits = logits.contiguous()
    flat = logits.view(-1)
    places = torch.cat([inputs.banned, inputs.biased, inputs.seen])
    scores, rows = flat.take(places), logits.index_select(0, inputs.choosy_rows)
    try:
        edit(logits, inputs)
        yield logits
    finally:
        flat.index_copy_(0, places, scores)
        logits.index_copy_(0, inputs.choosy_rows, rows)


def edit(logits: Tensor, inputs: SamplingInputs) -> None:
    """Change contiguous scores to what each request wants, in place; see `edited`."""
    flat = logits.view(-1)
    if len(inputs.choosy_rows):
        allowed = flat.take(inputs.allowed)
        logits.index_fill_(0, inputs.choosy_rows, -torch.inf)
        flat.index_copy_(0, inputs.allowed, allowed)
    flat.index_fill_(0, inputs.banned, -torch.inf)
    flat.index_add_(0, inputs.biased, inputs.biases.float())
    if len(inputs.seen):
        penalise(flat, inputs)


def penalise(flat: Tensor, inputs: SamplingInputs) -> None:
    """Change the scores of tokens that the text has, in place.

    Args:
        flat: [num_rows * vocab_size].
        inputs: Says which, and how often the output has them.
    """
    names = ("repetition", "frequency", "presence")
    repetition, frequency, presence = (
        getattr(inputs, name).float().index_select(0, inputs.seen_rows)
        for name in names
    )
    counts = inputs.seen_counts.float()
    scores = flat.take(inputs.seen)
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = scores - frequency * counts - presence * (counts > 0)
    flat.index_copy_(0, inputs.seen, scores)
