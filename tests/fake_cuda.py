"""A GPU that is not there: the driver of `fake_cuda.c`, and tensors with addresses."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from minivllm.ops import driver, launch, nvrtc

SOURCE = Path(__file__).with_name("fake_cuda.c")
STREAM = 0x7F00_1122_3344_5566  # more than 32 bits
needs_c_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="there is no C compiler for a stand-in driver"
)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, at an address of the test's choice."""

    def __new__(cls, address: int, dtype=torch.float32, index: int = 0) -> "OnGpu":
        device = torch.device("cuda", index)
        return torch.Tensor._make_wrapper_subclass(
            cls, (4,), dtype=dtype, device=device
        )

    def __init__(self, address: int, dtype=torch.float32, index: int = 0) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} needs memory")


class FakeCuda:
    """What the stand-in has kept; its variables by name, without `fake_`."""

    KINDS: ClassVar[dict[str, Any]] = {
        "sizes": ctypes.c_size_t * 16,
        "grid": ctypes.c_uint * 3,
        "block": ctypes.c_uint * 3,
        "stream": ctypes.c_uint64,
        "arguments": ctypes.c_ubyte * 8 * 16,
        "image": ctypes.c_ubyte * 4,
        "kernel": ctypes.c_char * 200,
    }

    def __init__(self, path: Path) -> None:
        self.driver = driver.Driver(str(path))

    def variable(self, name: str) -> Any:
        kind = self.KINDS.get(name, ctypes.c_int)
        return kind.in_dll(self.driver.library, f"fake_{name}")

    def __getattr__(self, name: str) -> Any:
        variable = self.variable(name)
        if name == "kernel":
            return variable.value.decode()
        return variable.value if hasattr(variable, "value") else list(variable)

    def argument(self, index: int, kind: Any) -> Any:
        """Return an argument of the last launch, as a type of ctypes."""
        return kind.from_buffer_copy(self.variable("arguments")[index]).value


@pytest.fixture
def fake_cuda(tmp_path, monkeypatch) -> FakeCuda:
    """Give the launcher a driver, torch two GPUs of sm_80, and NVRTC nothing to do."""
    path = tmp_path / "libcuda.so"  # a new one each time: it keeps what it was given
    command = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", str(SOURCE), "-o", path]
    subprocess.run(command, check=True)
    fake = FakeCuda(path)
    for module in (driver, launch):
        monkeypatch.setattr(module, "load_driver", lambda: fake.driver)
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    compiled = fake.compiled = []

    def compile_cubin(source, instances, arch, major):
        compiled.append((list(instances), arch, major))
        names = {name: f"_Z{name}" for name in instances}
        return nvrtc.Cubin(b"\x7fELF code", names, "")

    monkeypatch.setattr(launch, "compile_cubin", compile_cubin)
    fake.is_capturing = False
    for name, answer in {
        "get_device_capability": lambda index: (8, index),
        "is_current_stream_capturing": lambda: fake.is_capturing,
        "current_stream": lambda index: SimpleNamespace(cuda_stream=STREAM + index),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return fake


class IndexWithoutCuda(TorchFunctionMode):
    """Lets a torch without CUDA index and copy fake CUDA tensors.

    Its own way wants a device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return self.view(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            place = self.view(x, index)
            assert (place.device, place.dtype) == (value.device, value.dtype)
            assert value.expand(place.shape).shape == place.shape
            return None
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))

    def view(self, x, index):
        axis = 0
        index = index if isinstance(index, tuple) else (index,)
        for item in index:
            if item is None:
                x = x.unsqueeze(axis)
            elif item is Ellipsis:
                axis += x.ndim - sum(i is not None for i in index) + 1
                continue
            elif isinstance(item, int):
                x = x.select(axis, item)
                continue
            elif isinstance(item, torch.Tensor):
                x = x.index_select(axis, item)
            else:
                start, stop, _ = item.indices(x.shape[axis])
                x = x.narrow(axis, start, stop - start)
            axis += 1
        return x
