"""C++ that is compiled on first use, or the reason why it is not."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

from minivllm.errors import BackendUnavailable
from minivllm.ops import compiler
from minivllm.ops.compiler import compile_library, kernel_source, load_library

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="no g++ on Linux",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


@pytest.fixture
def source(tmp_path):
    """A file with one function."""
    path = tmp_path / "twice.cpp"
    path.write_text('extern "C" int twice(int x) { return 2 * x; }\n')
    return path


@needs_compiler
def test_a_function_is_compiled_once_and_called(source, cache, monkeypatch):
    library = compile_library(source)
    assert ctypes.CDLL(str(library)).twice(21) == 42
    assert list(cache.iterdir()) == [library]  # no leftovers
    written = library.stat().st_mtime_ns
    assert compile_library(source) == library
    assert library.stat().st_mtime_ns == written


@needs_compiler
def test_the_operations_compile_wherever_a_compiler_is():
    """Without this test, a mistake in the file would skip all tests of it."""
    assert load_library("cpu_ops.cpp").rms_norm_float32


@needs_compiler
@pytest.mark.parametrize(
    "changed", ["source", "FLAGS", "processor", "compiler", "its arguments"]
)
def test_whatever_goes_into_a_library_is_in_its_name(
    changed, source, cache, monkeypatch, tmp_path
):
    before = compile_library(source)
    if changed == "source":
        source.write_text(source.read_text().replace("2", "3"))
    elif changed == "FLAGS":
        monkeypatch.setattr(compiler, "FLAGS", [*compiler.FLAGS, "-DDEBUG"])
    elif changed == "processor":
        monkeypatch.setattr(compiler, "processor", lambda: "another one")
    elif changed == "its arguments":
        monkeypatch.setenv("CXX", "g++ -DDEBUG")
    else:
        script = tmp_path / "other compiler"
        script.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo new || exec g++ "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", f"env '{script}'")  # a command with an argument
    assert compile_library(source) != before
    assert before.exists()


@needs_compiler
def test_a_mistake_in_the_source_is_named(source, cache):
    source.write_text("int broken( {")
    with pytest.raises(BackendUnavailable, match=r"fails: .*twice\.cpp:1.*error"):
        compile_library(source)
    assert not list(cache.glob("*.so"))


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_into_is_refused(source, cache, mode):
    library = compile_library(source)
    cache.chmod(mode)
    with pytest.raises(BackendUnavailable, match="others may write"):
        compile_library(source)
    cache.chmod(0o700)
    assert compile_library(source) == library


@needs_compiler
def test_no_bfloat16_is_made_of_a_nan_but_a_nan(tmp_path, cache):
    types = kernel_source("cpu_ops.cpp").read_text().split("// Fewer numbers")[0]
    path = tmp_path / "store.cpp"
    path.write_text(
        types
        + 'extern "C" void store_all(bfloat16* to, const float* from, int64_t n) {\n'
        + "  for (int64_t i = 0; i < n; i++) store(to + i, from[i]);\n}\n"
    )
    bits = np.array(
        [
            *(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0x7F800000),
            *(0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x80000000),
        ],
        dtype=np.uint32,
    )
    stored = np.zeros(len(bits), dtype=np.uint16)
    function = ctypes.CDLL(str(compile_library(path))).store_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(stored.ctypes.data, bits.ctypes.data, len(bits))
    values = (stored.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(values).tolist() == [True] * 4 + [False] * 6
    # Infinity, 1, and the middle of two: to the even one.
    expected = [0x7F80, 0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000]
    assert stored[4:].tolist() == expected


def test_without_a_compiler_the_reason_says_how_to_get_one(source, cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailable, match=r"'no-such-compiler'.*set CXX"):
        compile_library(source)


def test_a_command_that_cannot_be_read_is_refused(source, cache, monkeypatch):
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(BackendUnavailable, match=r"CXX cannot be read.*set it to g"):
        compile_library(source)


@needs_compiler
def test_a_command_of_spaces_is_none(source, cache, monkeypatch):
    before = compile_library(source)
    monkeypatch.setenv("CXX", " ")
    assert compile_library(source) == before


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        BackendUnavailable, match=r"compiled into.*set MINIVLLM_CACHE to"
    ):
        compile_library(source)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_compiler_that_fails_without_a_word_is_told_by_its_code(
    source, cache, monkeypatch, tmp_path
):
    script = tmp_path / "bad-compiler"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 3\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BackendUnavailable, match="exit code 3"):
        compile_library(source)


def test_the_failure_to_load_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    attempts = []
    monkeypatch.setattr(
        compiler, "kernel_source", lambda name: attempts.append(name) or tmp_path / name
    )
    (tmp_path / "remembered.cpp").write_text("")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="no C\\+\\+ compiler"):
            load_library("remembered.cpp")
    assert attempts == ["remembered.cpp"]


def test_the_sources_of_a_checkout_are_found():
    assert "rms_norm" in kernel_source("cpu_ops.cpp").read_text()


def test_an_engine_runs_without_a_compiler_and_says_what_it_lacks(tmp_path):
    script = (
        "from minivllm.ops import registry\n"
        "import minivllm.models.merged\n"
        "print(registry.choose('rms_norm', 'cpu', 'float32'))\n"
    )
    environment = os.environ | {"CXX": "no-such-compiler"}
    environment.pop("MINIVLLM_OP_RMS_NORM", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "name='torch'" in done.stdout
    assert "no C++ compiler" in done.stdout
