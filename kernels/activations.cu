// Gated activations: act(gate) * up for rows of [gate, up], [num_rows, 2 * size].
//
//   version      idea                             read   written  sectors  instructions
//   act_and_mul  one pass, packs of 16 bytes   147,456    73,728    6,912           480
//
// Counted by the emulator for 32 rows of 2 * 576 floats: bytes that threads ask for and
// write, sectors of 32 bytes that memory moves for that, and loads and stores of warps.
// Not yet measured on a GPU.
// Source: appendix A18, "Small kernels".
#include "activations.cuh"

// A block for each part of a row, a thread for each pack of the result.
template <typename Activation, typename T, int WIDTH>
__global__ void act_and_mul(T* out, const T* gate_up, int size) {
  using Packed = Pack<T, WIDTH>;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= size) return;
  const T* row = gate_up + int64_t(blockIdx.x) * 2 * size;
  const Packed gate = *(const Packed*)(row + i), up = *(const Packed*)(row + size + i);
  Packed result;
  for (int j = 0; j < WIDTH; j++) {
    const float share = Activation::of(to_float(gate.values[j]));
    result.values[j] = from_float<T>(share * to_float(up.values[j]));
  }
  *(Packed*)(out + int64_t(blockIdx.x) * size + i) = result;
}
