// Paged attention for decoding: one query per request looks at the keys in its blocks.
//
//   out          [num_reqs, num_heads, HEAD_DIM]
//   q            rows of the batch, q_stride apart, each [num_heads, HEAD_DIM]
//   rows         row of each request's query, [num_reqs]
//   k_cache      of a layer, [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
//   v_cache      like k_cache
//   block_table  blocks of each request, [num_reqs, max_num_blocks]
//   seq_lens     keys of each request, at least 1, [num_reqs]
//   window       a query sees so many of the last keys
//
//   version  idea                                 read   written  sectors  instructions
//   v1       one thread per head             2,637,856     1,024  460,034       164,930
//   v2       a warp per head, online         1,312,768     1,024   34,888        10,264
//   v3       packs, eight lanes per key      1,134,592     1,024   33,472         2,632
//   v4       split-k, and a merge            1,170,432     3,136   33,880         2,848
//
// Counted by the emulator for one request with 512 keys of 64 floats and 4 heads that
// share 2 key heads: bytes that threads ask for and write, sectors of 32 bytes that
// memory moves for that, and loads and stores of warps. Not yet measured on a GPU.
// Source: chapter 6, "CUDA kernels".
#include "reduce.cuh"

// Where a key lies in k_cache, and its value in v_cache.
template <int HEAD_DIM, int BLOCK_SIZE>
__device__ int64_t place_of(const int* block_ids, int key, int num_kv_heads,
                            int kv_head) {
  const int64_t block_id = block_ids[key / BLOCK_SIZE];
  const int64_t slot = block_id * BLOCK_SIZE + key % BLOCK_SIZE;
  return (slot * num_kv_heads + kv_head) * HEAD_DIM;
}

template <int SIZE, typename T>
__device__ float dot(const T* a, const T* b) {
  float sum = 0.0f;
  for (int i = 0; i < SIZE; i++) sum += to_float(a[i]) * to_float(b[i]);
  return sum;
}

// v1: one thread per head, one block per request. It keeps no scores, so it computes
// each twice: for the largest one, and for the shares.
template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void paged_attention_v1(T* out, const T* q, const T* k_cache,
                                   const T* v_cache, const int* rows,
                                   const int* block_table, const int* seq_lens,
                                   float scale, int q_stride, int num_kv_heads,
                                   int max_num_blocks, int window) {
  const int request = blockIdx.x, head = threadIdx.x, num_heads = blockDim.x;
  const int kv_head = head / (num_heads / num_kv_heads);  // neighbours share one
  const int* block_ids = block_table + int64_t(request) * max_num_blocks;
  const T* query = q + int64_t(rows[request]) * q_stride + head * HEAD_DIM;
  const int end = seq_lens[request], start = max(0, end - window);

  float top = LOWEST;
  for (int key = start; key < end; key++) {
    const int64_t place =
        place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, key, num_kv_heads, kv_head);
    top = fmaxf(top, dot<HEAD_DIM>(query, k_cache + place) * scale);
  }
  float total = 0.0f, mixed[HEAD_DIM] = {};
  for (int key = start; key < end; key++) {
    const int64_t place =
        place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, key, num_kv_heads, kv_head);
    const float share = __expf(dot<HEAD_DIM>(query, k_cache + place) * scale - top);
    total += share;
    for (int i = 0; i < HEAD_DIM; i++) mixed[i] += share * to_float(v_cache[place + i]);
  }
  T* to = out + (int64_t(request) * num_heads + head) * HEAD_DIM;
  for (int i = 0; i < HEAD_DIM; i++) to[i] = from_float<T>(mixed[i] / total);
}

// The running numbers of online attention: after any number of keys, mixed / total is
// the attention over them. A thread has SIZE numbers of each value.
template <int SIZE>
struct Running {
  float top = LOWEST, total = 0.0f, mixed[SIZE] = {};

  __device__ void add(float score, const float* value) {
    const float new_top = fmaxf(top, score);
    const float shrink = __expf(top - new_top);  // earlier shares had the old top
    const float share = __expf(score - new_top);
    total = total * shrink + share;
    for (int i = 0; i < SIZE; i++) mixed[i] = mixed[i] * shrink + share * value[i];
    top = new_top;
  }
};

// v2: one warp per head. A lane has the numbers lane, lane + 32, ... of each row, so
// that neighbouring lanes read neighbouring numbers.
template <int HEAD_DIM>
constexpr int SHARE = (HEAD_DIM + WARP - 1) / WARP;

// A lane's share of a row; zeros behind the end, where HEAD_DIM is no multiple of 32.
template <int HEAD_DIM, typename T>
__device__ void load_share(float* share, const T* row, int lane) {
  for (int i = 0; i < SHARE<HEAD_DIM>; i++) {
    const int dim = lane + i * WARP;
    share[i] = dim < HEAD_DIM ? to_float(row[dim]) : 0.0f;
  }
}

