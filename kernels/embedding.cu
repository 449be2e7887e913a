// Embedding: the rows of a table that token ids ask for.
//
//   out        [num_tokens, size]
//   token_ids  [num_tokens], each a row of the table
//   table      [vocab_size, size]
//
//   version    idea                              read   written  sectors  instructions
//   embedding  a copy in packs of 16 bytes    110,592    73,728    4,768           480
//
// Counted by the emulator for 32 tokens of 576 floats: bytes that threads ask for and
// write, sectors of 32 bytes that memory moves for that, and loads and stores of warps.
// Not yet measured on a GPU.
// Source: appendix A18, "Small kernels".
#include "common.cuh"

// A block for each part of a row, a thread for each pack of it.
template <typename T, int WIDTH>
__global__ void embedding(T* out, const int64_t* token_ids, const T* table, int size) {
  using Packed = Pack<T, WIDTH>;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= size) return;
  const T* from = table + token_ids[blockIdx.x] * size + i;
  *(Packed*)(out + int64_t(blockIdx.x) * size + i) = *(const Packed*)from;
}
