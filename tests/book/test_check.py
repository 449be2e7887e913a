"""A check that holds says what it compared, one that fails says where."""

import numpy as np
import pytest
import torch

from bookkit import check

ONE = np.array([[1.0, 2.0], [3.0, -4.0]])


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (ONE + 1e-6, ONE),
        (torch.tensor(ONE).bfloat16().requires_grad_(), ONE),
        ([1.0, np.inf, np.nan], [1.0, np.inf, np.nan]),
        (0.0, 0.0),
        ([], []),
    ],
)
def test_close_accepts_what_agrees(got, expected, capsys):
    check.close(got, expected, "two rows")
    assert capsys.readouterr().out.startswith("two rows: largest difference ")


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (
            [[1, 2], [3.001, -4]],
            ONE,
            r"rows: 3.001 instead of 3 at \[1, 0\]; .*4.0e-05",
        ),
        (ONE[0], ONE, r"rows: the shape is \(2,\), not \(2, 2\)"),
        ([np.nan, 1.0], [2.0, 1.0], r"rows: nan instead of 2 at \[0\]"),
        ([np.inf], [-np.inf], "rows: inf instead of -inf"),
        (1.0, np.inf, "rows: 1 instead of inf;"),
        (1e-3, 0.0, "rows: 0.001 instead of 0;"),
    ],
)
def test_close_refuses_what_differs(got, expected, message):
    with pytest.raises(AssertionError, match=message):
        check.close(got, expected, "rows")


@pytest.mark.parametrize("good", [[1, 2], "ab", (2, 3), np.arange(3), torch.arange(3)])
def test_equal_is_exact(good, capsys):
    check.equal(good, good, "ids")
    assert capsys.readouterr().out.startswith("ids: equal, ")
    with pytest.raises(AssertionError, match=r"ids: .* instead of "):
        check.equal(good, good[:-1], "ids")


def test_a_wrong_answer_gets_its_hint_and_not_the_right_one():
    hints = {3: "what about 0?", "B": "read again"}
    with pytest.raises(AssertionError) as caught:
        check.answer("1.2", 3.0, 4, "the count", hints=hints)
    assert str(caught.value) == "exercise 1.2: 3.0 is not the count: what about 0?"
    with pytest.raises(AssertionError, match="is not the choice: read again"):
        check.answer("1.2", " b", "c", "the choice", hints=hints)
    with pytest.raises(AssertionError, match="look again"):
        check.answer("1.2", "4", 4, "the count", hints=hints)


def test_a_number_may_be_off_by_what_the_check_allows(capsys):
    check.answer("1.2", 104, 100, "the bytes", rtol=0.05)
    assert capsys.readouterr().out == "the bytes: 104\nExercise 1.2 is right.\n"
    with pytest.raises(AssertionError):
        check.answer("1.2", 106, 100, "the bytes", rtol=0.05)


def test_a_failed_check_names_its_exercise():
    with pytest.raises(AssertionError, match=r"^exercise 1\.1: ids: 1 instead of 2$"):
        check.exercise("1.1", lambda x: check.equal(x, 2, "ids"), 1)
