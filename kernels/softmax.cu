// Softmax: the scores of each row become shares with sum one. Rows are contiguous,
// [num_rows, size].
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per row, three passes    221,184    73,728   73,728         2,304
//   v2       a block per row, three passes     221,184    73,728    9,216         2,304
//   v3       online: two passes                147,456    73,728    6,912         1,728
//   v4       a warp per row, no barriers       147,456    73,728    6,912         1,728
//
// Counted by the emulator for 32 rows of 576 floats: bytes that threads ask for and
// write, sectors of 32 bytes that memory moves for that, and loads and stores of warps.
// Not yet measured on a GPU.
// Source: chapter 6, "CUDA kernels".
#include "reduce.cuh"

// v1: one thread per row. Without the largest score exp() would overflow at 89.
template <typename T>
__global__ void softmax_v1(T* out, const T* x, int num_rows, int size) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  const T* from = x + int64_t(row) * size;
  T* to = out + int64_t(row) * size;

  float top = LOWEST;
  for (int i = 0; i < size; i++) top = fmaxf(top, to_float(from[i]));
  float total = 0.0f;
  for (int i = 0; i < size; i++) total += __expf(to_float(from[i]) - top);
  for (int i = 0; i < size; i++)
    to[i] = from_float<T>(__expf(to_float(from[i]) - top) / total);
}

// v2: one block per row. Each thread passes over its own part of the row, then the
// block joins what its threads have found.
template <typename T>
__global__ void softmax_v2(T* out, const T* x, int size) {
  const T* from = x + int64_t(blockIdx.x) * size;
  T* to = out + int64_t(blockIdx.x) * size;

  float top = LOWEST;
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    top = fmaxf(top, to_float(from[i]));
  top = block_reduce<Max>(top);
  float total = 0.0f;
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    total += __expf(to_float(from[i]) - top);
  total = block_reduce<Sum>(total);
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    to[i] = from_float<T>(__expf(to_float(from[i]) - top) / total);
}

// The largest score so far, and the sum relative to it: a sum of exp(score - top).
struct Running {
  float top = LOWEST, total = 0.0f;

  __device__ void add(float score) {
    const float new_top = fmaxf(top, score);
    // The sum so far was relative to the old top.
    total = total * __expf(top - new_top) + __expf(score - new_top);
    top = new_top;
  }
};

// v3: one pass for both numbers. A thread with a lower top than the block's corrects
// its sum once more, at the end.
template <typename T>
__global__ void softmax_v3(T* out, const T* x, int size) {
  const T* from = x + int64_t(blockIdx.x) * size;
  T* to = out + int64_t(blockIdx.x) * size;

  Running seen;
  for (int i = threadIdx.x; i < size; i += blockDim.x) seen.add(to_float(from[i]));
  const float top = block_reduce<Max>(seen.top);
  const float total = block_reduce<Sum>(seen.total * __expf(seen.top - top));
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    to[i] = from_float<T>(__expf(to_float(from[i]) - top) / total);
}

// v4: one warp per row, several rows per block. Rows that are shorter than a block
// leave threads idle; a warp wastes fewer, and its lanes never wait at a barrier.
template <typename T>
__global__ void softmax_v4(T* out, const T* x, int num_rows, int size) {
  const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (row >= num_rows) return;  // the whole warp
  const int lane = threadIdx.x % WARP;
  const T* from = x + int64_t(row) * size;
  T* to = out + int64_t(row) * size;

  Running seen;
  for (int i = lane; i < size; i += WARP) seen.add(to_float(from[i]));
  const float top = warp_reduce<Max>(seen.top);
  const float total = warp_reduce<Sum>(seen.total * __expf(seen.top - top));
  for (int i = lane; i < size; i += WARP)
    to[i] = from_float<T>(__expf(to_float(from[i]) - top) / total);
}
