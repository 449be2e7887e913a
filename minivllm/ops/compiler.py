"""Compile a C++ file when it is first needed, and load it.

Nothing is compiled at installation, and nothing needs a compiler: whoever asks gets the
library, or the reason why there is none.

Invariant: a library in the cache fits: its name is the hash of source, flags, compiler
and processor.

Called by the compiled backends of the ops.

In vLLM: vllm/_custom_ops.py, whose C++ is compiled when vLLM is built.
Source: appendix A10, "Compiled operations".
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import minivllm
from minivllm.config import cache_dir
from minivllm.errors import BackendUnavailable

FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"]


def kernel_source(name: str) -> Path:
    """Return the path of a file in `kernels/`, in a checkout or an installation."""
    package = Path(minivllm.__file__).parent
    installed = package / "kernels" / name
    return installed if installed.exists() else package.parent / "kernels" / name


def processor() -> str:
    """Return what makes this processor different from others, as far as we can see."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    known = dict.fromkeys(line for line in lines if line.startswith(kinds))
    return "\n".join([platform.machine(), platform.processor(), *known])


def run(command: list[str]) -> str:
    """Run a command and return what it prints.

    Raises:
        BackendUnavailable: It cannot be started, or fails; with its first complaint.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            env=os.environ | {"LC_ALL": "C"},  # complaints in English
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line]
        complaint = (complaints or [f"exit code {done.returncode}"])[0]
        raise BackendUnavailable(f"{command[0]} fails: {complaint}")
    return done.stdout


def others_may_write(folder: Path) -> bool:
    """Tell whether another user could have put something into a folder."""
    if os.name != "posix":
        return False
    status = folder.stat()
    return status.st_uid != os.getuid() or bool(status.st_mode & 0o022)


def compiler_command() -> list[str]:
    """Return how the C++ compiler is called.

    Raises:
        BackendUnavailable: There is none.
    """
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise BackendUnavailable(
            f"the variable CXX cannot be read ({error}): set it to g++"
        ) from error
    if shutil.which(command[0]) is None:
        raise BackendUnavailable(
            f"there is no C++ compiler: {command[0]!r} is not found (install g++, or "
            "set CXX)"
        )
    return command


def built_once(name: str, inputs: Iterable[str], build: Callable[[Path], None]) -> Path:
    """Return a file of the cache; built, if it is not there yet.

    Args:
        name: What to call it, such as "ops.so"; a hash is added.
        inputs: All that goes into it: the hash is theirs.
        build: Writes it to the path that it is given.

    Raises:
        BackendUnavailable: Others may write into the cache, or we may not.
    """
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    path = Path(name)
    file = cache_dir() / "compiled" / f"{path.stem}-{key}{path.suffix}"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others_may_write(file.parent):
            raise BackendUnavailable(
                f"others may write into {str(file.parent)!r}, and what lies there is "
                "run: make it yours alone (chmod 700), or set MINIVLLM_CACHE"
            )
        if file.exists():
            return file
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            built = Path(folder, name)
            build(built)
            os.replace(built, file)  # whole or not at all, even if two build at once
    except OSError as error:
        raise BackendUnavailable(
            f"nothing can be compiled into {str(file.parent)!r} ({error}): set "
            "MINIVLLM_CACHE to a folder that you may write"
        ) from error
    return file


def compile_library(source: Path) -> Path:
    """Return the library made from a source file; compiled, if it is not there yet.

    Raises:
        BackendUnavailable: There is no compiler, or it cannot compile the file.
    """
    command = compiler_command()

    def build(library: Path) -> None:
        objects = library.with_suffix(".o")
        run([*command, *FLAGS, "-c", str(source), "-o", str(objects)])
        # Linked without -fopenmp: its threads are then those that torch has started.
        run([*command, "-shared", str(objects), "-o", str(library)])

    version = run([*command, "--version"])
    inputs = [source.read_text(), *command, *FLAGS, version, processor()]
    return built_once(f"{source.stem}.so", inputs, build)


@cache
def _load(name: str) -> ctypes.CDLL | str:
    import torch  # has to be here before: the library uses its threads

    torch.get_num_threads()
    try:
        return ctypes.CDLL(str(compile_library(kernel_source(name))))
    except (BackendUnavailable, OSError) as error:
        return str(error)


def load_library(name: str) -> ctypes.CDLL:
    """Return the compiled form of a file in `kernels/`.

    Raises:
        BackendUnavailable: It cannot be compiled or loaded here; tried once.
    """
    library = _load(name)
    if isinstance(library, str):
        raise BackendUnavailable(library)
    return library
