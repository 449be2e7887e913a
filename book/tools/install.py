"""Installs this checkout, and of what its chapters need only what is missing.

The setup cell of a chapter calls it in Colab, where torch, NumPy and most of the rest
are there in versions that must stay.

Usage: `python book/tools/install.py`
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def is_missing(requirement: str) -> bool:
    """Tell whether the package of a requirement is not installed in any version."""
    try:
        version(re.match(r"[\w.-]+", requirement)[0])
    except PackageNotFoundError:
        return True
    return False


def main() -> None:
    """Install what is missing, then the package itself without its dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = project["dependencies"] + extras["grammar"] + extras["server"]
    missing = [need for need in needs if is_missing(need)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    if missing:
        subprocess.run([*pip, *missing], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)


if __name__ == "__main__":
    main()
