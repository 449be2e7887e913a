"""Every notebook runs alone: in an empty folder, through the lines of its setup cell.

As in Colab, the packages that a chapter uses are there, `minivllm` is not, and the
repository is cloned from the address that the environment names. The first notebook
goes the whole way; the others find the package installed, and clone for themselves.
"""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from nbformat import NotebookNode

from build import build
from project import HERE

SOURCES = sorted(HERE.sources.glob("*.md"))
NUM_CELLS = 3  # how many cells are run after the setup cell


def command(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return what it prints."""
    run = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def clean_environment() -> dict[str, str]:
    """Return the environment without what could lead to this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    return {key: text for key, text in os.environ.items() if key not in hidden}


@pytest.fixture(scope="session")
def clone_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a repository with one commit: the files as they are here."""
    folder = tmp_path_factory.mktemp("repository")
    listed = command(
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        cwd=HERE.root,
    )
    for name in listed.split("\0"):
        source = HERE.root / name
        if name and source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    person = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    branch = HERE.repository["branch"]
    command("git", "init", "--quiet", f"--initial-branch={branch}", cwd=folder)
    command("git", "add", "--all", "--force", cwd=folder)
    command("git", *person, "commit", "--quiet", "--message=All files", cwd=folder)
    return folder.as_uri()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that sees every package installed here but not `minivllm`.

    The packages come in by a `.pth` file. Python does not read the `.pth` files of a
    folder that was added like this, so an editable `minivllm` stays out.
    """
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "packages.pth").write_text("\n".join(sorted(paths)) + "\n")
    return Path(sysconfig.get_path("scripts", "venv", vars=scheme)) / "python"


def script(notebook: NotebookNode) -> str:
    """Return the first cells of a notebook, as IPython reads them from a file."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    proof = "import bookkit, minivllm\nprint(minivllm.__file__, bookkit.__file__)"
    return "\n\n".join([*code[: 1 + NUM_CELLS], proof])


def run_alone(source: Path, folder: Path, python: Path, url: str) -> list[str]:
    """Run the start of a chapter in an empty folder; return the packages' places."""
    (folder / "chapter.ipy").write_text(script(build(source, HERE)))
    printed = command(
        python,
        "-m",
        "IPython",
        "chapter.ipy",
        cwd=folder,
        MINIVLLM_REPOSITORY=url,
        MPLBACKEND="Agg",
        PIP_NO_BUILD_ISOLATION="0",  # pip reads 0 as "no isolation": nothing to fetch
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    return printed.splitlines()[-1].split()


def test_a_notebook_alone_installs_the_book_first(
    tmp_path: Path, python: Path, clone_url: str
):
    check = "import importlib.util as u; print(u.find_spec('minivllm'))"
    assert command(python, "-c", check, cwd=tmp_path) == "None\n"
    places = run_alone(SOURCES[0], tmp_path, python, clone_url)
    home = tmp_path / "minivllm-book"
    assert places == [
        str(home / "minivllm" / "__init__.py"),
        str(home / "book" / "bookkit" / "__init__.py"),
    ]
    after = command(
        python, "-c", "import minivllm; print(minivllm.__file__)", cwd=tmp_path
    )
    assert after.strip() == places[0], "a process started later finds it, too"


@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda path: path.stem)
def test_every_other_notebook_starts_alone(
    source: Path, tmp_path: Path, python: Path, clone_url: str
):
    places = run_alone(source, tmp_path, python, clone_url)
    assert all(place.startswith(str(tmp_path / "minivllm-book")) for place in places)
