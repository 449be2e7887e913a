// Two sums in one kernel: the second must not overwrite what others still read of the
// first. No rung of the ladders reduces twice in the same way, but later kernels do.
#include "reduce.cuh"

template <typename T>
__global__ void variance_v1(T* out, const T* x, int size) {
  const T* from = x + int64_t(blockIdx.x) * size;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < size; i += blockDim.x) sum += to_float(from[i]);
  const float mean = block_reduce<Sum>(sum) / size;
  sum = 0.0f;
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const float distance = to_float(from[i]) - mean;
    sum += distance * distance;
  }
  sum = block_reduce<Sum>(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = from_float<T>(sum / size);
}
