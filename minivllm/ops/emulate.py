"""Run CUDA kernels on the CPU, and say what is wrong with them.

A source is compiled with g++ after `kernels/cuda_on_cpu.h`, which makes a GPU out of
fibers. In check mode every access is watched: out of bounds, unwritten, in a race. It
is for learning and for tests, not for speed.

Invariant: a launch ends, whatever the kernel does; a fault of the kernel becomes a
KernelError that names thread, file and line, and harms no later launch.

Called by `minivllm.ops.launch` for tensors on a CPU, by chapters and tests.

In vLLM: none; on a GPU NVIDIA's compute-sanitizer looks for the same mistakes.
Source: appendix A15, "A GPU in one header".
"""

import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops.compiler import built_once, compiler_command, kernel_source
from minivllm.ops.compiler import run as run_command
from minivllm.ops.kernel_source import (
    SCALARS,
    Parameter,
    check_launch,
    is_array,
    kernel_parameters,
    pack_arguments,
)
from minivllm.ops.kernel_trace import ACCESS, SECTOR_BYTES, Memory, Trace, Turn

ORDERS = ("forward", "reverse", "round_robin", "random")
HEADERS = ("cuda_on_cpu.h", "emulated/cuda_pipeline.h", "emulated/mma.h")

# No -march: the same library, and the same last digit, on every processor. Version 4 of
# the tables of lines, since addr2line takes some of version 5 for another file.
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-gdwarf-4", "-fPIC", "-w"),
    *("-fno-strict-aliasing", "-fvisibility=hidden", "-ffp-contract=off"),
    # As on a GPU: nothing is thrown, and a static variable has no lock.
    *("-fno-exceptions", "-fno-threadsafe-statics"),
    "-fstack-clash-protection",  # so that no stack can step over its guard
]
# The hooks are in the header, so nothing of a sanitizer is ever linked. bounds-strict
# lets an index pass that is one too far, where only the element's address is asked for,
# as when a struct is assigned: there object-size comes in. Without SRA a load of 16
# bytes stays one access, instead of four of 4.
CHECK_FLAGS = [
    "-DEMU_CHECK",
    "-fsanitize=thread,bounds-strict,object-size,alignment,shift-exponent,"
    "signed-integer-overflow,integer-divide-by-zero,return",
    "-fno-tree-sra",
    *("--param", "tsan-instrument-func-entry-exit=0"),
]

MAX_SHARED = 227 * 1024  # bytes of a block, on the largest GPUs
SOURCES = "/sources-of-the-kernels"  # for the folder that a source is compiled in

_SHARED = re.compile(
    r"(?P<extern>\bextern\s+)?(?:\bstatic\s+)?\b__shared__\s+"
    r"(?P<extern_after>extern\s+)?(?:(?:__align__|alignas)\([^()]*\)\s*)?"
    r"(?P<type>[\w:][\w:<>,\s*]*?)\s*\b(?P<name>\w+)\s*"
    r"(?P<sides>(?:\[[^\[\]]*\]\s*)*);"
)
_UNROLL = re.compile(r"#[ \t]*pragma[ \t]+unroll\b[^\n]*")


def to_cpp(source: str) -> str:
    """Rewrite what macros cannot: the declarations of shared memory."""
    ids = iter(range(len(source)))

    def declare(found: re.Match[str]) -> str:
        kind, name, sides = found["type"], found["name"], found["sides"].strip()
        if found["extern"] or found["extern_after"]:
            code = f'{kind}* {name} = emu::dynamic_shared<{kind}>("{name}");'
        else:
            whole = f"{kind}{sides}"
            code = (
                f"{kind} (&{name}){sides} = emu::shared<{whole}>"
                f'(__PRETTY_FUNCTION__, {next(ids)}, "{name}");'
            )
        return " ".join(code.split()) + "\n" * found[0].count("\n")

    return _UNROLL.sub("", _SHARED.sub(declare, source))


