// What the experts of a token say, weighed and added up, the first choice first.
//
//   out      [num_tokens, size]
//   y        rows, sorted by expert, [num_choices, size]
//   order    which choice each row is, [num_choices]
//   weights  of the choices, [num_tokens, top_k]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a block looks for its rows        589,824    32,768   13,312         4,608
//   v2       rows say where they belong        591,872    33,792   12,009         3,152
//
// Counted by the emulator for 32 tokens with 8 choices and rows of 256 floats: bytes
// that threads ask for and write, sectors of 32 bytes that memory moves for that, and
// loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A26, "Kernels for experts".
#include "common.cuh"

// v1: a block per token walks along the order, to find the rows of its choices.
template <typename T>
__global__ void moe_combine_v1(T* out, const T* y, const int64_t* order,
                               const float* weights, int num_choices, int top_k,
                               int size) {
  extern __shared__ int rows[];  // of its choices, [top_k]
  const int first = blockIdx.x * top_k;
  for (int row = threadIdx.x; row < num_choices; row += blockDim.x) {
    const int choice = order[row] - first;
    if (choice >= 0 && choice < top_k) rows[choice] = row;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    float sum = 0.0f;
    for (int choice = 0; choice < top_k; choice++)
      sum += weights[first + choice] * to_float(y[int64_t(rows[choice]) * size + i]);
    out[int64_t(blockIdx.x) * size + i] = from_float<T>(sum);
  }
}

// v2: a first kernel turns the order around, once for all. Then a thread has a pack of
// a token's result.
__global__ void turn_around(int* rows, const int64_t* order, int num_choices) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < num_choices) rows[order[row]] = row;
}

template <typename T, int WIDTH>
__global__ void moe_combine_v2(T* out, const T* y, const int* rows,
                               const float* weights, int top_k, int size) {
  using Packed = Pack<T, WIDTH>;
  const int i = blockIdx.y * blockDim.x + threadIdx.x, num_packs = size / WIDTH;
  if (i >= num_packs) return;
  rows += blockIdx.x * top_k;
  weights += blockIdx.x * top_k;
  float sums[WIDTH] = {};
  for (int choice = 0; choice < top_k; choice++) {
    const Packed pack = ((const Packed*)y)[int64_t(rows[choice]) * num_packs + i];
    for (int j = 0; j < WIDTH; j++)
      sums[j] += weights[choice] * to_float(pack.values[j]);
  }
  Packed pack;
  for (int j = 0; j < WIDTH; j++) pack.values[j] = from_float<T>(sums[j]);
  ((Packed*)out)[int64_t(blockIdx.x) * num_packs + i] = pack;
}
