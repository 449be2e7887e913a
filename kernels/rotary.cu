// Rotary position embedding, in place: pair (i, i + head_dim / 2) of a head turns by
// the angle of its token.
//
//   heads  rows of tokens, stride apart, each [num_heads, head_dim]
//   cos    float, [num_tokens, head_dim], both halves alike
//   sin    like cos, the first half negated
//
//   version           idea                        read   written  sectors  instructions
//   rotary_embedding  one read, one write      196,608    98,304    6,912           576
//
// Counted by the emulator for 32 tokens of 12 heads of 64 floats, all rotated: bytes
// that threads ask for and write, sectors of 32 bytes that memory moves for that, and
// loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A18, "Small kernels".
#include "common.cuh"

// A block for each token. Thread (x, y) has pack x of head y, and then of the head
// blockDim.y further, which turns by the same angles. WIDTH divides half a head.
template <typename T, int WIDTH>
__global__ void rotary_embedding(T* heads, const float* cos, const float* sin,
                                 int64_t stride, int num_rotated, int head_dim) {
  using Packed = Pack<T, WIDTH>;
  using Angles = Pack<float, WIDTH>;
  const int half = head_dim / 2, i = threadIdx.x * WIDTH;
  const int64_t token = blockIdx.x, place = token * head_dim + i;
  // One half of each says it all: of sin the second, which is not negated.
  const Angles cosines = *(const Angles*)(cos + place);
  const Angles sines = *(const Angles*)(sin + place + half);
  for (int head = threadIdx.y; head < num_rotated; head += blockDim.y) {
    T* from = heads + token * stride + int64_t(head) * head_dim + i;
    Packed first = *(const Packed*)from, second = *(const Packed*)(from + half);
    for (int j = 0; j < WIDTH; j++) {
      const float a = to_float(first.values[j]), b = to_float(second.values[j]);
      first.values[j] = from_float<T>(a * cosines.values[j] - b * sines.values[j]);
      second.values[j] = from_float<T>(b * cosines.values[j] + a * sines.values[j]);
    }
    *(Packed*)from = first;
    *(Packed*)(from + half) = second;
  }
}
