// RMSNorm: each row is scaled to a root mean square of one, then each column by its
// weight. Rows are contiguous, [num_rows, hidden].
//
//   version  idea                                 read   written  sectors  instructions
//   v1       one thread per row                221,184    73,728   55,872         2,304
//   v2       a block per row, a shared sum     221,184    73,728    9,216         2,304
//   v3       shuffles instead of barriers      221,184    73,728    9,216         2,304
//   v4       packs of 16 bytes                 221,184    73,728    9,216           640
//   v5       packs, fused with an addition     221,184   147,456   11,520           800
//
// Counted by the emulator for 32 rows of 576 floats: bytes that threads ask for and
// write, sectors of 32 bytes that memory moves for that, and loads and stores of warps.
// Not yet measured on a GPU.
// Source: chapter 6, "CUDA kernels".
#include "reduce.cuh"

// One number of the result. Models differ in where they round: Llama's rounds before
// the weight, Gemma's, which stores its weights less one, only at the end.
template <typename T>
__device__ T weighted(float normed, T weight, int plus_one) {
  if (plus_one) return from_float<T>(normed * (1.0f + to_float(weight)));
  return from_float<T>(to_float(from_float<T>(normed)) * to_float(weight));
}

// v1: one thread per row, the way a loop over rows would do it.
template <typename T>
__global__ void rms_norm_v1(T* out, const T* x, const T* weight, float eps,
                            int num_rows, int hidden, int plus_one) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;  // the last block has threads to spare
  const T* from = x + int64_t(row) * hidden;
  T* to = out + int64_t(row) * hidden;

  float sum = 0.0f;
  for (int i = 0; i < hidden; i++) {
    const float value = to_float(from[i]);
    sum += value * value;
  }
  const float scale = rsqrtf(sum / hidden + eps);
  for (int i = 0; i < hidden; i++)
    to[i] = weighted(to_float(from[i]) * scale, weight[i], plus_one);
}

// v2: one block per row. Neighbouring threads read neighbouring numbers, and a tree of
// additions in shared memory makes one sum of theirs. The block has 2^n threads.
constexpr int MAX_THREADS = 1024;

template <typename T>
__global__ void rms_norm_v2(T* out, const T* x, const T* weight, float eps,
                            int hidden, int plus_one) {
  __shared__ float sums[MAX_THREADS];
  const T* from = x + int64_t(blockIdx.x) * hidden;
  T* to = out + int64_t(blockIdx.x) * hidden;

  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float value = to_float(from[i]);
    sum += value * value;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();  // the next round reads what this one wrote
  }
  const float scale = rsqrtf(sums[0] / hidden + eps);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    to[i] = weighted(to_float(from[i]) * scale, weight[i], plus_one);
}

// v3: shuffles pass numbers from register to register within a warp; shared memory and
// barriers are left for one number per warp. The block has whole warps.
template <typename T>
__global__ void rms_norm_v3(T* out, const T* x, const T* weight, float eps,
                            int hidden, int plus_one) {
  const T* from = x + int64_t(blockIdx.x) * hidden;
  T* to = out + int64_t(blockIdx.x) * hidden;

  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float value = to_float(from[i]);
    sum += value * value;
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum) / hidden + eps);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    to[i] = weighted(to_float(from[i]) * scale, weight[i], plus_one);
}

// v4: loads and stores of WIDTH numbers at once. Rows have to begin at multiples of
// that size, so hidden is a multiple of WIDTH.
template <typename T, int WIDTH>
__global__ void rms_norm_v4(T* out, const T* x, const T* weight, float eps,
                            int hidden, int plus_one) {
  using Packed = Pack<T, WIDTH>;
  const Packed* from = (const Packed*)(x + int64_t(blockIdx.x) * hidden);
  const Packed* weights = (const Packed*)weight;
  Packed* to = (Packed*)(out + int64_t(blockIdx.x) * hidden);

  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden / WIDTH; i += blockDim.x) {
    const Packed pack = from[i];
    for (int j = 0; j < WIDTH; j++) {
      const float value = to_float(pack.values[j]);
      sum += value * value;
    }
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum) / hidden + eps);
  for (int i = threadIdx.x; i < hidden / WIDTH; i += blockDim.x) {
    const Packed pack = from[i], scales = weights[i];
    Packed result;
    for (int j = 0; j < WIDTH; j++) {
      const float normed = to_float(pack.values[j]) * scale;
      result.values[j] = weighted(normed, scales.values[j], plus_one);
    }
    to[i] = result;
  }
}

// v5: residual += x, then the norm of that sum: two kernels in one. The sum stays in
// shared memory (hidden * sizeof(T) bytes), where a thread finds its own packs again.
template <typename T, int WIDTH>
__global__ void rms_norm_v5(T* out, T* residual, const T* x, const T* weight, float eps,
                            int hidden, int plus_one) {
  using Packed = Pack<T, WIDTH>;
  extern __shared__ int4 row_memory[];  // int4, so that it begins at a multiple of 16
  Packed* row = (Packed*)row_memory;
  const Packed* from = (const Packed*)(x + int64_t(blockIdx.x) * hidden);
  const Packed* weights = (const Packed*)weight;
  Packed* residuals = (Packed*)(residual + int64_t(blockIdx.x) * hidden);
  Packed* to = (Packed*)(out + int64_t(blockIdx.x) * hidden);

  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden / WIDTH; i += blockDim.x) {
    Packed pack = residuals[i];
    const Packed added = from[i];
    for (int j = 0; j < WIDTH; j++) {
      const float both = to_float(pack.values[j]) + to_float(added.values[j]);
      pack.values[j] = from_float<T>(both);
      const float value = to_float(pack.values[j]);  // rounded, as the residual is
      sum += value * value;
    }
    residuals[i] = pack;
    row[i] = pack;
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum) / hidden + eps);
  for (int i = threadIdx.x; i < hidden / WIDTH; i += blockDim.x) {
    const Packed pack = row[i], scales = weights[i];
    Packed result;
    for (int j = 0; j < WIDTH; j++) {
      const float normed = to_float(pack.values[j]) * scale;
      result.values[j] = weighted(normed, scales.values[j], plus_one);
    }
    to[i] = result;
  }
}
