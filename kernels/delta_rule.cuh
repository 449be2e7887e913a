// What the kernels of the delta rule share: where the numbers of a token are, and how a
// warp runs the rule with a part of a state in its registers.
// Source: appendix A29, "Kernels for delta nets".
#pragma once
#include "reduce.cuh"

// The numbers that a head of values has of each token.
template <typename T>
struct Head {
  T* out;
  const T *q, *k, *v;
  const float *log_decay, *beta;
  int q_stride, k_stride, v_stride, num_heads, value_head_dim;

  // Finds them, and returns the head's state. Neighbours share a head of keys.
  __device__ float* find(int head, int group_size, int key_head_dim, float* states,
                         int64_t slot) {
    out += head * value_head_dim;
    q += head / group_size * key_head_dim;
    k += head / group_size * key_head_dim;
    v += head * value_head_dim;
    log_decay += head;
    beta += head;
    return states + (slot * num_heads + head) * key_head_dim * value_head_dim;
  }
  __device__ const T* q_of(int token) const { return q + int64_t(token) * q_stride; }
  __device__ const T* k_of(int token) const { return k + int64_t(token) * k_stride; }
  __device__ const T* v_of(int token) const { return v + int64_t(token) * v_stride; }
  __device__ T* out_of(int token) const {
    return out + int64_t(token) * num_heads * value_head_dim;
  }
  __device__ float log_decay_of(int token) const {
    return log_decay[int64_t(token) * num_heads];
  }
  __device__ float beta_of(int token) const { return beta[int64_t(token) * num_heads]; }
};

// The factor that brings a row to the length of one, or a little less.
__device__ inline float to_length_one(float squares) { return rsqrtf(squares + 1e-6f); }

// A part of a state: neighbouring columns, and all rows. A warp has it in registers.
// Its lanes are eight teams of four: a team has every eighth row, a lane WIDTH columns.
constexpr int TEAMS = 8;
constexpr int LANES = WARP / TEAMS;

// Adds up what the teams have, for each column. Every lane gets the result.
__device__ inline float over_rows(float sum) {
  for (int offset = LANES; offset < WARP; offset *= 2)
    sum += __shfl_xor_sync(ALL_LANES, sum, offset);
  return sum;
}

template <int ROWS, int WIDTH>
struct Part {
  using Packed = Pack<float, WIDTH>;
  int row, column, key_head_dim, value_head_dim;  // the lane's first row and column
  Packed state[ROWS];

  // Chooses a part by its number; there may be none of that number.
  __device__ bool find(int number) {
    row = threadIdx.x % WARP / LANES;
    const int first = number * LANES * WIDTH;
    column = first + threadIdx.x % LANES * WIDTH;
    return first < value_head_dim;
  }
  __device__ bool has(int i) const {
    return row + i * TEAMS < key_head_dim && column < value_head_dim;
  }
  __device__ Packed* place(float* from, int i) const {
    return (Packed*)(from + (row + i * TEAMS) * value_head_dim + column);
  }
  __device__ void load(float* from) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) state[i] = has(i) ? *place(from, i) : Packed{};
  }
  __device__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (has(i)) *place(to, i) = state[i];
  }

  // Runs the rule for a token. Lengths are of rows, so they may wait until sums over
  // rows are there.
  template <typename T>
  __device__ void step(const Head<T>& head, int token) {
    const T *q = head.q_of(token), *k = head.k_of(token), *v = head.v_of(token);
    float queries[ROWS], keys[ROWS], q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int dim = row + i * TEAMS;
      queries[i] = dim < key_head_dim ? to_float(q[dim]) : 0.0f;
      keys[i] = dim < key_head_dim ? to_float(k[dim]) : 0.0f;
      q_squares += queries[i] * queries[i];
      k_squares += keys[i] * keys[i];
    }
    const float q_scale = to_length_one(over_rows(q_squares)) * rsqrtf(key_head_dim);
    const float k_scale = to_length_one(over_rows(k_squares));
    const float decay = expf(head.log_decay_of(token)), beta = head.beta_of(token);
    const bool is_there = column < value_head_dim;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      float known = 0.0f, read = 0.0f;
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        state[i].values[j] *= decay;
        known += state[i].values[j] * keys[i];
      }
      const float value = is_there ? to_float(v[column + j]) : 0.0f;
      const float correction = beta * (value - over_rows(known) * k_scale) * k_scale;
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        state[i].values[j] += keys[i] * correction;
        read += state[i].values[j] * queries[i];
      }
      read = over_rows(read) * q_scale;
      if (is_there && row == 0) head.out_of(token)[column + j] = from_float<T>(read);
    }
  }
};
