// The gated delta rule for one new token of each text. A head's state S fades, learns
// what the key k should give, and is read:
//
//   S = exp(log_decay) * S;  S = S + k (beta * (v - S^T k))^T;  out = S^T q
//
//   out        [num_texts, num_value_heads, value_head_dim]
//   states     [num_slots, num_value_heads, key_head_dim, value_head_dim]; changed
//   q, k       rows, q_stride and k_stride apart, each [num_key_heads, key_head_dim],
//              of any length: k is brought to the length of one, q to
//              1 / sqrt(key_head_dim)
//   v          rows, v_stride apart, each [num_value_heads, value_head_dim]
//   log_decay  [num_texts, num_value_heads]; beta likewise
//   slots      of the texts, [num_texts]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per column             1,845,248   264,192   35,000        16,464
//   v2       the state in shared memory        280,576   264,192   16,856         4,240
//   v3       a warp for a part of the columns  425,984   264,192   18,576         2,400
//
// Counted by the emulator for 2 texts, each with 2 heads of values for one of keys, all
// of 128 floats: bytes that threads ask for and write, sectors of 32 bytes that memory
// moves for that, and loads and stores of warps. The states are 262,144 bytes. Not yet
// measured on a GPU.
// Source: appendix A29, "Kernels for delta nets".
#include "delta_rule.cuh"

// v1: one thread per column of a state. It walks along the rows, to find what the
// column knows of the key; then again, to correct and to read it.
template <typename T>
__global__ void recurrent_delta_rule_v1(T* out, float* states, const T* q, const T* k,
                                        const T* v, const float* log_decay,
                                        const float* beta, const int64_t* slots,
                                        int q_stride, int k_stride, int v_stride,
                                        int group_size, int value_head_dim,
                                        int key_head_dim) {
  const int text = blockIdx.x, column = blockIdx.z * blockDim.x + threadIdx.x;
  if (column >= value_head_dim) return;
  Head<T> head = {out, q, k, v, log_decay, beta, q_stride, k_stride, v_stride,
                  int(gridDim.y), value_head_dim};
  float* state =
      head.find(blockIdx.y, group_size, key_head_dim, states, slots[text]) + column;
  q = head.q_of(text);
  k = head.k_of(text);

  float q_squares = 0.0f, k_squares = 0.0f, known = 0.0f, read = 0.0f;
  for (int i = 0; i < key_head_dim; i++) {
    q_squares += to_float(q[i]) * to_float(q[i]);
    k_squares += to_float(k[i]) * to_float(k[i]);
  }
  const float q_scale = to_length_one(q_squares) * rsqrtf(key_head_dim);
  const float k_scale = to_length_one(k_squares);
  const float decay = expf(head.log_decay_of(text));
  for (int i = 0; i < key_head_dim; i++)
    known += decay * state[i * value_head_dim] * to_float(k[i]) * k_scale;
  const float value = to_float(head.v_of(text)[column]);
  const float correction = head.beta_of(text) * (value - known);
  for (int i = 0; i < key_head_dim; i++) {
    float& number = state[i * value_head_dim];
    number = decay * number + to_float(k[i]) * k_scale * correction;
    read += number * to_float(q[i]) * q_scale;
  }
  head.out_of(text)[column] = from_float<T>(read);
}

// v2: a block copies its columns to shared memory, so that they are read once. What all
// columns need, the query, the key and their lengths, the block finds together.
template <typename T>
__global__ void recurrent_delta_rule_v2(T* out, float* states, const T* q, const T* k,
                                        const T* v, const float* log_decay,
                                        const float* beta, const int64_t* slots,
                                        int q_stride, int k_stride, int v_stride,
                                        int group_size, int value_head_dim,
                                        int key_head_dim) {
  extern __shared__ float shared[];  // [key_head_dim, 2 + blockDim.x]
  float *queries = shared, *keys = queries + key_head_dim;
  const int text = blockIdx.x, column = blockIdx.z * blockDim.x + threadIdx.x;
  Head<T> head = {out, q, k, v, log_decay, beta, q_stride, k_stride, v_stride,
                  int(gridDim.y), value_head_dim};
  float* state =
      head.find(blockIdx.y, group_size, key_head_dim, states, slots[text]) + column;
  float q_squares = 0.0f, k_squares = 0.0f;
  for (int i = threadIdx.x; i < key_head_dim; i += blockDim.x) {
    const float query = to_float(head.q_of(text)[i]);
    const float key = to_float(head.k_of(text)[i]);
    queries[i] = query;
    keys[i] = key;
    q_squares += query * query;
    k_squares += key * key;
  }
  // These sums have barriers: after them, all queries and keys are there.
  const float q_length = block_reduce<Sum>(q_squares);
  const float q_scale = to_length_one(q_length) * rsqrtf(key_head_dim);
  const float k_scale = to_length_one(block_reduce<Sum>(k_squares));
  if (column >= value_head_dim) return;

  float* mine = keys + key_head_dim + threadIdx.x;  // [key_head_dim], by blockDim.x
  float known = 0.0f, read = 0.0f;
  const float decay = expf(head.log_decay_of(text));
  for (int i = 0; i < key_head_dim; i++) {
    const float number = decay * state[i * value_head_dim];
    mine[i * blockDim.x] = number;
    known += number * keys[i];
  }
  const float value = to_float(head.v_of(text)[column]);
  const float correction = head.beta_of(text) * (value - known * k_scale) * k_scale;
  for (int i = 0; i < key_head_dim; i++) {
    const float number = mine[i * blockDim.x] + keys[i] * correction;
    state[i * value_head_dim] = number;
    read += number * queries[i];
  }
  head.out_of(text)[column] = from_float<T>(read * q_scale);
}

// v3: a warp has a part of the columns, and runs the rule alone.
template <typename T, int ROWS, int WIDTH>
__global__ void recurrent_delta_rule_v3(T* out, float* states, const T* q, const T* k,
                                        const T* v, const float* log_decay,
                                        const float* beta, const int64_t* slots,
                                        int q_stride, int k_stride, int v_stride,
                                        int group_size, int value_head_dim,
                                        int key_head_dim) {
  const int number = blockIdx.z * (blockDim.x / WARP) + threadIdx.x / WARP;
  Part<ROWS, WIDTH> part;
  part.key_head_dim = key_head_dim;
  part.value_head_dim = value_head_dim;
  if (!part.find(number)) return;  // the whole warp
  Head<T> head = {out, q, k, v, log_decay, beta, q_stride, k_stride, v_stride,
                  int(gridDim.y), value_head_dim};
  float* state =
      head.find(blockIdx.y, group_size, key_head_dim, states, slots[blockIdx.x]);
  part.load(state);
  part.step(head, blockIdx.x);
  part.store(state);
}
