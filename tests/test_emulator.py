"""A GPU in one header: what kernels compute there, and what is said of broken ones."""

import ctypes
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import cache

import numpy as np
import pytest

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops import emulate
from minivllm.ops.emulate import (
    ORDERS,
    UNSUPPORTED,
    EmulatedModule,
    complaint,
    find_unsupported,
    to_cpp,
    why_not_emulated,
)
from minivllm.ops.kernel_source import read_source
from tests.kernels.tools import needs_compiler

pytestmark = needs_compiler

IN_ORDERS = [
    ("forward", 0),
    ("reverse", 0),
    ("round_robin", 0),
    *(("random", s) for s in (1, 2)),
]


@cache
def module(source: str, *instances: str, check: bool = True) -> EmulatedModule:
    """Compile a source once for all tests; by default, all of its kernels."""
    if not instances:
        instances = tuple(re.findall(r"__global__ void (\w+)\(", source))
    return EmulatedModule(source, instances, check=check)


def ints(*sides: int) -> np.ndarray:
    """Return zeros of int32."""
    return np.zeros(sides, np.int32)


def floats(*sides: int) -> np.ndarray:
    """Return zeros of float32."""
    return np.zeros(sides, np.float32)


def complaint_of(source: str, name: str, *launch, **options) -> str:
    """Run a broken kernel in check mode and return what is said, in every order."""
    said = set()
    for order, seed in IN_ORDERS:
        with pytest.raises(KernelError) as error:
            module(source)[name](*launch, order=order, seed=seed, **options)
        said.add(
            re.sub(
                r"block \(\d+,\d+,\d+\) thread \(\d+,\d+,\d+\)", "T", str(error.value)
            )
        )
    return "\n".join(sorted(said))


# ---- What threads are told


INDICES = r"""
__global__ void indices(int* out) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}
"""


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
def test_every_thread_of_every_block_runs_once(order, seed, check):
    out = ints(12, 24)
    kernel = module(INDICES, check=check)["indices"]
    kernel((2, 3, 2), (3, 4, 2), out, order=order, seed=seed)
    expected = np.arange(12)[:, None] * 1000 + np.arange(24)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("grid", [1, 7, 96, 1000])
def test_blocks_in_random_order_come_once_each(grid):
    for seed in range(20):
        out = ints(grid, 1)
        module(INDICES, check=False)["indices"](grid, 1, out, order="random", seed=seed)
        np.testing.assert_array_equal(out[:, 0], np.arange(grid) * 1000)


# ---- Functions of a warp and of a block, against their definitions


WARP = r"""
__global__ void collectives(int* out, const int* in, int width, int by) {
  const unsigned full = 0xffffffffu;
  int thread = threadIdx.x, value = in[thread];
  int* to = out + thread * 16;
  to[0] = __shfl_sync(full, value, by, width);
  to[1] = __shfl_up_sync(full, value, by, width);
  to[2] = __shfl_down_sync(full, value, by, width);
  to[3] = __shfl_xor_sync(full, value, by, width);
  to[4] = int(__ballot_sync(full, value & 1));
  to[5] = __any_sync(full, value == 7);
  to[6] = __all_sync(full, value > 1);
  to[7] = __reduce_add_sync(full, value);
  to[8] = __reduce_max_sync(full, value);
  to[9] = __reduce_min_sync(full, value);
  to[10] = -1;
  if (thread % 2 == 0) to[10] = __shfl_xor_sync(0x55555555u, value, 2);
  to[11] = __shfl_sync(full, value, 0);  // after some lanes had one meeting more
  to[12] = __syncthreads_count(value & 1);
  to[13] = __syncthreads_or(value == 7);
  to[14] = __syncthreads_and(value > 1);
  to[15] = __shfl_sync(full, value, thread);  // each lane from another: itself
}

template <typename T>
__global__ void shuffled(T* out, const T* in) {
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 9);
}
"""
WARP_KERNELS = [
    "collectives",
    *(f"shuffled<{t}>" for t in ("double", "__half", "long long", "bool")),
]


def collectives(values: np.ndarray, width: int, by: int) -> list[list[int]]:
    """Say what each thread gets, by the CUDA C++ Programming Guide."""
    rows = []
    for thread, value in enumerate(values.tolist()):
        lane = thread % 32
        warp = values[thread - lane :][:32].tolist()
        first = lane // width * width
        end = first + width
        up, down, other = lane - by, lane + by, lane ^ by
        signed = sum((v & 1) << n for n, v in enumerate(warp))
        rows.append(
            [
                warp[first + by % width],
                warp[up] if up >= first else value,
                warp[down] if down < end else value,
                warp[other] if other < end else value,
                signed - 2**32 if signed >= 2**31 else signed,
                int(7 in warp),
                int(min(warp) > 1),
                sum(warp),
                max(warp),
                min(warp),
                warp[lane ^ 2] if lane % 2 == 0 else -1,
                warp[0],
                int((values & 1).sum()),
                int(7 in values),
                int(values.min() > 1),
                value,
            ]
        )
    return rows


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
def test_collectives_are_what_cuda_says(order, seed, check):
    generator = np.random.default_rng(seed)
    kernel = module(WARP, *WARP_KERNELS, check=check)["collectives"]
    for width, by in itertools.product([1, 2, 8, 32], [0, 1, 5, 31]):
        values = generator.integers(1, 40, 64, dtype=np.int32)
        out = ints(64, 16)
        kernel(1, 64, out, values, width, by, order=order, seed=seed)
        np.testing.assert_array_equal(out, collectives(values, width, by))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("double", "f8"), ("__half", "f2"), ("long long", "i8"), ("bool", "?")],
)
def test_a_shuffle_passes_any_number_of_up_to_8_bytes(kind, dtype):
    values = (np.arange(32) - 7).astype(dtype)
    out = np.zeros_like(values)
    module(WARP, *WARP_KERNELS)[f"shuffled<{kind}>"](1, 32, out, values)
    np.testing.assert_array_equal(out, values[np.arange(32) ^ 9])


ATOMICS = r"""
__global__ void atomics(int* x, unsigned* u, float* f, int* seen, const int* in) {
  int t = threadIdx.x, v = in[t];
  seen[t] = atomicAdd(&x[0], v);
  atomicSub(&x[1], v);
  atomicMax(&x[2], v);
  atomicMin(&x[3], v);
  atomicAnd(&x[4], v);
  atomicOr(&x[5], v);
  atomicXor(&x[6], v);
  atomicExch(&x[7], 5);
  atomicInc(&u[0], 9u);
  atomicDec(&u[1], 9u);
  atomicAdd(&f[0], 0.5f);
  if (t == 0) atomicCAS(&x[8], 0, 3), atomicCAS(&x[8], 0, 4);
}
"""


@pytest.mark.parametrize("yields", [False, True])
@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
def test_atomics_are_what_cuda_says(order, seed, yields):
    values = np.random.default_rng(0).integers(0, 1000, 70, dtype=np.int32)
    x, u, f, seen = ints(9), np.zeros(2, np.uint32), floats(1), ints(70)
    x[3:5] = 10**6, -1
    options = {"order": order, "seed": seed, "yield_at_atomics": yields}
    module(ATOMICS)["atomics"](1, 70, x, u, f, seen, values, **options)
    total = int(values.sum())
    reduced = [np.bitwise_and, np.bitwise_or, np.bitwise_xor]
    expected = [total, -total, values.max(), values.min()]
    expected += [function.reduce(values) for function in reduced] + [5, 3]
    assert x.tolist() == expected
    assert u.tolist() == [70 % 10, 0]  # 0, 9, 8, ... 1, 0: ten values, seven rounds
    assert f[0] == 35
    # Each saw a sum of some others, and no two the same.
    order_of_sums = np.argsort(seen, kind="stable")
    running = np.cumsum(values[order_of_sums]) - values[order_of_sums]
    np.testing.assert_array_equal(np.sort(seen), running)


LOCKS = r"""
__global__ void count(int* lock, int* counter) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *counter += 1;
      atomicExch(lock, 0);
      done = true;
    }
  }
}

__global__ void waits_for_the_last(int* flag, int* counter) {
  if (threadIdx.x == blockDim.x - 1)
    atomicExch(flag, 1);
  else
    while (atomicAdd(flag, 0) == 0) {
    }
  atomicAdd(counter, 1);
}

__global__ void last_block_sums(float* out, float* partial, unsigned* done,
                                const float* x) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = x[blockIdx.x];
    __threadfence();
    is_last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i];
    *out = sum;
  }
}
"""


@pytest.mark.parametrize("order", ["round_robin", "random"])
def test_a_lock_works_if_threads_stop_at_atomics(order):
    lock, counter = ints(1), ints(1)
    kernel = module(LOCKS, check=False)["count"]
    kernel(2, 64, lock, counter, order=order, yield_at_atomics=True)
    assert counter[0] == 128


@pytest.mark.parametrize("order", ["round_robin", "random"])
def test_a_thread_may_wait_for_another_if_threads_stop_at_atomics(order):
    flag, counter = ints(1), ints(1)
    kernel = module(LOCKS, check=False)["waits_for_the_last"]
    kernel(1, 64, flag, counter, order=order, yield_at_atomics=True, timeout_s=5)
    assert counter[0] == 64


def test_a_thread_that_never_lets_go_is_stopped():
    kernel = module(LOCKS, check=False)["count"]
    lock = ints(1)
    lock[0] = 1  # nobody holds it, and nobody will open it
    with pytest.raises(
        KernelError, match=r"still runs after 0\.2 s .* at kernel\.cu:5"
    ):
        kernel(1, 64, lock, ints(1), yield_at_atomics=True, timeout_s=0.2)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_may_share_memory_if_that_is_said(order):
    x = np.arange(8, dtype=np.float32)
    launch = (8, 64, floats(1), floats(8), np.zeros(1, np.uint32), x)
    kernel = module(LOCKS)["last_block_sums"]
    with pytest.raises(
        KernelError,
        match=r"race: reads byte .* of argument 1 .partial..*\(blocks_may_share, if",
    ):
        kernel(*launch, order=order)
    launch = (8, 64, floats(1), floats(8), np.zeros(1, np.uint32), x)
    kernel(*launch, order=order, blocks_may_share=True)
    assert launch[2][0] == 28


# ---- Numbers


