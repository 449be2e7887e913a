"""Text from tokens that arrive one by one.

A token is some bytes, and a character may need up to four of them, so a token can
end in the middle of a character. This detokenizer gives out what is certain and
holds back the rest: at most three bytes.

Invariant: all that `add` returned, plus `finish`, is `tokenizer.decode` of the same
ids; the work per token does not grow with the text. Called by the command line and
the engine, one per request.

In vLLM: vllm/v1/engine/detokenizer.py. Text Generation Inference and vLLM decode the
last few tokens twice and compare the strings (`prefix_offset`, `read_offset`), which
works for any tokenizer; knowing the bytes of each token makes that unnecessary.
Source: appendix A2, "Text".
"""

import codecs
from typing import SupportsIndex

from minivllm.text.tokenizer import Tokenizer, as_token_id


class IncrementalDetokenizer:
    """Turn one request's output tokens into text, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = (
            tokenizer.special_token_ids if skip_special_tokens else frozenset()
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._space_to_strip = tokenizer.spelling.strips_leading_space

    def add(self, token_id: SupportsIndex) -> str:
        """Take one token and return the text that became certain, "" if none.

        Raises:
            RequestError: The id is no integer, or outside the vocabulary.
        """
        token_id = as_token_id(token_id)
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._space_to_strip:
            data = data.removeprefix(b" ")
            self._space_to_strip = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was held back: U+FFFD if the text ended inside a character."""
        return self._decoder.decode(b"", final=True)