template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void paged_attention_v2(T* out, const T* q, const T* k_cache,
                                   const T* v_cache, const int* rows,
                                   const int* block_table, const int* seq_lens,
                                   float scale, int q_stride, int num_kv_heads,
                                   int max_num_blocks, int window) {
  constexpr int SIZE = SHARE<HEAD_DIM>;
  const int head = blockIdx.x, num_heads = gridDim.x, request = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads), lane = threadIdx.x;
  const int* block_ids = block_table + int64_t(request) * max_num_blocks;
  const T* query = q + int64_t(rows[request]) * q_stride + head * HEAD_DIM;
  const int end = seq_lens[request], start = max(0, end - window);

  float query_share[SIZE], key_share[SIZE], value_share[SIZE];
  load_share<HEAD_DIM>(query_share, query, lane);
  Running<SIZE> seen;
  for (int key = start; key < end; key++) {
    const int64_t place =
        place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, key, num_kv_heads, kv_head);
    load_share<HEAD_DIM>(key_share, k_cache + place, lane);
    load_share<HEAD_DIM>(value_share, v_cache + place, lane);
    float score = 0.0f;
    for (int i = 0; i < SIZE; i++) score += query_share[i] * key_share[i];
    seen.add(warp_reduce<Sum>(score) * scale, value_share);
  }
  T* to = out + (int64_t(request) * num_heads + head) * HEAD_DIM;
  for (int i = 0; i < SIZE; i++) {
    const int dim = lane + i * WARP;
    if (dim < HEAD_DIM) to[dim] = from_float<T>(seen.mixed[i] / seen.total);
  }
}

// v3: eight lanes are a team, with keys of its own. Each lane loads 16 bytes at once:
// a row of 64 numbers of 2 bytes takes the team one instruction.
constexpr int TEAM = 8;
constexpr int THREADS = 128;
constexpr int TEAMS = THREADS / TEAM;

// Packs that a lane has of a row, and numbers in them.
template <typename T, int HEAD_DIM>
constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> - 1) / (TEAM * WIDEST<T>);
template <typename T, int HEAD_DIM>
constexpr int PART = PACKS<T, HEAD_DIM> * WIDEST<T>;

// A lane's part of a row: every eighth pack of it, zeros behind its end.
template <typename T, int HEAD_DIM>
__device__ void load_part(float* part, const T* row, int lane) {
  using Packed = Pack<T, WIDEST<T>>;
  for (int i = 0; i < PACKS<T, HEAD_DIM>; i++) {
    const int dim = (lane + i * TEAM) * WIDEST<T>;
    Packed pack = {};
    if (dim < HEAD_DIM) pack = *(const Packed*)(row + dim);
    for (int j = 0; j < WIDEST<T>; j++)
      part[i * WIDEST<T> + j] = to_float(pack.values[j]);
  }
}

// What this lane's team finds among the keys from start to end.
template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__device__ Running<PART<T, HEAD_DIM>> attend(const T* query, const T* k_cache,
                                             const T* v_cache, const int* block_ids,
                                             float scale, int num_kv_heads,
                                             int kv_head, int start, int end) {
  constexpr int SIZE = PART<T, HEAD_DIM>;
  const int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
  // Teams of a warp may have different numbers of keys, so each shuffles on its own.
  const unsigned lanes = ((1u << TEAM) - 1) << (team * TEAM % WARP);
  float query_part[SIZE], key_part[SIZE], value_part[SIZE];
  load_part<T, HEAD_DIM>(query_part, query, lane);
  Running<SIZE> seen;
  for (int key = start + team; key < end; key += TEAMS) {
    const int64_t place =
        place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, key, num_kv_heads, kv_head);
    // Both loads are on their way before the first is needed.
    load_part<T, HEAD_DIM>(key_part, k_cache + place, lane);
    load_part<T, HEAD_DIM>(value_part, v_cache + place, lane);
    float score = 0.0f;
    for (int i = 0; i < SIZE; i++) score += query_part[i] * key_part[i];
    for (int offset = TEAM / 2; offset > 0; offset /= 2)
      score += __shfl_xor_sync(lanes, score, offset);
    seen.add(score * scale, value_part);
  }
  return seen;
}

// Makes one of results over different keys. Each is relative to a top of its own, so it
// counts exp(its top - the largest top) times.
template <int STRIDE>
__device__ float merged(const float* values, const float* tops, int num, float top) {
  float sum = 0.0f;
  for (int i = 0; i < num; i++) sum += values[i * STRIDE] * __expf(tops[i] - top);
  return sum;
}

__device__ inline float largest(const float* tops, int num) {
  float top = LOWEST;
  for (int i = 0; i < num; i++) top = fmaxf(top, tops[i]);
  return top;
}

// What each team of a block has seen, in shared memory.
template <int HEAD_DIM>
struct Findings {
  float tops[TEAMS], totals[TEAMS], mixed[TEAMS][HEAD_DIM];
};

