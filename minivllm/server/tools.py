"""Find the calls of functions in a text that comes in pieces.

    I look it up.
    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Invariant: however the text is cut into pieces, the same calls are found, and what is
no call is text, whole. Called by the answers of a chat, one reader for each.

In vLLM: vllm/tool_parsers/hermes_tool_parser.py (Hermes2ProToolParser).
Source: appendix A30, "Speaking OpenAI".
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class CallStart:
    """The name of a function; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the last call, as JSON text."""

    piece: str


Event = str | CallStart | Arguments  # a text is content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def read_call(text: str) -> list[Event] | None:
    """Return the events of a call, or None if the text is none."""
    try:
        call = json.loads(text, parse_constant=_refuse)
        arguments = call.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        name = call["name"]
        (name + written).encode()  # half a character can be written in JSON
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if not name or not isinstance(arguments, dict):
        return None
    return [CallStart(name), Arguments(written)]


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def is_inside_string(text: str) -> bool:
    """Tell whether JSON that begins like this is in the middle of a string."""
    return '"' in _STRING.sub("", text)


def num_begun(text: str, tag: str) -> int:
    """Return how many characters of a tag a text ends with; not all of them."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


class TaggedCalls:
    """Read calls in the format of Hermes and Qwen: JSON between two tags.

    A call is told when it is complete: what was told cannot be taken back, and until
    then the model may leave the format.
    """

    def __init__(self) -> None:
        self._held = ""  # blanks and the beginning of a tag, or a call
        self._is_in_call = False
        self._searched = 0  # of what is held, for the end of the call
        self._is_behind_call = False  # blanks are dropped

    def add(self, piece: str) -> list[Event]:
        """Take the next piece; return what became certain."""
        self._held += piece
        return list(self._read(is_end=False))

    def finish(self) -> list[Event]:
        """Return what was held back."""
        return list(self._read(is_end=True))

    def _read(self, is_end: bool) -> Iterator[Event]:
        while self._held:
            if not self._is_in_call:
                yield from self._read_text(is_end)
                if not self._is_in_call:
                    return
            events = self._read_call(is_end)
            if events is None:
                return
            yield from events

    def _read_text(self, is_end: bool) -> Iterator[str]:
        """Give out the text before a call; blanks next to a tag belong to the tag."""
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        start = self._held.find(CALL)
        self._is_in_call = start >= 0
        if is_end and start < 0:
            text = self._held
        else:
            end = start if start >= 0 else len(self._held) - num_begun(self._held, CALL)
            text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        self._searched = 0
        if text:
            yield text

    def _read_call(self, is_end: bool) -> list[Event] | None:
        """Read what is held, a call; None if more of it has to come."""
        start = self._held.index(CALL) + len(CALL)
        begun = self._held[start : start + 80].lstrip()
        is_json = not begun or begun[0] == "{"
        while is_json:
            end = self._held.find(END_CALL, max(start, self._searched))
            if end < 0:
                self._searched = max(start, len(self._held) - len(END_CALL))
                break
            body = self._held[start:end]
            if events := read_call(body):
                return self._end_call(events, end + len(END_CALL))
            if not is_inside_string(body):
                return self._end_call([self._held[:start]], start, is_text=True)
            self._searched = end + 1  # the tag is part of an argument
        if is_json and not is_end:
            return None
        end = len(self._held) - num_begun(self._held, END_CALL)
        if is_json and (events := read_call(self._held[start:end])):
            return self._end_call(events, len(self._held))
        return self._end_call([self._held[:start]], start, is_text=True)

    def _end_call(
        self, events: list[Event], length: int, is_text: bool = False
    ) -> list[Event]:
        self._held = self._held[length:]
        self._is_in_call, self._is_behind_call = False, not is_text
        return events


class NamedCall:
    """Read a text that is the arguments of one call, by its grammar."""

    def __init__(self, name: str) -> None:
        self._start: list[Event] = [CallStart(name)]

    def add(self, piece: str) -> list[Event]:
        """Take the next piece; all of it is certain."""
        start, self._start = self._start, []
        return [*start, Arguments(piece)] if piece else start

    def finish(self) -> list[Event]:
        """Return the call, if there was no piece at all."""
        return self.add("")


# What stands between the arguments of one call and those of the next.
_HEAD = re.compile(
    r'\s*(?:\[|\}\s*,)\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"parameters"\s*:\s*(?=\{)'
)


class ListedCalls:
    """Read a list of calls, [{"name": ..., "parameters": {...}}], by its grammar."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False
        self._depth = 0  # braces and brackets that are open; 0 outside of arguments
        self._is_in_string = self._is_escaped = False

    def add(self, piece: str) -> list[Event]:
        """Take the next piece; return what became certain."""
        self._held += piece
        events: list[Event] = []
        while self._held:
            if not self._depth:
                head = _HEAD.match(self._held)
                if head is None:
                    break
                self._has_begun = True
                events.append(CallStart(json.loads(head[1])))
                self._held = self._held[head.end() :]
            end = self._end_of_arguments()
            events.append(Arguments(self._held[:end]))
            self._held = self._held[end:]
        return events

    def finish(self) -> list[Event]:
        """Return a text that is no list, whole; what is cut off of one is left out."""
        held, self._held = self._held, ""
        return [held] if held and not self._has_begun else []

    def _end_of_arguments(self) -> int:
        for place, character in enumerate(self._held, 1):
            if self._is_in_string:
                is_end = character == '"' and not self._is_escaped
                self._is_escaped = character == "\\" and not self._is_escaped
                self._is_in_string = not is_end
            elif character == '"':
                self._is_in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    return place
        return len(self._held)


CallReader = TaggedCalls | NamedCall | ListedCalls
