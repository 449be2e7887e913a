// Attention for prompts: the queries of many tokens look at the keys in their blocks.
//
//   out          rows of a batch, [num_tokens, num_heads, HEAD_DIM]
//   q            likewise, but its rows lie q_stride apart
//   k_cache      of a layer, [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
//   v_cache      like k_cache
//   starts       first row of each request, [num_reqs]
//   ends         the row behind its last one; of a whole batch, these two are
//                query_start_loc without its last number, and without its first
//   block_table  blocks of each request, [num_reqs, max_num_blocks]
//   seq_lens     keys of each request, those of its queries included, [num_reqs]
//   window       a query sees so many keys, the last of which is its own
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a warp per query                1,224,704     8,192   28,640        15,968
//   v2       queries share tiles of keys       339,968     8,192    5,600         3,680
//   v3       heads share, too; packs            47,104     8,192    1,488           280
//   v4       tensor cores                       30,208     8,192    1,068           108
//
// Counted by the emulator for 32 tokens of a prompt behind 32 cached ones, and 2 heads
// of 64 half-precision numbers that share a key head. Not yet measured on a GPU.
// Source: appendix A20, "Prefill attention".
#include "reduce.cuh"

// A wheel may lack what mma.h includes; then there is no v4.
#if defined(__CUDA_ON_CPU__) || __has_include(<crt/mma.h>)
#include <mma.h>
#define HAS_MMA
#endif

// Where a key lies in k_cache, and its value in v_cache.
template <int HEAD_DIM, int BLOCK_SIZE>
__device__ int64_t place_of(const int* block_ids, int key, int num_kv_heads,
                            int kv_head) {
  const int64_t block_id = block_ids[key / BLOCK_SIZE];
  const int64_t slot = block_id * BLOCK_SIZE + key % BLOCK_SIZE;
  return (slot * num_kv_heads + kv_head) * HEAD_DIM;
}

// Some queries of a request, with the same keys. There is one for each token and each
// head of a group; those of a token lie side by side.
template <int HEAD_DIM>
struct Queries {
  int first, num;     // of all that the request has; num may be 0 or less: none
  int row, position;  // of the request's first token, in the batch and in its text
  int head, group;    // the first head of the group, and how many there are
  int window;

  __device__ int token(int i) const { return (first + i) / group; }

  // Where query i begins, if rows lie `stride` apart.
  __device__ int64_t place(int i, int stride) const {
    const int its_head = head + (first + i) % group;
    return int64_t(row + token(i)) * stride + its_head * HEAD_DIM;
  }

  // Query i sees the keys from first_key to before end_key: its own is the last.
  __device__ int end_key(int i) const { return position + token(i) + 1; }
  __device__ int first_key(int i) const { return max(0, end_key(i) - window); }
  __device__ bool sees(int i, int key) const {
    return key >= first_key(i) && key < end_key(i);
  }
};

// Those of this block, if each has `most`.
template <int HEAD_DIM>
__device__ Queries<HEAD_DIM> queries_of_block(int most, int group, const int* starts,
                                              const int* ends, const int* seq_lens,
                                              int window) {
  const int request = blockIdx.z, row = starts[request];
  const int num_tokens = ends[request] - row, first = blockIdx.x * most;
  const int num = min(most, num_tokens * group - first);
  const int position = seq_lens[request] - num_tokens, head = blockIdx.y * group;
  return {first, num, row, position, head, group, window};
}

// The running numbers of online attention: after any number of keys, mixed / total is
// the attention over them. A lane has SIZE numbers of each value.
template <int SIZE>
struct Running {
  float top = LOWEST, total = 0.0f, mixed[SIZE] = {};

  // Prepares for a score: whatever has been added had the old top.
  __device__ void raise(float score) {
    const float new_top = fmaxf(top, score), shrink = __expf(top - new_top);
    total *= shrink;
    for (int i = 0; i < SIZE; i++) mixed[i] *= shrink;
    top = new_top;
  }
};

// A lane has the numbers lane, lane + 32, ... of each row; zeros behind the end.
template <int HEAD_DIM>
constexpr int SHARE = (HEAD_DIM + WARP - 1) / WARP;

template <int HEAD_DIM, typename T>
__device__ void load_share(float* share, const T* row, int lane) {
  for (int i = 0; i < SHARE<HEAD_DIM>; i++) {
    const int dim = lane + i * WARP;
    share[i] = dim < HEAD_DIM ? to_float(row[dim]) : 0.0f;
  }
}