# What a kernel may use on a GPU and not here.
UNSUPPORTED = {
    r"\b(?:asm|__asm__)\b": "PTX (asm); put it between #ifndef __CUDA_ON_CPU__ and "
    "#endif, with plain C++ for the emulator",
    r"\b(?:cooperative_groups|cg\s*::)": "cooperative groups",
    r"\b(?:__cluster_dims__|cluster_group)\b": "clusters of blocks",
    r"(?<![\w:])cuda\s*::": "the library libcu++ (cuda::)",
    r"\b(?:cub|thrust|cute|cutlass)\s*::": "templates of other libraries",
    r"<<\s*<": "launches out of a kernel (<<<...>>>)",
    r"\bcuda[A-Z]\w*\s*\(": "calls of the CUDA runtime (cuda...)",
    r"\b__(?:shfl|shfl_up|shfl_down|shfl_xor|ballot|any|all)\s*\(": "functions of a "
    "warp without _sync; CUDA has dropped them, too",
    r"\b__activemask\b": "__activemask: which lanes happen to run together is chance; "
    "name those that you mean",
    r"\b__match_(?:any|all)_sync\b": "__match_any_sync and __match_all_sync",
    r"\b(?:clock|clock64|__nanosleep|__globaltimer)\s*\(": "clocks and sleep",
    r"\b(?:tex[123]D\w*|surf[123]D\w*|cudaTextureObject_t)\b": "textures and surfaces",
    r"\b__managed__\b": "managed variables",
    r"\b(?:malloc|free)\s*\(|\bnew\s+[\w:]": "memory from a heap (malloc, new)",
    r"\b(?:throw|try|catch)\b": "exceptions",
    r"\b(?:exit|abort)\s*\(": "functions that end the program; __trap() ends a kernel",
    r"\b__shared__\b": "this way to declare shared memory; write one variable at a "
    'time, such as "__shared__ float sums[32];"',
}
_MARKER = re.compile(r'# (\d+) "([^"]*)"')
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"')


def find_unsupported(preprocessed: str) -> str | None:
    """Return what the emulator lacks, with file and line, or None.

    Args:
        preprocessed: What `g++ -E` makes of a source: only the branches that are
            compiled, and markers of the lines they come from.
    """
    file, line = "", 0
    for text in preprocessed.splitlines():
        marker = _MARKER.match(text)
        if marker:
            line, file = int(marker[1]), marker[2]
            continue
        code = _TEXT.sub('""', text)
        is_ours = not os.path.isabs(file) and not file.startswith("<")
        for pattern, name in UNSUPPORTED.items() if is_ours else ():
            if re.search(pattern, code):
                return f"{file}:{line}: the emulator does not have {name}"
        line += 1
    return None


_UNKNOWN = re.compile(
    r"(?:error: '(\w+)' was not declared|error: use of undeclared identifier '(\w+)')"
)
_USED_AT = re.compile(r"([^/\s][^:]*:\d+:\d+):\s+required from")
_NO_HEADER = re.compile(
    r"^(.*?:\d+).*?error: '?([\w./]+)'?(?:: No such file|.*not found)"
)


def complaint(stderr: str) -> str:
    """Shorten what a compiler says to its first errors."""
    errors, used_at = [], ""
    for line in stderr.splitlines():
        if found := _USED_AT.match(line):
            used_at = found[1]
        elif "undefined reference" in line:  # from the linker, with a path before
            errors.append(line.rpartition("/")[2])
        elif "error:" in line and not line.startswith("collect2"):
            # A wrong use of a template of the header is a mistake where it is used.
            _, _, what = line.partition(" error: ")
            is_ours = used_at and os.path.isabs(line)
            errors.append(f"{used_at}: error: {what}" if is_ours else line)
    first = errors[0] if errors else stderr.strip()[:500]
    header = _NO_HEADER.match(first)
    if header:
        return (
            f"{header[1]}: the emulator does not have <{header[2]}>: use "
            "<cuda_fp16.h>, <cuda_bf16.h>, <cuda_pipeline.h>, <mma.h> and files in "
            "quotes, which are looked for beside the source"
        )
    unknown = _UNKNOWN.search(first)
    name = unknown and (unknown[1] or unknown[2])
    if name and (name.startswith("__") or name.startswith("atomic")):
        return (
            f"{first} (the emulator does not have it; appendix A15 lists what it has)"
        )
    return "\n".join(errors[:3]) or first


