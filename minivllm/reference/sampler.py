"""Choose tokens from their scores, in NumPy, the way the definition is written.

Every step takes a row of all tokens, [vocab_size], and returns one: scores, edited as
the request asks, then probabilities, those that are cut off set to 0.

Invariant: no step changes its input. Scores keep their dtype; probabilities are
float64, whatever the scores are.

Called by the NumPy runner; the oracle for `minivllm.sampling.sampler`.

Source: appendix A5, "Records"; chapter 5, "Sampling".
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from minivllm.request import Request
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.uniform import uniform


def token_probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return softmax(logits / temperature), float64, [vocab_size]; temperature > 0."""
    # Shifted before the division: the best token stays at 0, however cold it is.
    shifted = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # -inf is right: exp(-inf) is 0
        shares = np.exp(shifted / temperature)
    return shares / shares.sum()


def draw_token(probabilities: np.ndarray, number: float) -> int:
    """Return the token on whose stretch a number from [0, 1) falls.

    The probabilities laid end to end fill a line, which need not be of length 1
    (inverse transform sampling).
    """
    ends = probabilities.cumsum()
    return int(np.searchsorted(ends, number * ends[-1], side="right"))


def sample_token(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """Choose a token from scores that are edited already.

    Args:
        logits: [vocab_size].
        params: Filled.
        number: The random number, 0 <= number < 1.
    """
    # Scores that are no numbers have no token: any id, the caller reports an error.
    if params.temperature == 0 or not np.isfinite(logits.max()):
        return int(logits.argmax())
    order = best_first(logits)
    probabilities = token_probabilities(logits, params.temperature)
    probabilities = keep_min_p(probabilities, params.min_p)
    probabilities = keep_top_k(probabilities, order, params.top_k)
    probabilities = keep_top_p(probabilities, order, params.top_p)
    return draw_token(probabilities, number)


def sample(logits: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Choose the next token of each request, [num_rows] int64.

    Args:
        logits: Edited already, [num_rows, vocab_size].
        requests: One per row.
    """
    token_ids = [
        sample_token(
            row,
            request.sampling_params,
            uniform(request.seed, request.num_output_tokens),
        )
        for row, request in zip(logits, requests, strict=True)
    ]
    return np.array(token_ids, dtype=np.int64)


def best_first(logits: np.ndarray) -> np.ndarray:
    """Return the token ids from the best score to the worst, equal ones by id."""
    return np.argsort(-logits, kind="stable")


def keep_min_p(probabilities: np.ndarray, min_p: float) -> np.ndarray:
    """Drop tokens that are less probable than this share of the best."""
    is_kept = probabilities >= min_p * probabilities.max()
    return np.where(is_kept, probabilities, 0)


def keep_top_k(probabilities: np.ndarray, order: np.ndarray, top_k: int) -> np.ndarray:
    """Drop all tokens but the first in this order; 0 and -1 keep all."""
    kept = probabilities.copy()
    if top_k > 0:
        kept[order[top_k:]] = 0
    return kept


def keep_top_p(
    probabilities: np.ndarray, order: np.ndarray, top_p: float
) -> np.ndarray:
    """Drop tokens in this order once those before add up to a share of the whole."""
    kept = probabilities.copy()
    if top_p < 1:
        ends = probabilities[order].cumsum()
        # The first token stays, however small top_p is.
        kept[order[1:][ends[:-1] >= top_p * ends[-1]]] = 0
    return kept


def known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Leave out the tokens that the model has no scores for."""
    return [token_id for token_id in token_ids if token_id < vocab_size]


def ban(logits: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    """Make tokens impossible."""
    edited = logits.copy()
    edited[known(token_ids, len(logits))] = -np.inf
    return edited


def completing(
    bad_words: Iterable[Sequence[int]], output_token_ids: Sequence[int]
) -> list[int]:
    """Return the tokens that would complete a bad word if they came next."""
    banned = []
    for *beginning, last in bad_words:
        end = list(output_token_ids[len(output_token_ids) - len(beginning) :])
        if len(beginning) <= len(output_token_ids) and end == beginning:
            banned.append(last)
    return banned


def allow_only(logits: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    """Make all other tokens impossible."""
    edited = np.full_like(logits, -np.inf)
    allowed = known(token_ids, len(logits))
    edited[allowed] = logits[allowed]
    return edited


def add_bias(logits: np.ndarray, biases: Mapping[int, float]) -> np.ndarray:
    """Add to each token its bias."""
    edited = logits.copy()
    for token_id in known(biases, len(logits)):
        edited[token_id] += biases[token_id]
    return edited


def penalise_repetition(
    logits: np.ndarray, token_ids: Sequence[int], penalty: float
) -> np.ndarray:
    """Make tokens that the text has less likely: a penalty above 1 lowers any score."""
    has = np.bincount(token_ids, minlength=len(logits)) > 0
    lowered = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.where(has, lowered, logits)


def penalise_output(
    logits: np.ndarray,
    output_token_ids: Sequence[int],
    frequency: float,
    presence: float,
) -> np.ndarray:
    """Subtract a penalty for each time that the output has a token, and one for any."""
    ids = np.array(output_token_ids, dtype=np.int64)
    counts = np.bincount(ids, minlength=len(logits)).astype(logits.dtype)
    return logits - frequency * counts - presence * np.minimum(counts, 1)


def edit_row(logits: np.ndarray, request: Request) -> np.ndarray:
    """Apply all that a request asks of its scores, [vocab_size]; a new array."""
    params = request.sampling_params
    if params.allowed_token_ids is not None:
        logits = allow_only(logits, params.allowed_token_ids)
    logits = ban(logits, completing(request.bad_words, request.output_token_ids))
    if request.num_output_tokens < params.min_tokens:
        logits = ban(logits, request.stop_token_ids)
    logits = add_bias(logits, params.logit_bias)
    logits = penalise_repetition(logits, request.token_ids, params.repetition_penalty)
    return penalise_output(
        logits,
        request.output_token_ids,
        params.frequency_penalty,
        params.presence_penalty,
    )


def sample_row(logits: np.ndarray, request: Request, number: float) -> int:
    """Choose the next token of a request from the scores of the model, [vocab_size]."""
    return sample_token(edit_row(logits, request), request.sampling_params, number)


def edit(logits: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Return the scores as each request wants them, [num_rows, vocab_size]."""
    rows = zip(logits, requests, strict=True)
    return np.stack([edit_row(row, request) for row, request in rows])