// Adds this team's; each lane its part, and the first one what all lanes know.
template <typename T, int HEAD_DIM>
__device__ void put(Findings<HEAD_DIM>& found, const Running<PART<T, HEAD_DIM>>& seen) {
  const int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
  if (lane == 0) {
    found.tops[team] = seen.top;
    found.totals[team] = seen.total;
  }
  for (int i = 0; i < PART<T, HEAD_DIM>; i++) {
    const int pack = lane + i / WIDEST<T> * TEAM;
    const int dim = pack * WIDEST<T> + i % WIDEST<T>;
    if (dim < HEAD_DIM) found.mixed[team][dim] = seen.mixed[i];
  }
}

template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void paged_attention_v3(T* out, const T* q, const T* k_cache,
                                   const T* v_cache, const int* rows,
                                   const int* block_table, const int* seq_lens,
                                   float scale, int q_stride, int num_kv_heads,
                                   int max_num_blocks, int window) {
  const int head = blockIdx.x, num_heads = gridDim.x, request = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int* block_ids = block_table + int64_t(request) * max_num_blocks;
  const T* query = q + int64_t(rows[request]) * q_stride + head * HEAD_DIM;
  const int end = seq_lens[request], start = max(0, end - window);

  __shared__ Findings<HEAD_DIM> found;
  const auto seen = attend<T, HEAD_DIM, BLOCK_SIZE>(
      query, k_cache, v_cache, block_ids, scale, num_kv_heads, kv_head, start, end);
  put<T>(found, seen);
  __syncthreads();
  const float top = largest(found.tops, TEAMS);
  const float total = merged<1>(found.totals, found.tops, TEAMS, top);
  T* to = out + (int64_t(request) * num_heads + head) * HEAD_DIM;
  for (int dim = threadIdx.x; dim < HEAD_DIM; dim += blockDim.x) {
    const float sum = merged<HEAD_DIM>(&found.mixed[0][dim], found.tops, TEAMS, top);
    to[dim] = from_float<T>(sum / total);
  }
}

// v4: a long text keeps one block busy for long, and the rest of the GPU idle. So its
// keys are split among several blocks, which leave their running numbers in memory:
// tops and totals [num_reqs, num_heads, num_splits], mixed [..., HEAD_DIM].
template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void paged_attention_v4(float* tops, float* totals, float* mixed, const T* q,
                                   const T* k_cache, const T* v_cache, const int* rows,
                                   const int* block_table, const int* seq_lens,
                                   float scale, int q_stride, int num_kv_heads,
                                   int max_num_blocks, int window, int split_size) {
  const int head = blockIdx.x, num_heads = gridDim.x, request = blockIdx.y;
  const int split = blockIdx.z, num_splits = gridDim.z;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int* block_ids = block_table + int64_t(request) * max_num_blocks;
  const T* query = q + int64_t(rows[request]) * q_stride + head * HEAD_DIM;
  const int seq_len = seq_lens[request];
  const int start = max(0, seq_len - window) + split * split_size;
  const int end = min(seq_len, start + split_size);
  if (start >= end) return;  // a shorter text than others

  __shared__ Findings<HEAD_DIM> found;
  const auto seen = attend<T, HEAD_DIM, BLOCK_SIZE>(
      query, k_cache, v_cache, block_ids, scale, num_kv_heads, kv_head, start, end);
  put<T>(found, seen);
  __syncthreads();
  const float top = largest(found.tops, TEAMS);
  const int64_t place = (int64_t(request) * num_heads + head) * num_splits + split;
  if (threadIdx.x == 0) {
    tops[place] = top;
    totals[place] = merged<1>(found.totals, found.tops, TEAMS, top);
  }
  for (int dim = threadIdx.x; dim < HEAD_DIM; dim += blockDim.x)
    mixed[place * HEAD_DIM + dim] =
        merged<HEAD_DIM>(&found.mixed[0][dim], found.tops, TEAMS, top);
}

// The second kernel of v4: one block per head.
template <typename T, int HEAD_DIM>
__global__ void merge_splits(T* out, const float* tops, const float* totals,
                             const float* mixed, const int* seq_lens, int num_splits,
                             int window, int split_size) {
  const int head = blockIdx.x, num_heads = gridDim.x, request = blockIdx.y;
  const int num_keys = min(seq_lens[request], window);
  const int num = (num_keys + split_size - 1) / split_size;  // splits with keys
  const int64_t place = int64_t(request) * num_heads + head;
  tops += place * num_splits;
  totals += place * num_splits;
  mixed += place * num_splits * HEAD_DIM;

  const float top = largest(tops, num);
  const float total = merged<1>(totals, tops, num, top);
  for (int dim = threadIdx.x; dim < HEAD_DIM; dim += blockDim.x) {
    const float sum = merged<HEAD_DIM>(mixed + dim, tops, num, top);
    out[place * HEAD_DIM + dim] = from_float<T>(sum / total);
  }
}
