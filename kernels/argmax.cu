// Argmax: the largest score of each row, and where it first stands. NaN counts as the
// largest. Rows are `stride` apart, [num_rows, size].
//
//   version  idea                                 read   written  sectors  instructions
//   v1       one thread per row                131,088        48   32,774         8,195
//   v2       a block per row, keys            131,088        48    4,108         1,036
//   v3       several blocks per row            131,216       176    4,128         1,056
//
// Counted by the emulator for 4 rows of 8,192 floats: bytes that threads ask for and
// write, sectors of 32 bytes that memory moves for that, and loads and stores of warps.
// Not yet measured on a GPU.
// Source: appendix A19, "Sampling kernels".
#include "tokens.cuh"

// v1: one thread per row, the way a loop would do it.
template <typename T>
__global__ void argmax_v1(T* largest, int64_t* ids, const T* logits, int64_t stride,
                          int num_rows, int size) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  const T* scores = logits + row * stride;

  int best = 0;
  float top = to_float(scores[0]);
  for (int i = 1; i < size; i++) {
    const float score = to_float(scores[i]);
    if (score > top || (score != score && top == top)) {  // the first NaN stays
      top = score;
      best = i;
    }
  }
  largest[row] = scores[best];
  ids[row] = best;
}

// v2: one block per row. Score and id travel in one number, the order key, so that a
// shuffle takes both, and the larger of two keys is the better token.
template <typename T>
__device__ Key best_of(const T* scores, int start, int end) {
  Key best = 0;
  for (int i = start + threadIdx.x; i < end; i += blockDim.x)
    best = max(best, key_of(to_float(scores[i]), i));
  return block_reduce<Best>(best);
}

template <typename T>
__global__ void argmax_v2(T* largest, int64_t* ids, const T* logits, int64_t stride,
                          int size) {
  const T* scores = logits + blockIdx.x * stride;
  const int best = id_of(best_of(scores, 0, size));
  if (threadIdx.x == 0) {
    largest[blockIdx.x] = scores[best];
    ids[blockIdx.x] = best;
  }
}

// v3: several blocks per row, each for a part of it: few rows would leave most of a GPU
// idle. A second kernel finds the best of the best.
template <typename T>
__global__ void argmax_v3(unsigned long long* bests, const T* logits, int64_t stride,
                          int size, int part_size) {
  const int row = blockIdx.y, num_parts = gridDim.x;
  const int start = blockIdx.x * part_size;
  const T* scores = logits + row * stride;
  const Key best = best_of(scores, start, min(start + part_size, size));
  if (threadIdx.x == 0) bests[row * num_parts + blockIdx.x] = best;
}

template <typename T>
__global__ void merge_bests(T* largest, int64_t* ids, const unsigned long long* bests,
                            int num_parts, const T* logits, int64_t stride) {
  const int row = blockIdx.x;
  Key best = 0;
  for (int i = threadIdx.x; i < num_parts; i += blockDim.x)
    best = max(best, bests[row * num_parts + i]);
  best = block_reduce<Best>(best);
  if (threadIdx.x == 0) {
    largest[row] = logits[row * stride + id_of(best)];
    ids[row] = id_of(best);
  }
}
