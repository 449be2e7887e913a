"""The reader's guess before a cell runs, and what to learn from how far off it was.

    guess = predict.number("requests that fit at once", guess=30)
    ...
    guess.reveal(95, explain="...", traps={16: "you kept one long strip per request"})

A trap is a wrong answer that many give, with the reason. Without a guess, as in the
printed book, `reveal` states the answer and names the first trap.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bookkit.figures.base import Figure, escape

_CSS = """
.mv-figure .mv-verdict{font-weight:600;margin:0 0 4px}
.mv-figure .mv-line{margin:4px 0 0}
.mv-figure .mv-eyebrow{font-size:11.5px;letter-spacing:.06em;text-transform:uppercase;
 color:var(--mv-dim);margin:0 0 2px}
.mv-figure .mv-hit{color:var(--mv-right)}
.mv-figure .mv-miss{color:var(--mv-wrong)}
"""


@dataclass(frozen=True, slots=True)
class NumberGuess:
    """A guessed number; `reveal` compares it with the real one."""

    question: str
    guess: float | None
    unit: str

    def _repr_html_(self) -> str:
        return _card([("Predict", "eyebrow"), *self._lines()])._repr_html_()

    def __repr__(self) -> str:
        return "\n".join(["Predict", *(line for line, _ in self._lines())])

    def _lines(self) -> list[tuple[str, str]]:
        said = "none yet" if self.guess is None else _amount(self.guess, self.unit)
        return [(self.question, "verdict"), (f"Your guess: {said}.", "line")]

    def reveal(
        self,
        actual: Any,
        *,
        explain: str = "",
        traps: Mapping[float, str] | None = None,
        tolerance: float = 0.1,
    ) -> Figure:
        """Show how far off the guess was, and why.

        Args:
            actual: The number, or a `bench.Measurement` (its median counts).
            explain: Why it is so, in a sentence or two.
            traps: Wrong answer to why many give it, the likeliest first.
            tolerance: How near counts as met, as a share of the number.
        """
        value = float(getattr(actual, "median", actual))
        traps = dict(traps or {})
        lines = [(_answer(self.question, _amount(value, self.unit)), "verdict")]
        hit = None
        if self.guess is not None:
            near = [t for t in traps if _is_near(self.guess, t, tolerance)]
            hit = min(near, key=lambda t: abs(self.guess - t), default=None)
            if _is_near(self.guess, value, tolerance):
                hit = None
                lines.append((self._said(_closeness(self.guess, value)), "line mv-hit"))
            else:
                lines.append((self._said(_distance(self.guess, value)), "line mv-miss"))
        return _verdict(
            lines,
            explain,
            {_amount(trap, self.unit): why for trap, why in traps.items()},
            None if hit is None else _amount(hit, self.unit),
        )

    def _said(self, how: str) -> str:
        return f"You said {_amount(self.guess, self.unit)}: {how}."


@dataclass(frozen=True, slots=True)
class ChoiceGuess:
    """A guessed option; `reveal` compares it with the right one."""

    question: str
    options: tuple[str, ...]
    guess: str | None

    def _repr_html_(self) -> str:
        return _card([("Predict", "eyebrow"), *self._lines()])._repr_html_()

    def __repr__(self) -> str:
        return "\n".join(["Predict", *(line for line, _ in self._lines())])

    def _lines(self) -> list[tuple[str, str]]:
        return [
            (self.question, "verdict"),
            (" · ".join(self.options), "line"),
            (f"Your guess: {self.guess or 'none yet'}.", "line"),
        ]

    def reveal(
        self,
        actual: str,
        *,
        explain: str = "",
        traps: Mapping[str, str] | None = None,
    ) -> Figure:
        """Show whether the guess was right, and why.

        Args:
            actual: The right option.
            explain: Why it is so, in a sentence or two.
            traps: Wrong option to why many choose it, the likeliest first.
        """
        traps = dict(traps or {})
        for option in (actual, *traps):
            _check_option(option, self.options)
        lines = [(_answer(self.question, actual), "verdict")]
        if self.guess is not None:
            right = self.guess == actual
            lines.append(
                (
                    f"You said {self.guess}: {'right' if right else 'not this one'}.",
                    "line mv-hit" if right else "line mv-miss",
                )
            )
        hit = self.guess if self.guess in traps and self.guess != actual else None
        return _verdict(lines, explain, traps, hit)


def number(question: str, guess: float | None = None, unit: str = "") -> NumberGuess:
    """Ask for a number. The book leaves `guess` at None; the reader fills it in."""
    is_number = isinstance(guess, int | float) and not isinstance(guess, bool)
    if guess is not None and not is_number:
        raise ValueError(f"the guess is {guess!r}: write a number, such as guess=30")
    return NumberGuess(question, guess, unit)


def choice(
    question: str, options: Sequence[str], guess: str | None = None
) -> ChoiceGuess:
    """Ask for one of `options`. The book leaves `guess` at None."""
    if guess is not None:
        _check_option(guess, options)
    return ChoiceGuess(question, tuple(options), guess)


def _check_option(option: str, options: Sequence[str]) -> None:
    if option not in options:
        near = difflib.get_close_matches(str(option), options, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {list(options)}"
        raise ValueError(f"{option!r} is not one of the options: {hint}")


def _verdict(
    lines: list[tuple[str, str]],
    explain: str,
    traps: Mapping[str, str],
    hit: str | None,
) -> Figure:
    if explain:
        lines.append((explain, "line"))
    if hit is not None:
        lines.append((f"Many answer {hit}: {traps[hit]}", "line"))
    elif traps:
        wrong, why = next(iter(traps.items()))
        lines.append((f"A common answer is {wrong}: {why}", "line"))
    return _card(lines)


def _answer(question: str, answer: str) -> str:
    return f"{question}{'' if question.endswith('?') else ':'} {answer}."


def _card(lines: Sequence[tuple[str, str]]) -> Figure:
    body = "\n".join(f'<p class="mv-{cls}">{escape(line)}</p>' for line, cls in lines)
    text = "\n".join(line for line, _ in lines)
    return Figure(body, text=text, css=_CSS, width=640, full=False)


def _is_near(guess: float, value: float, tolerance: float) -> bool:
    return abs(guess - value) <= tolerance * abs(value)


def _closeness(guess: float, value: float) -> str:
    if guess == value:
        return "exactly right"
    return f"within {max(1, round(100 * abs(guess - value) / abs(value)))} %"


def _distance(guess: float, value: float) -> str:
    if guess > 0 < value:
        high = guess > value
        ratio = guess / value if high else value / guess
        way = "high" if high else "low"
        if ratio < 2:
            return f"{abs(guess - value) / value:.0%} too {way}"
        return f"{ratio:,.{ratio < 10:d}f} times too {way}"
    return f"off by {_plain(abs(guess - value))}"


def _amount(value: float, unit: str) -> str:
    return f"{_plain(value)} {unit}".strip()


def _plain(value: float) -> str:
    """Write a whole number exactly, any other one with three digits."""
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
