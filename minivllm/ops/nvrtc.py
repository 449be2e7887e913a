"""Compile CUDA C++ for a GPU with NVRTC, NVIDIA's compiler in the form of a library.

No GPU is needed, nor nvcc: NVRTC comes with torch's wheels for CUDA, with the package
`nvidia-cuda-nvrtc`, or with a CUDA toolkit.

Invariant: what it returns is a cubin, the machine code of one architecture. Never PTX,
which the driver would compile once more, and only if it is as new as the compiler.

Called by `minivllm.ops.launch`.

In vLLM: CMakeLists.txt; its kernels are compiled with nvcc when vLLM is built, for a
list of architectures.
Source: appendix A16, "Launching kernels".
"""

import ctypes
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops.compiler import built_once

# Lines in the code, for tools that look for mistakes; and a word on each kernel's size.
OPTIONS = ["--std=c++17", "-lineinfo", "--ptxas-options=-v"]
# The kernels are written for warps whose threads need not march in step: Volta's.
OLDEST = 70


@dataclass(frozen=True, slots=True)
class Cubin:
    """Kernels in the machine code of one architecture.

    Attributes:
        code: An ELF file, which the driver loads.
        names: Instance ("scale<float>") -> what the code calls it.
        log: What the assembler says of each: registers, shared memory, spills.
    """

    code: bytes
    names: dict[str, str]
    log: str


class Nvrtc:
    """NVRTC, and the folder with the headers that belong to it."""

    def __init__(self, library: Path) -> None:
        try:
            # NVRTC opens its other half by name, and not every wheel says where.
            for part in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
            self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise BackendUnavailable(f"NVRTC cannot be loaded: {error}") from error
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self.include = find_headers(self.version)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library, all of which return an error code."""
        if code := getattr(self.library, f"nvrtc{name}")(*arguments):
            text = self.library.nvrtcGetErrorString(code).decode()
            raise KernelError(f"nvrtc{name} fails: {text}")

    def read(self, what: str, program: ctypes.c_void_p) -> bytes:
        """Return a result of a program: its "ProgramLog" or its "CUBIN"."""
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, buffer)
        return buffer.raw

    def compile(
        self, source: str, instances: Sequence[str], options: Sequence[str]
    ) -> Cubin:
        """Compile a source, without looking into the cache."""
        program = ctypes.c_void_p()
        text = source.encode()
        named = (ctypes.byref(program), text, b"kernels.cu")
        self.call("CreateProgram", *named, 0, None, None)
        try:
            for instance in instances:
                self.call("AddNameExpression", program, instance.encode())
            flags = [option.encode() for option in options]
            array = (ctypes.c_char_p * len(flags))(*flags)
            code = self.library.nvrtcCompileProgram(program, len(flags), array)
            log = self.read("ProgramLog", program).rstrip(b"\0\n").decode()
            if code:
                raise KernelError(
                    f"NVRTC cannot compile {', '.join(instances)}:\n{log}"
                )
            names = {}
            for instance in instances:
                name = ctypes.c_char_p()
                asked = (program, instance.encode(), ctypes.byref(name))
                self.call("GetLoweredName", *asked)
                names[instance] = name.value.decode()
            return Cubin(self.read("CUBIN", program), names, log)
        finally:
            self.call("DestroyProgram", ctypes.byref(program))

    def architectures(self) -> list[int]:
        """Return what it compiles for: 75 is sm_75."""
        count = ctypes.c_int()
        self.call("GetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self.call("GetSupportedArchs", known)
        return list(known)


def installed(pattern: str) -> list[Path]:
    """Return what matches below the folders of CUDA: those of wheels, then toolkits."""
    found: list[Path] = []
    for folder in sys.path:
        found += sorted(Path(folder, "nvidia").glob(f"*/{pattern}"))
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    for home in filter(None, [*homes, "/usr/local/cuda"]):
        found += sorted(Path(home).glob(pattern))
    return found


def package_of(part: str, major: int) -> str:
    """Return the name of NVIDIA's package with a part of CUDA."""
    return f"nvidia-cuda-{part}" + ("-cu12" if major == 12 else "")


def find_libraries() -> dict[int, Path]:
    """Return NVRTC of each major version of CUDA; the first that is found."""
    found: dict[int, Path] = {}
    for path in installed("lib*/libnvrtc.so.*"):
        if match := re.fullmatch(r"libnvrtc\.so\.(\d+)", path.name):
            found.setdefault(int(match[1]), path)
    return found


