"""What a user installs: the wheel, its requirements, and the commands around it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import minivllm
from tests.tiny_folder import write_parrot

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = (ROOT / "requirements.txt").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output; fail with what it wrote."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory) -> Path:
    """Build the wheel and install it into a new virtual environment."""
    work = tmp_path_factory.mktemp("wheel with a space")
    source = work / "source"
    shutil.copytree(
        ROOT / "minivllm",
        source / "minivllm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(ROOT / "kernels", source / "kernels")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, source)
    run(*pip, *build, cwd=work)
    venv.create(work / "venv", with_pip=False)
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    python = work / "venv" / scripts / "python"
    [wheel] = work.glob("*.whl")
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=work)
    # The requirements come from this environment instead of a download. A path file
    # adds them behind what is installed there, and not this checkout itself.
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work
    )
    (Path(site.strip()) / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_holds_every_module_and_nothing_else(fresh_python, tmp_path):
    script = "import minivllm; print(minivllm.__file__)"
    installed = Path(run(fresh_python, "-c", script, cwd=tmp_path).strip()).parent
    assert ROOT not in installed.parents

    def files(folder: Path) -> set[str]:
        return {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }

    kernels = {f"kernels/{name}" for name in files(ROOT / "kernels") - {"README.md"}}
    assert files(installed) == files(ROOT / "minivllm") | kernels
    assert {"py.typed", "kernels/cpu_ops.cpp"} <= files(installed)


def test_an_installation_finds_the_sources_of_its_kernels(fresh_python, tmp_path):
    script = (
        "from minivllm.ops.compiler import kernel_source\n"
        "print(kernel_source('cpu_ops.cpp'))"
    )
    source = Path(run(fresh_python, "-c", script, cwd=tmp_path).strip())
    assert ROOT not in source.parents
    assert source.read_text() == (ROOT / "kernels" / "cpu_ops.cpp").read_text()


def test_the_installed_command_answers(fresh_python, tmp_path):
    command = fresh_python.with_name("minivllm")
    version = run(command, "--version", cwd=tmp_path)
    assert version == f"minivllm {minivllm.__version__}\n"
    model = write_parrot(tmp_path / "model")
    arguments = ("generate", "--model", model, "--backend", "numpy", "Why?")
    assert run(command, *arguments, cwd=tmp_path) == " blué!\n"
    module = (fresh_python, "-m", "minivllm")
    assert run(*module, *arguments, cwd=tmp_path) == " blué!\n"


def test_the_package_is_found_from_the_folder_above_a_clone(tmp_path):
    (tmp_path / "minivllm").mkdir()  # the clone, with the package one level deeper
    command = [sys.executable, "-c", "from minivllm import load_model"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_every_requirement_of_the_tests_and_the_book_is_pinned():
    pins = set(re.findall(r"^([\w.-]+)==", REQUIREMENTS, re.M))
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [
        *PYPROJECT["project"]["dependencies"],
        *(line for extra in ("torch", "book", "test") for line in extras[extra]),
    ]
    assert {re.match(r"[\w.-]+", line)[0] for line in wanted} <= pins
    lines = [line for line in REQUIREMENTS.splitlines() if line and line[0] != "#"]
    assert len(lines) == len(pins), "every line is one exact pin"


def test_all_extras_are_in_all():
    extras = PYPROJECT["project"]["optional-dependencies"]
    names = ",".join(name for name in extras if name != "all")
    assert extras["all"] == [f"minivllm[{names}]"]


def test_every_command_of_make_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M)
    assert {"demo", "test", "book", "chapters"} <= set(targets)
    assert [name for name in targets if f"`make {name}`" not in readme] == []
    assert set(targets) == set(
        re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[0].split()
    )


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_help_lists_every_command(tmp_path):
    listed = run("make", "--no-print-directory", "help", cwd=ROOT)
    assert re.findall(r"^  make ([a-z-]+) ", listed, re.M) == re.findall(
        r"^([a-z-]+):.*## ", MAKEFILE, re.M
    )


def test_the_readme_links_to_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", readme)
    local = [link for link in links if not re.match(r"https?:", link)]
    assert any(link.startswith("book/figures/readme_") for link in local)
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_readme_and_the_book_name_one_repository():
    readme = (ROOT / "README.md").read_text()
    [address] = re.findall(r"^  url: (.*)$", (ROOT / "_config.yml").read_text(), re.M)
    clones = re.findall(r"git clone(?: -\S+(?: \d)?)* (\S+)", readme)
    assert len(clones) == 2 and set(clones) == {address}
