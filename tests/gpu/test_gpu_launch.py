"""The launcher on a real device: streams, shared memory, graphs, threads, faults."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from minivllm.errors import KernelError
from minivllm.ops.launch import CudaModule

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__global__ void scale(T* out, const T* x, float factor, long long num) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < num) out[i] = T(factor * float(x[i]));
}

// Turns rows around, by way of shared memory.
__global__ void reverse(float* out, const float* x, int size) {
  extern __shared__ float row[];
  x += blockIdx.x * size;
  out += blockIdx.x * size;
  for (int i = threadIdx.x; i < size; i += blockDim.x) row[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[i] = row[size - 1 - i];
}
"""
NAMES = {
    torch.float32: "scale<float>",
    torch.float16: "scale<__half>",
    torch.bfloat16: "scale<__nv_bfloat16>",
}


@pytest.fixture(scope="module")
def module() -> CudaModule:
    return CudaModule(SOURCE, [*NAMES.values(), "reverse"])


def scale(module: CudaModule, x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return factor * x."""
    out = torch.empty_like(x)
    num = x.numel()
    module[NAMES[x.dtype]](-(-num // 256), 256, out, x, factor, num)
    return out


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("num", [1, 255, 256, 1_000_003])
def test_a_kernel_computes(num, dtype, module, gpu):
    x = torch.randn(num, device=gpu).to(dtype)
    expected = (0.5 * x.float()).to(dtype)
    assert scale(module, x, 0.5).equal(expected)


def test_a_view_begins_where_it_begins(module, gpu):
    x = torch.arange(100.0, device=gpu)
    assert scale(module, x[37:], 2.0).equal(2 * x[37:])


def test_kernels_and_torch_take_turns_on_a_stream(module, gpu):
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=gpu)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: whoever does not wait reads zeros
        x.fill_(3)
        y = scale(module, x, 2.0)
        z = y + 1
    stream.synchronize()
    assert z.unique().tolist() == [7]


def test_more_than_48_kb_of_shared_memory(module, gpu):
    size = 15_000  # 60 KB; a T4 has 64
    x = torch.randn(3, size, device=gpu)
    out = torch.empty_like(x)
    module["reverse"](3, 1024, out, x, size, shared_bytes=4 * size)
    assert out.equal(x.flip(1))


def test_more_shared_memory_than_there_is(module, gpu):
    x = torch.zeros(1, 100_000, device=gpu)
    with pytest.raises(KernelError, match="shared_bytes is 400000"):
        module["reverse"](1, 32, x, x.clone(), 100_000, shared_bytes=400_000)


def test_a_graph_replays_launches(module, gpu):
    x = torch.zeros(1000, device=gpu)
    scale(module, x, 2.0)  # loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scale(module, x, 2.0)
        z = scale(module, y, 3.0)
    for value in (1.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert z.unique().tolist() == [6 * value]


def test_loading_while_a_graph_is_captured_is_refused(gpu):
    module, x = CudaModule(SOURCE, ["scale<float>"]), torch.zeros(8, device=gpu)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x + 1  # something to capture
        with pytest.raises(KernelError, match="captured: run once before"):
            scale(module, x, 2.0)
    assert scale(module, x, 2.0).equal(x)
    assert y.shape == x.shape


def test_a_thread_of_its_own_can_launch(gpu):
    module, x = CudaModule(SOURCE, ["scale<float>"]), torch.ones(8, device=gpu)
    out = torch.zeros(8, device=gpu)
    call = (1, 32, out, x, 2.0, 8)
    thread = threading.Thread(target=module["scale<float>"], args=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert out.tolist() == [2] * 8


def test_torchs_device_stays_as_it_was(module, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    x = torch.ones(8, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert scale(module, x, 2.0).tolist() == [2] * 8
    assert torch.cuda.current_device() == 0
    assert torch.ones(1, device=gpu).device.index == 0


def test_a_fault_is_told_at_the_next_launch():
    script = f"""
import torch
from minivllm.ops.launch import CudaModule
module = CudaModule({SOURCE!r}, ["scale<float>"])
x = torch.ones(8, device="cuda")
module["scale<float>"](1 << 20, 1024, x, x, 2.0, 1 << 40)  # far beyond its end
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
module["scale<float>"](1, 32, x, x, 2.0, 8)
"""
    command, root = [sys.executable, "-c", script], Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, timeout=300
    )
    assert done.returncode
    assert "minivllm.errors.KernelError: scale<float>: cu" in done.stderr
    assert "CUDA_LAUNCH_BLOCKING=1" in done.stderr
