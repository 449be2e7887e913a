"""Bring the notebooks in `chapters/` up to date with their sources, and run them.

Every notebook is made from its source (`build.py`), then the package is made from the
notebooks (`export.py`), then the notebooks are executed and keep their outputs. Run
twice, a notebook is the same byte for byte, except for the outputs of cells tagged
`measured`, whose timings move. A cell tagged `gpu` keeps the outputs recorded on a GPU
where there is none.

Usage: `python book/tools/run.py [--check | --no-run | --twice] [CHAPTER ...]`
"""

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from build import build
from export import export, write
from project import HERE, BookError, Project

TIMEOUT_S = 600
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def sources(project: Project, chapters: list[str]) -> list[Path]:
    """Return the sources of the chapters that were asked for, all of them if none."""
    found = sorted(project.sources.glob("*.md"))
    unknown = [c for c in chapters if not any(p.name.startswith(c) for p in found)]
    if unknown:
        raise BookError(f"no source starts with {', '.join(unknown)}")
    return [p for p in found if not chapters or p.name.startswith(tuple(chapters))]


def notebook_of(source: Path, project: Project) -> Path:
    """Return where the notebook of a source lies."""
    return project.chapters / f"{source.stem}.ipynb"


def is_current(source: Path, project: Project) -> bool:
    """Tell whether a notebook, its outputs aside, is what its source says."""
    path = notebook_of(source, project)
    if not path.exists():
        return False
    old = nbformat.read(path, as_version=4)
    return bare(old) == bare(build(source, project))


def bare(notebook: NotebookNode) -> Any:
    """Return what a source decides of a notebook."""
    cells = [(c.id, c.cell_type, c.source, c.metadata) for c in notebook.cells]
    return cells, {k: v for k, v in notebook.metadata.items() if k != "widgets"}


def has_tag(cell: NotebookNode, tag: str) -> bool:
    """Tell whether a cell carries a tag."""
    return tag in cell.metadata.get("tags", [])


def sync(source: Path, project: Project) -> None:
    """Make the notebook from its source; unchanged cells keep their outputs."""
    path = notebook_of(source, project)
    notebook = build(source, project)
    if path.exists():
        old = nbformat.read(path, as_version=4)
        kept = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
        for cell in notebook.cells:
            if cell.id in kept:
                cell.outputs = kept[cell.id].outputs
                cell.execution_count = kept[cell.id].execution_count
        if "widgets" in old.metadata:
            notebook.metadata.widgets = old.metadata.widgets
    save(notebook, path, project)


def execute(path: Path, project: Project, *, has_gpu: bool) -> NotebookNode:
    """Run a notebook from its top and return it with its new outputs."""
    notebook = nbformat.read(path, as_version=4)
    recorded = {
        cell.id: cell.outputs for cell in notebook.cells if has_tag(cell, "gpu")
    }
    notebook.metadata.pop("widgets", None)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(project.chapters)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise BookError(f"{path.stem}: {COLOURS.sub('', str(error))}") from None
    for cell in notebook.cells:
        if not has_gpu and recorded.get(cell.id):
            cell.outputs = recorded[cell.id]
        if has_tag(cell, "export"):  # a docstring alone would be shown as a result
            kept = [out for out in cell.outputs if out.output_type != "execute_result"]
            cell.outputs = kept
    notebook.metadata.pop("language_info", None)  # it names the version of Python
    return notebook


def differing_cells(one: NotebookNode, two: NotebookNode) -> list[str]:
    """Return the cells whose outputs differ although they measure nothing."""
    pairs = zip(one.cells, two.cells, strict=True)
    return [a.source for a, b in pairs if a != b and not has_tag(a, "measured")]


def text_of(notebook: NotebookNode, project: Project) -> str:
    """Return a notebook as text: no path of this machine, no random widget id."""
    state = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    names = {
        model: f"{i:032x}" for i, model in enumerate(state)
    }  # in order of creation
    text = nbformat.writes(notebook).replace(f"{project.root}/", "")
    text = re.sub(r"[0-9a-f]{32}", lambda m: names.get(m[0], m[0]), text)
    return nbformat.writes(nbformat.reads(text, as_version=4)) + "\n"


def save(notebook: NotebookNode, path: Path, project: Project) -> None:
    """Write a notebook in one step, so that nobody reads half of it."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text_of(notebook, project))
    unfinished.replace(path)


def check(project: Project, chapters: list[str]) -> list[str]:
    """Return the notebooks that are not what their sources say."""
    wanted = sources(project, chapters)
    stale = [s.stem for s in wanted if not is_current(s, project)]
    if not chapters:
        known = {source.stem for source in wanted}
        stale += [
            p.stem for p in project.chapters.glob("*.ipynb") if p.stem not in known
        ]
    return sorted(stale)


def has_gpu() -> bool:
    """Tell whether torch finds a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def run(project: Project, chapters: list[str], *, twice: bool = False) -> None:
    """Execute the notebooks of the chapters and store their outputs."""
    gpu = has_gpu()
    for source in sources(project, chapters):
        path = notebook_of(source, project)
        print("running", source.stem, flush=True)
        notebook = execute(path, project, has_gpu=gpu)
        save(notebook, path, project)
        if twice:
            again = execute(path, project, has_gpu=gpu)
            cells = differing_cells(notebook, again)
            if cells:
                listed = "\n---\n".join(cells)
                raise BookError(
                    f"{source.stem}: outputs that differ when run again; tag the cells "
                    f"`measured` or make them reproducible:\n{listed}"
                )


def main(arguments: list[str] | None = None, project: Project = HERE) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. 01 or a1")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--check", action="store_true", help="compare, write nothing")
    modes.add_argument("--no-run", action="store_true", help="do not execute")
    modes.add_argument("--twice", action="store_true", help="fail if outputs differ")
    args = parser.parse_args(arguments)
    try:
        if args.check:
            stale = check(project, args.chapters)
            for stem in stale:
                print(f"chapters/{stem}.ipynb is not what its source says")
            if stale:
                print("book/tools/run.py makes them; one without a source must go")
            return int(bool(stale))
        wanted = sources(project, args.chapters)
        for source in sources(project, []):  # the export needs all of them
            if source in wanted or not notebook_of(source, project).exists():
                sync(source, project)
        for path in write(export(project), project.root):
            print("wrote", path)
        if not args.no_run:
            run(project, args.chapters, twice=args.twice)
    except BookError as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