def find_headers(version: tuple[int, int]) -> Path:
    """Return the folder with the headers of a version of CUDA, or the nearest to it.

    Raises:
        BackendUnavailable: There are none of the same major version.
    """
    found: dict[int, Path] = {}  # 12080 is version 12.8
    for path in installed("include/cuda_fp16.h"):
        header = path.with_name("cuda.h")
        text = header.read_text("utf-8", "replace") if header.exists() else ""
        if match := re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text):
            found.setdefault(int(match[1]), path.parent)
    major, minor = version
    wanted = 1000 * major + 10 * minor
    near = [known for known in found if known // 1000 == major]
    if not near:
        raise BackendUnavailable(
            f"there are no headers (cuda_fp16.h) for NVRTC {major}.{minor}: "
            f"pip install {package_of('runtime', major)}, or set CUDA_HOME to a "
            f"toolkit of CUDA {major}"
        )
    return found[min(near, key=lambda known: abs(known - wanted))]


@cache
def find_nvrtc(major: int | None = None) -> Nvrtc:
    """Return NVRTC of a major version of CUDA, or the newest that is there.

    Raises:
        BackendUnavailable: It is not installed, or its headers are not.
    """
    libraries = find_libraries()
    wanted = major or max(libraries, default=13)
    if wanted not in libraries:
        others = " and ".join(map(str, sorted(libraries)))
        raise BackendUnavailable(
            f"NVRTC of CUDA {wanted} is not installed"
            + (f", only that of {others}" if others else "")
            + f": pip install {package_of('nvrtc', wanted)}, or set CUDA_HOME"
        )
    return Nvrtc(libraries[wanted])


def find_mma() -> Path | None:
    """Return the folder with `crt/mma.h`, which `mma.h` includes, or None."""
    found = [path.parents[1] for path in installed("include/crt/mma.h")]
    for folder in sys.path:
        copy = Path(folder, "triton/backends/nvidia/include")
        found += [copy] if (copy / "crt/mma.h").exists() else []
    return found[0] if found else None


def why_no_mma(major: int | None = None) -> str | None:
    """Return why no kernel can use tensor cores, or None if it can."""
    if find_mma():
        return None
    package = "nvidia-cuda-nvcc-cu12" if major == 12 else "nvidia-cuda-crt"
    return f"CUDA's mma.h lacks crt/mma.h: pip install {package}, or set CUDA_HOME"


def include_options(nvrtc: Nvrtc) -> list[str]:
    """Return where the compiler is to look for headers."""
    folders = [nvrtc.include, find_mma()]
    return [f"-I{folder}" for folder in folders if folder]


def why_not_compiled_for(arch: str, major: int | None = None) -> str | None:
    """Return why nothing can be compiled for an architecture, or None if it can."""
    try:
        nvrtc = find_nvrtc(major)
    except BackendUnavailable as error:
        return str(error)
    if not re.fullmatch(r"sm_\d+", arch):
        return f"{arch!r} is no architecture of a GPU: write it as 'sm_80'"
    number = int(arch.removeprefix("sm_"))
    if number < OLDEST:
        return f"the kernels need a GPU of sm_{OLDEST} or newer, and this is {arch}"
    known = nvrtc.architectures()
    if number not in known:
        return (
            "NVRTC {}.{} compiles for".format(*nvrtc.version)
            + f" sm_{min(known)} to sm_{max(known)}, but not for {arch}"
        )
    return None


def compile_cubin(
    source: str, instances: Sequence[str], arch: str, major: int | None = None
) -> Cubin:
    """Compile kernels for a GPU; what was compiled before is read from the cache.

    Args:
        source: CUDA C++ with all that it includes, but for CUDA's own headers.
        instances: Kernels with their template arguments: "scale<float>".
        arch: "sm_80".
        major: Version of CUDA whose compiler to take; the newest by default.

    Raises:
        BackendUnavailable: There is no NVRTC, or it does not know the architecture.
        KernelError: The source cannot be compiled; with the compiler's log.
    """
    if reason := why_not_compiled_for(arch, major):
        raise BackendUnavailable(reason)
    nvrtc = find_nvrtc(major)
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    header = (nvrtc.include / "cuda_fp16.h").read_text("utf-8", "replace")

    def build(path: Path) -> None:
        cubin = nvrtc.compile(source, instances, [*options, *include_options(nvrtc)])
        about = json.dumps({"names": cubin.names, "log": cubin.log})
        content = about.encode() + b"\n" + cubin.code
        path.write_bytes(hashlib.sha256(content).digest() + content)

    inputs = [source, *instances, *options, str(nvrtc.version), header]
    path = built_once(f"{arch}.cubin", inputs, build)
    cubin = unpack(path.read_bytes())
    if cubin is None:  # a driver would load the half of it that is there
        path.unlink(missing_ok=True)
        cubin = unpack(built_once(f"{arch}.cubin", inputs, build).read_bytes())
    assert cubin, f"{path} changes while it is read"
    return cubin


def unpack(data: bytes) -> Cubin | None:
    """Return what a file of the cache holds, or None if it is damaged."""
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    about, _, code = content.partition(b"\n")
    return Cubin(code, **json.loads(about))
