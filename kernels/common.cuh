// What all kernels share: one spelling for every element type, and wide loads.
//
// NVRTC or nvcc compiles these files for a GPU, g++ for the emulator. They have no host
// code: Python starts the kernels.
// Source: chapter 6, "CUDA kernels".
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC_RTC__  // NVRTC knows no <cstdint>
using int64_t = long long;
#else
#include <cstdint>
#endif

// Below every score; unlike -INFINITY, it may be subtracted from itself.
constexpr float LOWEST = -3.402823466e38f;

// Sums are in float, whatever the elements are.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float(float x) { return x; }
template <>
__device__ inline __half from_float(float x) { return __float2half_rn(x); }
template <>
__device__ inline __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }

// Neighbours that one instruction loads or stores. Their address has to be a multiple
// of their size: a GPU faults otherwise.
template <typename T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Pack {
  T values[WIDTH];
};

// Elements in 16 bytes, the most that one instruction loads (before Blackwell).
template <typename T>
constexpr int WIDEST = 16 / sizeof(T);