template <int HEAD_DIM, typename T>
__device__ void store_share(T* row, const Running<SHARE<HEAD_DIM>>& seen, int lane) {
  for (int i = 0; i < SHARE<HEAD_DIM>; i++) {
    const int dim = lane + i * WARP;
    if (dim < HEAD_DIM) row[dim] = from_float<T>(seen.mixed[i] / seen.total);
  }
}

// v1: one warp per query and head, as v2 of paged_attention.cu.
template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void prefill_attention_v1(T* out, const T* q, const T* k_cache,
                                     const T* v_cache, const int* starts,
                                     const int* ends, const int* block_table,
                                     const int* seq_lens, float scale, int q_stride,
                                     int num_heads, int num_kv_heads,
                                     int max_num_blocks, int window) {
  constexpr int SIZE = SHARE<HEAD_DIM>;
  const auto queries =
      queries_of_block<HEAD_DIM>(1, 1, starts, ends, seq_lens, window);
  if (queries.num < 1) return;  // a shorter request than others
  const int kv_head = queries.head / (num_heads / num_kv_heads), lane = threadIdx.x;
  const int* block_ids = block_table + int64_t(blockIdx.z) * max_num_blocks;

  float query[SIZE], key_share[SIZE], value[SIZE];
  load_share<HEAD_DIM>(query, q + queries.place(0, q_stride), lane);
  Running<SIZE> seen;
  for (int key = queries.first_key(0); key < queries.end_key(0); key++) {
    const int64_t place =
        place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, key, num_kv_heads, kv_head);
    load_share<HEAD_DIM>(key_share, k_cache + place, lane);
    load_share<HEAD_DIM>(value, v_cache + place, lane);
    float score = 0.0f;
    for (int i = 0; i < SIZE; i++) score += query[i] * key_share[i];
    score = warp_reduce<Sum>(score) * scale;
    seen.raise(score);
    const float share = __expf(score - seen.top);
    seen.total += share;
    for (int i = 0; i < SIZE; i++) seen.mixed[i] += share * value[i];
  }
  store_share<HEAD_DIM>(out + queries.place(0, num_heads * HEAD_DIM), seen, lane);
}

// v2: a block has several queries of a head. It loads a tile of keys into shared
// memory, where all of its queries look at them; then, in the same place, their values.
constexpr int KEYS = WARP;  // of a tile: one for each lane
constexpr int WARPS = 4;
constexpr int FEW = 8;  // queries of a block, two for each warp

// Copies a tile of keys or values, in packs; zeros in place of those behind the end.
template <int HEAD_DIM, int BLOCK_SIZE, int WIDTH, int STRIDE, typename T>
__device__ void load_tile(T* tile, const T* cache, const int* block_ids, int start,
                          int end, int num_kv_heads, int kv_head) {
  using Packed = Pack<T, WIDTH>;
  for (int i = threadIdx.x; i < KEYS * HEAD_DIM / WIDTH; i += blockDim.x) {
    const int key = i * WIDTH / HEAD_DIM, dim = i * WIDTH % HEAD_DIM;
    Packed pack = {};
    if (start + key < end) {
      const int64_t place = place_of<HEAD_DIM, BLOCK_SIZE>(block_ids, start + key,
                                                           num_kv_heads, kv_head);
      pack = *(const Packed*)(cache + place + dim);
    }
    *(Packed*)(tile + key * STRIDE + dim) = pack;
  }
}

// Copies the queries of a block; zeros in place of those that there are not.
template <int SIZE, int WIDTH, int STRIDE, int HEAD_DIM, typename T>
__device__ void load_queries(T* tile, const T* q, const Queries<HEAD_DIM>& queries,
                             int q_stride) {
  using Packed = Pack<T, WIDTH>;
  for (int i = threadIdx.x; i < SIZE * HEAD_DIM / WIDTH; i += blockDim.x) {
    const int query = i * WIDTH / HEAD_DIM, dim = i * WIDTH % HEAD_DIM;
    Packed pack = {};
    if (query < queries.num)
      pack = *(const Packed*)(q + queries.place(query, q_stride) + dim);
    *(Packed*)(tile + query * STRIDE + dim) = pack;
  }
}

// Takes the score of a key from each lane, and returns the key's share. LOWEST stands
// for a key that is not seen. Its share is 0, or if no key was seen yet, something that
// the first score makes 0: raise() multiplies it by exp(LOWEST - score).
template <int SIZE>
__device__ float share_of(Running<SIZE>& seen, float score) {
  seen.raise(warp_reduce<Max>(score));
  const float share = __expf(score - seen.top);
  seen.total += warp_reduce<Sum>(share);
  return share;
}

