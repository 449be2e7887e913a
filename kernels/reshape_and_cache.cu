// The keys and values of new tokens, put into their slots of the cache.
//
//   k, v              rows of tokens, k_stride and v_stride apart, each of size numbers
//   k_cache, v_cache  of a layer, [num_slots, size]
//   slots             [num_tokens]; a token with a negative one goes nowhere
//
//   version            idea                       read   written  sectors  instructions
//   reshape_and_cache  a copy in packs          65,536    49,152    3,136           320
//
// Counted by the emulator for 32 tokens with 3 key heads of 64 floats, in rows that
// also hold 9 queries: bytes that threads ask for and write, sectors of 32 bytes that
// memory moves for that, and loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A18, "Small kernels".
#include "common.cuh"

// A block for each token; WIDTH divides size and both strides.
template <typename T, int WIDTH>
__global__ void reshape_and_cache(const T* k, const T* v, T* k_cache, T* v_cache,
                                  const int64_t* slots, int64_t k_stride,
                                  int64_t v_stride, int size) {
  using Packed = Pack<T, WIDTH>;
  const int64_t token = blockIdx.x, slot = slots[token];
  if (slot < 0) return;  // padding
  const Packed* key = (const Packed*)(k + token * k_stride);
  const Packed* value = (const Packed*)(v + token * v_stride);
  Packed* key_to = (Packed*)(k_cache + slot * size);
  Packed* value_to = (Packed*)(v_cache + slot * size);
  for (int i = threadIdx.x; i < size / WIDTH; i += blockDim.x) {
    key_to[i] = key[i];
    value_to[i] = value[i];
  }
}
