"""The op `draw`: a token for each row that does not simply take the best one.

    draw        compiled, on the CPU, if there is a compiler
                torch    always (the reference)

Both take scores to shares, the probabilities divided by that of the best token: they
leave tokens out by min_p, top_k and top_p, and lay the rest end to end. A random number
falls on the stretch of one of them (inverse transform sampling).

Invariant: a row depends on nothing but itself. On a GPU nothing waits for the device:
what to do depends on shapes and arguments, never on a value.

Called by `minivllm.sampling.sampler`.

In vLLM: vllm/v1/sample/ops/topk_topp_sampler.py (TopKTopPSampler).
Source: appendix A12, "A sampler for a whole batch".
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.registry import Backend, define_op

NUM_CANDIDATES = 2048  # best tokens among which most cuts of top_k and top_p lie
PAGE_SIZE = 256  # tokens whose shares are added in float32
BELOW_ONE = 1 - 2**-53  # the largest number below 1


def draw(
    logits: Tensor,
    largest: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """Return a token id for each of some rows, [num_sampled] int64.

    Args:
        logits: float32, [num_rows, vocab_size]; not changed.
        largest: The largest score of each row, [num_rows]. If it is not finite, any
            token may be drawn.
        rows: Those that draw, [num_sampled] int64.
        temperatures: [num_sampled] float64, above 0.
        uniforms: A random number for each, 0 <= u < 1, [num_sampled] float64.
        min_p: Of the first rows, which leave tokens out, [num_cut] float64.
        top_k: [num_cut] int64, at most vocab_size.
        top_p: [num_cut] float64.
    """
    tops = largest.index_select(0, rows).unsqueeze(-1)
    # float32 has no smaller number; at this one, all but the best have share 0.
    temperatures = temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    temperatures = temperatures.float().unsqueeze(-1)
    shares = to_shares(logits.index_select(0, rows), tops, temperatures)
    num_cut = len(top_k)
    if num_cut:
        few, rows, *first = (
            x.narrow(0, 0, num_cut) for x in (shares, rows, tops, temperatures)
        )
        masses = page_sums(few).sum(dim=-1)
        columns = (column.unsqueeze(-1) for column in (masses, min_p, top_k, top_p))
        cut(logits.index_select(0, rows), few, Rules(*first, *columns))
    return draw_from(shares, uniforms)


def to_shares(scores: Tensor, tops: Tensor, temperatures: Tensor) -> Tensor:
    """Return the probabilities of tokens, divided by that of the best token.

    Args:
        scores: [num_rows, num_tokens]; overwritten with the result.
        tops: The best score of each row, [num_rows, 1].
        temperatures: Above 0, [num_rows, 1].
    """
    # Shifted before the division: the best token stays at 0, however cold it is.
    return scores.sub_(tops).div_(temperatures).exp_()


class Rules(NamedTuple):
    """Which of its tokens a row keeps; each [num_rows, 1]."""

    tops: Tensor  # the best score
    temperatures: Tensor
    masses: Tensor  # the sum of all shares, float64
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    def of(self, rows: Tensor) -> "Rules":
        """Return the rules of some of the rows."""
        return Rules(*(column.index_select(0, rows) for column in self))


class Cuts(NamedTuple):
    """Where a row is cut; each [num_rows, 1].

    Tokens with a better score than `lowest` are kept, and the first `num_ties` of
    those that have just this score.
    """

    lowest: Tensor
    num_ties: Tensor
    is_open: Tensor  # the cut may lie behind the tokens that were looked at


def cut(scores: Tensor, shares: Tensor, rules: Rules) -> None:
    """Set the shares of tokens to 0 that min_p, top_k and top_p leave out.

    What is kept is the beginning of all tokens in the order of their scores, so it is
    enough to find the last one.

    Args:
        scores: [num_rows, vocab_size]; used up.
        shares: [num_rows, vocab_size]; changed in place.
        rules: Of the rows.
    """
    cuts = find_cuts(scores, rules)
    drop_late_ties(scores, shares, cuts)
    shares.mul_(scores.ge_(cuts.lowest))


def may_look_at(x: Tensor) -> bool:
    """Say whether the values of a tensor may decide what is done.

    On a GPU the host would wait for them.
    """
    return x.device.type == "cpu"


def find_cuts(scores: Tensor, rules: Rules) -> Cuts:
    """Find the last token that each row keeps.

    Args:
        scores: [num_rows, vocab_size].
        rules: Of the rows.
    """
    vocab_size = scores.shape[1]
    if not may_look_at(scores) or vocab_size <= NUM_CANDIDATES:
        return cuts_among(best_scores(scores, vocab_size), rules, vocab_size)
    cuts = cuts_among(best_scores(scores, NUM_CANDIDATES), rules, vocab_size)
    rows = cuts.is_open.squeeze(-1).nonzero().squeeze(-1)
    if len(rows):
        best = best_scores(scores.index_select(0, rows), vocab_size)
        whole = cuts_among(best, rules.of(rows), vocab_size)
        for column, found in zip(cuts, whole, strict=True):
            column.index_copy_(0, rows, found)
    return cuts


def best_scores(scores: Tensor, count: int) -> Tensor:
    """Return the best scores of each row in descending order, [num_rows, count]."""
    if not may_look_at(scores):
        return scores.sort(dim=-1, descending=True).values.narrow(1, 0, count)
    # NumPy sorts with vector instructions, many times as fast as torch.
    values = scores.numpy()
    if count < values.shape[1]:
        values = np.partition(values, -count)[:, -count:]
    return torch.from_numpy(np.sort(values)).flip(-1)


def cuts_among(best: Tensor, rules: Rules, vocab_size: int) -> Cuts:
    """Find the last token that each row keeps among its best.

    Args:
        best: Their scores, in descending order, [num_rows, num_best].
        rules: Of the rows.
        vocab_size: Of how many tokens these are the best.
    """
    num_best = best.shape[1]
    shares = to_shares(best.clone(), rules.tops, rules.temperatures)
    num_kept = torch.minimum(rules.top_k, count(shares, rules.min_p.float()))
    num_kept.clamp_(1, num_best)  # also in rows that are no numbers
    ends = shares.cumsum(dim=-1, dtype=torch.float64)
    # top_p is a share of what the others keep: of these tokens, if they leave out any.
    is_shorter = (rules.min_p > 0) | (rules.top_k < vocab_size)
    masses = torch.where(is_shorter, ends.gather(1, num_kept - 1), rules.masses)
    is_open = is_shorter & (num_kept == num_best)
    # A token is kept while the mass before it is below that share.
    num_below = torch.searchsorted(ends, rules.top_p * masses)
    num_kept = torch.minimum(num_kept, num_below + 1)
    is_open |= num_kept == num_best
    lowest = best.gather(1, num_kept - 1)
    num_ties = num_kept - count(best, lowest, or_equal=False)
    return Cuts(lowest, num_ties, is_open)


def count(descending: Tensor, bound: Tensor, or_equal: bool = True) -> Tensor:
    """Count the numbers of each row that are larger than a bound, [num_rows, 1]."""
    return torch.searchsorted(-descending, -bound, right=or_equal)


def drop_late_ties(scores: Tensor, shares: Tensor, cuts: Cuts) -> None:
    """Set the shares of tokens to 0 that have the lowest score but come too late.

    Args:
        scores: [num_rows, vocab_size].
        shares: [num_rows, vocab_size]; changed in place.
        cuts: Of these rows.
    """
    if not may_look_at(scores):
        is_tie = scores == cuts.lowest
        is_late = is_tie & (is_tie.cumsum(dim=-1) > cuts.num_ties)
        shares.masked_fill_(is_late, 0)
        return
    # Few tokens have this score, and NumPy finds them fast.
    places = np.flatnonzero(scores.numpy() == cuts.lowest.numpy())
    rows = places // scores.shape[1]
    ranks = np.arange(len(rows)) - np.searchsorted(rows, rows)
    is_late = ranks >= cuts.num_ties.numpy()[rows, 0]
    shares.view(-1).index_fill_(0, torch.from_numpy(places[is_late]), 0)


def paged(shares: Tensor) -> Tensor:
    """Split rows into pages, the last filled with zeros, [num_rows, num_pages, ...]."""
    num_missing = -shares.shape[-1] % PAGE_SIZE
    if num_missing:
        shares = F.pad(shares, (0, num_missing))
    return shares.unflatten(-1, (-1, PAGE_SIZE))


def page_sums(shares: Tensor) -> Tensor:
    """Add the shares of each page, [num_rows, num_pages] float64.

    So few float32 numbers may be added as they are; sums of the sums need float64.
    """
    return paged(shares).sum(dim=-1).double()


def draw_from(shares: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token on whose stretch each number falls, [num_rows] int64.

    The shares laid end to end fill a line (inverse transform sampling). The page is
    found first, then the token in it.

    Args:
        shares: [num_rows, vocab_size].
        uniforms: [num_rows] float64.
    """
    pages, rest = stretch_at(uniforms.unsqueeze(-1), page_sums(shares))
    in_page = torch.take_along_dim(paged(shares), pages.unsqueeze(-1), dim=1).squeeze(1)
    tokens, _ = stretch_at(rest, in_page.double())
    return (pages * PAGE_SIZE + tokens).squeeze(-1)


def stretch_at(fractions: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Find the stretch on which a point of a line falls; never one of width 0.

    Args:
        fractions: How much of the line lies before the point, below 1, [num_rows, 1].
        widths: Of the stretches, laid end to end, float64, [num_rows, num_stretches].

    Returns:
        The index of the stretch, and how much of the stretch lies before the point,
        below 1, both [num_rows, 1].
    """
    ends = widths.cumsum(dim=-1)
    # A number below 1 times the length is rounded to less than the length.
    points = fractions * ends.narrow(1, -1, 1)
    # Sums that a GPU makes in parallel may rise where nothing was added.
    is_behind = (ends > points) & (widths > 0)
    found = is_behind.byte().argmax(dim=-1, keepdim=True)  # the first
    width = widths.gather(1, found)
    start = ends.gather(1, found) - width
    # Right at an end of the stretch, the quotient may be rounded out of it.
    return found, ((points - start) / width).clamp_(0, BELOW_ONE)


define_op("draw", [Backend("torch", draw)])