template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void prefill_attention_v2(T* out, const T* q, const T* k_cache,
                                     const T* v_cache, const int* starts,
                                     const int* ends, const int* block_table,
                                     const int* seq_lens, float scale, int q_stride,
                                     int num_heads, int num_kv_heads,
                                     int max_num_blocks, int window) {
  constexpr int SIZE = SHARE<HEAD_DIM>;
  constexpr int STRIDE = HEAD_DIM + 4 / sizeof(T);  // next key, next bank
  __shared__ T query_tile[FEW * HEAD_DIM];
  __shared__ T tile[KEYS * STRIDE];
  const auto queries =
      queries_of_block<HEAD_DIM>(FEW, 1, starts, ends, seq_lens, window);
  if (queries.num < 1) return;
  const int kv_head = queries.head / (num_heads / num_kv_heads);
  const int* block_ids = block_table + int64_t(blockIdx.z) * max_num_blocks;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

  load_queries<FEW, 1, HEAD_DIM>(query_tile, q, queries, q_stride);
  // Of the queries warp, warp + 4, ...; and their shares of this lane's key. Registers
  // have no address: loops over them are unrolled, so that each index is known.
  Running<SIZE> seen[FEW / WARPS];
  float shares[FEW / WARPS];
  const int end = queries.end_key(queries.num - 1);
  for (int start = queries.first_key(0); start < end; start += KEYS) {
    load_tile<HEAD_DIM, BLOCK_SIZE, 1, STRIDE>(tile, k_cache, block_ids, start, end,
                                               num_kv_heads, kv_head);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < FEW / WARPS; j++) {
      const int query = warp + j * WARPS;
      float score = 0.0f;
      for (int dim = 0; dim < HEAD_DIM; dim++)
        score += to_float(query_tile[query * HEAD_DIM + dim]) *
                 to_float(tile[lane * STRIDE + dim]);
      const bool is_seen = queries.sees(query, start + lane);
      shares[j] = share_of(seen[j], is_seen ? score * scale : LOWEST);
    }
    __syncthreads();  // the keys have been read
    load_tile<HEAD_DIM, BLOCK_SIZE, 1, STRIDE>(tile, v_cache, block_ids, start, end,
                                               num_kv_heads, kv_head);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < FEW / WARPS; j++)
      for (int key = 0; key < KEYS; key++) {
        const float share = __shfl_sync(ALL_LANES, shares[j], key);
        float value[SIZE];
        load_share<HEAD_DIM>(value, tile + key * STRIDE, lane);
        for (int i = 0; i < SIZE; i++) seen[j].mixed[i] += share * value[i];
      }
    __syncthreads();  // the values have been read
  }
#pragma unroll
  for (int j = 0; j < FEW / WARPS; j++) {
    const int query = warp + j * WARPS;
    if (query < queries.num)
      store_share<HEAD_DIM>(out + queries.place(query, num_heads * HEAD_DIM), seen[j],
                            lane);
  }
}

// v3: the heads that share keys share the block, too. And what a lane has loaded from
// shared memory into registers serves all queries of its warp, so these may be more. Of
// heads with more than 512 bytes, 32 would take more than the 48 KiB of shared memory
// that any block may have.
template <typename T, int HEAD_DIM>
constexpr int SOME = HEAD_DIM * sizeof(T) > 512 ? 8 : 32;

