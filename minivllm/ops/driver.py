"""The CUDA driver, through ctypes: load machine code into a GPU and start it.

Invariant: torch's context is current during a call and no longer, whatever thread
calls, so that kernels see torch's memory and torch notices nothing.

Called by `minivllm.ops.launch`.

In vLLM: vllm/distributed/device_communicators/cuda_wrapper.py (CudaRTLibrary), which
calls CUDA's runtime in the same way.
Source: appendix A16, "Launching kernels".
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from minivllm.errors import BackendUnavailable, KernelError

# From cuda.h: what one can ask of a kernel, and of a device.
MAX_THREADS_PER_BLOCK = 0
SHARED_SIZE_BYTES = 1
NUM_REGS = 4
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

UNASKED_BYTES = 48 * 1024  # of shared memory, that any block may have


class Driver:
    """The library that belongs to the GPU's driver."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise BackendUnavailable(
                f"there is no CUDA driver ({error}): install that of your NVIDIA GPU"
            ) from error
        # ctypes passes numbers in 32 bits, and the handle of a stream is an address.
        sizes, pointers = [ctypes.c_uint] * 7, [ctypes.c_void_p] * 3
        self.library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, *pointers]
        try:
            self.call("cuInit", 0)
        except KernelError as error:
            raise BackendUnavailable(
                f"the CUDA driver does not start: {error}"
            ) from error

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the library, all of which return an error code.

        Raises:
            KernelError: It fails; with the driver's words.
        """
        if code := getattr(self.library, function)(*arguments):
            words = []
            for describe in ("cuGetErrorName", "cuGetErrorString"):
                text = ctypes.c_char_p()
                getattr(self.library, describe)(code, ctypes.byref(text))
                words.append(text.value.decode() if text.value else f"error {code}")
            raise KernelError(f"{function} fails: {', '.join(words)}")


@cache
def load_driver() -> Driver:
    """Return the driver; it is loaded once."""
    return Driver()


class Device:
    """A GPU. In `with device:` its primary context is current, the one torch uses."""

    def __init__(self, index: int) -> None:
        self.call = load_driver().call
        number, limit = ctypes.c_int(), ctypes.c_int()
        self.context = ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(number), index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
        which = MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.call("cuDeviceGetAttribute", ctypes.byref(limit), which, number)
        self.max_shared_bytes = limit.value

    def __enter__(self) -> None:
        self.call("cuCtxPushCurrent_v2", self.context)

    def __exit__(self, *error: object) -> None:
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def load(self, code: bytes, names: dict[str, str]) -> "dict[str, LoadedKernel]":
        """Load machine code, and return the kernels in it.

        Args:
            code: A cubin.
            names: What we call each -> what the code calls it.
        """
        module = ctypes.c_void_p()
        with self:
            self.call("cuModuleLoadData", ctypes.byref(module), code)
            return {
                name: LoadedKernel(self, module, name, symbol)
                for name, symbol in names.items()
            }


class LoadedKernel:
    """A kernel in the memory of a GPU, and what a block of it may have."""

    def __init__(
        self, device: Device, module: ctypes.c_void_p, name: str, symbol: str
    ) -> None:
        self.device = device
        self.name = name
        self.function = ctypes.c_void_p()
        # Asking for a kernel loads it: too late while a CUDA graph is captured.
        wanted = (ctypes.byref(self.function), module, symbol.encode())
        device.call("cuModuleGetFunction", *wanted)
        self.num_registers = self.attribute(NUM_REGS)
        self.max_threads = self.attribute(MAX_THREADS_PER_BLOCK)
        self.static_bytes = self.attribute(SHARED_SIZE_BYTES)
        self.granted_bytes = UNASKED_BYTES - self.static_bytes

    def attribute(self, which: int) -> int:
        """Return a number that the driver knows of the kernel."""
        value = ctypes.c_int()
        asked = (ctypes.byref(value), which, self.function)
        self.device.call("cuFuncGetAttribute", *asked)
        return value.value

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        arguments: Sequence[Any],
    ) -> None:
        """Put the kernel at the end of a stream, and do not wait for it.

        Args:
            grid: Blocks.
            block: Threads of a block.
            shared_bytes: Of a block, beside those that the source declares.
            stream: As torch gives it.
            arguments: From `pack_arguments`.

        Raises:
            KernelError: It does not fit, or the driver refuses.
        """
        self.check(math.prod(block), shared_bytes)
        # The driver copies what is at these addresses before it returns.
        addresses = [ctypes.addressof(argument) for argument in arguments]
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        size = (*grid, *block, shared_bytes)
        try:
            with self.device:
                if shared_bytes > self.granted_bytes:
                    wish = (self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
                    self.device.call("cuFuncSetAttribute", *wish)
                    self.granted_bytes = shared_bytes
                start = (self.function, *size, stream, array, None)
                self.device.call("cuLaunchKernel", *start)
        except KernelError as error:
            raise KernelError(
                f"{self.name}: {error}; the fault may be that of a kernel before it: "
                "with CUDA_LAUNCH_BLOCKING=1 each reports its own"
            ) from None

    def check(self, num_threads: int, shared_bytes: int) -> None:
        """Refuse a block that the GPU cannot hold."""
        if num_threads > self.max_threads:
            raise KernelError(
                f"{self.name}: {num_threads} threads of {self.num_registers} registers "
                f"do not fit into a block: use at most {self.max_threads}"
            )
        most = self.device.max_shared_bytes - self.static_bytes
        if not 0 <= shared_bytes <= most:
            raise KernelError(
                f"{self.name}: shared_bytes is {shared_bytes}, but a block of this GPU "
                f"has {most} beside the {self.static_bytes} that the source declares: "
                "use less"
            )
