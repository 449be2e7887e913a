// The gated delta rule for any number of new tokens of each text: as in
// recurrent_delta_rule.cu, one token after another.
//
//   query_start_loc  the first row of each text, and the end, [num_texts + 1]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a warp for a part of the columns  958,464   141,312   26,976        14,000
//   v2       16 tokens at a time               426,304   141,312   14,900         5,048
//
// Counted by the emulator for a text of 20 tokens with 2 heads of values for one of
// keys, all of 128 halves: bytes that threads ask for and write, sectors of 32 bytes
// that memory moves for that, and loads and stores of warps. The states are 131,072
// bytes. Not yet measured on a GPU.
// Source: appendix A29, "Kernels for delta nets".
#include "delta_rule.cuh"

// v1: a warp has a part of the columns, from a text's first token to its last.
template <typename T, int ROWS, int WIDTH>
__global__ void chunked_delta_rule_v1(T* out, float* states, const T* q, const T* k,
                                      const T* v, const float* log_decay,
                                      const float* beta, const int64_t* slots,
                                      const int* query_start_loc, int q_stride,
                                      int k_stride, int v_stride, int group_size,
                                      int value_head_dim, int key_head_dim) {
  const int number = blockIdx.z * (blockDim.x / WARP) + threadIdx.x / WARP;
  Part<ROWS, WIDTH> part;
  part.key_head_dim = key_head_dim;
  part.value_head_dim = value_head_dim;
  if (!part.find(number)) return;  // the whole warp
  Head<T> head = {out, q, k, v, log_decay, beta, q_stride, k_stride, v_stride,
                  int(gridDim.y), value_head_dim};
  float* state =
      head.find(blockIdx.y, group_size, key_head_dim, states, slots[blockIdx.x]);
  const int start = query_start_loc[blockIdx.x], end = query_start_loc[blockIdx.x + 1];
  part.load(state);
  for (int token = start; token < end; token++) part.step(head, token);
  part.store(state);
}

// v2: a block looks at a chunk of tokens at a time. What these have to do with each
// other is the same for all columns, so the block computes it once, in shared memory.
// Its warps then run the rule with what the state was before the chunk.
constexpr int CHUNK = 16, THREADS = 128;

template <int SIZE>
__device__ float dot(const float* a, const float* b) {
  using Four = Pack<float, 4>;
  float sum = 0.0f;
  for (int i = 0; i < SIZE; i += 4) {
    const Four x = *(const Four*)(a + i), y = *(const Four*)(b + i);
    for (int j = 0; j < 4; j++) sum += x.values[j] * y.values[j];
  }
  return sum;
}

// What the tokens from `first` to `end` leave of a state. A quotient of what is left
// since token 0 would be the same, but 0 / 0 where nothing is left.
__device__ inline float what_is_left(const float* log_decays, int first, int end) {
  float sum = 0.0f;
  for (int token = first; token < end; token++) sum += log_decays[token];
  return expf(sum);
}