NUMBERS = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename T>
__global__ void widen(float* out, const T* in) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = float(in[i]);
}
template <typename T>
__global__ void narrow(T* out, const float* in) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = T(in[i]);
}
template <typename T>
__global__ void reckon(T* out, const T* a, const T* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = a[i] + b[i];
  out[n + i] = a[i] - b[i];
  out[2 * n + i] = a[i] * b[i];
  out[3 * n + i] = a[i] / b[i];
  out[4 * n + i] = -a[i];
}
__global__ void bits(int* out, const float* f, const int* x) {
  int v = x[threadIdx.x];
  float y = f[threadIdx.x];
  int* to = out + threadIdx.x * 8;
  to[0] = __popc(v);
  to[1] = __clz(v);
  to[2] = __ffs(v);
  to[3] = int(__brev(unsigned(v)));
  to[4] = __float_as_int(y);
  to[5] = __float_as_int(__int_as_float(v));
  to[6] = max(v, 3);
  to[7] = min(v, 3L);
  if (__longlong_as_double(__double_as_longlong(1.5 * v)) != 1.5 * v) __trap();
}
__global__ void functions(float* out, const float* x) {
  float v = x[threadIdx.x];
  float* to = out + threadIdx.x * 16;
  to[0] = rsqrtf(v);
  to[1] = __expf(v);
  to[2] = __logf(v);
  to[3] = __log2f(v);
  to[4] = __sinf(v);
  to[5] = __cosf(v);
  to[6] = __powf(v, 1.5f);
  to[7] = __fdividef(1.0f, v);
  to[8] = __saturatef(v - 1);
  to[9] = __fmaf_rn(v, v, 1.0f);
  to[10] = __frcp_rn(v);
  to[11] = __frsqrt_rn(v);
  to[12] = __fsqrt_rn(v);
  to[13] = __exp10f(v);
  to[14] = __fadd_rn(v, v) + __fmul_rn(v, v);
  to[15] = __ldg(&x[threadIdx.x]) + __ldcs(&x[threadIdx.x]);
  if (isnan(v) || isinf(v) || !isfinite(v)) __trap();
}
__global__ void pairs(float* out, const float* in) {
  __half2 h = __floats2half2_rn(in[0], in[1]);
  __nv_bfloat162 b = __floats2bfloat162_rn(in[0], in[1]);
  float2 a = __half22float2(h), c = __bfloat1622float2(b);
  float4 all = make_float4(a.x, a.y, c.x, c.y);
  reinterpret_cast<float4*>(out)[0] = all;
  out[4] = __half2float(__float2half(in[0])) + __half2float(__float2half_rn(in[0]));
  out[5] = __bfloat162float(__float2bfloat16(in[0]));
  out[6] = sizeof(float3) + sizeof(float4) + alignof(float4) + alignof(__half2);
  out[7] = alignof(uchar4) + alignof(double2) + alignof(double4) + warpSize;
}
"""
NUMBER_KERNELS = [
    *(
        f"{kernel}<{t}>"
        for kernel in ("widen", "narrow", "reckon")
        for t in ("__half", "__nv_bfloat16")
    ),
    *("bits", "functions", "pairs"),
]
EVERY = np.arange(65536, dtype=np.uint16)  # all numbers of 16 bits


def number_kernel(name: str):
    """Return a kernel about numbers, without checks: it is run often."""
    return module(NUMBERS, *NUMBER_KERNELS, check=False)[name]


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


FORMATS = [("__half", from_float16), ("__nv_bfloat16", from_bfloat16)]


def test_every_float16_is_read_right():
    out = floats(65536)
    number_kernel("widen<__half>")(64, 1024, out, EVERY.view(np.float16))
    np.testing.assert_array_equal(out, EVERY.view(np.float16).astype(np.float32))


def test_every_bfloat16_is_read_right():
    out = floats(65536)
    number_kernel("widen<__nv_bfloat16>")(64, 1024, out, EVERY)
    np.testing.assert_array_equal(out, from_bfloat16(EVERY))


def tricky_floats() -> np.ndarray:
    """Return all float16 and bfloat16, those between them, and their neighbours."""
    with np.errstate(all="ignore"):
        halves = EVERY.view(np.float16).astype(np.float32)
        between = (from_bfloat16(EVERY).view(np.uint32) | 0x8000).view(np.float32)
        steps = [halves, from_bfloat16(EVERY), between]
        middle = (np.sort(halves)[:-1] + np.sort(halves)[1:]) / 2
        steps += [np.append(middle, np.float32(65520))]
        steps += [
            np.nextafter(step, np.float32(direction))
            for step in steps
            for direction in (-np.inf, np.inf)
        ]
        noise = np.random.default_rng(0).integers(0, 2**32, 65536, dtype=np.uint32)
        return np.concatenate([*steps, noise.view(np.float32)])


def test_floats_are_rounded_to_float16_as_numpy_does():
    values = tricky_floats()
    out = np.zeros(values.shape, np.float16)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    number_kernel("narrow<__half>")(len(values) // 1024, 1024, out, values)
    is_nan = np.isnan(expected)
    assert np.isnan(out[is_nan]).all()
    np.testing.assert_array_equal(
        out[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16)
    )


def test_floats_are_rounded_to_bfloat16_as_torch_does():
    torch = pytest.importorskip("torch")
    values = tricky_floats()
    out = np.zeros(values.shape, np.uint16)
    number_kernel("narrow<__nv_bfloat16>")(len(values) // 1024, 1024, out, values)
    expected = (
        torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )
    is_nan = np.isnan(values)
    assert (out[is_nan] == 0x7FFF).all()  # the NaN of a GPU
    np.testing.assert_array_equal(out[~is_nan], expected[~is_nan])


@pytest.mark.parametrize(("kind", "read"), FORMATS)
def test_a_tie_goes_to_the_even_neighbour_and_all_else_to_the_nearest(kind, read):
    low = np.arange(0x0000, 0x7BFF, 7, dtype=np.uint16)  # up to the largest float16
    below, above = read(low), read(low + np.uint16(1))
    middle = ((below.astype(float) + above) / 2).astype(np.float32)  # exact
    near = [np.nextafter(middle, below), middle, np.nextafter(middle, above)]
    expected = [low, low + low % 2, low + 1]
    for values, bits in zip(near, expected, strict=True):
        for sign in (1, -1):
            padded = np.resize(sign * values, (len(values) // 32 + 1) * 32)
            out = np.zeros(len(padded), np.uint16)
            target = out.view(np.float16) if kind == "__half" else out
            number_kernel(f"narrow<{kind}>")(len(out) // 32, 32, target, padded)
            np.testing.assert_array_equal(out[: len(low)], bits + 0x8000 * (sign < 0))


def test_arithmetic_of_float16_rounds_every_result():
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(0, 65536, 8192, dtype=np.uint16).view(np.float16) for _ in "ab"
    )
    out = np.zeros((5, 8192), np.float16)
    number_kernel("reckon<__half>")(8, 1024, out, a, b, 8192)
    with np.errstate(all="ignore"):
        expected = np.stack([a + b, a - b, a * b, a / b, -a])
    np.testing.assert_array_equal(out, expected)


def test_functions_of_bits_are_what_cuda_says():
    x = np.array([0, 1, -1, 6, 2**30, -(2**31), 12345], np.int32)
    f = np.array([0.0, -0.0, 1.5, np.inf, 1e-40, -7, 3], np.float32)
    out = ints(7, 8)
    number_kernel("bits")(1, 7, out, f, x)
    for row, value, number in zip(out.tolist(), x.tolist(), f, strict=True):
        digits = f"{value % 2**32:032b}"
        backwards = int(digits[::-1], 2)
        assert row == [
            digits.count("1"),
            len(digits) - len(digits.lstrip("0")),
            (digits[::-1].index("1") + 1) if value else 0,
            backwards - 2**32 if backwards >= 2**31 else backwards,
            number.view(np.int32),
            value,
            max(value, 3),
            min(value, 3),
        ]


def test_functions_of_numbers_are_what_their_names_say():
    x = np.array([0.25, 1.0, 1.75, 3.0], np.float32)
    out = floats(4, 16)
    number_kernel("functions")(1, 4, out, x)
    v = x.astype(np.float64)
    expected = [v**-0.5, np.exp(v), np.log(v), np.log2(v), np.sin(v), np.cos(v), v**1.5]
    expected += [1 / v, np.clip(v - 1, 0, 1), v * v + 1, 1 / v, v**-0.5, v**0.5, 10**v]
    expected += [2 * v + v * v, 2 * v]
    np.testing.assert_allclose(out, np.stack(expected, axis=1), rtol=3e-7)


def test_pairs_and_vectors_have_the_layout_of_cuda():
    out = floats(8)
    number_kernel("pairs")(1, 1, out, np.array([1 + 2**-11 + 2**-20, -3.0], np.float32))
    up, tie = 1 + 2**-10, 1.0
    assert out.tolist() == [
        up,
        -3,
        tie,
        -3,
        2 * up,
        tie,
        12 + 16 + 16 + 4,
        4 + 16 + 16 + 32,
    ]


# ---- What is wrong: memory


MEMORY = r"""
__global__ void past_the_end(float* out, const float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) out[i] = 1.0f;  // wrong
}
__global__ void reads_past_the_end(float* out, const float* x, int n) {
  out[threadIdx.x] = x[threadIdx.x + 1];  // wrong
}
__global__ void before_the_beginning(float* out, const float* x, int n) {
  out[int(threadIdx.x) - 1] = 1.0f;  // wrong
}
__global__ void writes_an_input(float* out, const float* x, int n) {
  float* to = (float*)x;
  to[threadIdx.x] = 1.0f;  // wrong
}
__global__ void null_pointer(float* out, const float* x, int n) {
  out[threadIdx.x] = x[threadIdx.x];  // wrong, if x is null
}
__global__ void local_of_another(float* out, const float* x, int n) {
  __shared__ float* address;
  float mine = x[0];
  float* volatile seen = &mine;
  if (threadIdx.x == 0) address = seen;
  __syncthreads();
  out[threadIdx.x] = *address + *seen;  // wrong
}
__global__ void unwritten(float* out, const float* x, int n) {
  __shared__ float sums[32];
  if (threadIdx.x != 5) sums[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = sums[threadIdx.x];  // wrong
}
__global__ void too_small(float* out, const float* x, int n) {
  __shared__ float sums[31];
  float* pointer = sums;
  pointer[threadIdx.x] = 1.0f;  // wrong
}
__global__ void bad_index(float* out, const float* x, int n) {
  __shared__ float sums[31];
  sums[threadIdx.x] = 1.0f;  // wrong
}
__global__ void negative_index(float* out, const float* x, int n) {
  float mine[4][8] = {};
  out[threadIdx.x] = mine[1][-n];  // wrong, though mine[0] is there
}
__global__ void large_index(float* out, const float* x, int n) {
  float mine[32] = {};
  out[threadIdx.x] = mine[blockDim.x - n];  // wrong, if n is 33
}
struct Halves {
  __half values[4];
};
__global__ void writes_halves(float* out, const float* x, int n) {
  Halves halves;
  for (int i = 0; i <= n; i++) halves.values[i] = __float2half(x[i]);  // wrong
  out[threadIdx.x] = __half2float(halves.values[3]);
}
__global__ void reads_halves(float* out, const float* x, int n) {
  __half mine[4] = {};
  float sum = 0.0f;
  for (int i = 0; i <= n; i++) sum += __half2float(mine[i]);  // wrong
  out[threadIdx.x] = sum;
}
__constant__ float4 WEIGHTS[4] = {};
__global__ void reads_constants(float* out, const float* x, int n) {
  float4 weight = WEIGHTS[n];  // wrong
  out[threadIdx.x] = weight.y;
}
__global__ void by_pointer(float* out, const float* x, int n) {
  float mine[4] = {};
  float* pointer = mine;
  pointer[n] = x[0];  // wrong
  out[threadIdx.x] = mine[3];
}
__global__ void by_wide_pointer(float* out, const float* x, int n) {
  float4 mine[4] = {};
  const float4* pointer = mine;
  float4 last = pointer[n];  // wrong
  out[threadIdx.x] = last.w;
}
__global__ void in_wide_steps(float* out, const float* x, int n) {
  __align__(16) float mine[8];
  for (int i = 0; i < n; i++)
    *(float4*)(mine + 4 * i) = *(const float4*)(x + 4 * i);  // wrong, if n is 3
  out[threadIdx.x] = mine[7];
}
__global__ void up_to_the_end(float* out, const float* x, int n) {
  __half mine[4], *end = &mine[n];
  for (__half* one = mine; one != end; one++) *one = __float2half(x[one - mine]);
  Halves halves[2] = {};
  for (const Halves* one = halves + 2; one != halves;) out[--one - halves] = 1.0f;
  out[threadIdx.x] = __half2float(*(end - 1));
}
__global__ void dynamic_too_small(float* out, const float* x, int n) {
  extern __shared__ float row[];
  row[threadIdx.x] = x[threadIdx.x];  // wrong, with 31 * 4 bytes
}
__global__ void too_much_static(float* out, const float* x, int n) {
  __shared__ char many[48 * 1024 + 1];
  many[0] = 1;
}
__global__ void static_and_dynamic(float* out, const float* x, int n) {
  extern __shared__ float row[];
  __shared__ float more[4];
  row[0] = more[0] = 1.0f;
}
__global__ void misaligned(float* out, const float* x, int n) {
  float4 v = *reinterpret_cast<const float4*>(x + 1);  // wrong
  out[threadIdx.x] = v.x + v.w;
}
struct Sums {
  int count;
  float values[3];
};
__global__ void last_member(float* out, const float* x, int n) {
  Sums sums = {};
  for (int i = 0; i <= n; i++) sums.values[i] = x[i];  // wrong, if n is 3
  out[0] = sums.values[0];
}
__global__ void shift(float* out, const float* x, int n) {
  out[threadIdx.x] = float(1 << n);  // wrong, if n is 32
}
__global__ void overflow(float* out, const float* x, int n) {
  out[threadIdx.x] = float(n * 100000);  // wrong, if n is 100000
}
__global__ void division(float* out, const float* x, int n) {
  out[threadIdx.x] = float(7 / n);  // wrong, if n is 0
}
__global__ void asserted(float* out, const float* x, int n) {
  assert(n == 3);  // wrong, if it is not
  if (n == 3) __trap();
}
__device__ float sign(float x) {
  if (x > 0) return 1.0f;
}  // wrong
__global__ void no_result(float* out, const float* x, int n) {
  out[threadIdx.x] = sign(x[threadIdx.x]);
}
__global__ void deeper_still(float* out, const float* x, int n) {
  volatile float large[3000000];
  large[n] = 1.0f;
  out[0] = large[n];
}
__global__ void deep(float* out, const float* x, int n) {
  volatile float large[30000];
  for (int i = 0; i < 30000; i++) large[i] = 1.0f;
  out[0] = large[n];
}
"""


def line_of(source: str, name: str, mark: str = "// wrong") -> int:
    """Return the line of the first mark after the name of a kernel."""
    lines = source.splitlines()
    start = next(n for n, line in enumerate(lines) if f" {name}(" in line)
    return 1 + next(n for n in range(start, len(lines)) if mark in lines[n])


@pytest.mark.parametrize(
    ("name", "n", "options", "message"),
    [
        (
            "past_the_end",
            32,
            {},
            "illegal write of 4 bytes, 0 bytes past the end of argument 0 (out)",
        ),
        (
            "reads_past_the_end",
            32,
            {},
            "illegal read of 4 bytes, 0 bytes past the end of argument 1 (x)",
        ),
        (
            "before_the_beginning",
            32,
            {},
            "illegal write of 4 bytes, 4 bytes before argument 0 (out)",
        ),
        (
            "writes_an_input",
            32,
            {},
            "of argument 1 (x) at HERE, which the kernel declares const",
        ),
        ("local_of_another", 32, {}, "read of a local variable of thread 0 at HERE"),
        (
            "unwritten",
            32,
            {},
            "byte 20 of shared 'sums' at HERE, which no thread of the block has",
        ),
        (
            "too_small",
            32,
            {},
            "illegal write of 4 bytes, 0 bytes past the end of shared 'sums', at HERE",
        ),
        (
            "dynamic_too_small",
            32,
            {"shared_bytes": 124},
            "0 bytes past the end of shared 'row', at HERE",
        ),
        ("misaligned", 32, {}, "misaligned access at HERE"),
        ("shift", 32, {}, "shift by more bits than there are at HERE"),
        ("overflow", 100_000, {}, "integer overflow at HERE"),
        ("division", 0, {}, "division by zero"),
        ("asserted", 4, {}, "assertion failed at HERE: n == 3"),
    ],
)
def test_a_mistake_with_memory_is_named_with_its_line(name, n, options, message):
    block = 64 if name == "past_the_end" else 32
    said = complaint_of(MEMORY, name, 1, block, floats(32), floats(32), n, **options)
    place = f"kernel.cu:{line_of(MEMORY, name)}"
    assert message.replace("HERE", place) in said
    assert said.count(place) == len(said.splitlines())  # in every order
    assert said.startswith(f"{name}: T: ")


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("bad_index", 32, "index 31 is out of the bounds of an array of 31"),
        ("negative_index", 1, "index -1 is out of the bounds of an array of 8"),
        ("large_index", 33, "index 4294967295 is out of the bounds of an array of 32"),
        ("last_member", 3, "index 3 is out of the bounds of an array of 3"),
        ("reads_halves", 4, "index 4 is out of the bounds of an array of 4"),
        ("reads_constants", 4, "index 4 is out of the bounds of an array of 4"),
        ("reads_constants", 5, "index 5 is out of the bounds of an array of 4"),
        ("writes_halves", 4, "illegal write out of the bounds of its array"),
        ("by_pointer", 4, "illegal write out of the bounds of its array"),
        ("in_wide_steps", 3, "illegal write out of the bounds of its array"),
        ("by_wide_pointer", 4, "illegal read out of the bounds of its array"),
    ],
)
def test_a_step_out_of_any_array_is_named_with_its_line(name, n, message):
    said = complaint_of(MEMORY, name, 1, 32, floats(32), floats(32), n)
    place = f"kernel.cu:{line_of(MEMORY, name)}"
    assert said == f"{name}: T: {message} at {place}"  # in every order


def test_the_address_behind_the_last_element_may_be_taken():
    for order, seed in IN_ORDERS:
        out, x = floats(32), np.arange(32, dtype=np.float32)
        module(MEMORY)["up_to_the_end"](1, 1, out, x, 4, order=order, seed=seed)
        assert out[:3].tolist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "too_much_static",
            {},
            "'many': 49153 bytes of static shared memory, and 49152 are allowed",
        ),
        (
            "static_and_dynamic",
            {"shared_bytes": 48 * 1024},
            "'more': the block needs 49168 bytes of shared memory, and has 49152",
        ),
        (
            "static_and_dynamic",
            {"shared_bytes": 48 * 1024 + 4},
            "49156 bytes of dynamic shared memory, and 49152 are allowed",
        ),
        (
            "static_and_dynamic",
            {},
            "'row': the kernel was launched without dynamic shared memory",
        ),
        ("asserted", {}, "__trap() at kernel.cu:"),
    ],
)
def test_limits_of_a_block_are_kept(name, options, message):
    assert message in complaint_of(
        MEMORY, name, 1, 32, floats(32), floats(32), 3, **options
    )


def test_a_launch_finds_nothing_that_an_earlier_one_has_left():
    fill = module(MEMORY)["dynamic_too_small"]
    fill(1, 32, floats(32), floats(32), 0, shared_bytes=128)
    assert "which no thread" in complaint_of(
        MEMORY, "unwritten", 1, 32, floats(32), floats(32), 32
    )


def test_a_negative_number_may_be_shifted():
    """As every GPU does, and C++ since 2020."""
    out = ints(32)
    source = "__global__ void k(int* x) { x[threadIdx.x] = ~0 << threadIdx.x; }"
    module(source)["k"](1, 32, out)
    np.testing.assert_array_equal(out, -1 << np.arange(32))


def test_more_shared_memory_can_be_asked_for():
    launch = (1, 1, floats(32), floats(32), 3)
    kernel = module(MEMORY)["static_and_dynamic"]
    kernel(*launch, shared_bytes=48 * 1024, shared_limit=64 * 1024)


@pytest.mark.parametrize("check", [False, True])
def test_faults_that_only_the_system_sees_are_reported_and_survived(check):
    for _ in range(3):
        kernel = module(MEMORY, check=check)
        with pytest.raises(
            KernelError, match=r"illegal (access|read).*address 0x\w+, which"
        ):
            kernel["null_pointer"](1, 32, floats(32), None, 0)
        with pytest.raises(KernelError, match="division by zero"):
            kernel["division"](1, 32, floats(32), floats(32), 0)
        for name, order in itertools.product(["deep", "deeper_still"], ORDERS):
            with pytest.raises(
                KernelError, match="local variables need more than 65536 bytes"
            ):
                kernel[name](1, 32, floats(32), floats(32), 0, order=order)
        out, x = floats(32), np.arange(32, dtype=np.float32)
        kernel["null_pointer"](1, 32, out, x, 0)
        np.testing.assert_array_equal(out, x)


def test_a_function_that_forgets_its_result_is_named():
    said = complaint_of(MEMORY, "no_result", 1, 32, floats(32), floats(32), 0)
    line = line_of(MEMORY, "sign", "__device__")
    assert f"function that ends without a return at kernel.cu:{line}" in said


def test_the_assert_of_c_is_that_of_the_emulator_too():
    """That of the C library would end Python."""
    for header in ("assert.h", "cassert"):
        source = f"#include <{header}>\n__global__ void k(int n) {{ assert(n == 3); }}"
        module(source)["k"](1, 1, 3)
        with pytest.raises(KernelError, match=r"assertion failed at kernel\.cu:2"):
            module(source)["k"](1, 1, 4)


STATIC = r"""
__global__ void k(int* out) {
  static __shared__ int box[64];
  static int step = threadIdx.x + 1;
  box[threadIdx.x] = step;
  __syncthreads();
  out[threadIdx.x] = box[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize("check", [False, True])
def test_what_is_static_needs_nothing_more(check):
    for _ in range(2):
        out = ints(64)
        module(STATIC, check=check)["k"](1, 64, out)
        assert out.tolist() == [1] * 64


@pytest.mark.parametrize(
    "declared", ["__shared__ int box[2];", "extern __shared__ int box[];"]
)
def test_shared_memory_outside_of_a_kernel_is_refused(declared):
    source = declared + "\n__global__ void k(int* x) {\n  box[0] = x[0];\n}"
    with pytest.raises(KernelError, match="'box' is declared outside of a function"):
        EmulatedModule(source, ["k"])


def test_a_kernel_that_has_failed_can_be_made_again():
    with pytest.raises(KernelError, match="race"):
        EmulatedModule(RACES, ["adds_plainly"], check=True)["adds_plainly"](
            1, 2, ints(1)
        )
    EmulatedModule(RACES, ["adds_plainly"], check=True)["adds_plainly"](1, 1, ints(1))


def test_the_line_of_a_fault_is_found_without_checks_too():
    with pytest.raises(
        KernelError, match=rf"kernel\.cu:{line_of(MEMORY, 'null_pointer')}"
    ):
        module(MEMORY, check=False)["null_pointer"](1, 32, floats(32), None, 0)


def test_what_a_broken_kernel_wrote_before_it_stopped_stays():
    out = floats(32)
    with pytest.raises(KernelError):
        module(MEMORY)["past_the_end"](1, 64, out, floats(32), 32)
    assert out.tolist() == [1.0] * 32


# ---- What is wrong: the order of things


RACES = r"""
__global__ void write_read(int* out) {
  __shared__ int box[64];
  box[threadIdx.x] = 0;
  __syncthreads();
  box[threadIdx.x] = threadIdx.x;  // wrong
  out[threadIdx.x] = box[threadIdx.x ^ 32];
}
__global__ void in_a_warp(int* out) {
  __shared__ int box[64];
  box[threadIdx.x] = 0;
  __syncwarp();
  box[threadIdx.x] = threadIdx.x;  // wrong
  out[threadIdx.x] = box[threadIdx.x ^ 1];
}
__global__ void overwritten(int* out) {
  __shared__ int box;
  if (threadIdx.x == 0) box = 1;
  __syncthreads();
  out[threadIdx.x] = box;
  if (threadIdx.x == 40) box = 2;  // wrong
}
__global__ void both_write(int* out) {
  __shared__ int box;
  box = 1;  // wrong
  out[threadIdx.x] = 0;
}
__global__ void adds_plainly(int* out) {
  out[0] += 1;  // wrong
}
__global__ void counts_readers(int* out) {
  int seen = out[0];  // wrong
  if (blockIdx.x == 1) out[0] = seen + 1;
}
__global__ void atomic_and_plain(int* out) {
  atomicAdd(&out[0], 1);  // wrong
  if (threadIdx.x == 0) out[1] = out[0];
}
__global__ void only_lanes_that_meet(int* out) {
  __shared__ int box[32];
  unsigned mine = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
  box[threadIdx.x] = 0;
  __syncwarp();
  box[threadIdx.x] = threadIdx.x;  // wrong
  __syncwarp(mine);
  out[threadIdx.x] = box[threadIdx.x ^ 16];
}
__global__ void a_shuffle_orders_nothing(int* out) {
  __shared__ int box[32];
  box[threadIdx.x] = threadIdx.x;  // wrong
  int other = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
  out[threadIdx.x] = box[other];
}
__global__ void one_of_three_readers(int* out) {
  __shared__ int box;
  if (threadIdx.x == 0) box = 1;
  __syncwarp();
  int seen = threadIdx.x < 3 ? box : 0;  // wrong
  if (threadIdx.x == 0 || threadIdx.x == 2) __syncwarp(0x5u);
  if (threadIdx.x == 2) box = 2;
  out[threadIdx.x] = seen;
}
__global__ void ordered(int* out) {
  __shared__ int box[64];
  unsigned mine = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  box[threadIdx.x] = threadIdx.x;
  __syncwarp(mine);
  int a = box[threadIdx.x ^ 1];
  __syncwarp(mine);
  box[threadIdx.x] = a;
  __syncwarp();
  int b = box[threadIdx.x ^ 16];
  __syncthreads();
  box[threadIdx.x] = b;
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x ^ 32];
  atomicAdd(&out[64], 1);
}
"""


@pytest.mark.parametrize(
    ("name", "block", "where", "which"),
    [
        ("write_read", 64, "of shared 'box'", "in another warp"),
        ("in_a_warp", 64, "of shared 'box'", "in the same warp"),
        ("overwritten", 64, "byte 0 of shared 'box'", "in another warp"),
        ("both_write", 64, "byte 0 of shared 'box'", "in the same warp"),
        ("adds_plainly", 64, "byte 0 of argument 0 (out)", "in the same warp"),
        ("atomic_and_plain", 64, "byte 0 of argument 0 (out)", "in the same warp"),
        ("only_lanes_that_meet", 32, "of shared 'box'", "in the same warp"),
        ("one_of_three_readers", 32, "of shared 'box'", "in the same warp"),
        ("a_shuffle_orders_nothing", 32, "of shared 'box'", "in the same warp"),
    ],
)
def test_a_race_is_found_in_every_order(name, block, where, which):
    said = complaint_of(RACES, name, 1, block, ints(65))
    line = line_of(RACES, name)
    for text in said.splitlines():
        assert re.search(
            r"race: (reads|writes) .* at kernel\.cu:\d+, which thread \d+", text
        )
        assert text.endswith("with nothing between that orders the two")
        assert f"kernel.cu:{line}" in text
        assert where in text
    assert which in said


@pytest.mark.parametrize("name", ["adds_plainly", "counts_readers"])
def test_a_race_between_blocks_is_found_in_every_order(name):
    said = complaint_of(RACES, name, 3, 1, ints(1))
    assert said.count("in another block") == len(said.splitlines())


def test_what_is_ordered_is_no_race():
    for order, seed in IN_ORDERS:
        out = ints(65)
        module(RACES)["ordered"](1, 64, out, order=order, seed=seed)
        lanes = np.arange(64) ^ 1 ^ 16 ^ 32
        np.testing.assert_array_equal(out, [*lanes, 64])


CLASSICS = r"""
__global__ void scan(int* out, const int* x) {  // Hillis and Steele, in two buffers
  __shared__ int sums[2][128];
  int t = threadIdx.x, from = 0;
  sums[0][t] = x[t];
  __syncthreads();
  for (int step = 1; step < 128; step *= 2) {
    sums[1 - from][t] = sums[from][t] + (t >= step ? sums[from][t - step] : 0);
    from = 1 - from;
    __syncthreads();
  }
  out[t] = sums[from][t];
}
__global__ void sort(int* out, const int* x) {  // bitonic, each pair by one thread
  int t = threadIdx.x;
  out[t] = x[t];
  __syncthreads();
  for (int size = 2; size <= 128; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      int other = t ^ step;
      if (other > t && (out[t] > out[other]) == ((t & size) == 0)) {
        int kept = out[t];
        out[t] = out[other];
        out[other] = kept;
      }
      __syncthreads();
    }
}
__global__ void histogram(int* out, const int* x) {
  __shared__ int counts[32];
  if (threadIdx.x < 32) counts[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&counts[x[threadIdx.x]], 1);
  __syncthreads();
  if (threadIdx.x < 32) atomicAdd(&out[threadIdx.x], counts[threadIdx.x]);
}
__global__ void last_warp(int* out, const int* x) {
  __shared__ int sums[128];
  int t = threadIdx.x;
  sums[t] = x[t];
  __syncthreads();
  if (t < 32) {
    int sum = sums[t] + sums[t + 32] + sums[t + 64] + sums[t + 96];
    for (int step = 16; step > 0; step /= 2) {
      sums[t] = sum;
      __syncwarp();
      sum += sums[t ^ step];
      __syncwarp();
    }
    if (t == 0) out[0] = sum;
  }
}
__global__ void keep_odd(int* out, const int* x) {  // one atomic for a warp
  int value = x[threadIdx.x], lane = threadIdx.x % 32;
  unsigned kept = __ballot_sync(0xffffffffu, value % 2);
  if (value % 2) {
    int leader = __ffs(kept) - 1, begin = 0;
    if (lane == leader) begin = atomicAdd(&out[0], __popc(kept));
    begin = __shfl_sync(kept, begin, leader);
    out[1 + begin + __popc(kept & ((1u << lane) - 1))] = value;
  }
}
__global__ void transpose(int* out, const int* x) {  // 8 x 16, by threads of 16 x 8
  __shared__ int tile[8][17];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 16 + threadIdx.x];
  __syncthreads();
  int t = threadIdx.y * 16 + threadIdx.x;
  out[t] = tile[t % 8][t / 8];
}
"""


def expected_of(name: str, x: np.ndarray) -> np.ndarray:
    """Say what a classic kernel writes."""
    return {
        "scan": lambda: np.cumsum(x),
        "sort": lambda: np.sort(x),
        "histogram": lambda: np.bincount(x, minlength=128),
        "last_warp": lambda: np.append(x.sum(), np.zeros(127)),
        "keep_odd": lambda: np.sort(np.append(x[x % 2 == 1], (x % 2).sum())),
        "transpose": lambda: x.reshape(8, 16).T.ravel(),
    }[name]()


@pytest.mark.parametrize(
    "name", ["scan", "sort", "histogram", "last_warp", "keep_odd", "transpose"]
)
def test_of_right_kernels_nothing_is_reported(name):
    x = np.random.default_rng(0).integers(0, 32, 128, dtype=np.int32)
    for order, seed in IN_ORDERS:
        out = ints(128)
        block = (16, 8) if name == "transpose" else 128
        module(CLASSICS)[name](1, block, out, x, order=order, seed=seed)
        if name == "keep_odd":  # in any order of the warps
            out = np.sort(out[: out[0] + 1])
        np.testing.assert_array_equal(out, expected_of(name, x))


PROGRAM = r"""
// Runs a program: [step][thread] of operation and argument.
__global__ void run(int* out, const int* operations, const int* arguments, int steps) {
  __shared__ int cells[4];
  if (threadIdx.x == 0)
    for (int i = 0; i < 4; i++) cells[i] = 0;
  __syncthreads();
  int seen = 0;
  for (int step = 0; step < steps; step++) {
    int operation = operations[step * blockDim.x + threadIdx.x];
    int argument = arguments[step * blockDim.x + threadIdx.x];
    if (operation == 1) seen += cells[argument];
    if (operation == 2) cells[argument] = step;
    if (operation == 3) atomicAdd(&cells[argument], 1);
    if (operation == 4) __syncwarp(unsigned(argument));
    if (operation == 5) __syncthreads();
  }
  out[threadIdx.x] = seen;
}
"""
THREADS = 64


def random_program(rng: random.Random, masks: list[list[int]]) -> tuple:
    """Return operations and arguments, [steps, THREADS] each."""
    operations, arguments = ints(8, THREADS), ints(8, THREADS)
    for step in range(8):
        kind = rng.random()
        if kind < 0.2:
            operations[step] = 5
        elif kind < 0.55:
            for warp in range(THREADS // 32):
                for mask in rng.choice(masks):
                    lanes = [warp * 32 + n for n in range(32) if mask >> n & 1]
                    operations[step, lanes] = 4
                    arguments[step, lanes] = mask - 2**32 if mask >= 2**31 else mask
        else:
            for _ in range(rng.choice([1, 1, 2, 3])):
                thread = rng.randrange(THREADS)
                operations[step, thread] = rng.choice([1, 1, 2, 3])
                arguments[step, thread] = rng.randrange(4)
    return operations, arguments


def has_race(operations: np.ndarray, arguments: np.ndarray) -> bool:
    """Tell from the definition: two accesses, and no chain of barriers between."""
    before = [frozenset()] * THREADS  # accesses that are over, for each thread
    accesses: list[tuple] = []
    mine: list[list] = [[] for _ in range(THREADS)]
    for step, (row, values) in enumerate(zip(operations, arguments, strict=True)):
        meetings: dict[tuple, list[int]] = {}
        for thread, (operation, argument) in enumerate(
            zip(row.tolist(), values.tolist(), strict=True)
        ):
            if operation in (1, 2, 3):
                access = (step, thread, operation, argument)
                for other in accesses:
                    if other[3] != argument or other[1] == thread:
                        continue
                    if {other[2], operation} in ({1}, {3}):
                        continue  # two reads, two atomics
                    if other not in before[thread]:
                        return True
                accesses.append(access)
                mine[thread].append(access)
            elif operation == 4:
                meetings.setdefault((thread // 32, argument), []).append(thread)
            elif operation == 5:
                meetings.setdefault((-1, 0), []).append(thread)
        for threads in meetings.values():
            over = frozenset().union(
                *(before[t] for t in threads), *(mine[t] for t in threads)
            )
            for t in threads:
                before[t] = over
    return False


WHOLE = [[0xFFFFFFFF]]
PARTS = [
    *WHOLE,
    [0xFFFF, 0xFFFF0000],
    [0x55555555, 0xAAAAAAAA],
    [0xFF],
    [0xF0F0F0F0, 0x0F0F0F0F],
]


@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
@pytest.mark.parametrize("masks", [WHOLE, PARTS], ids=["whole warps", "parts of warps"])
def test_races_of_random_programs_are_those_of_the_definition(masks, order, seed):
    rng = random.Random(f"{order}{seed}{len(masks)}")
    kernel = module(PROGRAM)["run"]
    racy = 0
    for _ in range(150):
        operations, arguments = random_program(rng, masks)
        expected = has_race(operations, arguments)
        try:
            kernel(
                1,
                THREADS,
                ints(THREADS),
                operations,
                arguments,
                8,
                order=order,
                seed=seed,
            )
            found = False
        except KernelError as error:
            assert "race" in str(error)
            found = True
        assert found == expected, (operations.tolist(), arguments.tolist())
        racy += expected
    assert 30 < racy < 120


# ---- What is wrong: barriers


BARRIERS = r"""
__global__ void half_of_a_block(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1;
  __syncthreads();
}
__global__ void two_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
__global__ void early_return(int* out) {
  if (threadIdx.x >= 50) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 16);
}
__global__ void returns_are_fine(int* out) {
  if (threadIdx.x >= 50) return;
  __syncwarp();
  __syncthreads();
  out[threadIdx.x] = __any_sync(0xffffffffu, threadIdx.x == 49);
}
__global__ void divergent_shuffle(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x < 4)
    v = __shfl_xor_sync(0xffffffffu, v, 1);
  else
    v = __shfl_xor_sync(0xffffffffu, v, 2);
  out[threadIdx.x] = v;
}
__global__ void missing_lanes(int* out) {
  if (threadIdx.x < 4) out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
  __syncthreads();
}
__global__ void not_named(int* out) {
  __syncwarp(0x0000ffffu);
}
__global__ void reads_unnamed(int* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_sync(0x0000ffffu, int(threadIdx.x), 20);
}
__global__ void bad_width(int* out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 0, 12);
}
__global__ void meets_in_parts_first(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x % 3 == 0) v = __shfl_sync(0x49249249u, v, 30);
  __syncwarp();
  out[threadIdx.x] = __shfl_sync(0xffffffffu, v, 9);
}
__global__ void forever(int* out) {
  while (*(volatile int*)out == 0) {
  }
}
__global__ void waits_for_another_block(int* out) {
  if (blockIdx.x == 0)
    while (atomicAdd(&out[0], 0) == 0) {
    }
  else
    atomicAdd(&out[0], 1);
}
"""


@pytest.mark.parametrize(
    ("name", "block", "message"),
    [
        (
            "half_of_a_block",
            64,
            r"divergent barrier: thread \d+ waits in __syncthreads at kernel.cu:[35], "
            r"thread \d+ in __syncthreads at kernel.cu:[35]",
        ),
        (
            "two_barriers",
            64,
            "divergent barrier: thread 0 waits in __syncthreads at kernel.cu:9, "
            "thread 32 in __syncthreads at kernel.cu:11",
        ),
        (
            "early_return",
            64,
            "__shfl_xor_sync at kernel.cu:17 reads lane .*, which has returned",
        ),
        (
            "early_return",
            48,
            r"__shfl_xor_sync at kernel.cu:17 reads lane .*, which the block does not",
        ),
        (
            "divergent_shuffle",
            32,
            "deadlock: thread 0 waits in __shfl_xor_sync at kernel.cu:28 with mask "
            "ffffffff, thread 4 waits in __shfl_xor_sync at kernel.cu:30 with mask ",
        ),
        (
            "missing_lanes",
            32,
            "deadlock: thread 0 waits in __ballot_sync at kernel.cu:34 with mask "
            "ffffffff, thread 4 waits in __syncthreads at kernel.cu:35",
        ),
        (
            "not_named",
            32,
            r"__syncwarp at kernel.cu:38: mask 0000ffff does not name the calling lane",
        ),
        (
            "reads_unnamed",
            32,
            "__shfl_sync at kernel.cu:42 reads lane 20, which the mask does not name",
        ),
        (
            "bad_width",
            32,
            "__shfl_sync at kernel.cu:45: width 12 is not a power of two up to 32",
        ),
    ],
)
def test_a_barrier_that_cannot_complete_is_explained(name, block, message):
    said = complaint_of(BARRIERS, name, 1, block, ints(64))
    for text in said.splitlines():
        assert re.search(message, text), text


def test_threads_that_returned_are_not_waited_for():
    for order, seed in IN_ORDERS:
        out = ints(64)
        module(BARRIERS)["returns_are_fine"](1, 64, out, order=order, seed=seed)
        assert out.tolist() == [0] * 32 + [1] * 18 + [0] * 14


def test_lanes_may_meet_in_parts_before_they_meet_as_a_whole():
    for order, seed in [*IN_ORDERS, *(("random", seed) for seed in range(3, 30))]:
        out = ints(32)
        module(BARRIERS)["meets_in_parts_first"](1, 32, out, order=order, seed=seed)
        assert out.tolist() == [30] * 32


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_that_never_ends_does_not_hang(order, check):
    start = time.perf_counter()
    with pytest.raises(
        KernelError, match=r"still runs after 0\.1 s .* at kernel\.cu:5[34]:"
    ):
        module(BARRIERS, check=check)["forever"](
            1, 32, ints(1), order=order, timeout_s=0.1
        )
    assert time.perf_counter() - start < 20


def test_the_end_of_the_time_is_heard_whatever_thread_gets_the_signal():
    script = (
        "import threading\n"
        "import numpy as np\n"
        "from minivllm.errors import KernelError\n"
        "from minivllm.ops.emulate import EmulatedModule\n"
        f"kernel = EmulatedModule({BARRIERS!r}, ['forever'])['forever']\n"
        "def launch():\n"
        "    for _ in range(20):\n"
        "        try:\n"
        "            kernel(1, 1, np.zeros(1, np.int32), timeout_s=0.05)\n"
        "        except KernelError:\n"
        "            print('stopped')\n"
        "thread = threading.Thread(target=launch, daemon=True)\n"
        "thread.start()\n"
        "while thread.is_alive():\n"  # a running thread gets half of the signals
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("stopped") == 20


def test_waiting_for_another_block_is_explained():
    with pytest.raises(KernelError, match="Blocks run one after another"):
        module(BARRIERS)["waits_for_another_block"](2, 1, ints(1), timeout_s=0.1)


# ---- Tensor cores and asynchronous copies


TILES = r"""
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>
using namespace nvcuda;

__global__ void multiply(float* out, const __half* a, const __half* b, int stride) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 1.0f);
  wmma::load_matrix_sync(fa, a, stride);
  wmma::load_matrix_sync(fb, b, stride);
  wmma::mma_sync(fc, fa, fb, fc);
  for (float& element : fc.x) element *= 2;
  wmma::store_matrix_sync(out, fc, 16, wmma::mem_row_major);
}

template <int WAIT>
__global__ void copies(float* out, const float* x) {
  __shared__ alignas(16) float box[2][128];
  for (int part = 0; part < 2; part++) {
    float* to = &box[part][threadIdx.x * 4];
    __pipeline_memcpy_async(to, x + part * 128 + threadIdx.x * 4, 16);
    __pipeline_commit();
  }
  __pipeline_wait_prior(WAIT);
  __syncwarp();
  out[threadIdx.x] = box[0][threadIdx.x];  // first
  out[32 + threadIdx.x] = box[1][threadIdx.x];  // second
}

__global__ void copies_three_bytes(float* out, const float* x) {
  __shared__ float box[4];
  __pipeline_memcpy_async(box, x, 3);
}

__global__ void copies_askew(float* out, const float* x) {
  __shared__ float box[8];
  __pipeline_memcpy_async(box + 1, x, 16);
}
"""
TILE_KERNELS = [
    "multiply",
    *(f"copies<{n}>" for n in (0, 1, 2)),
    "copies_three_bytes",
    "copies_askew",
]


@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
def test_a_warp_multiplies_tiles(order, seed):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 24)).astype(np.float16) for _ in "ab")
    out = aligned(floats(16, 16))
    kernel = module(TILES, *TILE_KERNELS)["multiply"]
    kernel(1, 32, out, aligned(a), aligned(b), 24, order=order, seed=seed)
    expected = 2 * (a[:, :16].astype(float) @ b[:, :16].astype(float).T + 1)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins where an allocation would."""
    return array.copy()


def test_a_tile_has_to_be_aligned():
    kernel = module(TILES, *TILE_KERNELS)["multiply"]
    halves = np.zeros((16, 24), np.float16)
    with pytest.raises(
        KernelError, match=r"load_matrix_sync at kernel\.cu:12: the tile must"
    ):
        kernel(1, 32, floats(16, 16), halves, halves, 17)


@pytest.mark.parametrize("threads", [16, 33])
def test_a_tile_needs_a_whole_warp(threads):
    kernel = module(TILES, *TILE_KERNELS)["multiply"]
    halves = np.zeros((16, 24), np.float16)
    with pytest.raises(
        KernelError, match=r"load_matrix_sync at kernel\.cu:12 needs all 32 lanes"
    ):
        kernel(1, threads, floats(16, 16), halves, halves, 24, order="reverse")


def test_copies_arrive_when_they_are_waited_for():
    x = np.arange(256, dtype=np.float32)
    for order, seed in IN_ORDERS:
        out = floats(64)
        kernels = module(TILES, *TILE_KERNELS)
        kernels["copies<0>"](1, 32, out, x, order=order, seed=seed)
        np.testing.assert_array_equal(out, [*x[:32], *x[128:160]])
        for wait, mark in ((1, "// second"), (2, "// first")):
            with pytest.raises(
                KernelError, match="before the asynchronous copy"
            ) as error:
                kernels[f"copies<{wait}>"](1, 32, out, x, order=order, seed=seed)
            assert f"kernel.cu:{line_of(TILES, 'copies', mark)}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("copies_three_bytes", r"of 3 bytes at kernel\.cu:\d+: it copies 4, 8 or 16"),
        (
            "copies_askew",
            r"misaligned __pipeline_memcpy_async of 16 bytes at kernel\.cu",
        ),
    ],
)
def test_a_copy_that_no_gpu_can_do_is_refused(name, message):
    with pytest.raises(KernelError, match=message):
        module(TILES, *TILE_KERNELS)[name](1, 1, floats(32), floats(32))


# ---- Traces


TRACED = r"""
__global__ void copy(float* out, const float* x, int step) {
  int i = threadIdx.x * step;
  out[i] = x[i];
}
struct alignas(16) Four {
  float values[4];
};
__global__ void copy_four(float* out, const float* x, int step) {
  float4 v = reinterpret_cast<const float4*>(x)[threadIdx.x];
  v.x += 1;
  Four w = reinterpret_cast<const Four*>(x)[threadIdx.x];
  for (int i = 0; i < 4; i++) w.values[i] += i;
  reinterpret_cast<float4*>(out)[threadIdx.x] = v;
  __syncwarp();
  reinterpret_cast<Four*>(out)[threadIdx.x] = w;
}
__global__ void copy_by_function(float* out, const float* x, int step) {
  float v[4];
  memcpy(v, x + threadIdx.x * 4, 16);
  memcpy(out + threadIdx.x * 4, v, step);
  memset(out + threadIdx.x * 4, 0, 4);
}
__global__ void banks(float* out, const float* x, int step) {
  __shared__ float box[32 * 33];
  for (int i = threadIdx.x; i < 32 * 33; i += 32) box[i] = 0;
  __syncwarp();
  out[threadIdx.x] = box[threadIdx.x * step % (32 * 33)];  // asked
}
__global__ void wide_banks(float* out, const float* x, int step) {
  __shared__ float4 box[32];
  box[threadIdx.x] = make_float4(1, 2, 3, 4);
  out[threadIdx.x] = 0;
}
__global__ void divergent(float* out, const float* x, int step) {
  for (int i = 0; i < threadIdx.x; i++) out[threadIdx.x * 8] = x[i];
}
__global__ void counts(float* out, const float* x, int step) {
  atomicAdd(&out[threadIdx.x], x[0]);
}
"""


@pytest.mark.parametrize("step", [1, 2, 3, 8, 16])
def test_sectors_are_counted_as_a_gpu_would_move_them(step):
    x = np.zeros(64 * step, np.float32)
    trace = module(TRACED)["copy"].trace(1, 64, x.copy(), x, step)
    expected = sum(
        len({lane * step * 4 // 32 for lane in range(first, first + 32)})
        for first in (0, 32)
    )
    assert trace.sectors("x") == trace.sectors("out") == expected
    assert trace.sectors() == 2 * expected
    assert trace.bytes_read() == trace.bytes_read("x") == 64 * 4
    assert trace.bytes_written("out") == 64 * 4
    assert len(trace.instructions) == 4
    assert trace.instructions.lanes.tolist() == [32] * 4


def test_a_view_that_begins_within_a_sector_needs_one_more():
    x = np.zeros(65, np.float32)
    kernel = module(TRACED)["copy"]
    assert kernel.trace(1, 32, floats(32), x[:32], 1).sectors("x") == 4
    assert kernel.trace(1, 32, floats(32), x[1:33], 1).sectors("x") == 5


def test_sixteen_bytes_at_once_are_one_instruction():
    x, out = np.arange(128, dtype=np.float32), floats(128)
    trace = module(TRACED)["copy_four"].trace(1, 32, out, x, 1)
    assert [(r.bytes, r.sectors, r.lanes) for r in trace.instructions] == [
        (512, 16, 32)
    ] * 4
    np.testing.assert_array_equal(out, x + np.tile(np.arange(4), 32))


def test_copies_by_a_function_of_c_are_seen():
    x, out = np.arange(128, dtype=np.float32), floats(128)
    kernel = module(TRACED)["copy_by_function"]
    trace = kernel.trace(1, 32, out, x, 8)
    rows = [(int(r.bytes), int(r.lanes)) for r in trace.instructions]
    assert rows == [(512, 32), (256, 32), (128, 32)]
    assert out[:8].tolist() == [0, 1, 0, 0, 0, 5, 0, 0]
    with pytest.raises(KernelError, match="race: writes byte 16 of argument 0"):
        kernel(1, 32, out, x, 20)


@pytest.mark.parametrize(
    ("step", "passes"),
    [(0, 1), (1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (3, 1), (16, 16)],
)
def test_bank_conflicts_are_counted(step, passes):
    trace = module(TRACED)["banks"].trace(1, 32, floats(32), floats(32), step)
    line = f"kernel.cu:{line_of(TRACED, 'banks', '// asked')}"
    rows = trace.instructions
    asked = rows[
        (rows.passes > 0) & (np.array([trace.places[p] == line for p in rows.place]))
    ]
    assert (asked.passes.tolist(), asked.ideal.tolist()) == ([passes], [1])
    assert trace.bank_conflicts("box") == trace.bank_conflicts() == passes - 1


def test_a_wide_store_takes_four_passes_and_no_conflict():
    trace = module(TRACED)["wide_banks"].trace(1, 32, floats(32), floats(32), 1)
    rows = trace.instructions[trace.instructions.passes > 0]
    assert (rows.passes.tolist(), rows.ideal.tolist()) == ([4], [4])


@pytest.mark.parametrize(("order", "seed"), IN_ORDERS)
def test_lanes_that_loop_longer_are_alone_in_later_instructions(order, seed):
    trace = module(TRACED)["divergent"].trace(
        1, 32, floats(256), floats(32), 1, order=order, seed=seed
    )
    reads = trace.instructions[trace.instructions.kind == 0]
    assert sorted(reads.lanes.tolist()) == list(range(1, 32))
    writes = trace.instructions[trace.instructions.kind == 1]
    assert sorted(writes.sectors.tolist()) == list(range(1, 32))


def test_an_atomic_reads_and_writes():
    trace = module(TRACED)["counts"].trace(1, 32, floats(32), floats(32), 1)
    assert trace.bytes_read("out") == trace.bytes_written("out") == 128
    assert [row["kind"] for row in trace.summary()] == ["read", "atomic"]


def test_turns_tell_who_ran_until_where():
    trace = module(BARRIERS)["returns_are_fine"].trace(
        2, 64, ints(64), blocks_may_share=True
    )
    first = [turn for turn in trace.turns if turn.block == 0]
    assert [turn.thread for turn in first[:3]] == [0, 1, 2]
    assert first[0].stopped_in == "__syncwarp"
    assert first[0].place == "kernel.cu:21"
    assert first[-1].stopped_in == ""
    ends = [turn.thread for turn in first if not turn.stopped_in]
    assert sorted(ends) == list(range(64))
    assert trace.turns[-1].num_accesses == len(trace.accesses)
    back = module(BARRIERS)["returns_are_fine"].trace(1, 64, ints(64), order="reverse")
    assert back.turns[0].thread == 63


def test_a_trace_that_is_too_long_says_so(monkeypatch):
    monkeypatch.setattr(emulate, "MAX_ACCESSES", 100)
    with pytest.raises(KernelError, match="more than 100 accesses"):
        module(TRACED)["copy"].trace(1, 64, floats(64), floats(64), 1)
    monkeypatch.setattr(emulate, "MAX_ACCESSES", 200)
    monkeypatch.setattr(emulate, "MAX_TURNS", 10)
    with pytest.raises(KernelError, match="more than 10 turns"):
        module(TRACED)["copy"].trace(1, 64, floats(64), floats(64), 1)


def test_a_trace_knows_its_memories():
    trace = module(TRACED)["copy"].trace(1, 1, floats(1), floats(1), 1)
    with pytest.raises(KernelError, match="no memory 'y': use one of out, x"):
        trace.bytes_read("y")


def test_a_kernel_that_touches_nothing_has_an_empty_trace():
    trace = module(TRACED)["divergent"].trace(1, 1, floats(1), floats(1), 1)
    assert len(trace.accesses) == len(trace.instructions) == trace.sectors() == 0
    assert trace.summary() == []


# ---- Arguments and launches


ARGUMENTS = r"""
template <typename T>
__global__ void copy(T* out, const T* in, int n, long long step, bool twice,
                     double add) {
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    out[i * step] = T(in[i] * (twice ? 2 : 1) + add);
}
__global__ void shift_left(float* to, const float* from, int n) {
  for (int i = 0; i < n; i++) to[i] = from[i];
}
__global__ void no_arguments() {}
"""
ARGUMENT_KERNELS = ["copy<float>", "copy<int>", "shift_left", "no_arguments"]


def argument_kernel(name: str, check: bool = True):
    return module(ARGUMENTS, *ARGUMENT_KERNELS, check=check)[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((floats(4), floats(4), 4, 1, False), "takes 6 arguments"),
        (
            (floats(4), np.zeros(4), 4, 1, False, 0.0),
            "argument 1 is const float* in, but an array of float64 was passed",
        ),
        (
            (floats(4), [0.0] * 4, 4, 1, False, 0.0),
            "argument 1 is const float* in, but a list",
        ),
        (
            (floats(4), floats(4), 4.0, 1, False, 0.0),
            "argument 2 is int n, but a float",
        ),
        (
            (floats(4), floats(4), 2**31, 1, False, 0.0),
            "argument 2 is int n, but 2147483648, which does not fit,",
        ),
        (
            (floats(4), floats(4), 4, "1", False, 0.0),
            "argument 3 is long long step, but a str",
        ),
        ((floats(4), floats(4), 4, 1, 1, 0.0), "argument 4 is bool twice, but an int"),
        ((floats(4), floats(4), 4, 1, True, 1), "argument 5 is double add, but an int"),
    ],
)
def test_arguments_are_checked_against_the_kernel(arguments, message):
    for check in (False, True):
        with pytest.raises(KernelError, match=re.escape(message)):
            argument_kernel("copy<float>", check)(1, 32, *arguments)


def test_an_array_that_may_only_be_read_is_not_written():
    out = floats(4)
    out.flags.writeable = False
    with pytest.raises(KernelError, match="may only be read"):
        argument_kernel("copy<float>")(1, 32, out, floats(4), 4, 1, False, 0.0)
    argument_kernel("copy<float>")(1, 32, floats(4), out, 4, 1, False, 0.0)


@pytest.mark.parametrize("check", [False, True])
def test_numbers_arrive_in_all_their_forms(check):
    out, x = floats(8), np.arange(4, dtype=np.float32)
    numbers = (np.int64(4), ctypes.c_int64(2), np.True_, np.float32(0.5))
    argument_kernel("copy<float>", check)(1, 3, out, x, *numbers)
    assert out.tolist() == [0.5, 0, 2.5, 0, 4.5, 0, 6.5, 0]
    argument_kernel("no_arguments", check)(3, 32)


def test_tensors_of_torch_are_arrays_too():
    torch = pytest.importorskip("torch")
    whole = torch.arange(20, dtype=torch.int32).reshape(4, 5)
    out = torch.zeros(5, 4, dtype=torch.int32).t()  # not contiguous: data pointers only
    argument_kernel("copy<int>")(1, 32, out[0], whole[1], 2, 4, False, 1.0)
    assert out[0].tolist() == [6, 7, 0, 0, 0]
    with pytest.raises(KernelError, match="past the end of argument 1"):
        argument_kernel("copy<int>")(1, 32, out[0], whole[1], 6, 1, False, 0.0)
    with pytest.raises(
        KernelError, match=r"argument 0 is on meta.*minivllm\.ops\.launch"
    ):
        argument_kernel("copy<int>")(1, 32, out.to("meta"), whole, 1, 1, False, 0.0)


def test_views_end_where_they_end():
    """A step too far into the next row of one array is found, too."""
    rows = np.zeros((2, 8), np.float32)
    with pytest.raises(
        KernelError, match=r"illegal read .* past the end of argument 1"
    ):
        argument_kernel("copy<float>")(1, 32, rows[0], rows[1], 9, 1, False, 0.0)


def test_arrays_that_overlap_are_one_memory():
    x = np.arange(9, dtype=np.float32)
    argument_kernel("shift_left")(1, 1, x[:8], x[1:], 8)
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    with pytest.raises(KernelError, match=r"race.* of argument 0 \(to\) / 1 \(from\)"):
        argument_kernel("shift_left")(1, 2, x[:8], x[1:], 8)
    x[:] = np.arange(9)
    argument_kernel("copy<float>")(1, 32, x, x, 9, 1, True, 0.0)  # in place
    assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16]


def test_memory_that_cannot_be_written_is_not(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4, dtype=np.float32))
    x, out = np.load(tmp_path / "x.npy", mmap_mode="r"), floats(4)
    argument_kernel("copy<float>")(1, 32, out, x, 4, 1, False, 0.0)
    assert out.tolist() == [0, 1, 2, 3]


def test_an_array_may_be_empty():
    for check in (False, True):
        argument_kernel("copy<float>", check)(
            1, 32, floats(0), floats(0, 3), 0, 1, False, 0.0
        )


def test_a_tensor_may_be_empty():
    torch = pytest.importorskip("torch")  # its empty tensors have no address
    empty = torch.zeros(0)
    for check in (False, True):
        kernel = argument_kernel("copy<float>", check)
        kernel(1, 32, empty, empty, 0, 1, False, 0.0)
    with pytest.raises(KernelError, match="past the end of argument 1"):
        kernel(1, 32, torch.zeros(4), empty, 4, 1, False, 0.0)


@pytest.mark.parametrize(
    ("grid", "block", "options", "message"),
    [
        (0, 32, {}, "the grid is 0"),
        ((1, 1, 1, 1), 32, {}, "the grid is"),
        (1, (32, 32, 2), {}, "2048 threads"),
        (1, (1, 1, 65), {}, "the block is"),
        (1, 32, {"shared_bytes": 48 * 1024 + 1}, "shared_limit"),
        (1, 32, {"order": "sideways"}, "use one of forward"),
        (1, 32, {"seed": -1}, "seed is -1"),
        (1, 32, {"timeout_s": 0}, "timeout_s is 0"),
        (1, 32, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (1, 32, {"shared_bytes": 1.5}, "must be a whole number from 0"),
        (1, 32, {"shared_limit": 10**10}, "from 0 to 232448"),
    ],
)
def test_launches_that_no_gpu_takes_are_refused(grid, block, options, message):
    with pytest.raises(KernelError, match=re.escape(message)):
        argument_kernel("no_arguments")(grid, block, **options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="oder"):
        argument_kernel("no_arguments")(1, 1, oder="forward")


def test_only_kernels_that_were_asked_for_are_there():
    with pytest.raises(
        KernelError, match=r"copy<double>: this module was made for copy<float>"
    ):
        argument_kernel("copy<double>")


# ---- Sources


def test_includes_are_put_in_once_and_lines_keep_their_numbers(tmp_path):
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.cuh").write_text('#include "../a.cuh"\nint b;\n')
    (tmp_path / "k.cu").write_text(
        '#include "a.cuh"\n#include "sub/b.cuh"\n#include <x>\nint k;\n'
    )
    assert read_source(tmp_path / "k.cu").splitlines() == [
        '#line 1 "k.cu"',
        '#line 1 "a.cuh"',
        "",
        "int a;",
        '#line 2 "k.cu"',
        '#line 1 "sub/b.cuh"',
        '#line 2 "sub/b.cuh"',
        "int b;",
        '#line 3 "k.cu"',
        "#include <x>",
        "int k;",
    ]


def test_a_source_that_is_not_there_is_named(tmp_path):
    (tmp_path / "k.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(KernelError, match=r"gone\.cuh.*No such file"):
        read_source(tmp_path / "k.cu")


def test_reports_name_the_included_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.cuh").write_text(
        "template <typename T>\n__device__ T add(T* x) {\n  return x[0] += 1;\n}\n"
    )
    (tmp_path / "k.cu").write_text(
        '#include "sub/deep.cuh"\n__global__ void k(int* x) {\n  add(x);\n}\n'
    )
    with pytest.raises(KernelError, match=r"at sub/deep\.cuh:3, .* at sub/deep\.cuh:3"):
        module(read_source(tmp_path / "k.cu"))["k"](1, 32, ints(1))


def test_shared_memory_is_rewritten_in_all_its_forms():
    assert to_cpp("__shared__ float x[N][M];") == (
        'float (&x)[N][M] = emu::shared<float[N][M]>(__PRETTY_FUNCTION__, 0, "x");'
    )
    assert to_cpp("__shared__ alignas(16) Pair<T, 2> x;") == (
        'Pair<T, 2> (&x) = emu::shared<Pair<T, 2>>(__PRETTY_FUNCTION__, 0, "x");'
    )
    dynamic = 'float* x = emu::dynamic_shared<float>("x");'
    assert to_cpp("extern __shared__ __align__(16) float x[];") == dynamic
    assert to_cpp("__shared__ int\n x;\nint y;").count("\n") == 2


BROKEN = {
    'asm volatile("membar.gl;");': "PTX (asm)",
    "auto block = cooperative_groups::this_thread_block();": "cooperative groups",
    "__shared__ float a[2], b[2];": "this way to declare shared memory",
    "x[0] = __activemask();": "__activemask",
    "x[0] = __shfl_xor(x[0], 1);": "without _sync",
    "x[0] = __match_any_sync(~0u, x[0]);": "__match_any_sync",
    "x[0] = clock64();": "clocks",
    "cuda::atomic_ref<int> a(x[0]);": "libcu++",
    "k<<<1, 1>>>(x);": "launches out of a kernel",
    "cudaMemcpyAsync(x, x, 4);": "the CUDA runtime",
    "x[0] = tex1D<float>(0, 0);": "textures",
    "cub::WarpReduce<int> reduce;": "other libraries",
    "__managed__ int y;": "managed variables",
    "int* y = new int[4];": "from a heap",
    "exit(1);": "functions that end the program",
    "throw 1;": "exceptions",
    "__cluster_dims__(2) int y;": "clusters",
}


@pytest.mark.parametrize("line", BROKEN)
def test_what_is_not_supported_is_named_with_its_line(line):
    source = f"__global__ void k(int* x) {{\n  int y = 0;\n  {line}\n}}\n"
    with pytest.raises(KernelError) as error:
        EmulatedModule(source, ["k"])
    text = str(error.value)
    assert text.startswith("kernel.cu:3: the emulator does not have ")
    assert BROKEN[line] in text
    assert len(text) < 200


def test_every_entry_of_the_list_is_tried():
    sources = [f'# 1 "k.cu"\n{line}' for line in BROKEN]
    found = "".join(find_unsupported(source) or "" for source in sources)
    assert all(name in found for name in UNSUPPORTED.values())


def test_what_is_not_compiled_and_what_is_quoted_does_not_count():
    source = """
__global__ void k(int* x) {
#ifndef __CUDA_ON_CPU__
  asm volatile("membar.gl;");
#endif
  // asm
  printf("asm cuda::x <<<");
  x[0] = 1;
}
"""
    x = ints(1)
    EmulatedModule(source, ["k"])["k"](1, 1, x)
    assert x[0] == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "__global__ void k(int* x) {\n  x[0] = y;\n}",
            r"kernel\.cu:2:\d+: error: 'y'",
        ),
        (
            "__global__ void k(int* x) {\n  x[0] = __vadd4(1, 2);\n}",
            r"does not have it; appendix A15",
        ),
        (
            "#include <cooperative_groups.h>\n__global__ void k(int* x) {}",
            r"kernel\.cu:1: the emulator does not have <cooperative_groups\.h>",
        ),
        (
            "__global__ void k(int* x) {\n  atomicMax((float*)x, 1.0f);\n}",
            r"kernel\.cu:2:\d+: error: .*: atomicMax of this type is not in CUDA",
        ),
        (
            "__global__ void k(int* x) {\n  __shared__ char c;\n  atomicAdd(&c, 1);\n}",
            r"kernel\.cu:3:\d+: error: .*: atomicAdd of this type is not in CUDA",
        ),
        (
            "struct S { int a[3]; };\n__global__ void k(int* x) {\n"
            "  x[0] = __shfl_sync(~0u, S{}, 0).a[1];\n}",
            r"kernel\.cu:3:\d+: error: .*: a lane gives at most 8 bytes$",
        ),
        (
            "__device__ int f(int);\n__global__ void k(int* x) {\n  x[0] = f(1);\n}",
            r"kernel\.cu:3: undefined reference to `f\(int\)'$",
        ),
        (
            "__global__ void k(int* x) {\n  if (x[0]) {\n}",
            r"after the source:1:\d+: error",
        ),
    ],
)
def test_a_source_that_does_not_compile_is_explained_shortly(source, message):
    with pytest.raises(KernelError, match=message) as error:
        EmulatedModule(source, ["k"])
    assert len(str(error.value)) < 600


def test_only_the_first_errors_are_repeated():
    stderr = "\n".join(f"k.cu:{n}:1: error: wrong\nnote: long" for n in range(9))
    assert complaint(stderr).count("error") == 3
    assert complaint("Killed") == "Killed"


# ---- The machine around it


def test_without_a_compiler_the_reason_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailable, match=r"'no-such-compiler'.*set CXX"):
        EmulatedModule(INDICES, ["indices"])


def test_clang_is_not_trusted_with_checks(tmp_path, monkeypatch):
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho clang version 19\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert why_not_emulated() is None
    with pytest.raises(BackendUnavailable, match=r"set CXX to g\+\+"):
        EmulatedModule(INDICES, ["indices"], check=True)


def test_on_another_system_the_reason_names_it(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BackendUnavailable, match=r"runs on Linux, and this is darwin"):
        EmulatedModule(INDICES, ["indices"])


def test_nothing_is_compiled_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    EmulatedModule(INDICES, ["indices"])
    monkeypatch.setattr(emulate, "_run_compiler", None)
    EmulatedModule(INDICES, ["indices"])
    (library,) = (tmp_path / "compiled").iterdir()  # and nothing is left over
    assert library.suffix == ".so"


def test_a_library_that_is_damaged_is_named(tmp_path):
    (tmp_path / "damaged.so").write_bytes(b"")
    with pytest.raises(BackendUnavailable, match=r"damaged\.so.*delete that file"):
        emulate._Library(tmp_path / "damaged.so")


def test_two_threads_of_python_may_launch_at_once():
    right, wrong = module(INDICES)["indices"], module(MEMORY)["past_the_end"]
    problems = []

    def launch_right() -> None:
        for _ in range(30):
            out = ints(4, 64)
            right(4, 64, out, order="random", seed=1)
            if out.sum() != np.sum(np.arange(4)[:, None] * 1000 + np.arange(64)):
                problems.append(out)

    def launch_wrong() -> None:
        for _ in range(30):
            try:
                wrong(1, 64, floats(32), floats(32), 32)
                problems.append("not found")
            except KernelError as error:
                if "past the end" not in str(error):
                    problems.append(error)

    threads = [threading.Thread(target=f) for f in (launch_right, launch_wrong) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_a_fault_in_another_thread_of_python_is_not_taken_for_ours():
    script = (
        "import ctypes, threading, time\n"
        "from minivllm.ops.emulate import EmulatedModule\n"
        f"m = EmulatedModule({BARRIERS!r}, ['forever'])\n"
        "import numpy as np\n"
        "x = np.zeros(1, np.int32)\n"
        "t = threading.Thread(target=m['forever'], args=(1, 1, x))\n"
        "t.daemon = True\n"
        "t.start()\n"
        "time.sleep(0.5)\n"
        "ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == -signal.SIGSEGV


@pytest.fixture
def listening():
    """Let Ctrl-C interrupt: a program in the background is started without."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.usefixtures("listening")
def test_a_launch_can_be_interrupted():
    out, start = ints(64), time.perf_counter()
    for _ in range(2):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            module(BARRIERS)["forever"](1, 1, ints(1))
    assert time.perf_counter() - start < 20  # the limit is 60
    module(BARRIERS)["returns_are_fine"](1, 64, out)
    assert out[40] == 1


@pytest.mark.usefixtures("listening")
def test_no_interrupt_is_lost_between_the_launches():
    kernel, out = module(BARRIERS)["returns_are_fine"], ints(64)
    for n in range(100):
        sender = threading.Timer(n * 2e-5, os.kill, (os.getpid(), signal.SIGINT))
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            sender.start()
            while time.perf_counter() - start < 2:
                kernel(1, 64, out)
            raise AssertionError(f"interrupt {n} never came")
        sender.join()


def test_a_program_that_listens_hears_of_an_interrupt_before_the_error():
    heard = []
    old = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KernelError, match=r"interrupted at kernel\.cu"):
            module(BARRIERS)["forever"](1, 1, ints(1))
        assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, old)


def test_signals_and_timers_of_the_program_are_left_as_they_were():
    heard = []
    old = signal.signal(signal.SIGVTALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_VIRTUAL, 30)
    try:
        with pytest.raises(KernelError):
            module(MEMORY)["null_pointer"](1, 1, floats(1), None, 0)
        left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        assert 0 < left < 30.1  # it counts in ticks
        signal.raise_signal(signal.SIGVTALRM)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGVTALRM, old)


def test_what_a_kernel_prints_is_printed(capsys):
    source = r"""
__global__ void k(int n) {
  printf("thread %d of %d: %.1f\n", int(threadIdx.x), int(blockDim.x), 1.5);
}
__global__ void much(int n) {
  for (int i = 0; i < n; i++) printf("0123456789");
}
"""
    module(source)["k"](1, 2, 0)
    assert capsys.readouterr().out == "thread 0 of 2: 1.5\nthread 1 of 2: 1.5\n"
    module(source)["much"](1, 1, 200_000)  # more than the buffer holds
    assert len(capsys.readouterr().out) == 2**20 - 1


def test_a_random_order_is_the_same_for_the_same_seed():
    def who(seed: int) -> list[int]:
        kernel = module(BARRIERS)["returns_are_fine"]
        trace = kernel.trace(1, 64, ints(64), order="random", seed=seed)
        return [turn.thread for turn in trace.turns]

    assert who(1) == who(1)
    assert who(1) != who(2)


@pytest.mark.skipif("CXX" in os.environ, reason="a compiler was chosen")
def test_torch_is_not_needed():
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from minivllm.ops.emulate import EmulatedModule\n"
        f"m = EmulatedModule({INDICES!r}, ['indices'])\n"
        "m['indices'](1, 4, np.zeros(4, np.int32))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
