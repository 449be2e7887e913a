"""Checks: what a cell computed against what it should be, and the reader's exercises.

A check that holds prints what was compared; one that fails raises `AssertionError`
with the values. An exercise that is not solved yet prints one line, so that "Run all"
goes on. With the environment variable `BOOKKIT_STRICT=1`, set by the tests, it raises.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

UNSOLVED = "exercise "  # how the message of an unsolved exercise starts


def close(got: Any, expected: Any, what: str, *, rtol: float = 1e-5) -> None:
    """Check that two arrays or tensors agree up to rounding.

    Args:
        got: the values to check; NumPy, torch, lists and numbers will do.
        expected: the values they should have, of the same shape.
        what: what is compared, in words.
        rtol: the largest difference allowed, as a part of the largest expected value.
    """
    ours, theirs = _array(got), _array(expected)
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: the shape is {ours.shape}, not {theirs.shape}")
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))  # infinities as well
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(ours - theirs))
    finite = np.abs(theirs[np.isfinite(theirs)])
    scale = finite.max(initial=0.0) or 1.0
    # Not `difference > ...`, which is False where a difference is not a number.
    if not (difference <= rtol * scale).all():
        worst = np.argmax(np.nan_to_num(difference, nan=np.inf))
        where = np.unravel_index(worst, same.shape)
        index = f" at {list(map(int, where))}" if where else ""
        raise AssertionError(
            f"{what}: {ours[where]:.6g} instead of {theirs[where]:.6g}{index}; "
            f"a difference up to {rtol * scale:.1e} would be rounding"
        )
    largest = difference.max(initial=0.0) / scale
    shape = f", shape {ours.shape}" if ours.shape else ""
    print(f"{what}: largest difference {largest:.1e} (allowed {rtol:.0e}){shape}")


def equal(got: Any, expected: Any, what: str) -> None:
    """Check that two values are exactly the same: ids, text, shapes, arrays.

    Args:
        got: the value to check.
        expected: the value it should have.
        what: what is compared, in words.
    """
    if not _same(got, expected):
        raise AssertionError(f"{what}: {_short(got)} instead of {_short(expected)}")
    print(f"{what}: equal, {_short(expected)}")


def exercise(number: str, check: Callable[..., None], *answers: Any) -> None:
    """Check the reader's solution of an exercise.

    Args:
        number: chapter and exercise, such as "1.2".
        check: called with the answers; raises `AssertionError` where they are wrong.
        answers: the functions or values that the reader wrote; None means not yet.
    """
    try:
        if any(answer is None for answer in answers):
            raise NotImplementedError(f"{UNSOLVED}{number}: no answer yet")
        check(*answers)
    except NotImplementedError as error:
        is_stub = str(error).startswith(UNSOLVED)
        if not is_stub or os.environ.get("BOOKKIT_STRICT") == "1":
            raise
        print(f"Still to do, and nothing below needs it: {error}.")
    except AssertionError as error:
        error.args = (f"exercise {number}: {error}",)
        raise
    else:
        print(f"Exercise {number} is right.")


def answer(
    number: str,
    given: Any,
    expected: Any,
    what: str,
    *,
    rtol: float = 0.0,
    hints: Mapping[Any, str] | None = None,
) -> None:
    """Check the answer to a pencil exercise: a number, or the letter of a choice.

    Args:
        number: chapter and exercise, such as "1.1".
        given: the reader's answer; None means not yet.
        expected: the right answer, which no message gives away.
        what: what was asked for, in words.
        rtol: how far a number may be off, as a part of the expected one.
        hints: wrong answer -> what it overlooks.
    """

    def matches(value: Any, other: Any) -> bool:
        if isinstance(value, str) and isinstance(other, str):
            return value.strip().lower() == other.strip().lower()
        if isinstance(value, str) or isinstance(other, str):
            return False
        return math.isclose(value, other, rel_tol=rtol)

    def check(value: Any) -> None:
        if not matches(value, expected):
            found = [
                hint for wrong, hint in (hints or {}).items() if matches(value, wrong)
            ]
            reason = f": {found[0]}" if found else ", look again"
            raise AssertionError(f"{value!r} is not {what}{reason}")
        print(f"{what}: {value!r}")

    exercise(number, check, given)


def _array(value: Any) -> np.ndarray:
    """Return values as float64; a torch tensor comes from its device first."""
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def _same(got: Any, expected: Any) -> bool:
    if any(hasattr(value, "shape") for value in (got, expected)):
        ours, theirs = (v.cpu() if hasattr(v, "cpu") else v for v in (got, expected))
        return np.array_equal(np.asarray(ours), np.asarray(theirs))
    return bool(got == expected)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    if len(text) <= 120:
        return text
    start = text[:100].rpartition(" ")[0] or text[:100]
    return f"{start} ... ({len(text)} characters)"