template <typename T, int ROWS, int WIDTH>
__global__ void chunked_delta_rule_v2(T* out, float* states, const T* q, const T* k,
                                      const T* v, const float* log_decay,
                                      const float* beta, const int64_t* slots,
                                      const int* query_start_loc, int q_stride,
                                      int k_stride, int v_stride, int group_size,
                                      int value_head_dim, int key_head_dim) {
  using Packed = Pack<float, WIDTH>;
  constexpr int SIZE = TEAMS * ROWS;  // of a key, with zeros at its end
  constexpr int STRIDE = SIZE + 4;    // next row, next 16 bytes of the banks
  __shared__ alignas(16) float queries[CHUNK * STRIDE];
  __shared__ alignas(16) float keys[CHUNK * STRIDE];
  __shared__ float log_decays[CHUNK];
  __shared__ float q_scales[CHUNK];  // what brings a query to its length
  __shared__ float k_scales[CHUNK];
  __shared__ float overlaps[CHUNK * CHUNK];  // of a key with those before it
  __shared__ float scores[CHUNK * CHUNK];    // of a query with the keys up to its own
  __shared__ Packed corrections[THREADS / WARP][CHUNK * LANES];  // of each warp
  const int warp = threadIdx.x / WARP;
  Part<ROWS, WIDTH> part;
  part.key_head_dim = key_head_dim;
  part.value_head_dim = value_head_dim;
  part.find(blockIdx.z * (THREADS / WARP) + warp);
  Head<T> head = {out, q, k, v, log_decay, beta, q_stride, k_stride, v_stride,
                  int(gridDim.y), value_head_dim};
  float* state =
      head.find(blockIdx.y, group_size, key_head_dim, states, slots[blockIdx.x]);
  const bool is_there = part.column < value_head_dim;
  Packed* mine = corrections[warp] + threadIdx.x % LANES;
  part.load(state);

  const int end = query_start_loc[blockIdx.x + 1];
  for (int first = query_start_loc[blockIdx.x]; first < end; first += CHUNK) {
    const int num = min(CHUNK, end - first);
    for (int i = threadIdx.x; i < CHUNK * SIZE; i += THREADS) {
      const int token = i / SIZE, dim = i % SIZE, at = token * STRIDE + dim;
      const bool has_dim = token < num && dim < key_head_dim;
      queries[at] = has_dim ? to_float(head.q_of(first + token)[dim]) : 0.0f;
      keys[at] = has_dim ? to_float(head.k_of(first + token)[dim]) : 0.0f;
    }
    if (threadIdx.x < num)
      log_decays[threadIdx.x] = head.log_decay_of(first + threadIdx.x);
    __syncthreads();
    if (threadIdx.x < num) {  // a thread for each token
      const float* query = queries + threadIdx.x * STRIDE;
      const float* key = keys + threadIdx.x * STRIDE;
      const float q_length = to_length_one(dot<SIZE>(query, query));
      q_scales[threadIdx.x] = q_length * rsqrtf(key_head_dim);
      k_scales[threadIdx.x] = to_length_one(dot<SIZE>(key, key));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num * CHUNK; i += THREADS) {
      const int token = i / CHUNK, other = i % CHUNK;
      if (other > token) continue;
      const float left = what_is_left(log_decays, other + 1, token + 1);
      const float scale = k_scales[other] * left;
      const float* key = keys + other * STRIDE;
      overlaps[i] = dot<SIZE>(keys + token * STRIDE, key) * k_scales[token] * scale;
      scores[i] = dot<SIZE>(queries + token * STRIDE, key) * q_scales[token] * scale;
    }
    __syncthreads();

    for (int token = 0; token < num; token++) {
      // What the state from before the chunk says, and what tokens before this one
      // have written since: a team has some rows of the one, and some of the others.
      Packed known = {}, read = {};
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const int at = token * STRIDE + part.row + i * TEAMS;
        for (int j = 0; j < WIDTH; j++) {
          known.values[j] += part.state[i].values[j] * keys[at];
          read.values[j] += part.state[i].values[j] * queries[at];
        }
      }
      const float left = what_is_left(log_decays, 0, token + 1);
      for (int j = 0; j < WIDTH; j++) {
        known.values[j] *= k_scales[token] * left;
        read.values[j] *= q_scales[token] * left;
      }
      for (int other = part.row; other < token; other += TEAMS) {
        const Packed before = mine[other * LANES];
        for (int j = 0; j < WIDTH; j++) {
          known.values[j] += overlaps[token * CHUNK + other] * before.values[j];
          read.values[j] += scores[token * CHUNK + other] * before.values[j];
        }
      }
      const T* values = head.v_of(first + token);
      Packed correction;
      for (int j = 0; j < WIDTH; j++) {
        const int column = part.column + j;
        const float value = is_there ? to_float(values[column]) : 0.0f;
        const float missing = value - over_rows(known.values[j]);
        correction.values[j] = head.beta_of(first + token) * missing;
        const float result = over_rows(read.values[j]) +
                             scores[token * CHUNK + token] * correction.values[j];
        if (is_there && part.row == 0)
          head.out_of(first + token)[column] = from_float<T>(result);
      }
      if (token % TEAMS == part.row) mine[token * LANES] = correction;
    }
    __syncwarp();  // now all teams need all corrections

    const float left = what_is_left(log_decays, 0, num);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < WIDTH; j++) part.state[i].values[j] *= left;
    for (int token = 0; token < num; token++) {
      Packed written = mine[token * LANES];
      const float scale = k_scales[token] * what_is_left(log_decays, token + 1, num);
      for (int j = 0; j < WIDTH; j++) written.values[j] *= scale;
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const float key = keys[token * STRIDE + part.row + i * TEAMS];
        for (int j = 0; j < WIDTH; j++)
          part.state[i].values[j] += written.values[j] * key;
      }
    }
    __syncthreads();  // before the next chunk takes its place
  }
  part.store(state);
}
