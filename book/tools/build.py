"""Makes a notebook, without outputs, out of a chapter's Markdown source.

The notebook is the source with a few things worked out: the setup cell, the exercises'
stubs and solutions, and the table of exports. The same source always gives the same
notebook, byte for byte: a cell's id is a hash of its text.
"""

import ast
import hashlib
import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from exercises import check_independence, find_exercises, solution_of, stub_of
from export import TARGET
from project import BookError, Project, label
from statements import bound_names, is_docstring

KEPT_METADATA = ("accelerator", "colab", "kernelspec", "minivllm")
SETUP = "# {{setup}}"
EXPORTS = re.compile(r"^\{\{exports\}\}$", re.MULTILINE)
SOLUTION = re.compile(r"^\{\{solution (A?\d+\.\d+)\}\}$", re.MULTILINE)

SETUP_CODE = """\
# @title Setup (in Colab, this fetches the code of the book first)
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

home = Path("..").resolve()  # chapters/ lies in a clone of the repository ...
if not (home / "book" / "bookkit").is_dir():  # ... or the notebook is alone
    home = Path("minivllm-book").resolve()
    url = os.environ.get("MINIVLLM_REPOSITORY", "{url}")
    if not home.exists():
        clone = ["git", "clone", "--quiet", "--depth=1", "--branch={branch}", url]
        subprocess.run([*clone, str(home)], check=True)
if importlib.util.find_spec("minivllm") is None:
    install = home / "book" / "tools" / "install.py"
    subprocess.run([sys.executable, str(install)], check=True)
    importlib.invalidate_caches()
sys.path[:0] = [str(home), str(home / "book")]
"""

FOLD = """\
<details>
<summary>Solution</summary>

{{{{solution {number}}}}}

</details>"""


def read_source(path: Path) -> NotebookNode:
    """Read a Markdown source as a notebook, before anything is worked out."""
    return jupytext.read(path, fmt="md:myst")


def build(path: Path, project: Project) -> NotebookNode:
    """Return the notebook that a source stands for, without outputs."""
    try:
        return _build(path, project)
    except (BookError, SyntaxError) as error:
        raise BookError(f"{path.name}: {error}") from error


def _build(path: Path, project: Project) -> NotebookNode:
    source = read_source(path)
    cells = with_exercises(source.cells, label(path.stem))
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or not code[0].source.startswith(SETUP):
        raise BookError(f"the first code cell starts with the line {SETUP}")
    code[0].source = setup(code[0].source, project)
    for cell in cells:
        if cell.cell_type == "markdown" and EXPORTS.search(cell.source):
            table = exports_table(cells, project)
            cell.source = EXPORTS.sub(lambda _: table, cell.source)  # noqa: B023
    notebook = nbformat.v4.new_notebook(cells=identified(cells))
    notebook.metadata.update(
        {key: source.metadata[key] for key in KEPT_METADATA if key in source.metadata}
    )
    return notebook


def setup(source: str, project: Project) -> str:
    """Put the lines that every chapter shares where the setup mark stands."""
    code = SETUP_CODE.format(**project.repository)
    rest = source.removeprefix(SETUP).strip("\n")
    return f"{code}\n{rest}".strip("\n")


def with_exercises(cells: list[NotebookNode], chapter: str) -> list[NotebookNode]:
    """Return the cells with stubs and folded solutions, and without wrong answers."""
    exercises = find_exercises(cells)
    check_independence(cells, exercises)
    solutions: dict[str, str] = {}
    folds: dict[int, str] = {}
    dropped: set[int] = set()
    placed = {number for cell in cells for number in SOLUTION.findall(cell.source)}
    for exercise in exercises:
        if exercise.number.split(".")[0] != chapter:
            raise BookError(f"exercise {exercise.number} stands in chapter {chapter}")
        code = solution_of(cells[exercise.solution].source)
        solutions[exercise.number] = f"```python\n{code}\n```"
        dropped |= set(exercise.wrong)
        if exercise.number not in placed:
            folds[exercise.check] = FOLD.format(number=exercise.number)
    if placed - solutions.keys():
        raise BookError(f"no exercise {', '.join(placed - solutions.keys())}")
    result = []
    for index, cell in enumerate(cells):
        if index in dropped:
            continue
        tags = cell.metadata.get("tags", [])
        metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            text = stub_of(cell.source) if "solution" in tags else cell.source
            result.append(new_code_cell(text, metadata=metadata))
        else:
            text = SOLUTION.sub(lambda mark: solutions[mark[1]], cell.source)
            result.append(new_markdown_cell(text, metadata=metadata))
        if index in folds:
            text = SOLUTION.sub(lambda mark: solutions[mark[1]], folds[index])
            result.append(new_markdown_cell(text))
    return result


def exports_table(cells: list[NotebookNode], project: Project) -> str:
    """Return the Markdown table of the files that a chapter exports."""
    names: dict[str, dict[str, None]] = {}
    purposes: dict[str, str] = {}
    for cell in cells:
        target = TARGET.match(cell.source) if cell.cell_type == "code" else None
        if target is None:
            continue
        file = names.setdefault(target[1], {})
        text = cell.source[target.end() :]
        if target[1].endswith(".py"):
            nodes = ast.parse(text).body
            bound = [
                n for node in nodes for n in bound_names(node) if is_public(node, n)
            ]
            file |= dict.fromkeys(bound)
            path = project.root / target[1]
            if not is_docstring(nodes[0]) and path.exists():
                nodes = ast.parse(path.read_text()).body  # begun by an earlier chapter
            purposes.setdefault(target[1], purpose(nodes))
        else:
            comment = re.search(r"^// (.+)", text, re.MULTILINE)
            purposes.setdefault(target[1], comment[1] if comment else "")
    rows = ["| file | names | what it does |", "|---|---|---|"]
    for path, file in names.items():
        if path.endswith("__init__.py") and not file:
            continue  # a line about a folder is nothing to look up
        link = f"[`{path}`]({project.blob(path)})"
        listed = ", ".join(f"`{name}`" for name in file) or "(none)"
        rows.append(f"| {link} | {listed} | {purposes[path]} |")
    return "\n".join(rows)


def is_public(node: ast.stmt, name: str) -> bool:
    """Tell whether a statement defines a name that others may use."""
    is_import = isinstance(node, (ast.Import, ast.ImportFrom, ast.If))
    return not is_import and not name.startswith("_")


def purpose(nodes: list[ast.stmt]) -> str:
    """Return the first line of the module's docstring, else of its first member."""
    if nodes and is_docstring(nodes[0]):
        return str(nodes[0].value.value).split("\n")[0]
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""


def identified(cells: list[NotebookNode]) -> list[NotebookNode]:
    """Give every cell an id that depends on its text, and on nothing else."""
    seen: dict[str, int] = {}
    for cell in cells:
        text = f"{cell.cell_type}\n{cell.source}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return cells