def why_not_emulated(check: bool = False) -> str | None:
    """Return why no kernel can be emulated here, or None."""
    if sys.platform != "linux":
        return (
            f"the emulator of CUDA kernels runs on Linux, and this is {sys.platform}: "
            "use the torch or NumPy implementation"
        )
    try:
        version = run_command([*compiler_command(), "--version"])
    except BackendUnavailable as error:
        return str(error)
    if check and "clang" in version:
        return (
            "clang does not announce every access of a kernel, so it cannot check one: "
            "set CXX to g++"
        )
    return None


def build(source: str, instances: Sequence[str], check: bool) -> Path:
    """Return the library made of a source; compiled, if it is not there yet.

    Raises:
        BackendUnavailable: This is not Linux, or there is no compiler.
        KernelError: The source cannot be compiled.
    """
    if reason := why_not_emulated(check):
        raise BackendUnavailable(reason)
    command = compiler_command()
    header = kernel_source("cuda_on_cpu.h").resolve()
    first = ["-include", str(header), f"-I{header.parent}"]
    first += [f"-I{header.parent / 'emulated'}"]
    flags = FLAGS + CHECK_FLAGS if check else FLAGS
    launchers = "\n".join(
        _launcher(number, instance, kernel_parameters(source, instance))
        for number, instance in enumerate(instances)
    )
    text = f'#line 1 "kernel.cu"\n{to_cpp(source)}\n'
    text += f'#line 1 "after the source"\n{launchers}\n'

    def compile_into(library: Path) -> None:
        folder = library.parent
        (folder / "kernels.cpp").write_text(text)
        preprocess = [*flags, *first, "-E", "kernels.cpp", "-o", "kernels.ii"]
        _run_compiler([*command, *preprocess], folder)
        if lacking := find_unsupported((folder / "kernels.ii").read_text()):
            raise KernelError(lacking)
        here = f"-fdebug-prefix-map={folder}={SOURCES}"
        compile_ = [*flags, here, "-c", "kernels.ii", "-o", "kernels.o"]
        _run_compiler([*command, *compile_], folder)
        link = ["-shared", "-Wl,-z,defs", "kernels.o", "-o", library.name]
        _run_compiler([*command, *link], folder)

    headers = [kernel_source(name).read_text() for name in HEADERS]
    version = run_command([*command, "--version"])
    inputs = [text, *headers, *flags, *command, version]
    return built_once("kernels.so", inputs, compile_into)


def _launcher(number: int, instance: str, parameters: list[Parameter]) -> str:
    """Return the line of C++ that makes a function for Python out of a kernel."""
    sizes = [8 if p.is_pointer else ctypes.sizeof(SCALARS[p.dtype]) for p in parameters]
    return f"EMU_KERNEL({', '.join([str(number), f'({instance})', *map(str, sizes)])})"


def _run_compiler(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        env=os.environ | {"LC_ALL": "C"},
    )
    if done.returncode:
        raise KernelError(f"the kernels do not compile: {complaint(done.stderr)}")


# The structs of the same names in cuda_on_cpu.h.


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("cells", ctypes.c_void_p),
        ("granule", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
    )


