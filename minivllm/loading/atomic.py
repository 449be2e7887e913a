"""Files and folders that appear whole or not at all.

Invariant: a name without the suffix `.tmp` is complete; whoever is killed half-way
leaves only `.tmp` entries behind, which the next one to hold the lock removes.
Called by the modules that write into the cache.

In vLLM: vllm/model_executor/model_loader/weight_utils.py, get_lock.
Source: appendix A1, "Files".
"""

import glob
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def _beside(path: Path) -> Path:
    # In the same folder, hence on the same disk: only there is a rename atomic.
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")


def _sync(path: Path) -> None:
    # A rename may reach the disk before the bytes it names, unless we wait for them.
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` when the block ends without an error."""
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            yield file
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` that is removed when the block ends."""
    temporary = _beside(path)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that becomes `path` when the block ends without an error."""
    with scratch_folder(path) as temporary:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        os.rename(temporary, path)
        _sync(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` left; nobody may be writing it now."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _try_lock(file: BinaryIO) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # held: the latter on Windows
        return False
    return True


@contextmanager
def lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Let one process at a time into the block; the system frees it if we die.

    The lock file stays: to remove it would let two processes hold "the" lock.
    """
    with open(path, "ab") as file:
        if not _try_lock(file):
            if on_wait:
                on_wait()
            while not _try_lock(file):
                time.sleep(0.1)
        yield
