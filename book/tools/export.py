"""Build the package out of the chapters' export cells.

A code cell tagged `export` starts with a comment that names its file:

    # minivllm/engine/block_manager.py
    class BlockManager: ...

Cells are merged in build order (`project.py`), one file at a time (`merge.py`): imports
gather at the top, `class Name(Name):` adds members to a class, and ruff formats the
result. A C++ or CUDA file is exported by cells that bind its text to a name:

    # kernels/rms_norm.cu
    RMS_NORM_CU = r\"\"\"...\"\"\"

`--check` writes nothing; it fails on a file that differs from what the chapters build
and on a file that no chapter builds.
"""

import argparse
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imports import check_imports
from merge import Kernel, Module, Origin
from project import HERE, BookError, Project, build_key, chapter_name

TARGET = re.compile(r"# (minivllm/[\w/]+\.py|kernels/[\w/]+\.(?:cu|cuh|h|cpp))\n")
HANDWRITTEN = {"minivllm/py.typed"}


def export(project: Project, until: str | None = None) -> dict[str, str]:
    """Return path -> text of every file that the chapters build.

    Args:
        project: the checkout whose `chapters/` are read.
        until: stop after the notebook whose name starts so, such as "03", and after
            the appendices that follow it.
    """
    files: dict[str, Module | Kernel] = {}
    built: dict[str, set[str]] = {}
    for notebook in up_to(project.build_order(), until):
        cells = json.loads(notebook.read_text())["cells"]
        for cell in cells:
            if cell["cell_type"] != "code":
                continue
            try:
                path = add_cell(files, built, cell, chapter_name(notebook.stem, cells))
            except (BookError, SyntaxError) as error:
                raise BookError(f"{where(notebook, cell)}: {error}") from error
            if path:
                built[path] = files[path].names()
    return {path: text_of(path, files[path]) for path in sorted(files)}


def up_to(notebooks: list[Path], until: str | None) -> list[Path]:
    """Cut the build order behind a notebook and, for a chapter, its appendices."""
    if not until:
        return notebooks
    found = [i for i, path in enumerate(notebooks) if path.name.startswith(until)]
    if not found:
        raise BookError(f"no chapter starts with {until}")
    last = found[0]
    number, is_appendix = build_key(notebooks[last].stem, notebooks[last])
    if is_appendix:
        return notebooks[: last + 1]
    return [path for path in notebooks if build_key(path.stem, path)[0] <= number]


def where(notebook: Path, cell: dict[str, Any]) -> str:
    """Return the notebook and the first lines of a cell, to find it by."""
    start = "\n".join("".join(cell["source"]).split("\n")[:3])
    return f"{notebook.stem}, cell\n{start}\n"


def add_cell(
    files: dict[str, Module | Kernel],
    built: dict[str, set[str]],
    cell: dict[str, Any],
    chapter: str,
) -> str | None:
    """Check a code cell and merge it if it is an export cell; return its path then."""
    source = "".join(cell["source"])
    tags = cell["metadata"].get("tags", [])
    target = TARGET.match(source)
    if ("export" in tags) != bool(target):
        raise BookError(
            "the tag `export` and a first line `# path of the file` go together"
        )
    path = target[1] if target else None
    check_imports(source, built, own_path=path)
    if target is None:
        return None
    kind = Module if path.endswith(".py") else Kernel
    file = files.setdefault(path, kind())
    file.add(source[target.end() :], Origin(chapter, "replaces" in tags))
    return path


def text_of(path: str, file: Module | Kernel) -> str:
    """Return the finished text of a file."""
    try:
        text = file.render()
    except BookError as error:
        raise BookError(f"{path}: {error}") from error
    return ruff(path, text) if path.endswith(".py") else text


def ruff(path: str, source: str) -> str:
    """Sort the imports, drop those that nothing uses, and format.

    An `__init__.py` keeps all of its own (ruff sees to it): it passes names on.
    """
    stdin = ["--stdin-filename", str(HERE.root / path), "-"]
    first_party = 'lint.isort.known-first-party=["minivllm"]'
    for command in (
        ["check", "--fix-only", "--select", "I,F401", "--config", first_party],
        ["format"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", *stdin],
            input=source,
            text=True,
            capture_output=True,
        )
        if run.returncode:
            raise BookError(f"{path}: {run.stderr}")
        source = run.stdout
    return source


def write(files: dict[str, str], folder: Path) -> list[str]:
    """Write the files that changed; return their paths."""
    changed = [p for p, text in files.items() if read(folder / p) != text]
    for path in changed:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(files[path])
    return changed


def differences(files: dict[str, str], folder: Path) -> Iterator[str]:
    """Yield a diff for every file that is not as the chapters build it."""
    for path, text in files.items():
        old = read(folder / path).splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        yield from difflib.unified_diff(old, new, path, f"{path} (from the chapters)")
    for path in sorted(existing(folder) - files.keys() - HANDWRITTEN):
        yield f"{path}: no chapter builds it\n"
    folders = {Path(path).parent for path in files if path.endswith(".py")}
    for path in sorted((folder / "__init__.py").as_posix() for folder in folders):
        if path not in files:
            yield f"{path}: no chapter builds it, and its folder is no package\n"


def existing(folder: Path) -> set[str]:
    """Return the paths of the generated files that lie in a folder."""
    found = [
        p for p in (folder / "minivllm").rglob("*") if "__pycache__" not in p.parts
    ]
    for suffix in ("cu", "cuh", "h", "cpp"):
        found += (folder / "kernels").rglob(f"*.{suffix}")
    return {p.relative_to(folder).as_posix() for p in found if p.is_file()}


def read(path: Path) -> str:
    """Return the text of a file, nothing if it is not there."""
    return path.read_text() if path.exists() else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--until", metavar="CHAPTER", help="stop after it, e.g. 02")
    parser.add_argument("--out", type=Path, default=HERE.root, help="write below it")
    args = parser.parse_args(arguments)
    try:
        files = export(HERE, args.until)
    except BookError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    if args.check:
        found = list(differences(files, args.out))
        sys.stdout.writelines(found)
        return int(bool(found))
    for path in write(files, args.out):
        print("wrote", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
