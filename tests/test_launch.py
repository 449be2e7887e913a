"""A launch: what reaches the driver, and everything that is refused before."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops import driver, launch
from minivllm.ops.driver import Driver
from minivllm.ops.launch import CudaModule, KernelFile, check_launch, why_no_launch
from tests.fake_cuda import STREAM, FakeCuda, OnGpu, fake_cuda, needs_c_compiler

__all__ = ["fake_cuda"]  # a fixture

pytestmark = needs_c_compiler

SOURCE = """
template <typename T>
__global__ void scale(T* out, const T* x, float factor, int num) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num) out[i] = factor * x[i];
}

template <typename T>
__global__ void fill(T* out, float value, bool is_set, long long first) {
  if (is_set) out[first + threadIdx.x] = value;
}
"""
SCALE, FILL = "scale<float>", "fill<float>"
OUT, X = 0x7FFF_1234_5678, 0x7FFF_8765_4321
ARGUMENTS = (OnGpu(OUT), OnGpu(X), 0.5, 1000)


@pytest.fixture
def module(fake_cuda: FakeCuda) -> CudaModule:
    fake_cuda.variable("sizes")[:4] = [8, 8, 4, 4]
    return CudaModule(SOURCE, [SCALE, FILL])


def test_every_argument_arrives_with_all_its_bytes(module, fake_cuda):
    module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.argument(0, ctypes.c_uint64) == OUT
    assert fake_cuda.argument(1, ctypes.c_uint64) == X
    assert fake_cuda.argument(2, ctypes.c_float) == 0.5
    assert fake_cuda.argument(3, ctypes.c_int) == 1000


def test_flags_and_wide_integers_arrive_too(module, fake_cuda):
    fake_cuda.variable("sizes")[:4] = [8, 4, 1, 8]
    module[FILL](1, 32, OnGpu(OUT), -1.5, True, 2**40)
    assert fake_cuda.argument(1, ctypes.c_float) == -1.5
    assert fake_cuda.argument(2, ctypes.c_bool) is True
    assert fake_cuda.argument(3, ctypes.c_int64) == 2**40


def test_an_array_may_be_left_out(module, fake_cuda):
    module[SCALE](4, 256, OnGpu(OUT), None, 0.5, 1000)
    assert fake_cuda.argument(1, ctypes.c_uint64) == 0


@pytest.mark.parametrize(
    ("grid", "block", "sides"),
    [
        (7, 32, ([7, 1, 1], [32, 1, 1])),
        ((7, 5), (32, 2), ([7, 5, 1], [32, 2, 1])),
        ((7, 5, 3), (32, 2, 4), ([7, 5, 3], [32, 2, 4])),
        (np.int64(7), [32], ([7, 1, 1], [32, 1, 1])),
    ],
)
def test_grid_and_block_have_three_sides(grid, block, sides, module, fake_cuda):
    module[SCALE](grid, block, *ARGUMENTS)
    assert (fake_cuda.grid, fake_cuda.block) == sides


def test_a_launch_joins_torchs_current_stream(module, fake_cuda):
    module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.stream == STREAM


def test_each_name_starts_its_own_kernel(module, fake_cuda):
    module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.kernel == f"_Z{SCALE}"
    module[FILL](1, 32, OnGpu(OUT), 0.0, False, 0)
    assert fake_cuda.kernel == f"_Z{FILL}"


def test_kernels_are_compiled_for_the_gpu_and_loaded_once(module, fake_cuda):
    for _ in range(3):
        module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.compiled == [([SCALE, FILL], "sm_80", 13)]
    assert (fake_cuda.loads, fake_cuda.launches) == (1, 3)
    assert bytes(fake_cuda.image) == b"\x7fELF"


def test_each_gpu_gets_kernels_of_its_own(module, fake_cuda):
    on_second = [OnGpu(OUT, index=1), OnGpu(X, index=1)]
    for arrays, index in ((ARGUMENTS[:2], 0), (on_second, 1), (ARGUMENTS[:2], 0)):
        module[SCALE](4, 256, *arrays, 0.5, 1000)
        assert fake_cuda.device == index
        assert fake_cuda.stream == STREAM + index
    assert [arch for _, arch, _ in fake_cuda.compiled] == ["sm_80", "sm_81"]
    assert fake_cuda.loads == 2


def test_the_context_is_given_back_whatever_happens(module, fake_cuda):
    module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.depth == 0
    fake_cuda.variable("error").value = 700
    with pytest.raises(KernelError):
        module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.depth == 0


def test_a_thread_that_torch_has_not_been_in_can_launch(module, fake_cuda):
    thread = threading.Thread(target=module[SCALE], args=(4, 256, *ARGUMENTS))
    thread.start()
    thread.join()
    assert fake_cuda.launches == 1


def test_an_error_of_the_driver_is_told_in_its_words(module, fake_cuda):
    fake_cuda.variable("error").value = 700
    message = (
        r"scale<float>: cuLaunchKernel fails: CUDA_ERROR_ILLEGAL_ADDRESS, an illegal "
        r"memory access.*kernel before it.*CUDA_LAUNCH_BLOCKING=1"
    )
    with pytest.raises(KernelError, match=message):
        module[SCALE](4, 256, *ARGUMENTS)


def test_an_error_without_words_is_told_by_its_number(module, fake_cuda):
    fake_cuda.variable("error").value = 999
    with pytest.raises(KernelError, match="error 999"):
        module[SCALE](4, 256, *ARGUMENTS)


def test_a_kernel_that_the_code_lacks_is_an_error_when_loading(fake_cuda):
    module = CudaModule(SOURCE.replace("scale", "missing"), ["missing<float>"])
    with pytest.raises(KernelError, match="cuModuleGetFunction fails: error 500"):
        module["missing<float>"](4, 256, *ARGUMENTS)
    assert fake_cuda.depth == 0


# Shared memory and threads.


def test_shared_memory_up_to_48_kb_needs_no_request(module, fake_cuda):
    module[SCALE](4, 256, *ARGUMENTS, shared_bytes=47 * 1024)  # and 1 KB in the source
    assert (fake_cuda.shared, fake_cuda.grants) == (47 * 1024, 0)
    module[SCALE](4, 256, *ARGUMENTS, shared_bytes=47 * 1024 + 1)
    assert fake_cuda.grants == 1


def test_more_shared_memory_is_requested_once(module, fake_cuda):
    for _ in range(2):
        module[SCALE](4, 256, *ARGUMENTS, shared_bytes=60_000)
        module[SCALE](4, 256, *ARGUMENTS, shared_bytes=50_000)
    assert (fake_cuda.grants, fake_cuda.granted) == (1, 60_000)
    module[SCALE](4, 256, *ARGUMENTS, shared_bytes=98 * 1024)
    assert (fake_cuda.grants, fake_cuda.granted) == (2, 98 * 1024)


def test_more_shared_memory_than_the_gpu_has_is_refused(module, fake_cuda):
    message = r"shared_bytes is 100353.*has 100352 beside the 1024.*use less"
    with pytest.raises(KernelError, match=message):
        module[SCALE](4, 256, *ARGUMENTS, shared_bytes=98 * 1024 + 1)
    with pytest.raises(KernelError, match="shared_bytes is -1"):  # 4 GiB to the driver
        module[SCALE](4, 256, *ARGUMENTS, shared_bytes=-1)
    assert fake_cuda.launches == 0


def test_more_threads_than_the_registers_are_for_are_refused(module, fake_cuda):
    module[SCALE](4, 640, *ARGUMENTS)
    with pytest.raises(KernelError, match=r"641 threads of 80 .*at most 640"):
        module[SCALE](4, 641, *ARGUMENTS)
    with pytest.raises(KernelError, match="672 threads"):
        module[SCALE](4, (32, 21), *ARGUMENTS)
    assert fake_cuda.launches == 1


# What is refused before anything is compiled.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ARGUMENTS[:3], "4 arguments"),
        ((*ARGUMENTS, 1), "4 arguments"),
        ((OnGpu(OUT), OnGpu(X), 1, 1000), "factor"),
        ((OnGpu(OUT), OnGpu(X), 0.5, 1000.0), "num"),
        ((OnGpu(OUT), OnGpu(X), 0.5, 2**31), "num"),
        ((OnGpu(OUT), OnGpu(X, torch.float16), 0.5, 1000), "x"),
        ((OnGpu(OUT), 5, 0.5, 1000), "x"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, message, module, fake_cuda):
    with pytest.raises(KernelError, match=rf"scale<float>.*\b{message}\b"):
        module[SCALE](4, 256, *arguments)
    assert not fake_cuda.compiled


@pytest.mark.parametrize(
    ("x", "where"),
    [
        (torch.zeros(4), "cpu and cuda:0"),
        (np.zeros(4, np.float32), "cpu and cuda:0"),
        (OnGpu(X, index=1), "cuda:0 and cuda:1"),
    ],
)
def test_arrays_in_several_places_are_refused(x, where, module, fake_cuda):
    with pytest.raises(KernelError, match=f"its arrays are on {where}"):
        module[SCALE](4, 256, OnGpu(OUT), x, 0.5, 1000)
    assert not fake_cuda.compiled


@pytest.mark.parametrize("make", [torch.zeros, lambda size: np.zeros(size, np.float32)])
def test_arrays_on_the_cpu_are_refused(make, module, fake_cuda):
    with pytest.raises(KernelError, match="its arrays are on cpu: put"):
        module[SCALE](4, 256, make(4), make(4), 0.5, 4)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 32, "grid is 0"),
        ((4, 0), 32, r"grid is \(4, 0\)"),
        ((1, 65536), 32, "65535"),
        ((1, 1, 65536), 32, "65535"),
        (2**31, 32, "2147483647"),
        ((1, 1, 1, 1), 32, "grid"),
        (1, 0, "block is 0"),
        (1, 1025, "1024"),
        (1, (1, 1, 65), "64"),
        (1, (32, 33), "1056 threads"),
    ],
)
def test_a_launch_that_no_gpu_takes_is_refused(grid, block, message, module, fake_cuda):
    with pytest.raises(KernelError, match=message):
        module[SCALE](grid, block, *ARGUMENTS)
    assert not fake_cuda.compiled


def test_the_largest_launches_are_taken():
    largest = ((2**31 - 1, 65535, 65535), (1024, 1, 1))
    assert check_launch("f", *largest) == largest
    assert check_launch("f", 1, (4, 4, 64)) == ((1, 1, 1), (4, 4, 64))


def test_a_kernel_that_is_not_in_the_source_is_refused(fake_cuda):
    with pytest.raises(KernelError, match="scales"):
        CudaModule(SOURCE, ["scales<float>"])


# CUDA graphs.


def test_nothing_is_loaded_while_a_graph_is_captured(module, fake_cuda):
    fake_cuda.is_capturing = True
    with pytest.raises(KernelError, match=r"scale<float>.*captured: run once before"):
        module[SCALE](4, 256, *ARGUMENTS)
    assert not fake_cuda.compiled
    fake_cuda.is_capturing = False
    module.load(0)
    fake_cuda.is_capturing = True
    module[SCALE](4, 256, *ARGUMENTS)
    assert fake_cuda.launches == 1


# Whether it can run at all.


def test_without_a_driver_the_reason_is_told():
    with pytest.raises(BackendUnavailable, match=r"no CUDA driver.*install"):
        Driver("libcuda-of-nobody.so")


def test_a_driver_that_does_not_start_is_no_driver(fake_cuda, monkeypatch):
    """As after an update of the driver, before the machine is started again."""

    def call(self, function, *arguments):
        raise KernelError(f"{function} fails: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    monkeypatch.setattr(Driver, "call", call)
    with pytest.raises(BackendUnavailable, match="does not start: cuInit fails: CUDA_"):
        Driver(fake_cuda.driver.library._name)


def test_each_thing_that_is_missing_is_named(fake_cuda, monkeypatch):
    reason = why_no_launch.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked = []
    monkeypatch.setattr(
        launch, "why_not_compiled_for", lambda *about: asked.append(about)
    )
    assert reason() is None
    assert asked == [("sm_80", 13)]
    monkeypatch.setattr(launch, "why_not_compiled_for", lambda *about: "no NVRTC")
    assert reason() == "no NVRTC"

    def no_driver():
        raise BackendUnavailable("no driver")

    monkeypatch.setattr(launch, "load_driver", no_driver)
    assert reason() == "no driver"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason() == "torch sees no GPU"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reason() == "this build of torch is not for CUDA"


def test_the_driver_is_looked_for_once(monkeypatch):
    made = []
    monkeypatch.setattr(driver, "Driver", lambda: made.append(1) or "the driver")
    driver.load_driver.cache_clear()
    assert driver.load_driver() == driver.load_driver() == "the driver"
    driver.load_driver.cache_clear()
    assert made == [1]


# Files of kernels.


@pytest.fixture
def kernels(monkeypatch) -> KernelFile:
    """A file, without the compilers: what was made, and how it was called."""
    file = KernelFile("scale.cu")
    file.source = SOURCE
    file.made, file.calls = [], []

    def maker(name):
        def make(source, instances):
            assert source == SOURCE
            file.made.append((name, *instances))
            (instance,) = instances
            return {instance: lambda *call, **options: file.calls.append(options)}

        return make

    monkeypatch.setattr(launch, "CudaModule", maker("cuda"))
    monkeypatch.setattr(launch, "EmulatedModule", maker("emulated"))
    return file


def test_a_kernel_runs_where_its_arrays_are(kernels):
    kernels[SCALE](4, 256, *ARGUMENTS)
    kernels[SCALE](1, 32, torch.zeros(4), torch.zeros(4), 0.5, 4)
    kernels[SCALE](1, 32, np.zeros(4), np.zeros(4), 0.5, 4)
    assert kernels.made == [("cuda", SCALE), ("emulated", SCALE)]


def test_an_instance_is_made_when_it_is_first_run(kernels):
    run = kernels[SCALE]
    assert not kernels.made
    for _ in range(2):
        run(4, 256, *ARGUMENTS, shared_bytes=8)
    assert kernels.made == [("cuda", SCALE)]
    assert kernels.calls == [{"shared_bytes": 8}] * 2


def test_a_file_is_read_with_its_headers():
    source = KernelFile("rms_norm.cu").source
    assert "rms_norm_v1" in source
    assert "block_reduce" in source
    assert CudaModule(source, ["rms_norm_v1<__half>"]).parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_of_kernels_runs_on_the_cpu(dtype):
    names = {torch.float32: "float", torch.float16: "__half"}
    kernel = KernelFile("rms_norm.cu")[
        f"rms_norm_v2<{names.get(dtype, '__nv_bfloat16')}>"
    ]
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
    out = torch.zeros_like(x)
    try:
        kernel(3, 32, out, x, weight, 1e-5, 40, 0)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    expected = torch.nn.functional.rms_norm(x.double(), (40,), weight.double(), 1e-5)
    assert torch.allclose(
        out.double(), expected, atol=0.05 if dtype.itemsize < 4 else 1e-5
    )
