// One number from those of many threads: of a warp, by shuffles; of a block, by
// shuffles within its warps and shared memory between them.
// Source: chapter 6, "CUDA kernels".
#pragma once
#include "common.cuh"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffff;

// How two numbers become one, and the number that changes nothing.
struct Sum {
  static constexpr float NOTHING = 0.0f;
  template <typename N> __device__ static N join(N a, N b) { return a + b; }
};
struct Max {
  static constexpr float NOTHING = LOWEST;
  __device__ static float join(float a, float b) { return fmaxf(a, b); }
};

// Of a full warp; every lane gets the result. Each round, a lane joins its number with
// that of a partner: 16 lanes away, then 8, 4, 2 and 1.
template <typename How, typename Number>
__device__ Number warp_reduce(Number value) {
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    value = How::join(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// Of a block of whole warps; every thread gets the result.
template <typename How, typename Number>
__device__ Number block_reduce(Number value) {
  __shared__ Number of_warps[WARP];  // a block has 32 warps at most
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  value = warp_reduce<How>(value);
  __syncthreads();  // some may still read what an earlier call has left here
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / WARP ? of_warps[lane] : Number(How::NOTHING);
  return warp_reduce<How>(value);
}