template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void prefill_attention_v3(T* out, const T* q, const T* k_cache,
                                     const T* v_cache, const int* starts,
                                     const int* ends, const int* block_table,
                                     const int* seq_lens, float scale, int q_stride,
                                     int num_heads, int num_kv_heads,
                                     int max_num_blocks, int window) {
  constexpr int SIZE = SHARE<HEAD_DIM>, NUM = SOME<T, HEAD_DIM>, WIDTH = WIDEST<T>;
  constexpr int STRIDE = HEAD_DIM + WIDTH;  // next key, next 16 bytes of the banks
  using Packed = Pack<T, WIDTH>;
  __shared__ alignas(16) T query_tile[NUM * HEAD_DIM];
  __shared__ alignas(16) T tile[KEYS * STRIDE];
  const auto queries = queries_of_block<HEAD_DIM>(NUM, num_heads / num_kv_heads, starts,
                                                  ends, seq_lens, window);
  if (queries.num < 1) return;
  const int* block_ids = block_table + int64_t(blockIdx.z) * max_num_blocks;
  const int kv_head = blockIdx.y;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

  load_queries<NUM, WIDTH, HEAD_DIM>(query_tile, q, queries, q_stride);
  Running<SIZE> seen[NUM / WARPS];
  float shares[NUM / WARPS];
  const int end = queries.end_key(queries.num - 1);
  for (int start = queries.first_key(0); start < end; start += KEYS) {
    load_tile<HEAD_DIM, BLOCK_SIZE, WIDTH, STRIDE>(tile, k_cache, block_ids, start, end,
                                                   num_kv_heads, kv_head);
    __syncthreads();
    float scores[NUM / WARPS] = {};
    for (int dim = 0; dim < HEAD_DIM; dim += WIDTH) {
      const Packed key = *(const Packed*)(tile + lane * STRIDE + dim);
      for (int j = 0; j < NUM / WARPS; j++) {
        const int query = warp + j * WARPS;
        const Packed pack = *(const Packed*)(query_tile + query * HEAD_DIM + dim);
        for (int i = 0; i < WIDTH; i++)
          scores[j] += to_float(pack.values[i]) * to_float(key.values[i]);
      }
    }
    for (int j = 0; j < NUM / WARPS; j++) {
      const bool is_seen = queries.sees(warp + j * WARPS, start + lane);
      shares[j] = share_of(seen[j], is_seen ? scores[j] * scale : LOWEST);
    }
    __syncthreads();
    load_tile<HEAD_DIM, BLOCK_SIZE, WIDTH, STRIDE>(tile, v_cache, block_ids, start, end,
                                                   num_kv_heads, kv_head);
    __syncthreads();
    for (int key = 0; key < KEYS; key++) {
      float value[SIZE];
      load_share<HEAD_DIM>(value, tile + key * STRIDE, lane);
      for (int j = 0; j < NUM / WARPS; j++) {
        const float share = __shfl_sync(ALL_LANES, shares[j], key);
        for (int i = 0; i < SIZE; i++) seen[j].mixed[i] += share * value[i];
      }
    }
    __syncthreads();
  }
  for (int j = 0; j < NUM / WARPS; j++) {
    const int query = warp + j * WARPS;
    if (query < queries.num)
      store_share<HEAD_DIM>(out + queries.place(query, num_heads * HEAD_DIM), seen[j],
                            lane);
  }
}

#ifdef HAS_MMA
// v4: tensor cores. A warp has 16 queries, and multiplies matrices of 16 by 16: queries
// and keys give scores, shares and values give the result. Which lane holds which
// number of a matrix is the GPU's secret, so what concerns rows, the mask and the
// softmax, happens in shared memory.
constexpr int SIDE = 16;
constexpr int SCORE_STRIDE = KEYS + 4, SHARE_STRIDE = KEYS + 8;  // as bytes, n * 16

// Queries of a block, again for the sake of 48 KiB.
template <int HEAD_DIM>
constexpr int MANY = HEAD_DIM > 128 ? 32 : 64;

