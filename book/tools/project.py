"""Where the parts of the book lie, what its chapters are called and in which order.

Everything that another tool must know about the repository as a whole is asked here:
the folders, the one configured address (`_config.yml`), and the build order, in which
the chapters' exports make up the package.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

HEADING = re.compile(r"^# (?:A?\d+\. )?(.+)$", re.MULTILINE)


class BookError(Exception):
    """A source or a notebook breaks a rule of the book."""


@dataclass(frozen=True)
class Project:
    """One checkout of the book."""

    root: Path

    @property
    def chapters(self) -> Path:
        """The folder of the generated notebooks."""
        return self.root / "chapters"

    @property
    def sources(self) -> Path:
        """The folder of the Markdown sources."""
        return self.root / "book" / "src"

    @cached_property
    def repository(self) -> dict[str, str]:
        """The `repository` section of the configuration: `url` and `branch`."""
        return yaml.safe_load((self.root / "_config.yml").read_text())["repository"]

    def blob(self, path: str) -> str:
        """Return the address under which a file of the repository can be read."""
        return f"{self.repository['url']}/blob/{self.repository['branch']}/{path}"

    def contents(self) -> list[str]:
        """Return the stems of the chapters in the order of the table of contents."""
        toc = yaml.safe_load((self.root / "_toc.yml").read_text())
        files = _files(toc)
        return [
            file[len("chapters/") :] for file in files if file.startswith("chapters/")
        ]

    def build_order(self) -> list[Path]:
        """Return the notebooks in the order in which their exports are merged.

        Chapters come by number. An appendix comes after the chapter that its metadata
        names (`minivllm: {follows: 1}`, 0 for before the first); several that follow
        the same one keep the order of the table of contents.
        """
        contents = self.contents()
        notebooks = {path.stem: path for path in self.chapters.glob("*.ipynb")}
        unlisted = sorted(notebooks.keys() - set(contents))
        if unlisted:
            raise BookError(f"{', '.join(unlisted)}: not listed in _toc.yml")
        listed = [stem for stem in contents if stem in notebooks]
        ordered = sorted(listed, key=lambda stem: build_key(stem, notebooks[stem]))
        return [notebooks[stem] for stem in ordered]


def build_key(stem: str, notebook: Path) -> tuple[int, bool]:
    """Return the chapter that a notebook is or follows, and whether it follows."""
    if stem[0].isdigit():
        return int(stem.split("_")[0]), False
    metadata = json.loads(notebook.read_text())["metadata"]
    follows = metadata.get("minivllm", {}).get("follows")
    if type(follows) is not int:
        raise BookError(
            f"{stem}: an appendix says after which chapter its exports come: "
            "add `minivllm: {follows: 1}` to the header of its source"
        )
    return follows, True


def label(stem: str) -> str:
    """Return how exercises number the chapter: `1` for 01_name, `A1` for a1_name."""
    return stem.split("_")[0].lstrip("0").upper()


def chapter_name(stem: str, cells: list[dict[str, Any]]) -> str:
    """Return a chapter's number and short title: `chapter 1, "Naive generation"`."""
    for cell in cells:
        heading = HEADING.search("".join(cell["source"]))
        if cell["cell_type"] == "markdown" and heading:
            title = heading[1].split(":")[0].strip()
            kind = "chapter" if stem[0].isdigit() else "appendix"
            return f'{kind} {label(stem)}, "{title}"'
    raise BookError(f"{stem}: no heading `# {label(stem)}. Title`")


def _files(toc: Any) -> list[str]:
    """Return every `file:` of the table of contents, depth first."""
    if isinstance(toc, list):
        return [file for entry in toc for file in _files(entry)]
    if not isinstance(toc, dict):
        return []
    own = [toc["file"]] if "file" in toc else []
    return own + [file for value in toc.values() for file in _files(value)]


HERE = Project(Path(__file__).resolve().parents[2])
