"""Generate without an engine: naively, with a cache, or in a static batch.

The naive way recomputes the whole text for every new token. It keeps nothing between
two tokens, so nothing can go stale: it is the oracle for every faster way. The cached
way computes each token once; the static batch does so for several texts in step.

Source: chapter 1, "Naive generation"; chapter 2, "The KV cache".
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from minivllm.errors import MinivllmError, RequestError
from minivllm.models.context import CachingContext
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


def make_random(seed: int | None) -> np.random.Generator:
    """Return the source of the random choices.

    Raises:
        RequestError: The seed is not an integer of at least 0.
    """
    if seed is not None and (type(seed) is not int or seed < 0):
        raise RequestError(f"seed is {seed!r}, but must be an integer of at least 0")
    return np.random.default_rng(seed)


def stream_tokens(
    next_logits: Callable[[list[int]], np.ndarray],
    token_ids: list[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    temperature: float,
    random: np.random.Generator,
) -> Iterator[int]:
    """Score the text, pick a token, append it to `token_ids`; again and again."""
    for _ in range(max_new_tokens):
        token_id = pick_token(next_logits(token_ids), temperature, random)
        token_ids.append(token_id)
        yield token_id
        if token_id in stop_token_ids:
            return


def stream_naive(
    model: NextTokenModel,
    prompt_token_ids: Iterable[int],
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
    return stream_tokens(
        model.next_token_logits,
        token_ids,
        max_new_tokens,
        frozenset(stop_token_ids),
        temperature,
        make_random(seed),
    )


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


class CachingModel(NextTokenModel, Protocol):
    """What the faster ways need from a decoder; both decoders offer it."""

    def cached_context(self, max_tokens: int) -> CachingContext:
        """Return an empty cache for one text."""
        ...

    def static_batch_context(
        self, lengths: Sequence[int], max_tokens: int
    ) -> CachingContext:
        """Return an empty cache for prompts of these lengths."""
        ...

    def extend(self, token_ids: Sequence, context: CachingContext) -> np.ndarray:
        """Add new tokens to each text in a context and score what follows."""
        ...


def stream_cached(
    model: CachingModel,
    prompt_token_ids: Iterable[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Generate like `stream_naive`, which has the arguments, with a KV cache.

    Cost:
        One forward pass over the prompt, then one over a single token for each new
        one. Memory for the keys and values of all tokens, reserved at the call.
    """
    token_ids = check_request(model.spec, prompt_token_ids, max_new_tokens, temperature)
    random = make_random(seed)
    # The last token is picked and never fed back: it needs no row.
    context = model.cached_context(len(token_ids) + max_new_tokens - 1)

    def next_logits(token_ids: list[int]) -> np.ndarray:
        return model.extend(token_ids[context.num_tokens :], context)

    return stream_tokens(
        next_logits,
        token_ids,
        max_new_tokens,
        frozenset(stop_token_ids),
        temperature,
        random,
    )


def generate_cached(
    model: CachingModel,
    prompt_token_ids: Iterable[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int | None = None,
) -> list[int]:
    """Return the new token ids of `stream_cached`; `stream_naive` has the arguments."""
    return list(
        stream_cached(
            model,
            prompt_token_ids,
            max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            seed=seed,
        )
    )


def generate_static_batch(
    model: CachingModel,
    prompts: Iterable[Iterable[int]],
    max_new_tokens: int | Sequence[int],
    *,
    stop_token_ids: Collection[int] = (),
) -> list[list[int]]:
    """Generate for several prompts in step, greedily, until the longest is done.

    Args:
        model: Either decoder.
        prompts: The texts to continue, token ids each.
        max_new_tokens: Tokens to generate at most, for all texts or for each.
        stop_token_ids: Tokens that end a text; the one that did comes last.

    Returns:
        The new token ids of each text, in the order of the prompts.

    Raises:
        RequestError: For an impossible request, before any work is done.

    Cost:
        A pass over as many lines as texts, each as long as the longest prompt; then one
        row per text for each token of the longest answer.
    """
    prompts = list(prompts)
    if isinstance(max_new_tokens, Sequence):
        limits = list(max_new_tokens)
    else:
        limits = [max_new_tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise RequestError(
            f"max_new_tokens has {len(limits)} numbers for {len(prompts)} prompts: "
            "give one for each, or a single one for all"
        )
    texts = [
        check_request(model.spec, prompt, limit, 0.0)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    if not texts:
        return []
    lengths, random = [len(text) for text in texts], make_random(None)
    width = max(lengths)
    context = model.static_batch_context(lengths, width + max(limits) - 1)
    answers: list[list[int]] = [[] for _ in texts]
    is_done = [False] * len(texts)
    # Any token will do as padding: nobody looks at it.
    new_token_ids = [[0] * (width - len(text)) + text for text in texts]
    while not all(is_done):
        logits = model.extend(new_token_ids, context)
        for i, answer in enumerate(answers):
            if not is_done[i]:
                answer.append(pick_token(logits[i], 0.0, random))
                is_done[i] = len(answer) == limits[i] or answer[-1] in stop_token_ids
        # A text that is done is fed on with its last token, for nothing.
        new_token_ids = [[answer[-1]] for answer in answers]
    return answers
