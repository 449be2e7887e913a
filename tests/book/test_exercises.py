"""Stubs are cut from solutions; every stub fails, wrong answers too, solutions pass."""

import ast
import contextlib
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from bookkit import check
from build import build, read_source
from exercises import Exercise, find_exercises, solution_of, stub_of
from minivllm.ops import registry
from names import binds, changes, plain, reads, reads_later
from project import HERE, BookError, Project
from statements import IMPORTS, bound_names

SOURCES = sorted(HERE.sources.glob("*.md"))
SAMPLE = Path(__file__).with_name("sample.md")


def needed(cells: list[NotebookNode], exercises: list[Exercise]) -> set[int]:
    """Return the cells that must run for the exercises' checks to run.

    Found by following names backwards from the checks; the setup cell always counts.
    What a function looks up is bound when it is called, perhaps in a later cell than
    its own, so the way back is gone again until nothing is added. To import a name that
    is there already changes nothing.
    """
    own = {i for e in exercises for i in (e.solution, e.check, *e.wrong)}
    code = [i for i, cell in enumerate(cells) if cell.cell_type == "code"]
    imported = {name for i in code for name in imported_names(cells[i].source)}
    first: dict[str, int] = {}  # name -> the first cell that binds it
    for index in code:
        for name in binds(cells[index].source):
            first.setdefault(name, index)
    found, size = {code[0]}, 0
    while len(found) > size:
        size = len(found)
        later = {name for i in found | own for name in reads_later(cells[i].source)}
        names: set[str] = set()
        for index in reversed(code[1:]):
            source = cells[index].source
            again = {n for n in imported_names(source) if first.get(n, index) < index}
            bound = binds(source) - again
            if index in own:
                names |= reads(source)
            elif (names | later) & (bound | (changes(source) - imported)):
                found.add(index)
                names = (names - bound) | reads(source)
    return found


def imported_names(source: str) -> set[str]:
    """Return the names of modules and of what is imported from them."""
    nodes = ast.walk(ast.parse(plain(source)))
    return {n for x in nodes if isinstance(x, IMPORTS) for n in bound_names(x)}


def run(source: str, namespace: dict[str, Any]) -> str:
    """Run a cell and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(plain(source), "<cell>", "exec"), namespace)
    return printed.getvalue()


def attempt(answer: str, check_cell: str, namespace: dict[str, Any]) -> Any:
    """Return what the check prints for an answer, or the error that it raises."""
    try:
        run(answer, namespace)
        return run(check_cell, namespace)
    except (AssertionError, NotImplementedError) as error:
        return error


@contextlib.contextmanager
def own_ops() -> Iterator[None]:
    """Forget afterwards which ops the cells of a chapter have defined anew."""
    registry.load_backends()  # a module adds its backends only once
    known = {op: list(backends) for op, backends in registry.OPS.items()}
    try:
        yield
    finally:
        registry.OPS.clear()
        registry.OPS.update(known)


@cache
def attempts(source: Path) -> dict[str, dict[str, Any]]:
    """Run a chapter once, as far as its exercises need it, and try every answer.

    Returns:
        number of the exercise -> "stub", "solution" or "wrong 1" ... -> what happened.
    """
    cells = read_source(source).cells
    exercises = find_exercises(cells)
    by_check = {exercise.check: exercise for exercise in exercises}
    chosen = needed(cells, exercises)
    namespace: dict[str, Any] = {"__name__": "__main__", "display": lambda *_: None}
    found: dict[str, dict[str, Any]] = {}
    with own_ops():
        for index, cell in enumerate(cells):
            if index in chosen:
                run(cell.source, namespace)
            elif index in by_check:
                exercise = by_check[index]
                solution = cells[exercise.solution].source
                wrong = [cells[i].source for i in exercise.wrong]
                answers = {"stub": stub_of(solution)}
                answers |= {f"wrong {i}": text for i, text in enumerate(wrong, start=1)}
                answers["solution"] = solution_of(solution)  # last, for later exercises
                found[exercise.number] = {
                    kind: attempt(text, cell.source, namespace)
                    for kind, text in answers.items()
                }
    return found


def exercises_of_the_book() -> list[tuple[Path, str]]:
    found = []
    for source in [SAMPLE, *SOURCES]:
        numbers = find_exercises(read_source(source).cells)
        found += [pytest.param(source, e.number, id=e.number) for e in numbers]
    found[: len(found)] = [
        pytest.param(*p.values, id=f"{p.values[0].stem}-{p.id}") for p in found
    ]
    return found


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let unsolved exercises raise, and run the cells where the notebooks lie."""
    monkeypatch.setenv("BOOKKIT_STRICT", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    HERE.chapters.mkdir(exist_ok=True)
    monkeypatch.chdir(HERE.chapters)


@pytest.mark.parametrize(("source", "number"), exercises_of_the_book())
def test_the_stub_raises_the_solution_passes_and_wrong_answers_are_explained(
    source: Path, number: str
):
    found = attempts(source)[number]
    stub, solution = found.pop("stub"), found.pop("solution")
    assert isinstance(stub, NotImplementedError)
    assert f"exercise {number}: " in str(stub)
    assert isinstance(solution, str), solution
    lines = solution.splitlines()
    assert lines[-1] == f"Exercise {number} is right."
    assert len(lines) > 1, "the check prints nothing of what it compared"
    assert found, "no wrong answer"
    for answer, outcome in found.items():
        assert isinstance(outcome, AssertionError), f"{answer} passes: {outcome}"
        start = f"exercise {number}: "
        assert str(outcome).startswith(start)
        assert len(str(outcome)) > len(start) + 10, f"{answer}: no helpful message"


def test_in_a_notebook_an_unsolved_exercise_says_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("BOOKKIT_STRICT")

    def unsolved():
        raise NotImplementedError("exercise 1.1: about 4 lines")

    check.exercise("1.1", lambda f: f(), unsolved)
    check.answer("1.2", None, 4, "the number")
    assert capsys.readouterr().out.count("\n") == 2
    with pytest.raises(NotImplementedError, match="another"):
        check.exercise("1.3", lambda: unsolved_elsewhere())


def unsolved_elsewhere() -> None:
    raise NotImplementedError("another reason")


FUNCTION = '''\
# exercise 3.2
import math


def f(
    x: float,
) -> float:
    """Return something: (odd).

    Two lines.
    """
    # a comment
    y = math.sqrt(x)

    return y


LIMIT = 3
'''


def test_without_marks_the_body_below_the_docstring_is_cut():
    assert stub_of(FUNCTION) == FUNCTION.replace(
        "    # a comment\n    y = math.sqrt(x)\n\n    return y\n",
        '    raise NotImplementedError("exercise 3.2: about 2 lines")\n',
    )


def test_marks_leave_the_rest_of_the_cell_to_the_reader():
    source = (
        "# exercise 3.2\nclass A:\n    def f(self, x):\n        y = x + 1\n"
        "        # your code\n        return y * 2\n        # end of your code\n\n"
        "    def g(self):\n        # your code\n        a = 1\n        return a\n"
        "        # end of your code"
    )
    assert stub_of(source) == (
        "# exercise 3.2\nclass A:\n    def f(self, x):\n        y = x + 1\n"
        '        raise NotImplementedError("exercise 3.2: about 1 line")\n\n'
        "    def g(self):\n"
        '        raise NotImplementedError("exercise 3.2: about 2 lines")'
    )
    assert "your code" not in solution_of(source)
    assert solution_of(source).startswith("class A:\n")


def test_with_a_pencil_the_answers_become_none():
    source = """\
# exercise 3.1
letter = "ä"  # "a" or "ä"
size: int = (
    1 + 1
)  # bytes"""
    assert stub_of(source) == (
        '# exercise 3.1\nletter = None  # "a" or "ä"\nsize: int = None  # bytes'
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("# exercise 3.1\nprint(1)", "mark the reader's part"),
        ("# exercise 3.1\n# your code\nx = 1\n# end of your code", "inside a function"),
        ("# exercise 3.1\ndef f():\n    # your code\n    return 1", "without"),
        ("# exercise 3.1\ndef f():\n    # end of your code\n    return 1", "without"),
        ("# exercise 3.1\ndef f(): return 1", "lines of their own"),
    ],
)
def test_a_solution_that_cannot_be_cut_is_refused(source: str, message: str):
    with pytest.raises(BookError, match=message):
        stub_of(source)


