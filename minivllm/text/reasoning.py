"""Tell what a model thinks from what it answers, while the text is being written.

    <think>
    They ask for a capital.     <- reasoning_content
    </think>

    Paris.                      <- text

Invariant: however the text is cut into pieces, the parts are the same, and nothing
but the tags, the blanks around the first and the line breaks around the other is left
out. Called by the engine, one for each continuation.

In vLLM: vllm/reasoning/basic_parsers.py (BaseThinkingReasoningParser), and for Qwen3
vllm/parser/qwen3.py.
Source: appendix A27, "Thinking".
"""

import enum
import re
from collections.abc import Sequence

from minivllm.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"


class Place(enum.Enum):
    """Where in a text we are."""

    BEFORE = "before"  # nothing but blanks so far, or the beginning of a tag
    THOUGHTS = "thoughts"
    ANSWER = "answer"


class ReasoningSplitter:
    """Split one text, piece by piece.

    Args:
        prompt_end: What `prompt_end_of` says: the prompt may have opened thoughts.

    Attributes:
        has_thoughts: Whether the text has a part that is thoughts, even if empty.
    """

    def __init__(self, prompt_end: str = "") -> None:
        self.has_thoughts = False
        self._place = Place.BEFORE
        self._held = ""  # may be the beginning of a tag, or line breaks before one
        self._num_borrowed = 0  # characters of what is held that are the prompt's
        self._is_at_tag = False  # line breaks are dropped
        self.add(prompt_end[_start_of_thoughts(prompt_end) :])
        self.has_thoughts = self._place is Place.THOUGHTS
        self._num_borrowed = len(self._held)

    def add(self, piece: str) -> tuple[str, str]:
        """Take the next piece; return what became certain of thoughts and answer."""
        text, self._held = self._held + piece, ""
        thoughts = ""
        if self._place is Place.BEFORE:
            text = self._begin(text)
        if self._place is Place.THOUGHTS:
            thoughts, text = self._think(text)
        if self._place is Place.ANSWER:
            return thoughts, self._own(self._without_breaks(text))
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """Return what was held back: it was no tag."""
        held, self._held = self._own(self._held), ""
        return (held, "") if self._place is Place.THOUGHTS else ("", held)

    def _begin(self, text: str) -> str:
        """Find out what the text begins with; return what is behind it."""
        begun = text.lstrip()
        if begun.startswith(THINK):
            self.has_thoughts = self._is_at_tag = True
            self._place, self._num_borrowed = Place.THOUGHTS, 0
            return begun.removeprefix(THINK)
        if THINK.startswith(begun):
            self._held = text
            return ""
        self._place = Place.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """Return the thoughts that are certain, and what is behind their end."""
        text = self._without_breaks(text)
        thoughts, tag, rest = text.partition(END_THINK)
        if not tag:
            thoughts = text[: len(text) - _num_begun(text, END_THINK)]
        thoughts = thoughts.rstrip("\n")
        if tag:
            self._place, self._is_at_tag = Place.ANSWER, True
        else:
            self._held = text[len(thoughts) :]
        thoughts = self._own(thoughts)
        if tag:
            self._num_borrowed = 0
        return thoughts, rest

    def _without_breaks(self, text: str) -> str:
        """Drop line breaks that follow a tag."""
        if self._is_at_tag:
            text = text.lstrip("\n")
            self._is_at_tag = not text
        return text

    def _own(self, text: str) -> str:
        """Leave out what the prompt had already."""
        num_borrowed = self._num_borrowed
        self._num_borrowed = max(0, num_borrowed - len(text))
        return text[num_borrowed:]


def _num_begun(text: str, tag: str) -> int:
    """Return how many characters of a tag a text ends with; not all of them."""
    lengths = range(1, min(len(text) + 1, len(tag)))
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


# A tag in the middle of a line is a word that somebody explains.
_OPENING = re.compile(rf"^[^\S\n]*({THINK})|({THINK})\s*\Z", re.MULTILINE)


def _start_of_thoughts(prompt_end: str) -> int:
    """Return where a prompt opens thoughts, or begins to, or its length."""
    openings = list(_OPENING.finditer(prompt_end))
    if openings:
        return openings[-1].start(openings[-1].lastindex)
    return len(prompt_end) - _num_begun(prompt_end, THINK)


def tag_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that are a tag each; most vocabularies have none."""
    spellings = (
        tokenizer.encode(tag, add_special_tokens=False) for tag in (THINK, END_THINK)
    )
    return {ids[0] for ids in spellings if len(ids) == 1}


def prompt_end_of(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
    """Return the text behind the last markup token of a prompt; tags are text."""
    markup = tokenizer.special_token_ids - tag_ids(tokenizer)
    pieces: list[bytes] = []
    for token_id in reversed(prompt_token_ids):
        if token_id in markup:
            break
        pieces.append(tokenizer.token_bytes(token_id))
    return b"".join(reversed(pieces)).decode(errors="replace")
