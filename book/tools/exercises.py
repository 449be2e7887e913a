"""Cuts what the reader sees of an exercise out of its solution.

A source holds the solution (a code cell tagged `solution` that starts with the comment
`# exercise 1.2`), one or more plausible wrong answers (tagged `wrong`), and the cell
that checks the answer. The notebook gets a stub, the check and a folded solution; the
tests run the check on all three kinds of answer.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbformat import NotebookNode

from names import binds, reads
from project import BookError
from statements import FUNCTIONS, header_end, is_docstring

NUMBER = re.compile(r"# exercise (A?\d+\.\d+)\n")
CHECK = re.compile(r"\bcheck\.(?:exercise|answer)\(\s*\"(A?\d+\.\d+)\"")
BEGIN = re.compile(r"( *)# your code")
END = re.compile(r" *# end of your code")


@dataclass
class Exercise:
    """One exercise of a chapter, with the places of its cells in the source."""

    number: str
    solution: int
    wrong: list[int] = field(default_factory=list)
    check: int = -1


def find_exercises(cells: list[NotebookNode]) -> list[Exercise]:
    """Return the exercises of a source, and refuse one that is not complete."""
    found: list[Exercise] = []
    for index, cell in enumerate(cells):
        tags = cell.metadata.get("tags", [])
        numbers = [m[1] for m in [NUMBER.match(cell.source + "\n")] if m]
        if "solution" in tags:
            if not numbers:
                raise BookError("a solution starts with a comment: # exercise 1.2")
            found.append(Exercise(numbers[0], index))
        elif "wrong" in tags:
            if not found or numbers != [found[-1].number] or found[-1].check >= 0:
                raise BookError(
                    "a wrong answer stands between the solution and the check, and "
                    f"starts like the solution:\n{cell.source}"
                )
            found[-1].wrong.append(index)
        elif cell.cell_type == "code" and (checked := CHECK.search(cell.source)):
            if not found or checked[1] != found[-1].number:
                raise BookError(
                    f"the check of {checked[1]} does not follow its solution"
                )
            found[-1].check = index
    for exercise in found:
        if exercise.check < 0:
            raise BookError(
                f"exercise {exercise.number} has no check after its solution"
            )
        if not exercise.wrong:
            raise BookError(f"exercise {exercise.number} has no cell tagged `wrong`")
    numbers = [exercise.number for exercise in found]
    if len(set(numbers)) < len(numbers):
        raise BookError(f"an exercise number is used twice: {', '.join(numbers)}")
    return found


def solution_of(source: str) -> str:
    """Return the solution without the marks around the reader's part."""
    lines = source[len(NUMBER.match(source)[0]) :].split("\n")
    return "\n".join(x for x in lines if not (BEGIN.fullmatch(x) or END.fullmatch(x)))


def stub_of(source: str) -> str:
    """Return the cell that the reader completes.

    The reader's part is what stands between `# your code` and `# end of your code`;
    without such marks it is the body of every function or, in a cell without functions,
    every assigned value.
    """
    number = NUMBER.match(source)[1]
    lines = source.split("\n")
    nodes = ast.parse(source).body
    parts = list(marked(lines))
    if not parts:
        functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
        if not functions:
            return "\n".join(without_values(lines, nodes, number))
        parts = [body(source, node) for node in functions]
    for start, end, indent in reversed(parts):
        size = num_code_lines(lines[start:end])
        about = f"about {size} line{'' if size == 1 else 's'}"
        stub = f'{indent}raise NotImplementedError("exercise {number}: {about}")'
        lines[start:end] = [stub]
    return "\n".join(lines)


def marked(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and indent of the parts between marks, the marks included."""
    start = None
    for index, line in enumerate(lines):
        if begin := BEGIN.fullmatch(line):
            if start is not None or not begin[1]:
                raise BookError("`# your code` stands inside a function, and is closed")
            start, indent = index, begin[1]
        elif END.fullmatch(line):
            if start is None:
                raise BookError("`# end of your code` without its beginning")
            yield start, index + 1, indent
            start = None
    if start is not None:
        raise BookError("`# your code` without `# end of your code`")


def body(source: str, node: ast.FunctionDef) -> tuple[int, int, str]:
    """Return start, end and indent of a function's body below its docstring."""
    start = header_end(source, node)
    if is_docstring(node.body[0]):
        start = node.body[0].end_lineno
    return start, node.end_lineno, " " * node.body[0].col_offset


def without_values(lines: list[str], nodes: list[ast.stmt], number: str) -> list[str]:
    """Return the lines of a pencil exercise with None for every answer."""
    answers = [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]
    if not answers:
        raise BookError(f"exercise {number}: mark the reader's part with `# your code`")
    lines = list(lines)
    for node in reversed(answers):
        value = node.value
        before = lines[node.lineno - 1 : value.lineno]
        before[-1] = before[-1].encode()[: value.col_offset].decode()
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        start = "\n".join(before).rstrip(" (\n")
        lines[node.lineno - 1 : node.end_lineno] = [f"{start} None{after}"]
    return lines


def num_code_lines(lines: list[str]) -> int:
    """Count the lines that are neither empty nor only a comment."""
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for line in lines
    )


def check_independence(cells: list[NotebookNode], exercises: list[Exercise]) -> None:
    """Refuse a cell that needs an answer, since a reader may skip every exercise."""
    own = {e.check for e in exercises} | {i for e in exercises for i in e.wrong}
    solutions = {exercise.solution: exercise.number for exercise in exercises}
    owner: dict[str, str] = {}  # name -> the exercise that defines it
    for index, cell in enumerate(cells):
        if cell.cell_type != "code" or index in own:
            continue
        bound = binds(cell.source)
        if index in solutions:
            owner |= dict.fromkeys(bound, solutions[index])
            continue
        for name in sorted((reads(cell.source) & owner.keys()) - bound):
            raise BookError(
                f"this cell uses {name}, which only exercise {owner[name]} defines; a "
                f"reader may skip that:\n{cell.source}"
            )
        for name in bound & owner.keys():
            del owner[name]
