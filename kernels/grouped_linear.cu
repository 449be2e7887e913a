// A matrix product for each expert: the rows that chose it, times its weight.
//
//   out      [num_rows, out_size]
//   x        rows, sorted by expert, [num_rows, in_size]
//   weight   of each expert, [num_experts, out_size, in_size]
//   offsets  the first row of each expert, and the end, [num_experts + 1]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per number             2,138,624     8,192  541,252        33,220
//   v2       rows share a weight             1,253,376     8,192   43,520         9,472
//   v3       columns share a row, too          147,840     8,192    4,888           444
//   v4       tensor cores                      147,840     8,192    4,888           452
//
// Counted by the emulator for 32 rows of 128 half-precision numbers, 128 columns and 4
// experts, one of which has no rows: bytes that threads ask for and write, sectors of
// 32 bytes that memory moves for that, and loads and stores of warps. Not yet measured
// on a GPU.
// Source: appendix A26, "Kernels for experts".
#include "tokens.cuh"

// A wheel may lack what mma.h includes; then there is no v4.
#if defined(__CUDA_ON_CPU__) || __has_include(<crt/mma.h>)
#include <mma.h>
#define HAS_MMA
#endif

// v1: one thread per number of the result.
template <typename T>
__global__ void grouped_linear_v1(T* out, const T* x, const T* weight,
                                  const int* offsets, int in_size, int out_size) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= out_size) return;
  int expert = 0;
  while (row >= offsets[expert + 1]) expert++;
  x += int64_t(row) * in_size;
  weight += (int64_t(expert) * out_size + column) * in_size;
  float sum = 0.0f;
  for (int i = 0; i < in_size; i++) sum += to_float(x[i]) * to_float(weight[i]);
  out[int64_t(row) * out_size + column] = from_float<T>(sum);
}

// Some rows of an expert. The rows of an expert are cut into tiles of HEIGHT rows, the
// last of which may have fewer, and the tiles of all experts are numbered.
struct Tile {
  int expert, row, num;  // without rows: there is no such tile
};

// The host does not know how many rows an expert has, so it starts as many blocks as
// there may be tiles, and each of them looks for its own.
template <int HEIGHT>
__device__ Tile find_tile(int number, const int* offsets, int num_experts) {
  __shared__ Tile tile;
  if (threadIdx.x == 0) tile = {0, 0, 0};
  int before = 0;
  for (int start = 0; start < num_experts; start += blockDim.x) {
    const int expert = start + threadIdx.x;
    const bool is_there = expert < num_experts;
    const int row = is_there ? offsets[expert] : 0;
    const int num = is_there ? offsets[expert + 1] - row : 0;
    const int num_tiles = (num + HEIGHT - 1) / HEIGHT;
    Mass total;
    const int first = before + block_scan(num_tiles, total);
    if (first <= number && number < first + num_tiles) {
      const int skipped = (number - first) * HEIGHT;
      tile = {expert, row + skipped, min(HEIGHT, num - skipped)};
    }
    before += total;
  }
  __syncthreads();
  return tile;
}

// v2: a warp for each column, for a few rows of one expert at once: they share the
// weights, which lanes load in packs.
constexpr int FEW = 8;

template <typename T, int WIDTH>
__global__ void grouped_linear_v2(T* out, const T* x, const T* weight,
                                  const int* offsets, int num_experts, int in_size,
                                  int out_size) {
  using Packed = Pack<T, WIDTH>;
  const Tile tile = find_tile<FEW>(blockIdx.x, offsets, num_experts);
  const int column = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP, num_packs = in_size / WIDTH;
  if (tile.num < 1 || column >= out_size) return;  // the whole warp
  const Packed* rows = (const Packed*)(x + int64_t(tile.row) * in_size);
  weight += (int64_t(tile.expert) * out_size + column) * in_size;

  float sums[FEW] = {};
  for (int i = lane; i < num_packs; i += WARP) {
    const Packed shared = ((const Packed*)weight)[i];
#pragma unroll
    for (int row = 0; row < FEW; row++) {
      if (row >= tile.num) continue;
      const Packed pack = rows[int64_t(row) * num_packs + i];
      for (int j = 0; j < WIDTH; j++)
        sums[row] += to_float(pack.values[j]) * to_float(shared.values[j]);
    }
  }
#pragma unroll
  for (int row = 0; row < FEW; row++) {
    if (row >= tile.num) continue;
    const float sum = warp_reduce<Sum>(sums[row]);
    const int64_t place = int64_t(tile.row + row) * out_size + column;
    if (lane == 0) out[place] = from_float<T>(sum);
  }
}

// v3: a block has a tile of rows and 64 columns. It loads 128 bytes of each row, and of
// each column's weights, into shared memory; then the next 128 bytes, and so on.
constexpr int COLUMNS = 64, THREADS = 128;

template <typename T>
constexpr int STEP = 128 / sizeof(T);  // numbers of a row at once
template <typename T>
constexpr int STRIDE = STEP<T> + WIDEST<T>;  // next row, next 16 bytes of the banks

// Copies numbers `first` to `first + STEP` of ROWS rows, in packs; zeros in place of
// those that there are not. Rows have `size` numbers.
template <int ROWS, int WIDTH, typename T>
__device__ void load_rows(T* to, const T* from, int num_rows, int first, int size) {
  using Packed = Pack<T, WIDTH>;
  for (int i = threadIdx.x; i < ROWS * STEP<T> / WIDTH; i += blockDim.x) {
    const int row = i * WIDTH / STEP<T>, at = i * WIDTH % STEP<T>;
    Packed pack = {};
    if (row < num_rows && first + at < size)
      pack = *(const Packed*)(from + int64_t(row) * size + first + at);
    *(Packed*)(to + row * STRIDE<T> + at) = pack;
  }
}

