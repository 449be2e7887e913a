"""Format the code cells of the sources in `book/src/` with ruff.

Solutions and wrong answers, which no notebook shows as cells, are formatted as well.

Usage: `python book/tools/tidy.py [--check] [CHAPTER ...]`
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from project import HERE, BookError
from run import sources

CELL = re.compile(
    r"^(?P<head>```\{code-cell\}.*\n(?::.*\n)*\n?)(?P<code>(?:.*\n)*?)(?P<tail>```)$",
    re.MULTILINE,
)


def tidy(text: str) -> str:
    """Return a source with its code cells formatted and their imports sorted."""
    cells = [match["code"].strip("\n") for match in CELL.finditer(text)]
    notebook = new_notebook(cells=[new_code_cell(code) for code in cells])
    written = nbformat.writes(notebook)
    for command in (["check", "--fix-only", "--select=I"], ["format"]):
        name = f"--stdin-filename={HERE.chapters / 'source.ipynb'}"
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", name, "-"],
            input=written,
            text=True,
            capture_output=True,
        )
        if run.returncode:
            raise BookError(run.stderr)
        written = run.stdout
    fresh = iter(nbformat.reads(written, as_version=4).cells)

    def replaced(match: re.Match[str]) -> str:
        head = match["head"].rstrip("\n") + (
            "\n\n" if ":tags:" in match["head"] else "\n"
        )
        return f"{head}{next(fresh).source}\n{match['tail']}"

    return CELL.sub(replaced, text)


def untidy(path: Path) -> bool:
    """Tell whether a source is not as ruff would write it."""
    return tidy(path.read_text()) != path.read_text()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. 01 or a1")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    try:
        found = [path for path in sources(HERE, args.chapters) if untidy(path)]
    except BookError as error:
        print(f"tidy: {error}", file=sys.stderr)
        return 1
    for path in found:
        if args.check:
            print(f"{path.name} is not formatted: python book/tools/tidy.py")
        else:
            path.write_text(tidy(path.read_text()))
            print("formatted", path.name)
    return int(args.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
