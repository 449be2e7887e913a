"""Run CUDA kernels where their arrays are: on a GPU, or emulated on the CPU.

A kernel is compiled for the device at hand when it is first asked for, and loaded once.
A launch goes to torch's current stream, where it takes its turn among torch's own work.

Invariant: a kernel gets what its source declares. Number and types of the arguments are
checked before each launch, since a GPU sees only bytes.

Called by `minivllm.ops.cuda`, the tests and the benchmarks.

In vLLM: csrc/, whose launches are compiled with the kernels and bound to torch.
Source: appendix A16, "Launching kernels".
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops.compiler import kernel_source
from minivllm.ops.driver import Device, LoadedKernel, load_driver
from minivllm.ops.emulate import EmulatedModule
from minivllm.ops.kernel_source import (
    Parameter,
    check_launch,
    kernel_parameters,
    pack_arguments,
    read_source,
)
from minivllm.ops.nvrtc import compile_cubin, why_not_compiled_for


def architecture(index: int) -> str:
    """Return the architecture of a GPU: "sm_80"."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def cuda_major() -> int | None:
    """Return the major version of CUDA that torch is built for, or None.

    A driver that runs torch runs what that version's compiler makes; what a newer one
    makes, perhaps not.
    """
    version = torch.version.cuda
    return int(version.partition(".")[0]) if version else None


@cache
def why_no_launch() -> str | None:
    """Return why kernels cannot run on torch's GPU, or None if they can."""
    if cuda_major() is None:
        return "this build of torch is not for CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        load_driver()
    except BackendUnavailable as error:
        return str(error)
    arch = architecture(torch.cuda.current_device())
    return why_not_compiled_for(arch, cuda_major())


class CudaModule:
    """Kernels of a source, on GPUs: `module["scale<float>"](grid, block, out, ...)`."""

    def __init__(self, source: str, instances: Sequence[str]) -> None:
        """Find the kernels in their source; they are compiled once a GPU is known.

        Args:
            source: CUDA C++ with all that it includes.
            instances: Kernels with their template arguments: "scale<float>".

        Raises:
            KernelError: The source has no such kernel.
        """
        self.source = source
        self.parameters = {name: kernel_parameters(source, name) for name in instances}
        self.loaded: dict[int, dict[str, LoadedKernel]] = {}

    def __getitem__(self, instance: str) -> Callable[..., None]:
        """Return what launches a kernel; see `launch`."""
        return partial(self.launch, instance)

    def load(self, index: int) -> dict[str, LoadedKernel]:
        """Return the kernels on a GPU; the first call compiles and loads them.

        Raises:
            BackendUnavailable: There is no compiler for that GPU.
            KernelError: They cannot be compiled, or a CUDA graph is being captured.
        """
        if index not in self.loaded:
            names = list(self.parameters)
            if torch.cuda.is_current_stream_capturing():
                raise KernelError(
                    f"{', '.join(names)}: nothing can be loaded while a CUDA graph is "
                    "captured: run once before"
                )
            cubin = compile_cubin(self.source, names, architecture(index), cuda_major())
            self.loaded[index] = Device(index).load(cubin.code, cubin.names)
        return self.loaded[index]

    def launch(
        self,
        instance: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on torch's current stream, and do not wait for it.

        Args:
            instance: Which.
            grid: Blocks, in up to three directions.
            block: Threads of a block, likewise.
            arguments: Tensors on one GPU, and numbers.
            shared_bytes: Of a block, for `extern __shared__`.

        Raises:
            KernelError: It cannot be started like that.
        """
        grid, block = check_launch(instance, grid, block)
        parameters = self.parameters[instance]
        packed = pack_arguments(instance, parameters, arguments)
        index = gpu_of(instance, parameters, arguments)
        kernel = self.load(index)[instance]
        stream = torch.cuda.current_stream(index).cuda_stream
        kernel.launch(grid, block, shared_bytes, stream, packed)


def gpu_of(
    instance: str, parameters: Sequence[Parameter], arguments: Sequence[Any]
) -> int:
    """Return the number of the GPU that all arrays are on.

    Raises:
        KernelError: One is elsewhere, where its address means something else.
    """
    devices = set()
    for parameter, argument in zip(parameters, arguments, strict=True):
        if parameter.is_pointer and argument is not None:
            devices.add(argument.device)
    if len(devices) == 1:
        (device,) = devices
        if getattr(device, "type", None) == "cuda":  # NumPy's is a text
            return device.index
    where = " and ".join(sorted(map(str, devices))) or "no device"
    raise KernelError(
        f"{instance}: its arrays are on {where}: put all of them on one GPU"
    )


class KernelFile:
    """A file in `kernels/`, whose kernels run where their arrays are.

    kernels = KernelFile("rms_norm.cu")
    kernels["rms_norm_v3<float>"](grid, block, out, x, ...)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: dict[tuple[str, bool], CudaModule | EmulatedModule] = {}

    @cached_property
    def source(self) -> str:
        """The text, with what it includes."""
        return read_source(kernel_source(self.name))

    def __getitem__(self, instance: str) -> Callable[..., None]:
        """Return what runs a kernel; see `run`."""
        return partial(self.run, instance)

    def run(
        self,
        instance: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Run a kernel on the GPU if an array is there, else emulated.

        Args:
            instance: A kernel with its template arguments: "rms_norm_v3<float>".
            grid: Blocks.
            block: Threads of a block.
            arguments: Of the kernel.
            options: `shared_bytes`; emulated, what the emulator knows besides.

        Raises:
            BackendUnavailable: Its compiler is not here.
            KernelError: The kernel cannot be compiled or started, or goes wrong.
        """
        is_cuda = any(getattr(argument, "is_cuda", False) for argument in arguments)
        if (instance, is_cuda) not in self.modules:
            make = CudaModule if is_cuda else EmulatedModule
            self.modules[instance, is_cuda] = make(self.source, [instance])
        module = self.modules[instance, is_cuda]
        module[instance](grid, block, *arguments, **options)
