// Draw: the kept tokens, laid end to end in the order of their ids, fill a line. A
// number from 0 to 1 says how much of it lies before a point; on whose stretch is that?
//
//   drawn         the answers, [num_sampled]
//   logits        rows, `stride` apart, each [size]
//   largest       the largest score of each row
//   rows          row of each request, [num_sampled]
//   temperatures  like rows; so are uniforms
//   last_ids      the last token that a request keeps, of the first num_cut of them
//
//   version  idea                                 read   written  sectors  instructions
//   v1       one thread per row                 71,580        48   17,877         8,200
//   v2       a block per row, running sums     104,448        48    2,534           734
//   v3       pages: many blocks, then one      123,648       432    2,046           804
//
// Counted by the emulator for 3 requests with 4,096 floats, two of them with cuts:
// bytes that threads ask for and write, sectors of 32 bytes that memory moves for that,
// and loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A19, "Sampling kernels".
#include "tokens.cuh"

// The key of the last token that a request keeps; all tokens have better ones than 0.
template <typename T>
__device__ Key last_key(const Row<T>& row, int request, const int64_t* last_ids,
                        int num_cut) {
  if (request >= num_cut) return 0;
  const int last = last_ids[request];
  return key_of(row.score(last), last);
}

// What a token fills of the line.
template <typename T>
__device__ Mass mass_of(const Row<T>& row, int id, Key last) {
  const float score = row.score(id);
  return key_of(score, id) >= last ? row.mass(score) : 0;
}

// The mass up to a point of the line, and a unit more: whoever reaches that has it.
__device__ inline Mass point_of(Mass total, double uniform) {
  return min(Mass(uniform * double(total)) + 1, total);
}

// v1: one thread per row, twice: for the length of the line, and for the point.
template <typename T>
__global__ void draw_v1(int64_t* drawn, const T* logits, int64_t stride, int size,
                        const T* largest, const int64_t* rows,
                        const double* temperatures, const double* uniforms,
                        const int64_t* last_ids, int num_cut, int num_sampled) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;
  if (request >= num_sampled) return;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  drawn[request] = 0;
  if (!row.has_numbers()) return;

  const Key last = last_key(row, request, last_ids, num_cut);
  Mass total = 0;
  for (int i = 0; i < size; i++) total += mass_of(row, i, last);
  const Mass point = point_of(total, uniforms[request]);
  int token = -1;
  for (Mass sum = 0; sum < point; sum += mass_of(row, token, last)) token++;
  drawn[request] = token;
}

// v2: one block per row. Running sums are made by all threads at once.
template <typename T>
__global__ void draw_v2(int64_t* drawn, const T* logits, int64_t stride, int size,
                        const T* largest, const int64_t* rows,
                        const double* temperatures, const double* uniforms,
                        const int64_t* last_ids, int num_cut) {
  const int request = blockIdx.x;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  if (threadIdx.x == 0) drawn[request] = 0;
  if (!row.has_numbers()) return;

  const Key last = last_key(row, request, last_ids, num_cut);
  Mass total = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) total += mass_of(row, i, last);
  const Mass point = point_of(block_reduce<Sum>(total), uniforms[request]);
  const int token =
      reach(point, size, [&](int i) { return mass_of(row, i, last); }).index;
  if (threadIdx.x == 0) drawn[request] = token;
}

// v3: a warp for each page of the line adds up what is on it, without a barrier, and
// pages of a row are spread over many blocks. Then the page with the point is found,
// and only its scores are read once more.
constexpr int PAGE = 256;

template <typename T>
__global__ void page_masses(unsigned long long* masses, const T* logits, int64_t stride,
                            int size, const T* largest, const int64_t* rows,
                            const double* temperatures, const int64_t* last_ids,
                            int num_cut, int num_pages) {
  const int request = blockIdx.y;
  const int page = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (page >= num_pages) return;  // the whole warp
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  if (!row.has_numbers()) return;

  const Key last = last_key(row, request, last_ids, num_cut);
  const int end = min((page + 1) * PAGE, size);
  Mass sum = 0;
  for (int i = page * PAGE + threadIdx.x % WARP; i < end; i += WARP)
    sum += mass_of(row, i, last);
  sum = warp_reduce<Sum>(sum);
  if (threadIdx.x % WARP == 0) masses[int64_t(request) * num_pages + page] = sum;
}

template <typename T>
__global__ void draw_v3(int64_t* drawn, const T* logits, int64_t stride, int size,
                        const T* largest, const int64_t* rows,
                        const double* temperatures, const double* uniforms,
                        const int64_t* last_ids, int num_cut,
                        const unsigned long long* masses, int num_pages) {
  const int request = blockIdx.x;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  if (threadIdx.x == 0) drawn[request] = 0;
  if (!row.has_numbers()) return;

  masses += int64_t(request) * num_pages;
  Mass total = 0;
  for (int page = threadIdx.x; page < num_pages; page += blockDim.x)
    total += masses[page];
  const Mass point = point_of(block_reduce<Sum>(total), uniforms[request]);
  const Place page = reach(point, num_pages, [&](int i) { return masses[i]; });
  const Key last = last_key(row, request, last_ids, num_cut);
  const int start = page.index * PAGE;
  const int token = reach(point - page.before, min(PAGE, size - start), [&](int i) {
                      return mass_of(row, start + i, last);
                    }).index;
  if (threadIdx.x == 0) drawn[request] = start + token;
}
