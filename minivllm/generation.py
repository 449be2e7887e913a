"""Generate the naive way: recompute the whole text for every new token.

The slowest correct way there is. It stays in the package as the oracle for every
faster one: it keeps nothing between two tokens, so nothing can go stale.

Source: chapter 1, "Naive generation".
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from minivllm.errors import MinivllmError, RequestError
from minivllm.models.spec import ModelSpec


class NextTokenModel(Protocol):
    """What generation needs from a decoder; both decoders offer it."""

    spec: ModelSpec

    def next_token_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Score what follows the text, [vocab_size]."""
        ...


def pick_token(
    logits: np.ndarray, temperature: float, random: np.random.Generator
) -> int:
    """Return the best token at temperature 0, else draw from softmax(logits / t).

    Raises:
        MinivllmError: The model has computed NaN or infinity.
    """
    if not np.isfinite(logits.max()):
        raise MinivllmError(
            f"the largest logit is {logits.max()}, but must be finite: compute in "
            "float32 or bfloat16, or fetch the weights again if they are damaged"
        )
    if temperature == 0:
        return int(logits.argmax())
    # The largest of logits / t + Gumbel noise is a draw from the softmax (chapter 5).
    shifted = logits.astype(np.float64) - logits.max()
    return int((shifted + temperature * random.gumbel(size=logits.shape)).argmax())


def check_request(
    spec: ModelSpec,
    prompt_token_ids: Iterable[int],
    max_new_tokens: int,
    temperature: float,
) -> list[int]:
    """Refuse what cannot be generated, before any work is done.

    Returns:
        The prompt as a new list of Python integers.

    Raises:
        RequestError: Naming the value and its limit.
    """
    token_ids = []
    for token_id in prompt_token_ids:
        try:
            if isinstance(token_id, bool):
                raise TypeError
            token_ids.append(operator.index(token_id))
        except TypeError:
            raise RequestError(
                f"the prompt holds {token_id!r}, but token ids are integers: encode "
                "the text with the model's tokenizer"
            ) from None
        if not 0 <= token_ids[-1] < spec.vocab_size:
            raise RequestError(
                f"the prompt holds token id {token_id}, but the model knows 0 to "
                f"{spec.vocab_size - 1}: encode with this model's tokenizer"
            )
    if not token_ids:
        raise RequestError(
            "the prompt has 0 tokens, but a decoder needs at least 1 to continue: "
            "write a word"
        )
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RequestError(
            f"max_new_tokens is {max_new_tokens!r}, but must be an integer above 0"
        )
    num_tokens = len(token_ids) + max_new_tokens
    if num_tokens > spec.max_position_embeddings:
        limit = spec.max_position_embeddings
        ways = {
            "shorten the prompt to {} tokens": limit - max_new_tokens,
            "ask for at most {} new ones": limit - len(token_ids),
        }
        raise RequestError(
            f"{len(token_ids)} prompt tokens and {max_new_tokens} new ones are "
            f"{num_tokens}, but the model was trained for {limit}: "
            + " or ".join(way.format(n) for way, n in ways.items() if n > 0)
        )
    if not (isinstance(temperature, int | float) and 0 <= temperature <= 1e6):
        raise RequestError(
            f"temperature is {temperature!r}, but must be a number from 0 (greedy) to "
            "1,000,000 (blind)"
        )
    return token_ids


def stream_naive(
    model: NextTokenModel,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Generate token by token.

    Args:
        model: Either decoder.
        prompt_token_ids: The text to continue, at least one token.
        max_new_tokens: Tokens to generate at most.
        stop_token_ids: Tokens that end the text; the one that did is yielded last.
        temperature: 0 takes the best token; higher is more random.
        seed: Makes the random choices repeatable.

    Returns:
        An iterator over the new token ids.

    Raises:
        RequestError: At the call, for an impossible request.

    Cost:
        A full forward pass over all tokens so far, for every new one.
    """
    token_ids = check_request(model.spec, prompt_token_ids, max_new_tokens, temperature)
    if seed is not None and (type(seed) is not int or seed < 0):
        raise RequestError(f"seed is {seed!r}, but must be an integer of at least 0")
    random = np.random.default_rng(seed)
    stop = frozenset(stop_token_ids)

    def tokens() -> Iterator[int]:
        for _ in range(max_new_tokens):
            logits = model.next_token_logits(token_ids)
            token_ids.append(pick_token(logits, temperature, random))
            yield token_ids[-1]
            if token_ids[-1] in stop:
                return

    return tokens()


def generate_naive(
    model: NextTokenModel,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int | None = None,
) -> list[int]:
    """Return the new token ids of `stream_naive`, which has the arguments."""
    return list(
        stream_naive(
            model,
            prompt_token_ids,
            max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            seed=seed,
        )
    )
