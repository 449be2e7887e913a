// What the kernels of sampling share: which of two tokens is better, how much each
// weighs, and where a sum of weights reaches a target.
// Source: appendix A19, "Sampling kernels".
#pragma once
#include "reduce.cuh"

// Whole numbers in the order of the scores: NaN above all, and -0 where 0 is.
__device__ inline unsigned order_of(float score) {
  if (score != score) return 0xffffffff;
  const unsigned bits = __float_as_uint(score + 0.0f);  // -0 + 0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// The order key of a token: the better the token, the larger; of equal scores the lower
// id is better. No two tokens have the same key, and none has 0.
using Key = unsigned long long;
__device__ inline Key key_of(float score, int id) {
  return Key(order_of(score)) << 32 | ~unsigned(id);
}
__device__ inline int id_of(Key key) { return ~unsigned(key); }

struct Best {
  static constexpr Key NOTHING = 0;
  __device__ static Key join(Key a, Key b) { return max(a, b); }
};

// How much of the line a token fills: its share, which is its probability divided by
// that of the best token, in whole units. Sums of whole numbers are exact: threads may
// add them in any order.
using Mass = unsigned long long;
constexpr float UNITS = 0x1p44f;      // of the best token: 64 bits hold 2^19 of these
constexpr float COLDEST = 0x1p-126f;  // colder, and only the best token has a share

// The scores that a request draws from.
template <typename T>
struct Row {
  const T* scores;
  int size;
  float top, temperature;

  // Without a best score that is a number there is nothing to draw.
  __device__ bool has_numbers() const { return fabsf(top) <= -LOWEST; }
  __device__ float score(int id) const { return to_float(scores[id]); }
  __device__ float share(float score) const {
    return expf((score - top) / temperature);
  }
  __device__ Mass mass(float score) const { return Mass(share(score) * UNITS); }
};

template <typename T>
__device__ Row<T> row_of(int request, const T* logits, int64_t stride, int size,
                         const T* largest, const int64_t* rows,
                         const double* temperatures) {
  const int64_t row = rows[request];
  const float temperature = fmaxf(float(temperatures[request]), COLDEST);
  return {logits + row * stride, size, to_float(largest[row]), temperature};
}

// The sum of the numbers of the threads before this one; `total` becomes that of all.
// Each round of a warp adds the sums of lanes 1, 2, 4, 8 and 16 places before.
__device__ inline Mass block_scan(Mass value, Mass& total) {
  __shared__ Mass of_warps[WARP];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  Mass sum = value;
  for (int offset = 1; offset < WARP; offset *= 2) {
    const Mass before = __shfl_up_sync(ALL_LANES, sum, offset);
    if (lane >= offset) sum += before;
  }
  __syncthreads();  // some may still read what an earlier call has left here
  if (lane == WARP - 1) of_warps[warp] = sum;
  __syncthreads();
  sum -= value;
  total = 0;
  for (int i = 0; i < blockDim.x / WARP; i++) {
    if (i < warp) sum += of_warps[i];
    total += of_warps[i];
  }
  return sum;
}

// Where a target lies: in the weight of `index`; those before it add up to `before`.
struct Place {
  int index;
  Mass before;
};

// The first of some weights with which their sum reaches a target. All of them together
// have to reach it. Every thread of the block gets the result.
template <typename Weigh>
__device__ Place reach(Mass target, int size, Weigh weigh) {
  __shared__ Place place;
  Mass before = 0;
  for (int start = 0; before < target; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const Mass weight = i < size ? weigh(i) : 0;
    Mass total;
    const Mass mine = before + block_scan(weight, total);
    if (mine < target && target <= mine + weight) place = {i, mine};
    before += total;
  }
  __syncthreads();
  return place;
}
