"""A conversation as the user sees it: turns, of which the last may be open.

Invariant: an answer stands behind its question, so the messages always alternate.
Called by `minivllm chat`.

In vLLM: vllm/entrypoints/cli/openai.py (ChatCommand), which keeps a list of messages.
Source: appendix A34, "A chat in the terminal".
"""

from typing import NamedTuple

from minivllm.errors import RequestError


class TooLong(RequestError):
    """A conversation no longer fits; a shorter one might."""


class Turn(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class Conversation:
    """Keeps what was said, and what may still be taken back.

    Attributes:
        system: The system message, or None.
        turns: Question and answer, the oldest first.
        question: The one that is being answered, or None.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Turn] = []
        self.question: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return it in the form that chat templates and servers take."""
        texts = [] if self.system is None else [("system", self.system)]
        for turn in self.turns:
            texts += [("user", turn.question), ("assistant", turn.answer)]
        if self.question is not None:
            texts.append(("user", self.question))
        return [{"role": role, "content": text} for role, text in texts]

    def close(self, answer: str) -> None:
        """End the open turn; one that was not answered at all leaves no trace."""
        if self.question is not None and answer:
            self.turns.append(Turn(self.question, answer))
        self.question = None

    def undo(self) -> str | None:
        """Take the last turn back, and return its question; None if there is none."""
        return self.turns.pop().question if self.turns else None

    def forget_oldest(self) -> bool:
        """Drop the oldest turn; False if there is none."""
        if self.turns:
            del self.turns[0]
            return True
        return False