template <typename T, int HEAD_DIM, int BLOCK_SIZE>
__global__ void prefill_attention_v4(T* out, const T* q, const T* k_cache,
                                     const T* v_cache, const int* starts,
                                     const int* ends, const int* block_table,
                                     const int* seq_lens, float scale, int q_stride,
                                     int num_heads, int num_kv_heads,
                                     int max_num_blocks, int window) {
  using namespace nvcuda::wmma;
  using Packed = Pack<T, SIDE / 2>;
  constexpr int NUM = MANY<HEAD_DIM>, WIDTH = WIDEST<T>, STRIDE = HEAD_DIM + WIDTH;
  __shared__ alignas(32) T query_tile[NUM * STRIDE];
  __shared__ alignas(32) T tile[KEYS * STRIDE];
  __shared__ alignas(32) float score_tile[NUM * SCORE_STRIDE];
  __shared__ alignas(32) T share_tile[NUM * SHARE_STRIDE];
  const auto queries = queries_of_block<HEAD_DIM>(NUM, num_heads / num_kv_heads, starts,
                                                  ends, seq_lens, window);
  if (queries.num < 1) return;
  const int* block_ids = block_table + int64_t(blockIdx.z) * max_num_blocks;
  const int kv_head = blockIdx.y;

  // What belongs to this warp; and to this lane: every second number of a row.
  const int first = threadIdx.x / WARP * SIDE, query = first + threadIdx.x % SIDE;
  const T* my_queries = query_tile + first * STRIDE;
  float* my_scores = score_tile + first * SCORE_STRIDE;
  T* my_shares = share_tile + first * SHARE_STRIDE;
  float* scores = score_tile + query * SCORE_STRIDE;
  T* shares = share_tile + query * SHARE_STRIDE;
  const int odd = threadIdx.x % WARP / SIDE;

  load_queries<NUM, WIDTH, STRIDE>(query_tile, q, queries, q_stride);
  fragment<accumulator, SIDE, SIDE, SIDE, float> mixed[HEAD_DIM / SIDE], matrix;
  for (auto& part : mixed) fill_fragment(part, 0.0f);
  float top = LOWEST, total = 0.0f;
  const int end = queries.end_key(queries.num - 1);
  for (int start = queries.first_key(0); start < end; start += KEYS) {
    load_tile<HEAD_DIM, BLOCK_SIZE, WIDTH, STRIDE>(tile, k_cache, block_ids, start, end,
                                                   num_kv_heads, kv_head);
    __syncthreads();
    for (int key = 0; key < KEYS; key += SIDE) {
      fill_fragment(matrix, 0.0f);
      for (int dim = 0; dim < HEAD_DIM; dim += SIDE) {
        fragment<matrix_a, SIDE, SIDE, SIDE, T, row_major> a;
        fragment<matrix_b, SIDE, SIDE, SIDE, T, col_major> b;  // the keys, turned
        load_matrix_sync(a, my_queries + dim, STRIDE);
        load_matrix_sync(b, tile + key * STRIDE + dim, STRIDE);
        mma_sync(matrix, a, b, matrix);
      }
      store_matrix_sync(my_scores + key, matrix, SCORE_STRIDE, mem_row_major);
    }
    __syncwarp();

    float new_top = top, sum = 0.0f;
    for (int i = odd; i < KEYS; i += 2) {
      const bool is_seen = queries.sees(query, start + i);
      scores[i] = is_seen ? scores[i] * scale : LOWEST;
      new_top = fmaxf(new_top, scores[i]);
    }
    new_top = fmaxf(new_top, __shfl_xor_sync(ALL_LANES, new_top, SIDE));
    const float shrink = __expf(top - new_top);
    for (int i = odd; i < KEYS; i += 2) {
      shares[i] = from_float<T>(__expf(scores[i] - new_top));
      sum += to_float(shares[i]);  // as it will be multiplied
      scores[i] = shrink;
    }
    total = total * shrink + sum + __shfl_xor_sync(ALL_LANES, sum, SIDE);
    top = new_top;
    __syncthreads();

    load_tile<HEAD_DIM, BLOCK_SIZE, WIDTH, STRIDE>(tile, v_cache, block_ids, start, end,
                                                   num_kv_heads, kv_head);
    __syncthreads();
    // Each row of this matrix is filled with the row's `shrink`. Loaded like the
    // results, it has each factor where the number is that it belongs to.
    load_matrix_sync(matrix, my_scores, SCORE_STRIDE, mem_row_major);
    for (int dim = 0; dim < HEAD_DIM; dim += SIDE) {
      auto& part = mixed[dim / SIDE];
      for (int i = 0; i < matrix.num_elements; i++) part.x[i] *= matrix.x[i];
      for (int key = 0; key < KEYS; key += SIDE) {
        fragment<matrix_a, SIDE, SIDE, SIDE, T, row_major> a;
        fragment<matrix_b, SIDE, SIDE, SIDE, T, row_major> b;
        load_matrix_sync(a, my_shares + key, SHARE_STRIDE);
        load_matrix_sync(b, tile + key * STRIDE + dim, STRIDE);
        mma_sync(part, a, b, part);
      }
    }
    __syncthreads();
  }

  for (int dim = 0; dim < HEAD_DIM; dim += SIDE) {
    store_matrix_sync(my_scores, mixed[dim / SIDE], SCORE_STRIDE, mem_row_major);
    __syncwarp();
    const int half = odd * SIDE / 2;
    Packed pack;
    for (int i = 0; i < SIDE / 2; i++)
      pack.values[i] = from_float<T>(scores[half + i] / total);
    const int64_t place = queries.place(query, num_heads * HEAD_DIM) + dim + half;
    if (query < queries.num) *(Packed*)(out + place) = pack;
    __syncwarp();  // before the next part takes its place
  }
}
#endif
