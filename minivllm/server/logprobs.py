"""Log-probabilities in the two shapes that OpenAI's interface has for them.

Invariant: the pieces for some tokens and for the next ones, joined, are what all of
them at once would be. Called by the answers.

In vLLM: vllm/entrypoints/openai/chat_completion/serving.py and
vllm/entrypoints/openai/completion/serving.py (_create_chat_logprobs,
_create_completion_logprobs).
Source: appendix A30, "Speaking OpenAI".
"""

from collections.abc import Sequence
from typing import Any

from minivllm.outputs import Logprob
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf; vLLM's value

Entry = dict[int, Logprob]  # of one place: the token that was taken, then the best


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can say."""
    return max(logprob, LOWEST)


def chat_entry(
    entry: Entry, num_best: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the logprobs of a token in the shape of a chat."""
    best = [
        describe_token(token_id, logprob, tokenizer)
        for token_id, logprob in entry.items()
        if num_best == -1 or logprob.rank <= num_best
    ]
    best.sort(key=lambda described: -described["logprob"])
    token_id, logprob = next(iter(entry.items()))
    return {**describe_token(token_id, logprob, tokenizer), "top_logprobs": best}


def describe_token(
    token_id: int, logprob: Logprob, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a token's text, bytes and log-probability."""
    data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return {
        "token": f"token_id:{token_id}" if data is None else logprob.decoded_token,
        "logprob": finite(logprob.logprob),
        "bytes": data,
    }


def plain_entry(entry: Entry | None) -> dict[str, dict[str, Any]] | None:
    """Return the logprobs of a token of the prompt, in vLLM's shape."""
    return entry and {
        str(token_id): {
            "logprob": finite(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": logprob.decoded_token,
        }
        for token_id, logprob in entry.items()
    }


def spell(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Return a token as a text; one that is part of a character as its bytes.

    So different parts stay different; OpenAI writes them alike.
    """
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Make the logprobs of a completion, piece by piece.

    Args:
        tokenizer: None if the engine has none.
        skip_special_tokens: As in the text.
        prompt_token_ids: What the text continues.
        start: Where the text begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._offset = start
        self._detokenizer = tokenizer and IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            prompt_token_ids=prompt_token_ids,
        )

    def add(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None]
    ) -> dict[str, list[Any]]:
        """Return the logprobs of the next tokens; None for one that nothing predicts.

        A token's offset is where its first character begins that was not begun before.
        """
        logprobs: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens")
        }
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=False):
            logprobs["text_offset"].append(self._offset)
            logprobs["tokens"].append(spell(token_id, self._tokenizer))
            own = None if entry is None else finite(entry[token_id].logprob)
            logprobs["token_logprobs"].append(own)
            top_logprobs.append(entry and self._by_text(entry))
            if self._detokenizer:
                self._offset += len(self._detokenizer.add(token_id))
        return {**logprobs, "top_logprobs": top_logprobs}

    def _by_text(self, entry: Entry) -> dict[str, float]:
        texts: dict[str, float] = {}
        for token_id, logprob in entry.items():
            text = spell(token_id, self._tokenizer)
            texts.setdefault(text, finite(logprob.logprob))
        return texts
