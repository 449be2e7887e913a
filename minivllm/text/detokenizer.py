"""Text from tokens that arrive one by one, up to a stop text.

A token can end in the middle of a character, and a stop text can begin in one token
and end in another. So this detokenizer gives out what is certain and holds back the
rest: at most three bytes, and characters that may be the beginning of a stop text.

Invariant: all that `add` returned, plus `finish`, is `tokenizer.decode` of the same
ids, cut at the first stop text; the work per token does not grow with the text.
Called by the command line and the engine, one per request.

In vLLM: vllm/v1/engine/detokenizer.py (FastIncrementalDetokenizer,
check_stop_strings). It holds back as many characters as the longest stop text has,
less one. Its slow path, like Text Generation Inference, decodes the last few tokens
twice and compares the strings (`prefix_offset`, `read_offset`), which works for any
tokenizer; knowing the bytes of each token makes that unnecessary.
Source: appendix A2, "Text"; chapter 5, "Sampling".
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from minivllm.text.tokenizer import Tokenizer, as_token_id


class StopStrings:
    """Find the first of some texts in a text that comes character by character.

    Knuth, Morris and Pratt, "Fast Pattern Matching in Strings" (1977): all we keep of
    the text is how much of each stop the text ends with. Where the next character does
    not fit, a table says how much of the stop is there even so. The work is linear.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert not isinstance(stops, str) and all(stops), stops
        # The longest first: it wins where several end at once.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders_of(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)

    def read(self, character: str) -> str | None:
        """Take the next character; return the stop that it completes, if any."""
        found = None
        for n, stop in enumerate(self._stops):
            length = _extend(stop, self._borders[n], self._lengths[n], character)
            if length == len(stop):
                found = found or stop
                length = self._borders[n][length]  # a next one may overlap this one
            self._lengths[n] = length
        return found

    def begun(self) -> tuple[str, int]:
        """Return the stop of which the text ends with the most, and how much."""
        pairs = zip(self._stops, self._lengths, strict=True)
        return max(pairs, key=lambda pair: pair[1], default=("", 0))


class IncrementalDetokenizer:
    """Turn one request's output tokens into text, piece by piece.

    Args:
        tokenizer: Knows the bytes of each token.
        skip_special_tokens: Leave the tokens out that are markup.
        shown_token_ids: But not these.
        stop: The first of these that is complete ends the text; of several that end
            with the same character, the longest.
        include_stop_str_in_output: Cut behind the stop text, not before it.
        min_tokens: A stop text that ends within so many tokens does not count.
        prompt_token_ids: What the answer continues. A character that the prompt began
            and the answer completes belongs to the answer.

    Attributes:
        stop_reason: The stop text that ended the answer, or None.

    Raises:
        RequestError: A token at the end of the prompt is outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[SupportsIndex] = (),
    ) -> None:
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._skipped = (
            tokenizer.special_token_ids.difference(shown_token_ids)
            if skip_special_tokens
            else frozenset()
        )
        self._stops = StopStrings(stop) if stop else None
        self._held = ("", 0)  # a stop text, and how much of it is held back
        self._keeps_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # If the prompt ends inside a character, the last 3 bytes show it.
        end = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                end = tokenizer.token_bytes(token_id) + end
            if len(end) >= 3:
                break
        self._decoder.decode(end)
        self._borrowed: bytes = self._decoder.getstate()[0]
        # Encoding puts a space in front of a text, and the prompt is the front.
        self._space_to_strip = tokenizer.spelling.strips_leading_space and not end

    def add(self, token_id: SupportsIndex) -> str:
        """Take one token and return the text that became certain, "" if none.

        Raises:
            RequestError: The id is no integer, or outside the vocabulary.
        """
        if self.stop_reason is not None:
            return ""
        self._num_tokens += 1
        token_id = as_token_id(token_id)
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._space_to_strip:
            data = data.removeprefix(b" ")
            self._space_to_strip = False
        text = self._decode(data)
        return text if self._stops is None else self._before_stop(text, self._stops)

    def finish(self) -> str:
        """Return what was held back; nothing if a stop text ended the answer.

        A text that ends inside a character ends in U+FFFD. That cannot complete a stop
        text, because no token brought it.
        """
        if self.stop_reason is not None:
            return ""
        stop, num_held = self._held
        self._held = ("", 0)
        return stop[:num_held] + self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        """Return the characters that became certain."""
        waiting = self._decoder.getstate()[0] + data
        text = self._decoder.decode(data, final)
        if self._borrowed and text:
            if not waiting.startswith(text[0].encode()):
                # The answer does not complete the prompt's character: begin without.
                self._decoder.reset()
                text = self._decoder.decode(waiting[len(self._borrowed) :], final)
            self._borrowed = b""
        return text

    def _before_stop(self, piece: str, stops: StopStrings) -> str:
        """Return what is certain of the text held back with `piece` behind it."""
        stop, num_held = self._held
        num_certain = num_held + len(piece)
        for end, character in enumerate(piece, num_held + 1):
            found = stops.read(character)
            if found and self._num_tokens > self._min_tokens:
                self.stop_reason = found
                num_certain = end if self._keeps_stop else end - len(found)
                break
        else:
            if not self._keeps_stop:
                self._held = stops.begun()
                num_certain -= self._held[1]
        # Slices of the two, not of their sum: a long stop text is not copied each time.
        return (
            stop[: min(num_held, num_certain)] + piece[: max(0, num_certain - num_held)]
        )


def _extend(stop: str, borders: list[int], length: int, character: str) -> int:
    """Return how much of `stop` a text ends with, from that before `character`."""
    while length and stop[length] != character:
        length = borders[length]
    return length + (stop[length] == character)


def _borders_of(stop: str) -> list[int]:
    """Return, for each n, the length of the longest border of `stop[:n]`.

    A border is a beginning, not the whole, that is an end, too: "abcab" has "ab".
    """
    borders = [0, 0]
    for character in stop[1:]:
        borders.append(_extend(stop, borders, borders[-1], character))
    return borders
