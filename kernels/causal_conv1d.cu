// Each channel of a text is convolved: what a token has there, and what the few tokens
// before it had, times the channel's factors, added up; then silu. A text keeps its
// last inputs in a slot, for its next tokens.
//
//   y                [num_tokens, conv_size]
//   states           the last inputs, oldest first, [num_slots, conv_size,
//                    kernel_size - 1]; changed
//   x                rows of tokens, x_stride apart, each [conv_size]
//   weight           [conv_size, kernel_size], the last for the token itself
//   slots            of the texts, [num_texts]
//   query_start_loc  the first row of each text, and the end, [num_texts + 1]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per channel of a text    272,896    37,376   23,524         2,412
//   v2       the last inputs in registers       54,272    37,376    4,176           704
//   v3       texts in pieces                    82,432    37,376    5,248           912
//
// Counted by the emulator for texts of 60, 1 and 3 tokens with 128 channels of floats
// and 4 factors: bytes that threads ask for and write, sectors of 32 bytes that memory
// moves for that, and loads and stores of warps; v3 has pieces of 16 tokens. Not yet
// measured on a GPU.
// Source: appendix A29, "Kernels for delta nets".
#include "activations.cuh"

// The inputs of a channel: those of a text's tokens, and those that were kept of the
// tokens before. They may be kept in a wider type.
template <typename T, typename Kept>
struct Channel {
  const T* x;
  Kept* kept;
  int x_stride, num_kept, start;  // start: the text's first token

  __device__ T operator[](int token) const {
    if (token >= start) return x[int64_t(token) * x_stride];
    return from_float<T>(to_float(kept[token - start + num_kept]));
  }
  // Keeps the inputs before `end`. If the text is short some are there already, and
  // move to the front: each before its place is taken.
  __device__ void keep(int end) const {
    for (int i = 0; i < num_kept; i++)
      kept[i] = from_float<Kept>(to_float((*this)[end - num_kept + i]));
  }
};

// v1: one thread per channel of a text walks over the tokens, and for each of them over
// the inputs that count.
template <typename T, typename Kept>
__global__ void causal_conv1d_v1(T* y, Kept* states, const T* x, const T* weight,
                                 const int64_t* slots, const int* query_start_loc,
                                 int x_stride, int conv_size, int kernel_size) {
  const int channel = blockIdx.y * blockDim.x + threadIdx.x, text = blockIdx.x;
  const int start = query_start_loc[text], end = query_start_loc[text + 1];
  if (channel >= conv_size || start >= end) return;
  const int num_kept = kernel_size - 1;
  Kept* kept = states + (slots[text] * conv_size + channel) * num_kept;
  const Channel<T, Kept> inputs = {x + channel, kept, x_stride, num_kept, start};
  weight += int64_t(channel) * kernel_size;
  for (int token = start; token < end; token++) {
    float sum = 0.0f;
    for (int i = 0; i < kernel_size; i++)
      sum += to_float(inputs[token - num_kept + i]) * to_float(weight[i]);
    y[int64_t(token) * conv_size + channel] = from_float<T>(Silu::of(sum));
  }
  inputs.keep(end);
}

// Convolves the tokens from `first` to `end`. The inputs that count move along by one
// with each token, in registers, so that each is read once.
template <int KERNEL, typename T, typename Kept>
__device__ void convolve(T* y, const Channel<T, Kept>& inputs, const T* weight,
                         int first, int end, int conv_size) {
  float factors[KERNEL], window[KERNEL];
#pragma unroll
  for (int i = 0; i < KERNEL; i++) factors[i] = to_float(weight[i]);
#pragma unroll
  for (int i = 1; i < KERNEL; i++) window[i] = to_float(inputs[first - KERNEL + i]);
  for (int token = first; token < end; token++) {
    const float input = to_float(inputs.x[int64_t(token) * inputs.x_stride]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KERNEL; i++) {
      window[i] = i < KERNEL - 1 ? window[i + 1] : input;
      sum += window[i] * factors[i];
    }
    y[int64_t(token) * conv_size] = from_float<T>(Silu::of(sum));
  }
}

// v2: the last inputs of a channel, and its factors, are in registers.
template <typename T, typename Kept, int KERNEL>
__global__ void causal_conv1d_v2(T* y, Kept* states, const T* x, const T* weight,
                                 const int64_t* slots, const int* query_start_loc,
                                 int x_stride, int conv_size) {
  const int channel = blockIdx.y * blockDim.x + threadIdx.x, text = blockIdx.x;
  const int start = query_start_loc[text], end = query_start_loc[text + 1];
  if (channel >= conv_size || start >= end) return;
  Kept* kept = states + (slots[text] * conv_size + channel) * (KERNEL - 1);
  const Channel<T, Kept> inputs = {x + channel, kept, x_stride, KERNEL - 1, start};
  weight += int64_t(channel) * KERNEL;
  convolve<KERNEL>(y + channel, inputs, weight, start, end, conv_size);
  inputs.keep(end);
}

// Texts are cut into pieces of `size` tokens, and their pieces are numbered: those of
// text t from query_start_loc[t] / size + t on. So no two pieces have one number, and
// each block finds the text of its own by halving.
__device__ inline int text_of(int number, const int* query_start_loc, int num_texts,
                              int size) {
  int low = 0, high = num_texts - 1;  // it is one of these
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const bool is_behind = query_start_loc[middle] / size + middle > number;
    if (is_behind) high = middle - 1;
    else low = middle;
  }
  return low;
}

// v3: one thread per channel of a piece. Pieces are not shorter than what is kept, so
// that only a text's first piece looks at what was kept; it alone also replaces it.
template <typename T, typename Kept, int KERNEL>
__global__ void causal_conv1d_v3(T* y, Kept* states, const T* x, const T* weight,
                                 const int64_t* slots, const int* query_start_loc,
                                 int num_texts, int size, int x_stride, int conv_size) {
  const int channel = blockIdx.y * blockDim.x + threadIdx.x;
  const int text = text_of(blockIdx.x, query_start_loc, num_texts, size);
  const int start = query_start_loc[text], end = query_start_loc[text + 1];
  const int piece = blockIdx.x - (start / size + text), first = start + piece * size;
  if (channel >= conv_size || first >= end) return;
  Kept* kept = states + (slots[text] * conv_size + channel) * (KERNEL - 1);
  const Channel<T, Kept> inputs = {x + channel, kept, x_stride, KERNEL - 1, start};
  weight += int64_t(channel) * KERNEL;
  convolve<KERNEL>(y + channel, inputs, weight, first, min(first + size, end),
                   conv_size);
  if (piece == 0) inputs.keep(end);
}