template <typename T, int WIDTH, int HEIGHT>
__global__ void grouped_linear_v3(T* out, const T* x, const T* weight,
                                  const int* offsets, int num_experts, int in_size,
                                  int out_size) {
  using Packed = Pack<T, WIDEST<T>>;
  constexpr int NUM = HEIGHT * COLUMNS / THREADS;  // results of a thread
  __shared__ alignas(16) T row_tile[HEIGHT * STRIDE<T>];
  __shared__ alignas(16) T weight_tile[COLUMNS * STRIDE<T>];
  const Tile tile = find_tile<HEIGHT>(blockIdx.x, offsets, num_experts);
  if (tile.num < 1) return;
  const int start = blockIdx.y * COLUMNS, num_columns = min(COLUMNS, out_size - start);
  x += int64_t(tile.row) * in_size;
  weight += (int64_t(tile.expert) * out_size + start) * in_size;

  // A thread has one column, and every second row of it.
  const int column = threadIdx.x % COLUMNS, odd = threadIdx.x / COLUMNS;
  float sums[NUM] = {};
  for (int first = 0; first < in_size; first += STEP<T>) {
    load_rows<HEIGHT, WIDTH>(row_tile, x, tile.num, first, in_size);
    load_rows<COLUMNS, WIDTH>(weight_tile, weight, num_columns, first, in_size);
    __syncthreads();
    for (int at = 0; at < STEP<T>; at += WIDEST<T>) {
      const Packed shared = *(const Packed*)(weight_tile + column * STRIDE<T> + at);
#pragma unroll
      for (int j = 0; j < NUM; j++) {
        const int row = odd + j * (THREADS / COLUMNS);
        const Packed pack = *(const Packed*)(row_tile + row * STRIDE<T> + at);
        for (int i = 0; i < WIDEST<T>; i++)
          sums[j] += to_float(pack.values[i]) * to_float(shared.values[i]);
      }
    }
    __syncthreads();  // before the next bytes take their place
  }
  if (column >= num_columns) return;
#pragma unroll
  for (int j = 0; j < NUM; j++) {
    const int row = odd + j * (THREADS / COLUMNS);
    if (row < tile.num)
      out[int64_t(tile.row + row) * out_size + start + column] = from_float<T>(sums[j]);
  }
}

#ifdef HAS_MMA
// v4: tensor cores. Each of the four warps has 16 of the columns, and all rows of the
// tile in matrices of 16 by 16, so that it loads its weights once for all of them.
constexpr int SIDE = 16;
constexpr int SUM_STRIDE = SIDE + 4;  // as bytes, n * 16

template <typename T, int WIDTH, int HEIGHT>
__global__ void grouped_linear_v4(T* out, const T* x, const T* weight,
                                  const int* offsets, int num_experts, int in_size,
                                  int out_size) {
  using namespace nvcuda::wmma;
  __shared__ alignas(32) T row_tile[HEIGHT * STRIDE<T>];
  __shared__ alignas(32) T weight_tile[COLUMNS * STRIDE<T>];
  __shared__ alignas(32) float sum_tile[COLUMNS * SUM_STRIDE];
  const Tile tile = find_tile<HEIGHT>(blockIdx.x, offsets, num_experts);
  if (tile.num < 1) return;
  const int start = blockIdx.y * COLUMNS, num_columns = min(COLUMNS, out_size - start);
  x += int64_t(tile.row) * in_size;
  weight += (int64_t(tile.expert) * out_size + start) * in_size;

  const int mine = threadIdx.x / WARP * SIDE, lane = threadIdx.x % WARP;
  fragment<accumulator, SIDE, SIDE, SIDE, float> sums[HEIGHT / SIDE];
  for (auto& part : sums) fill_fragment(part, 0.0f);
  for (int first = 0; first < in_size; first += STEP<T>) {
    load_rows<HEIGHT, WIDTH>(row_tile, x, tile.num, first, in_size);
    load_rows<COLUMNS, WIDTH>(weight_tile, weight, num_columns, first, in_size);
    __syncthreads();
    for (int at = 0; at < STEP<T>; at += SIDE) {
      fragment<matrix_b, SIDE, SIDE, SIDE, T, col_major> b;  // weights, turned
      load_matrix_sync(b, weight_tile + mine * STRIDE<T> + at, STRIDE<T>);
#pragma unroll
      for (int i = 0; i < HEIGHT / SIDE; i++) {
        fragment<matrix_a, SIDE, SIDE, SIDE, T, row_major> a;
        load_matrix_sync(a, row_tile + i * SIDE * STRIDE<T> + at, STRIDE<T>);
        mma_sync(sums[i], a, b, sums[i]);
      }
    }
    __syncthreads();
  }

  float* my_sums = sum_tile + mine * SUM_STRIDE;
#pragma unroll
  for (int i = 0; i < HEIGHT / SIDE; i++) {
    store_matrix_sync(my_sums, sums[i], SUM_STRIDE, mem_row_major);
    __syncwarp();
    for (int j = lane; j < SIDE * SIDE; j += WARP) {
      const int row = i * SIDE + j / SIDE, column = mine + j % SIDE;
      if (row < tile.num && column < num_columns)
        out[int64_t(tile.row + row) * out_size + start + column] =
            from_float<T>(my_sums[j / SIDE * SUM_STRIDE + j % SIDE]);
    }
    __syncwarp();  // before the next matrix takes their place
  }
}
#endif