class _Turn(ctypes.Structure):
    _fields_ = (
        ("waits_in", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("num_accesses", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint16),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_limit", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("timeout_us", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("yield_at_atomics", ctypes.c_int32),
        ("blocks_may_share", ctypes.c_int32),
        ("num_regions", ctypes.c_int32),
        ("regions", ctypes.POINTER(_Region)),
        ("stacks", ctypes.c_void_p),
        ("accesses", ctypes.c_void_p),
        ("turns", ctypes.POINTER(_Turn)),
        ("max_accesses", ctypes.c_uint64),
        ("max_turns", ctypes.c_uint64),
        ("num_accesses", ctypes.c_uint64),
        ("num_turns", ctypes.c_uint64),
    )


GAP = 4096  # around each array, so that a step too far meets nobody


@dataclass(slots=True)
class _Array:
    """Where an argument lies: its bytes are from low to high."""

    number: int
    parameter: Parameter
    low: int
    high: int
    itemsize: int
    owner: int  # where the array begins of which this one is a view


def _locate(number: int, parameter: Parameter, value: Any) -> _Array:
    if isinstance(value, np.ndarray):
        low = high = value.ctypes.data
        if value.size:
            low, high = np.lib.array_utils.byte_bounds(value)
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        start = owner.ctypes.data
        return _Array(number, parameter, low, high, value.itemsize, start)
    low, size = value.data_ptr(), value.element_size()
    last = sum(
        (side - 1) * stride
        for side, stride in zip(value.shape, value.stride(), strict=True)
    )
    high = low + (last + 1) * size if value.numel() else low
    start = value.untyped_storage().data_ptr()
    return _Array(number, parameter, low, high, size, start)


@dataclass(slots=True)
class _Group:
    """Arrays that overlap: one piece of memory."""

    low: int
    high: int
    arrays: list[_Array] = field(default_factory=list)
    base: int = 0  # where its bytes lie during a launch
    buffer: Any = None
    cells: Any = None

    @property
    def granule(self) -> int:
        """Bytes that are watched together: none belongs to two elements."""
        steps = [array.low - self.low for array in self.arrays]
        return math.gcd(4, *steps, *(array.itemsize for array in self.arrays))

    @property
    def is_writable(self) -> bool:
        """Whether a parameter lets the kernel write here."""
        return any(not array.parameter.is_const for array in self.arrays)

    @property
    def shift(self) -> int:
        """Where it begins in the array that it is a view of."""
        return (self.low - min(array.owner for array in self.arrays)) % 256

    def copy_in(self, cell_bytes: int) -> None:
        """Move to a place of its own, with nothing beside it."""
        size = self.high - self.low
        self.buffer = np.empty(size + 2 * GAP + 512, np.uint8)
        # As on a GPU, arrays begin at multiples of 256.
        start = self.buffer.ctypes.data + GAP
        self.base = (start + 255) // 256 * 256 + self.shift
        ctypes.memmove(self.base, self.low, size)
        self.cells = np.zeros((size // self.granule + 1) * cell_bytes, np.uint8)

    def copy_out(self) -> None:
        """Move back what the kernel may have changed."""
        if self.is_writable:
            ctypes.memmove(self.low, self.base, self.high - self.low)


def group_arrays(arrays: list[_Array]) -> list[_Group]:
    """Put arrays that share bytes into one group, in order of their first argument."""
    groups: list[_Group] = []
    for array in sorted(arrays, key=lambda array: (array.low, array.high)):
        if not groups or array.low >= groups[-1].high:
            groups.append(_Group(array.low, array.high))
        groups[-1].arrays.append(array)
        groups[-1].high = max(groups[-1].high, array.high)
    for group in groups:
        group.arrays.sort(key=lambda array: array.number)
        group.base = group.low
    return sorted(groups, key=lambda group: group.arrays[0].number)


class _Library:
    """A compiled module: its functions, and where their code comes from."""

    stacks: int | None = None  # of the threads; one set for the whole process

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailable(
                f"the compiled kernels cannot be loaded ({error}): delete that file, "
                "or set MINIVLLM_CACHE to another folder"
            ) from error
        for name in ("emu_error", "emu_output", "emu_variable", "emu_outside"):
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.functions.emu_cell_bytes.restype = ctypes.c_size_t
        self.functions.emu_new_stacks.restype = ctypes.c_void_p
        if name := self.functions.emu_outside():
            raise KernelError(
                f"the shared memory {name.decode()!r} is declared outside of a "
                "function: declare it in the kernel"
            )
        self.places: dict[int, str] = {}

    def locate(self, codes: set[int]) -> dict[int, str]:
        """Return file and line for addresses of code, for those that have any."""
        new = sorted(codes - self.places.keys())
        if new and shutil.which("addr2line"):
            # A code is the address after a call, which may belong to the next line.
            addresses = "\n".join(hex(max(code - 1, 0)) for code in new)
            done = subprocess.run(
                ["addr2line", "-a", "-i", "-e", str(self.path)],
                input=addresses,
                capture_output=True,
                text=True,
            )
            for code, frames in zip(new, done.stdout.split("0x")[1:], strict=True):
                # Innermost first; those of the emulator's own headers do not count.
                ours = [frame for frame in frames.splitlines() if SOURCES in frame]
                if ours:
                    place = ours[0].partition(f"{SOURCES}/")[2]
                    self.places[code] = place.split(" (discriminator")[0]
        return {code: self.places[code] for code in codes & self.places.keys()}

    def launch(self, number: int, launch: _Launch, arguments: list[Any]) -> str | None:
        """Run a kernel; return what is wrong, if anything is."""
        if _Library.stacks is None:
            _Library.stacks = self.functions.emu_new_stacks()
            if not _Library.stacks:
                raise BackendUnavailable("there is no memory for the threads' stacks")
        launch.stacks = _Library.stacks
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        function = getattr(self.functions, f"emu_launch_{number}")
        failed = function(ctypes.byref(launch), pointers)
        if self.functions.emu_interrupted():
            # The launch took what was meant for Python. The second line lets Python
            # answer now, in the main thread with KeyboardInterrupt, not at some time.
            signal.raise_signal(signal.SIGINT)
            ctypes.pythonapi.PyErr_CheckSignals()
        return self.functions.emu_error().decode(errors="replace") if failed else None


class EmulatedModule:
    """The kernels of one source, compiled for the CPU.

    module = EmulatedModule(read_source(path), ["rms_norm_v1<float>"], check=True)
    module["rms_norm_v1<float>"](grid, block, out, x, weight, 1e-6, hidden, 0)
    """

    def __init__(
        self, source: str, instances: Sequence[str], check: bool = False
    ) -> None:
        """Compile, unless the cache has it.

        Args:
            source: CUDA C++ without host code, for example from `read_source`.
            instances: The kernels that will be used, with their template arguments.
            check: Whether to watch every access. That takes about three times as long.

        Raises:
            BackendUnavailable: There is no C++ compiler, or this is not Linux.
            KernelError: The source uses what the emulator does not have, or does not
                compile.
        """
        self.source = source
        self.instances = list(instances)
        self.check = check
        self._libraries = {check: _Library(build(source, self.instances, check))}
        self._kernels = {
            instance: EmulatedKernel(
                self, number, instance, kernel_parameters(source, instance)
            )
            for number, instance in enumerate(self.instances)
        }

    def __getitem__(self, instance: str) -> "EmulatedKernel":
        """Return a kernel by the name under which it was asked for."""
        if instance not in self._kernels:
            raise KernelError(
                f"{instance}: this module was made for {', '.join(self.instances)}"
            )
        return self._kernels[instance]

    def library(self, check: bool) -> _Library:
        """Return the compiled form with or without checks."""
        if check not in self._libraries:
            path = build(self.source, self.instances, check)
            self._libraries[check] = _Library(path)
        return self._libraries[check]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How to run a kernel, besides grid and block.

    Attributes:
        shared_bytes: Dynamic shared memory of each block.
        order: Which thread runs when several can: "forward" the lowest number,
            "reverse" the highest, "round_robin" the next after the last one, "random"
            any. Blocks run likewise, except that round_robin takes them forward.
        seed: For the random order.
        shared_limit: Bytes of shared memory that a block may have. 48 KiB are allowed
            everywhere; more has to be asked for: 64 KiB on sm_75, 163 on sm_80, 99 on
            sm_86 and sm_89, 227 on sm_90.
        yield_at_atomics: Whether a thread stops at atomic operations, too, so that
            others come in between. A lock needs that.
        blocks_may_share: Do not report that blocks use each other's memory.
        timeout_s: Processor time after which a launch that has not ended is an error.
    """

    shared_bytes: int = 0
    order: str = "forward"
    seed: int = 0
    shared_limit: int = 48 * 1024
    yield_at_atomics: bool = False
    blocks_may_share: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Check what C++ could not."""
        if self.order not in ORDERS:
            raise KernelError(f"order {self.order!r}: use one of {', '.join(ORDERS)}")
        for name, least, most in (
            ("shared_bytes", 0, math.inf),
            ("shared_limit", 0, MAX_SHARED),
            ("seed", 0, math.inf),
            ("timeout_s", 1e-3, 1e6),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, Real if name == "timeout_s" else Integral)
            if not is_number or not least <= value <= most:
                raise KernelError(
                    f"{name} is {value!r}, but must be a "
                    f"{'' if name == 'timeout_s' else 'whole '}number from {least} "
                    f"to {most}"
                )


# One at a time: a launch owns the stacks of the threads and the process's signals.
_LAUNCHING = threading.Lock()
MAX_ACCESSES = 1 << 24  # of a trace: half a gigabyte
MAX_TURNS = 1 << 20


class EmulatedKernel:
    """A kernel that is launched like on a GPU: `kernel(grid, block, *arguments)`."""

    def __init__(
        self,
        module: EmulatedModule,
        number: int,
        instance: str,
        parameters: list[Parameter],
    ) -> None:
        """Belong to a module, which makes it."""
        self.module = module
        self.number = number
        self.instance = instance
        self.parameters = parameters

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Run every thread of every block.

        Args:
            grid: Blocks, one to three sides.
            block: Threads of each, one to three sides.
            *arguments: Arrays of NumPy, tensors of torch on the CPU, and numbers.
            **options: Those of `LaunchOptions`.

        Raises:
            KernelError: The call is wrong, or the kernel breaks a rule. It then has
                stopped in the middle, and what it had written stays.
        """
        self._launch(grid, block, arguments, LaunchOptions(**options))

    def trace(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        **options: Any,
    ) -> Trace:
        """Run as in a call, with checks, and return what every thread did.

        Raises:
            KernelError: As in a call; or there are more accesses than we can keep.
        """
        return self._launch(
            grid, block, arguments, LaunchOptions(**options), is_traced=True
        )

    def _launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: tuple[Any, ...],
        options: LaunchOptions,
        is_traced: bool = False,
    ) -> Trace | None:
        sides = check_launch(self.instance, grid, block)
        for index, value in enumerate(arguments):
            if hasattr(value, "data_ptr") and value.device.type != "cpu":
                raise KernelError(
                    f"{self.instance}: argument {index} is on {value.device}, but the "
                    "emulator runs on the CPU: use minivllm.ops.launch, or .cpu()"
                )
        packed = pack_arguments(self.instance, self.parameters, arguments)
        arrays = [
            _locate(index, parameter, value)
            for index, (parameter, value) in enumerate(
                zip(self.parameters, arguments, strict=True)
            )
            if is_array(value)
        ]
        groups = group_arrays(arrays)
        check = self.module.check or is_traced
        library = self.module.library(check)
        if check:
            cell_bytes = library.functions.emu_cell_bytes()
            for group in groups:
                group.copy_in(cell_bytes)
                for array in group.arrays:
                    # An empty tensor of torch has no address.
                    address = packed[array.number].value or 0
                    moved = address + group.base - group.low
                    packed[array.number] = ctypes.c_void_p(moved)
        launch = _Launch(
            grid=sides[0],
            block=sides[1],
            shared_bytes=options.shared_bytes,
            shared_limit=options.shared_limit,
            seed=options.seed % 2**64,
            timeout_us=int(options.timeout_s * 1e6),
            order=ORDERS.index(options.order),
            yield_at_atomics=options.yield_at_atomics,
            blocks_may_share=options.blocks_may_share,
            num_regions=len(groups),
            regions=(_Region * len(groups))(*map(_region, groups)),
        )
        if is_traced:  # of the memory, only as much is used as is written
            accesses = np.empty(MAX_ACCESSES, ACCESS)
            turns = np.empty(MAX_TURNS * ctypes.sizeof(_Turn), np.uint8)
            launch.accesses, launch.max_accesses = accesses.ctypes.data, MAX_ACCESSES
            launch.turns = ctypes.cast(turns.ctypes.data, ctypes.POINTER(_Turn))
            launch.max_turns = MAX_TURNS
        with _LAUNCHING:
            error = library.launch(self.number, launch, packed)
            output = library.functions.emu_output().decode(errors="replace")
            shared = [
                library.functions.emu_variable(number).decode()
                for number in range(library.functions.emu_num_variables())
            ]
        if check:
            for group in groups:
                group.copy_out()
        if output:
            print(output, end="", flush=True)
        if error:
            raise KernelError(f"{self.instance}: {_readable(error, groups, library)}")
        if not is_traced:
            return None
        accesses = accesses[: launch.num_accesses].copy()
        codes = {int(code) for code in np.unique(accesses["code"])}
        places = {code: f"code {code:#x}" for code in codes} | library.locate(codes)
        memories = [
            Memory(
                "/".join(array.parameter.name for array in group.arrays),
                is_shared=False,
                shift=group.shift % SECTOR_BYTES,
            )
            for group in groups
        ]
        memories += [Memory(name, is_shared=True) for name in shared]
        ran = [_turn(turn) for turn in launch.turns[: launch.num_turns]]
        return Trace(accesses, places, memories, len(groups), ran)


def _region(group: _Group) -> _Region:
    return _Region(
        base=group.base,
        bytes=group.high - group.low,
        cells=group.cells.ctypes.data if group.cells is not None else None,
        granule=group.granule,
        writable=group.is_writable,
    )


def _turn(turn: _Turn) -> Turn:
    place = f"{turn.file.decode()}:{turn.line}" if turn.line else ""
    return Turn(
        turn.block, turn.thread, turn.waits_in.decode(), place, turn.num_accesses
    )


def _readable(error: str, groups: list[_Group], library: _Library) -> str:
    """Put places and names where C++ left addresses of code and numbers of regions."""
    marks = re.findall(r"@([0-9a-f]+)(?:\|([0-9a-f]+))?@", error)
    codes = [[int(code, 16) for code in mark if code] for mark in marks]
    places = library.locate({code for mark in codes for code in mark})

    def place(found: re.Match[str]) -> str:
        # After the bar is where the latest access was, for code without a line.
        candidates = [int(code, 16) for code in found.groups() if code]
        known = [places[code] for code in candidates if code in places]
        return known[0] if known else f"code {candidates[0]:#x}"

    def name(found: re.Match[str]) -> str:
        arrays = groups[int(found[1])].arrays
        names = [f"{array.number} ({array.parameter.name})" for array in arrays]
        return f"argument {' / '.join(names)}"

    error = re.sub(r"@([0-9a-f]+)(?:\|([0-9a-f]+))?@", place, error)
    return re.sub(r"\$(\d+)\$", name, error)
