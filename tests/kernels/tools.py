"""What the tests of the kernels need from this machine."""

import os
import shlex
import shutil

import pytest

COMPILER = shlex.split(os.environ.get("CXX") or "g++")[0]
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no C++ compiler: {COMPILER} is not found"
)
