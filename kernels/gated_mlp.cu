// The first half of a gated MLP for a few rows: act(x W_gate^T) * (x W_up^T).
//
//   out     [num_rows, size]
//   x       [num_rows, hidden]
//   weight  W_gate above W_up, [2 * size, hidden]
//
//   version    idea                              read   written  sectors  instructions
//   gated_mlp  each weight is read once     1,327,104     1,536   41,856         3,264
//
// Counted by the emulator for 4 rows of 576 floats and a size of 96: bytes that threads
// ask for and write, sectors of 32 bytes that memory moves for that, and loads and
// stores of warps. Not yet measured on a GPU.
// Source: appendix A18, "Small kernels".
#include "activations.cuh"
#include "reduce.cuh"

// A warp for each column of the result, for up to ROWS rows at once: a lane adds up
// its packs of both products, and the activation comes while they are in registers.
template <typename Activation, typename T, int WIDTH, int ROWS>
__global__ void gated_mlp(T* out, const T* x, const T* weight, int num_rows, int hidden,
                          int size) {
  using Packed = Pack<T, WIDTH>;
  const int lane = threadIdx.x % WARP, num_packs = hidden / WIDTH;
  const int column = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (column >= size) return;  // the whole warp
  const Packed* gates = (const Packed*)(weight + int64_t(column) * hidden);
  const Packed* ups = gates + int64_t(size) * num_packs;
  const int first = blockIdx.y * ROWS, num = min(ROWS, num_rows - first);
  const Packed* rows = (const Packed*)(x + int64_t(first) * hidden);

  float gate_sums[ROWS] = {}, up_sums[ROWS] = {};
  for (int i = lane; i < num_packs; i += WARP) {
    const Packed gate = gates[i], up = ups[i];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      if (row >= num) continue;
      const Packed pack = rows[int64_t(row) * num_packs + i];
      for (int j = 0; j < WIDTH; j++) {
        const float value = to_float(pack.values[j]);
        gate_sums[row] += value * to_float(gate.values[j]);
        up_sums[row] += value * to_float(up.values[j]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (row >= num) continue;
    const float gate = warp_reduce<Sum>(gate_sums[row]);
    const float up = warp_reduce<Sum>(up_sums[row]);
    if (lane == 0)
      out[int64_t(first + row) * size + column] =
          from_float<T>(Activation::of(gate) * up);
  }
}