WRONG = """\
```{code-cell} ipython3
:tags: [wrong]

# exercise 1.2
num_additions = 3
```
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (WRONG, "", "1.2 has no cell tagged `wrong`"),
        ("# exercise 1.2\nnum_additions = 4", "num_additions = 4", "starts with a com"),
        ('check.answer("1.2"', 'check.answer("1.3"', "does not follow its solution"),
        ('check.exercise("1.1", check_multiply, multiply)', "", "no check after"),
        ("1.2", "1.1", "used twice"),
        ("1.2", "2.2", "stands in chapter 1"),
        ("{{solution 1.2}}", "{{solution 1.9}}", "no exercise 1.9"),
        ("## Summary", "```{code-cell}\nmultiply(1, 2)\n```", "uses multiply, which"),
        (
            "## Summary",
            "```{code-cell}\ndef g():\n    return num_additions\n```",
            "uses num_additions, which only exercise 1.2 defines",
        ),
    ],
)
def test_an_exercise_that_is_not_complete_is_refused(
    project: Project, old: str, new: str, message: str
):
    source = project.sources / "01_pairs.md"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    with pytest.raises(BookError, match=message):
        build(source, project)


def test_a_name_that_a_later_cell_binds_itself_may_be_reused(project: Project):
    source = project.sources / "01_pairs.md"
    for code in ("num_additions = 1\nnum_additions", "num_additions"):
        cell = f"\n```{{code-cell}}\n{code}\n```\n"
        source.write_text(source.read_text() + cell)
    build(source, project)


def test_the_reader_sees_stub_check_and_solution_in_this_order(project: Project):
    cells = build(project.sources / "01_pairs.md", project).cells
    text = "\n".join(cell.source for cell in cells)
    marks = [
        'raise NotImplementedError("exercise 1.1: about 4 lines")',
        'check.exercise("1.1"',
        "<summary>Solution</summary>\n\n```python\ndef multiply",
        "num_additions = None  # how often",
        'check.answer("1.2"',
        "The loop runs `right` times:\n\n```python\nnum_additions = 4  # how often",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "left + right" not in text and "{{" not in text.replace("f{{", "")
    assert text.count("<details>") == text.count("</details>") == 2


def test_a_function_finds_what_a_later_cell_defines():
    sources = [
        "# {{setup}}",
        "def f():\n    return LIMIT",
        "OTHER = 1",
        "LIMIT = 2",
        "# exercise 1.1\nx = 1",
        'check.answer("1.1", x, f(), "x")',
    ]
    cells = [new_code_cell(source) for source in sources]
    assert needed(cells, [Exercise("1.1", 4, [], 5)]) == {0, 1, 3}


def test_only_the_cells_that_an_exercise_needs_are_run():
    cells = read_source(SAMPLE).cells
    chosen = needed(cells, find_exercises(cells))
    text = "\n".join(cells[index].source for index in sorted(chosen))
    assert "# {{setup}}" in text and "def add" in text
    assert "perf_counter" not in text and 'add(1, "two")' not in text
