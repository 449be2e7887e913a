// Operations of the engine on a CPU: one pass over memory each. Plain C++ that a
// compiler turns into vector instructions; only the products of bfloat16 name them.
//
// Called through ctypes by minivllm/ops/cpu.py; every pointer is to memory of a tensor.
// Sums are in float32, and what torch's operations round in between is rounded here.
// Source: appendix A10, "Compiled operations"; appendix A12, "A sampler for a whole batch"; appendix A24, "Windows"; appendix A25, "Experts in the engine".

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

struct bfloat16 {
  uint16_t bits;
};

static inline float load(float x) { return x; }

static inline float load(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void store(float* to, float value) { *to = value; }

static inline void store(bfloat16* to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = value == value ? rounded : 0x7fc0;  // NaN stays NaN
}

// Round to the type and back, as an operation of torch does with its result.
template <class T>
static inline float rounded(float value) {
  T narrow;
  store(&narrow, value);
  return load(narrow);
}

// Fewer numbers than these are done before a second thread has woken up.
static constexpr int64_t WORTH_THREADS = 16384;

// x += added, if there is any; y = x / sqrt(mean(x^2) + eps) * weight, row by row; or
// * (1 + weight), which is rounded only once.
template <class T>
static void rms_norm(T* x, const T* added, const T* weight, T* y, int64_t rows,
                     int64_t size, float eps, int plus_one, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    T* from = x + row * size;
    T* to = y + row * size;
    if (added) {
      const T* more = added + row * size;
#pragma omp simd
      for (int64_t i = 0; i < size; i++)
        store(from + i, load(from[i]) + load(more[i]));
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += load(from[i]) * load(from[i]);
    float scale = 1 / std::sqrt(sum / size + eps);
    if (plus_one) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++)
        store(to + i, load(from[i]) * scale * (1 + load(weight[i])));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < size; i++)
        store(to + i, rounded<T>(load(from[i]) * scale) * load(weight[i]));
    }
  }
}

// e^x to about 1e-7 of its value, as 2^n * e^r with |r| <= ln(2) / 2. The coefficients
// are those of Cephes (Moshier).
static inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float n = x == x ? x * 1.44269504f : 0.0f;  // a NaN stays in r
  n = (n + 12582912.0f) - 12582912.0f;  // to the nearest whole number: 1.5 * 2^23
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;  // ln(2) in two parts, the first of few digits
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

struct Silu {
  static inline float of(float x) {
    return x < -87.0f ? 0.0f : x / (1 + exponential(-x));
  }
};

// y = act(gate) * up; gate_up is [rows, 2 * size].
template <class Activation, class T>
static void act_and_mul(const T* gate_up, T* y, int64_t rows, int64_t size,
                        int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = y + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      float share = Activation::of(load(gate[i]));
      store(to + i, rounded<T>(share) * load(up[i]));
    }
  }
}

// Rotates the first heads of each token in place; heads is [tokens, num_heads, dim].
template <class T>
static void rotary_embedding(T* heads, const float* cos, const float* sin,
                             int64_t tokens, int64_t num_heads, int64_t num_rotated,
                             int64_t dim, int threads) {
  int64_t half = dim / 2, work = tokens * num_rotated * dim;
#pragma omp parallel for num_threads(threads) if (work > WORTH_THREADS)
  for (int64_t token = 0; token < tokens; token++) {
    const float* c = cos + token * dim;
    const float* s = sin + token * dim;
    for (int64_t head = 0; head < num_rotated; head++) {
      T* a = heads + (token * num_heads + head) * dim;
      T* b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; i++) {
        float x = load(a[i]), y = load(b[i]);
        store(a + i, x * c[i] + y * s[i]);
        store(b + i, y * c[half + i] + x * s[half + i]);
      }
    }
  }
}

// The largest number of each row, NaN if there is one, and where it first stands.
extern "C" void argmax_float32(const float* x, float* largest, int64_t* index,
                               int64_t rows, int64_t size, int64_t stride,
                               int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * stride;
    float most = -INFINITY;
    int nans = 0;
#pragma omp simd reduction(max : most) reduction(+ : nans)
    for (int64_t i = 0; i < size; i++) {
      most = from[i] > most ? from[i] : most;
      nans += from[i] != from[i];
    }
    int64_t i = 0;
    while (nans ? from[i] == from[i] : from[i] != most) i++;
    largest[row] = from[i];
    index[row] = i;
  }
}

// Copies rows of size numbers to their slots; a stride is from token to token.
template <class T>
static void reshape_and_cache(const T* k, const T* v, int64_t k_stride,
                              int64_t v_stride, T* keys, T* values,
                              const int64_t* slots, int64_t tokens, int64_t size) {
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0) continue;  // padding
    memcpy(keys + slots[token] * size, k + token * k_stride, size * sizeof(T));
    memcpy(values + slots[token] * size, v + token * v_stride, size * sizeof(T));
  }
}

// Sixteen numbers that are added or multiplied at once; the compiler makes of them what
// the processor has.
typedef float floats __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(64)));
static constexpr int LANES = 16;

static inline floats load_lanes(const float* from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

static inline floats load_lanes(const bfloat16* from) {
  halves x;
  memcpy(&x, from, sizeof x);
  return (floats)(__builtin_convertvector(x, words) << 16);
}

// The lanes of a and b in another order: 0 to 15 are those of a, 16 to 31 those of b.
#ifdef __clang__
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ints __attribute__((vector_size(64)));
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

// The sum of the lanes of each of four: in every step, halves are added to halves.
static inline four sums_of_lanes(floats x, floats y, floats z, floats w) {
  auto pairs = [](floats a, floats b) {  // a0 + a2, b0 + b2, a1 + a3, b1 + b3, ...
    return LANES_OF(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           LANES_OF(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  floats a = pairs(x, y), b = pairs(z, w);
  floats quads =  // of each of them, four lanes
      LANES_OF(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
      LANES_OF(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  eight halves[2];
  memcpy(halves, &quads, sizeof quads);
  eight half = halves[0] + halves[1];
  four quarters[2];
  memcpy(quarters, &half, sizeof half);
  return quarters[0] + quarters[1];
}

// How the numbers of a type are multiplied: as what, how many at a time, and how added.
template <class T>
struct Products {
  using Number = float;
  static constexpr int64_t LENGTH = LANES;
  template <class From>
  static floats load(const From* from, int64_t) {
    return load_lanes(from);
  }
  static floats add(floats sum, floats a, floats b) { return sum + a * b; }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16, each of which adds its two products to a sum in float32.
static inline __m512i load_pairs(const bfloat16* from, int64_t count) {
  __mmask32 mask = count >= 2 * LANES ? ~0u : (1u << count) - 1;
  return _mm512_maskz_loadu_epi16(mask, from);
}

static inline floats add_pairs(floats sum, __m512i a, __m512i b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

template <>
struct Products<bfloat16> {
  using Number = bfloat16;
  static constexpr int64_t LENGTH = 2 * LANES;
  static __m512i load(const bfloat16* from, int64_t rest) {
    return load_pairs(from, rest);
  }
  static floats add(floats sum, __m512i a, __m512i b) { return add_pairs(sum, a, b); }
};
#endif

// scores[query][key] for the keys of a block and the queries that share their head.
// Calls for as many rows from `next` on, which will be needed soon.
template <int QUERIES, class T, class Number>
static inline void score(const Number* queries, const T* keys, const T* next,
                         int64_t num_keys, int64_t stride, int64_t dim, float scale,
                         float* scores, int64_t width) {
  using P = Products<T>;
  for (int64_t key = 0; key < num_keys; key += 4) {
    const T* rows[4];  // the last key may stand in for those that are missing
    for (int64_t i = 0; i < 4; i++)
      rows[i] = keys + std::min(key + i, num_keys - 1) * stride;
    floats a[QUERIES] = {}, b[QUERIES] = {}, c[QUERIES] = {}, d[QUERIES] = {};
    for (int64_t i = 0; i < dim; i += P::LENGTH) {
      auto k0 = P::load(rows[0] + i, dim - i), k1 = P::load(rows[1] + i, dim - i);
      auto k2 = P::load(rows[2] + i, dim - i), k3 = P::load(rows[3] + i, dim - i);
      if (i * sizeof(T) % 64 == 0)
        for (const T* row : rows) __builtin_prefetch(next + (row - keys) + i);
#pragma GCC unroll 4
      for (int q = 0; q < QUERIES; q++) {
        auto query = P::load(queries + q * dim + i, dim - i);
        a[q] = P::add(a[q], query, k0), b[q] = P::add(b[q], query, k1);
        c[q] = P::add(c[q], query, k2), d[q] = P::add(d[q], query, k3);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < QUERIES; q++) {
      // All four: those behind the last key are overwritten later.
      four sum = sums_of_lanes(a[q], b[q], c[q], d[q]) * scale;
      memcpy(scores + q * width + key, &sum, sizeof sum);
    }
  }
}

// mixed[query] += the values of a block, each times its share.
template <int QUERIES, class T>
static inline void mix(const float* shares, int64_t width, const T* values,
                       const T* next, int64_t num_keys, int64_t stride, int64_t dim,
                       float* mixed) {
  for (int64_t i = 0; i < dim; i += LANES) {
    floats sums[QUERIES];
    for (int q = 0; q < QUERIES; q++) sums[q] = load_lanes(mixed + q * dim + i);
    for (int64_t key = 0; key < num_keys; key++) {
      floats v = load_lanes(values + key * stride + i);
      if (i * sizeof(T) % 64 == 0) __builtin_prefetch(next + key * stride + i);
      for (int q = 0; q < QUERIES; q++) sums[q] += shares[q * width + key] * v;
    }
    for (int q = 0; q < QUERIES; q++)
      memcpy(mixed + q * dim + i, &sums[q], sizeof(floats));
  }
}

#ifdef __AVX512BF16__
// The same for pairs of keys.
template <int QUERIES>
static inline void mix(const bfloat16* shares, int64_t width, const bfloat16* values,
                       const bfloat16* next, int64_t num_keys, int64_t stride,
                       int64_t dim, float* mixed) {
  for (int64_t i = 0; i < dim; i += 2 * LANES) {
    floats low[QUERIES] = {}, high[QUERIES] = {};
    for (int64_t key = 0; key < num_keys; key += 2) {
      const bfloat16* row = values + key * stride + i;
      __m512i even = load_pairs(row, dim - i);
      __m512i odd = load_pairs(row + stride, key + 1 < num_keys ? dim - i : 0);
      __builtin_prefetch(next + key * stride + i);
      __builtin_prefetch(next + (key + 1) * stride + i);
      // Of each eight numbers: the first four with their partners, and the others.
      __m512i first = _mm512_unpacklo_epi16(even, odd);
      __m512i second = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
      for (int q = 0; q < QUERIES; q++) {
        int pair;
        memcpy(&pair, shares + q * width + key, sizeof pair);
        low[q] = add_pairs(low[q], first, _mm512_set1_epi32(pair));
        high[q] = add_pairs(high[q], second, _mm512_set1_epi32(pair));
      }
    }
    for (int q = 0; q < QUERIES; q++) {
      floats a = low[q], b = high[q], parts[2] = {
          LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
          LANES_OF(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
      for (int part = 0; part < 2 && i + part * LANES < dim; part++) {
        float* to = mixed + q * dim + i + part * LANES;
        parts[part] += load_lanes(to);
        memcpy(to, &parts[part], sizeof(floats));
      }
    }
  }
}
#endif

// Of a whole number of vectors: one number at a time is slow.
template <class Number>
static inline void softmax(float* scores, Number* shares, int64_t count) {
  float largest = scores[0], sum = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; i++)
    largest = scores[i] > largest ? scores[i] : largest;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) {
    scores[i] = exponential(scores[i] - largest);
    sum += scores[i];
  }
  float one = 1 / sum;
#pragma omp simd
  for (int64_t i = 0; i < count; i++) store(shares + i, scores[i] * one);
}

// Calls `function<n>(...)` for 1 <= n <= 4 known when the program runs.
#define WITH_QUERIES(n, function, ...)             \
  switch (n) {                                     \
    case 1: function<1>(__VA_ARGS__); break;       \
    case 2: function<2>(__VA_ARGS__); break;       \
    case 3: function<3>(__VA_ARGS__); break;       \
    default: function<4>(__VA_ARGS__); break;      \
  }

// One query of each of some requests attends to its keys up to last[i]: to all, or to
// the last ones, as many as the window.
//   q [rows, num_heads, dim], its rows q_stride apart; query i is in row rows[i]
//   keys, values [num_blocks, block_size, num_kv_heads, dim]; table [num, width]
//   y [num, num_heads, dim]
template <class T>
static void paged_attention(const T* q, int64_t q_stride, const T* keys,
                            const T* values, const int64_t* table, int64_t width,
                            const int64_t* rows, const int64_t* last, T* y, int64_t num,
                            int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                            int64_t block_size, int64_t window, float scale,
                            int threads) {
  using Number = typename Products<T>::Number;
  int64_t group = num_heads / num_kv_heads, stride = num_kv_heads * dim;
  // A task is a query with all its heads, whose keys are neighbours in memory; with few
  // queries, one key head of it.
  int64_t parts = num >= 2 * threads ? 1 : num_kv_heads;
  int64_t kv_heads = num_kv_heads / parts, heads = kv_heads * group;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> floats_memory;
    std::vector<Number> memory;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < num; i++) {
      for (int64_t part = 0; part < parts; part++) {
        int64_t end = last[i] + 1, first = std::max<int64_t>(0, end - window);
        int64_t count = end - first, first_kv_head = part * kv_heads;
        int64_t first_head = first_kv_head * group;
        // Whole vectors, and room for three scores behind the last one.
        int64_t whole = (count + 3 + LANES - 1) / LANES * LANES;
        floats_memory.resize(heads * (dim + whole));
        float* mixed = floats_memory.data();
        float* scores = mixed + heads * dim;  // [heads][whole]
        memory.resize(heads * (dim + whole) + 1);  // a pair begins at the last share
        Number* queries = memory.data();
        Number* shares = queries + heads * dim;  // [heads][whole]
        const T* from = q + rows[i] * q_stride + first_head * dim;
        for (int64_t j = 0; j < heads * dim; j++) {
          store(queries + j, load(from[j]));
          mixed[j] = 0;
        }
        auto at = [&](const T* pool, int64_t key) {
          int64_t block = table[i * width + key / block_size];
          return pool + (block * block_size + key % block_size) * stride +
                 first_kv_head * dim;
        };
        // The key behind those that share a block with this one.
        auto end_of_block = [&](int64_t key) {
          return std::min(end, (key / block_size + 1) * block_size);
        };
        // Where a block begins; behind the last one of the keys, the values begin.
        auto next_block = [&](const T* pool, int64_t key) {
          return key < end ? at(pool, key) : at(values, first);
        };
        // Up to four query heads of the same key head.
        auto at_once = [&](int64_t head) {
          return std::min<int64_t>(4, group - head % group);
        };

        for (int64_t key = first, behind; key < end; key = behind) {
          behind = end_of_block(key);
          const T *k = at(keys, key), *next = next_block(keys, behind);
          for (int64_t head = 0; head < heads; head += at_once(head))
            WITH_QUERIES(at_once(head), score, queries + head * dim,
                         k + head / group * dim, next + head / group * dim,
                         behind - key, stride, dim, scale,
                         scores + head * whole + key - first, whole)
        }
        for (int64_t head = 0; head < heads; head++) {
          std::fill(scores + head * whole + count, scores + (head + 1) * whole,
                    -INFINITY);
          softmax(scores + head * whole, shares + head * whole, whole);
        }
        for (int64_t key = first, behind; key < end; key = behind) {
          behind = end_of_block(key);
          const T *v = at(values, key), *next = next_block(values, behind);
          for (int64_t head = 0; head < heads; head += at_once(head))
            WITH_QUERIES(at_once(head), mix, shares + head * whole + key - first,
                         whole, v + head / group * dim, next + head / group * dim,
                         behind - key, stride, dim, mixed + head * dim)
        }
        T* to = y + (i * num_heads + first_head) * dim;
        for (int64_t j = 0; j < heads * dim; j++) store(to + j, mixed[j]);
      }
    }
  }
}

// As many rows and panels at a time as have their sums in registers.
#ifdef __AVX512F__
static constexpr int MOST_ROWS = 8, MOST_PANELS = 3;  // 24 of 32
#else
static constexpr int MOST_ROWS = 6, MOST_PANELS = 1;  // 12 of 16, of half the size
#endif
static constexpr int64_t INPUTS_AT_ONCE = 288;      // of three panels: 54 KiB
static constexpr int64_t FLOATS_AT_ONCE = 1 << 18;  // of rows: 1 MiB

// y [rows, out] = x [rows, in] W^T; weight [out / 16][in][16], filled up with anything
struct Product {
  const float *x, *weight;
  float* y;
  int64_t rows, in, out;
};

// A vector, or its first columns: a size that is known is much quicker to copy.
static inline void copy_lanes(void* to, const void* from, int64_t columns) {
  if (columns >= LANES)
    memcpy(to, from, sizeof(floats));
  else if (columns > 0)
    memcpy(to, from, columns * sizeof(float));
}

// Adds the products of the inputs from .. to, for some rows and panels; the first
// inputs begin the sums.
template <int ROWS, int PANELS>
static void multiply_floats(const Product& p, int64_t row, int64_t panel, int64_t from,
                            int64_t to) {
  const float* x = p.x + row * p.in;
  const float* weight = p.weight + panel * p.in * LANES;
  float* y = p.y + row * p.out + panel * LANES;
  int64_t columns = p.out - panel * LANES;  // the last panel may have fewer
  floats sums[ROWS][PANELS] = {};
  if (from > 0)
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < PANELS; i++)
        copy_lanes(&sums[r][i], y + r * p.out + i * LANES, columns - i * LANES);
  for (int64_t input = from; input < to; input++) {
    floats weights[PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < PANELS; i++)
      weights[i] = load_lanes(weight + (i * p.in + input) * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
      for (int i = 0; i < PANELS; i++) sums[r][i] += weights[i] * x[r * p.in + input];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < PANELS; i++)
      copy_lanes(y + r * p.out + i * LANES, &sums[r][i], columns - i * LANES);
}

// The same for a number of rows, 1 .. ROWS, that is known when the program runs.
template <int ROWS, int PANELS>
static void multiply_rows(int64_t rows, const Product& p, int64_t row, int64_t panel,
                          int64_t from, int64_t to) {
  if (rows == ROWS)
    multiply_floats<ROWS, PANELS>(p, row, panel, from, to);
  else if constexpr (ROWS > 1)
    multiply_rows<ROWS - 1, PANELS>(rows, p, row, panel, from, to);
}

// Panels panel .. end of a product. Few rows take all inputs at a time.
template <int ROWS, int PANELS>
static void multiply_panels(const Product& p, int64_t panel, int64_t end) {
  int64_t inputs = p.rows > 2 * ROWS ? INPUTS_AT_ONCE : p.in;
  int64_t rows_at_once = std::max<int64_t>(FLOATS_AT_ONCE / p.in, ROWS);
  for (int64_t first = 0; first < p.rows; first += rows_at_once) {
    int64_t rows = std::min(p.rows - first, rows_at_once);
    int64_t parts = (rows + ROWS - 1) / ROWS;
    for (int64_t i = panel; i < end;) {
      bool is_last = i + PANELS > end;  // what is left over, one by one
      for (int64_t from = 0; from < p.in; from += inputs) {
        int64_t to = std::min(p.in, from + inputs);
        for (int64_t part = 0; part < parts; part++) {
          int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
          if (is_last)
            multiply_rows<ROWS, 1>(count, p, first + row, i, from, to);
          else
            multiply_rows<ROWS, PANELS>(count, p, first + row, i, from, to);
        }
      }
      i += is_last ? 1 : PANELS;
    }
  }
}

extern "C" void linear_float32(const float* x, const float* weight, float* y,
                               int64_t rows, int64_t in, int64_t out, int threads) {
  Product product = {x, weight, y, rows, in, out};
  int64_t panels = (out + LANES - 1) / LANES;
#pragma omp parallel num_threads(threads)
  {
    int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
    int64_t first = panels * self / team, end = panels * (self + 1) / team;
    if (rows == 1)
      multiply_panels<1, 4>(product, first, end);  // four streams of memory at a time
    else
      multiply_panels<MOST_ROWS, MOST_PANELS>(product, first, end);
  }
}

// The product of bfloat16 rows with a weight in panels, for processors that have the
// instructions: AVX-512 for up to two rows, which waits for memory only, AMX for more.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>

static inline void store_lanes(bfloat16* to, __m512 sums, int64_t columns) {
  __mmask16 mask = columns >= LANES ? 0xffff : (1 << columns) - 1;
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums));
}

// Some rows times some panels: every sum stays in a register.
template <int ROWS, int PANELS>
static void multiply(const bfloat16* x, int64_t in, const bfloat16* panels, bfloat16* y,
                     int64_t out, int64_t column) {
  __m512 sums[ROWS][PANELS];
  for (auto& row : sums)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < in; i += 2) {
    for (int panel = 0; panel < PANELS; panel++) {
      auto weights = (__m512bh)_mm512_loadu_si512(panels + (panel * in + i) * LANES);
      for (int row = 0; row < ROWS; row++) {
        int pair;
        memcpy(&pair, x + row * in + i, sizeof pair);
        auto inputs = (__m512bh)_mm512_set1_epi32(pair);
        sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], weights, inputs);
      }
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int panel = 0; panel < PANELS; panel++) {
      int64_t first = column + panel * LANES;
      store_lanes(y + row * out + first, sums[row][panel], out - first);
    }
}

template <int ROWS>
static void multiply_few(const bfloat16* x, int64_t in, const bfloat16* weight,
                         bfloat16* y, int64_t out, int64_t panel, int64_t end) {
  for (; panel + 4 <= end; panel += 4)  // four streams of memory at a time
    multiply<ROWS, 4>(x, in, weight + panel * in * LANES, y, out, panel * LANES);
  for (; panel < end; panel++)
    multiply<ROWS, 1>(x, in, weight + panel * in * LANES, y, out, panel * LANES);
}

// Some compilers do not know that loading a tile reads memory: what has been written
// before this line is in memory behind it.
static inline void finish_writing() { asm volatile("" ::: "memory"); }

static constexpr int TILE = 16;         // rows of a tile
static constexpr int INPUTS = 32;       // inputs in a row of a tile
static constexpr int SUMS = TILE * LANES;
static constexpr int64_t ROWS_AT_ONCE = 256;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int tile = 0; tile < 8; tile++) bytes_per_row[tile] = 64, rows[tile] = TILE;
  }
};

// One or two tiles of rows, a and b, times one, two or four panels. Tiles 0 to 3 hold
// the sums, 4 and 5 the rows, 6 and 7 the weights.
template <int ROW_TILES, int PANELS>
static void multiply_tiles(const bfloat16* a, const bfloat16* b, int64_t in,
                           const bfloat16* panels, float* sums) {
  static_assert(ROW_TILES * PANELS <= 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < in; i += INPUTS) {
    const bfloat16* weights = panels + i * LANES;
    _tile_loadd(4, a + i, in * sizeof(bfloat16));
    if constexpr (ROW_TILES == 2) _tile_loadd(5, b + i, in * sizeof(bfloat16));
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ROW_TILES == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (PANELS >= 2) {
      _tile_loadd(7, weights + in * LANES, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (ROW_TILES == 2) _tile_dpbf16ps(3, 5, 7);
    }
    if constexpr (PANELS == 4) {
      _tile_loadd(6, weights + 2 * in * LANES, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, weights + 3 * in * LANES, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + SUMS, 64);
  _tile_stored(2, sums + 2 * SUMS, 64);
  _tile_stored(3, sums + 3 * SUMS, 64);
}

// As above, and the sums of the rows that exist go to y.
template <int ROW_TILES, int PANELS>
static void multiply_many(const bfloat16* a, const bfloat16* b, int64_t rows,
                          int64_t in, const bfloat16* panels, bfloat16* y, int64_t out,
                          int64_t column) {
  alignas(64) float sums[4 * SUMS];
  multiply_tiles<ROW_TILES, PANELS>(a, b, in, panels, sums);
  for (int64_t row = 0; row < std::min<int64_t>(rows, ROW_TILES * TILE); row++)
    for (int panel = 0; panel < PANELS; panel++) {
      const float* tile = sums + (row / TILE * 2 + panel) * SUMS;
      int64_t first = column + panel * LANES;
      store_lanes(y + row * out + first, _mm512_load_ps(tile + row % TILE * LANES),
                  out - first);
    }
}

extern "C" const char* why_no_tiles() {
  // Linux grants the tiles' registers to programs that ask: ARCH_REQ_XCOMP_PERM, 18.
  static bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted ? nullptr : "the operating system does not grant AMX";
}

// y = x W^T; x [rows, in], in a multiple of 32; weight [panels][in / 2][16][2]
extern "C" void linear_bfloat16(const bfloat16* x, const bfloat16* weight,
                                bfloat16* y, int64_t rows, int64_t in, int64_t out,
                                int threads) {
  int64_t panels = (out + LANES - 1) / LANES;
#pragma omp parallel num_threads(threads)
  {
    int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
    int64_t first = panels * self / team, end = panels * (self + 1) / team;
    if (rows == 1) {
      multiply_few<1>(x, in, weight, y, out, first, end);
    } else if (rows == 2) {
      multiply_few<2>(x, in, weight, y, out, first, end);
    } else if (first < end) {
      TileConfig config;
      finish_writing();
      _tile_loadconfig(&config);
      int64_t whole = rows / TILE * TILE;
      std::vector<bfloat16> last;  // the last rows, filled up to a tile
      if (whole < rows) {
        last.resize(TILE * in);
        memcpy(last.data(), x + whole * in, (rows - whole) * in * sizeof(bfloat16));
      }
      finish_writing();
      auto tile = [&](int64_t row) { return row < whole ? x + row * in : last.data(); };
      // So many rows stay in the second cache while all panels pass by.
      for (int64_t from = 0; from < rows; from += ROWS_AT_ONCE) {
        int64_t to = std::min(rows, from + ROWS_AT_ONCE), panel = first;
        auto step = [&](auto few, auto many, int count) {
          const bfloat16* some = weight + panel * in * LANES;
          for (int64_t row = from; row < to; row += 2 * TILE) {
            const bfloat16 *a = tile(row), *b = tile(row + TILE);
            auto function = row + TILE < rows ? many : few;
            function(a, b, rows - row, in, some, y + row * out, out, panel * LANES);
          }
          panel += count;
        };
        if (rows <= TILE)
          while (panel + 4 <= end) step(multiply_many<1, 4>, multiply_many<1, 4>, 4);
        while (panel + 2 <= end) step(multiply_many<1, 2>, multiply_many<2, 2>, 2);
        if (panel < end) step(multiply_many<1, 1>, multiply_many<2, 1>, 1);
      }
      _tile_release();
    }
  }
}

// Keys for the product with queries, [keys / 16][dim / 32][16 pairs][16 keys][2], and
// values for the product with shares, [keys / 32][dim / 16][16 pairs][16 dims][2];
// the last ones are filled up with zeros.
static void pack_keys(const bfloat16* from, int64_t key, int64_t dim, uint32_t* to) {
  to += key / LANES * dim / INPUTS * SUMS + key % LANES;
  for (int64_t i = 0; i < dim; i += INPUTS, to += SUMS)
    for (int64_t pair = 0; pair < TILE; pair++)
      memcpy(to + pair * LANES, from + i + 2 * pair, 4);
}

static void pack_values(const bfloat16* even, const bfloat16* odd, int64_t key,
                        int64_t dim, uint32_t* to) {
  to += key / INPUTS * dim / LANES * SUMS + key % INPUTS / 2 * LANES;
  for (int64_t i = 0; i < dim; i += LANES, to += SUMS) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; lane++)
      to[lane] = even[i + lane].bits | uint32_t(odd[i + lane].bits) << 16;
  }
}

// A piece of a request with one key head: num_queries neighbouring queries, of which
// the last has num_keys keys up to its own, and each one before it a key less. Of these
// it sees the last ones, as many as the window.
struct Piece {
  const bfloat16* q;  // its queries, q_stride apart, from the group's first head on
  bfloat16* y;        // the same place in the result, y_stride apart
  int64_t q_stride, y_stride, num_queries, num_keys, group, dim, window;
};

static void attend_piece(const Piece& piece, const uint32_t* keys,
                         const uint32_t* values, float scale,
                         std::vector<float>& floats_memory,
                         std::vector<bfloat16>& halves_memory) {
  int64_t dim = piece.dim, width = (piece.num_keys + INPUTS - 1) / INPUTS * INPUTS;
  int64_t num_rows = piece.num_queries * piece.group;
  floats_memory.resize(2 * SUMS + TILE * width);
  halves_memory.resize(TILE * (width + dim));
  float* sums = floats_memory.data();
  float* scores = sums + 2 * SUMS;           // [16][width]
  bfloat16* shares = halves_memory.data();   // [16][width]
  bfloat16* queries = shares + TILE * width;  // [16][dim]
  for (int64_t first = 0; first < num_rows; first += TILE) {
    int64_t rows = std::min<int64_t>(TILE, num_rows - first);
    int64_t hidden[TILE], visible[TILE], most = 0;  // keys before the window, all
    for (int64_t row = 0; row < rows; row++) {
      int64_t query = (first + row) / piece.group, head = (first + row) % piece.group;
      memcpy(queries + row * dim, piece.q + query * piece.q_stride + head * dim,
             dim * sizeof(bfloat16));
      visible[row] = piece.num_keys - piece.num_queries + query + 1;
      hidden[row] = std::max<int64_t>(0, visible[row] - piece.window);
      most = std::max(most, visible[row]);
    }
    int64_t begin = hidden[0] / INPUTS * INPUTS;  // of the first query the fewest
    int64_t end = (most + INPUTS - 1) / INPUTS * INPUTS;
    finish_writing();

    for (int64_t key = begin; key < end; key += INPUTS) {  // two tiles of keys
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t i = 0; i < dim; i += INPUTS) {
        const uint32_t* tile = keys + key * dim / 2 + i / INPUTS * SUMS;
        _tile_loadd(4, queries + i, dim * sizeof(bfloat16));
        _tile_loadd(6, tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tile + LANES * dim / 2, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, scores + key, width * sizeof(float));
      _tile_stored(1, scores + key + LANES, width * sizeof(float));
    }

    float totals[TILE];
    for (int64_t row = 0; row < rows; row++) {
      float* of = scores + row * width;
      // What is not seen has no share, and whole vectors are quicker than a rest.
      std::fill(of + begin, of + hidden[row], -INFINITY);
      std::fill(of + visible[row], of + end, -INFINITY);
      float largest = of[hidden[row]], total = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t i = begin; i < end; i++) largest = of[i] > largest ? of[i] : largest;
      bfloat16* to = shares + row * width;
#pragma omp simd reduction(+ : total)
      for (int64_t i = begin; i < end; i++) {
        float share = of[i] == -INFINITY ? 0 : exponential((of[i] - largest) * scale);
        store(to + i, share);
        total += share;
      }
      totals[row] = total;
    }
    finish_writing();

    for (int64_t column = 0; column < dim; column += 2 * LANES) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t key = begin; key < end; key += INPUTS) {
        const uint32_t* tile = values + key * dim / 2 + column / LANES * SUMS;
        _tile_loadd(4, shares + key, width * sizeof(bfloat16));
        _tile_loadd(6, tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tile + SUMS, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, sums, 2 * 64);
      _tile_stored(1, sums + LANES, 2 * 64);
      for (int64_t row = 0; row < rows; row++) {
        int64_t query = (first + row) / piece.group, head = (first + row) % piece.group;
        bfloat16* to = piece.y + query * piece.y_stride + head * dim + column;
        for (int64_t i = 0; i < 2 * LANES; i++)
          store(to + i, sums[row * 2 * LANES + i] / totals[row]);
      }
    }
  }
}

// Pieces of requests attend to their keys in the cache.
//   q as for paged_attention; piece i is lengths[i] rows of it, from starts[i] on
//   y [num][longest][num_heads][dim]
extern "C" void prefill_attention_bfloat16(
    const bfloat16* q, int64_t q_stride, const bfloat16* keys, const bfloat16* values,
    const int64_t* table, int64_t width, const int64_t* starts, const int64_t* lengths,
    const int64_t* num_keys, bfloat16* y, int64_t num, int64_t longest,
    int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size,
    int64_t window, float scale, int threads) {
  int64_t group = num_heads / num_kv_heads, stride = num_kv_heads * dim;
#pragma omp parallel num_threads(threads)
  {
    TileConfig config;
    finish_writing();
    _tile_loadconfig(&config);
    // Kept from call to call: fresh memory costs more than the work.
    static thread_local std::vector<uint32_t> packed_keys, packed_values;
    static thread_local std::vector<float> floats_memory;
    static thread_local std::vector<bfloat16> halves_memory;
    static thread_local std::vector<int64_t> places;
    std::vector<bfloat16> zeros(dim, bfloat16{0});
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < num; i++) {
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        // From the first one on that any query of the piece sees.
        int64_t first = std::max<int64_t>(0, num_keys[i] - lengths[i] + 1 - window);
        int64_t count = num_keys[i] - first;
        int64_t whole = (count + INPUTS - 1) / INPUTS * INPUTS;
        for (auto packed : {&packed_keys, &packed_values}) {
          int64_t size = whole * dim / 2, last = size - INPUTS * dim / 2;
          if (int64_t(packed->size()) < size) packed->resize(size);
          // Some of the last places may stay empty.
          std::fill_n(packed->begin() + last, INPUTS * dim / 2, 0);
        }
        places.clear();  // where in both pools a key and its value begin
        for (int64_t key = first; key < num_keys[i]; key++) {
          int64_t block = table[i * width + key / block_size];
          int64_t token = block * block_size + key % block_size;
          places.push_back(token * stride + kv_head * dim);
        }
        for (int64_t key = 0; key < count; key++)
          pack_keys(keys + places[key], key, dim, packed_keys.data());
        for (int64_t key = 0; key < count; key += 2) {
          bool has_odd = key + 1 < count;
          const bfloat16* odd = has_odd ? values + places[key + 1] : zeros.data();
          pack_values(values + places[key], odd, key, dim, packed_values.data());
        }
        int64_t head = kv_head * group;
        Piece piece = {q + starts[i] * q_stride + head * dim,
                       y + (i * longest * num_heads + head) * dim,
                       q_stride, num_heads * dim, lengths[i], count, group, dim,
                       window};
        attend_piece(piece, packed_keys.data(), packed_values.data(), scale,
                     floats_memory, halves_memory);
      }
    }
    _tile_release();
  }
}
#else
extern "C" const char* why_no_tiles() { return "this processor has no AMX"; }
#endif

// The names that Python calls: each op, once for float32 and once for bfloat16.
#define NAMED(T, name)                                                              \
  extern "C" void rms_norm_##name(T* x, const T* added, const T* weight, T* y,      \
                                  int64_t rows, int64_t size, float eps,            \
                                  int plus_one, int threads) {                      \
    rms_norm(x, added, weight, y, rows, size, eps, plus_one, threads);              \
  }                                                                                 \
  extern "C" void silu_and_mul_##name(const T* gate_up, T* y, int64_t rows,         \
                                      int64_t size, int threads) {                  \
    act_and_mul<Silu>(gate_up, y, rows, size, threads);                             \
  }                                                                                 \
  extern "C" void rotary_embedding_##name(T* heads, const float* cos,               \
                                          const float* sin, int64_t tokens,         \
                                          int64_t num_heads, int64_t num_rotated,   \
                                          int64_t dim, int threads) {               \
    rotary_embedding(heads, cos, sin, tokens, num_heads, num_rotated, dim,          \
                     threads);                                                      \
  }                                                                                 \
  extern "C" void reshape_and_cache_##name(                                         \
      const T* k, const T* v, int64_t k_stride, int64_t v_stride, T* keys,          \
      T* values, const int64_t* slots, int64_t tokens, int64_t size) {              \
    reshape_and_cache(k, v, k_stride, v_stride, keys, values, slots, tokens, size); \
  }                                                                                 \
  extern "C" void paged_attention_##name(                                           \
      const T* q, int64_t q_stride, const T* keys, const T* values,                 \
      const int64_t* table, int64_t width, const int64_t* rows,                     \
      const int64_t* last, T* y, int64_t num, int64_t num_heads,                    \
      int64_t num_kv_heads, int64_t dim, int64_t block_size, int64_t window,        \
      float scale, int threads) {                                                   \
    paged_attention(q, q_stride, keys, values, table, width, rows, last, y, num,    \
                    num_heads, num_kv_heads, dim, block_size, window, scale,        \
                    threads);                                                       \
  }
NAMED(float, float32)
NAMED(bfloat16, bfloat16)

// A token of a row: a better score goes first, and of equal scores the lower index.
struct Token {
  float score;
  int64_t index;
};

static inline bool better(const Token& a, const Token& b) {
  return a.score != b.score ? a.score > b.score : a.index < b.index;
}

// The shares of a row's tokens: probabilities, divided by that of the best. To find the
// last token that is kept, the tokens are counted and weighed in buckets, by their
// distance from the best score: only the one bucket in which it lies has to be sorted.
struct Row {
  static constexpr int BUCKETS = 1024, PER_UNIT = 16, PAGE = 256;
  static constexpr int LAST = BUCKETS - 1;  // everything farther away
  static constexpr float FAR = float(LAST) / PER_UNIT;
  static constexpr float COLDEST = 0x1p-126f;  // what is colder would be 0 in float32

  const float* scores;
  int64_t size;
  float top, temperature;
  std::vector<float> shares;
  std::vector<uint16_t> buckets;
  std::vector<Token> tokens;  // of one bucket
  int64_t counts[BUCKETS];
  double masses[BUCKETS];

  // What is farther from the best than FAR has, all together, less than 2^-53 of the
  // probability. It is left out. At most about one draw in 2^53 misses it: the numbers
  // are multiples of 2^-53, and 0 would choose the first token, however improbable.
  void fill(const float* from, int64_t num, float best, double warmth) {
    scores = from, size = num, top = best;
    temperature = warmth > COLDEST ? float(warmth) : COLDEST;
    shares.resize(size);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      float x = (from[i] - best) / temperature;
      shares[i] = x <= -FAR ? 0.0f : exponential(x);
    }
  }

  void weigh() {
    buckets.resize(size);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      float place = (top - scores[i]) / temperature * PER_UNIT;
      buckets[i] = place < LAST ? uint16_t(int32_t(place)) : LAST;
    }
    // Two tokens that follow one another often share a bucket: with two sets of sums,
    // neither has to wait for the other.
    struct Sum {
      double mass;
      int64_t count;
    } sums[2 * BUCKETS] = {};
    const uint16_t* bucket = buckets.data();
    const float* share = shares.data();
    for (int64_t i = 0; i < size; i++) {
      Sum& sum = sums[2 * bucket[i] + (i & 1)];
      sum.mass += share[i];
      sum.count++;
    }
    for (int b = 0; b < BUCKETS; b++) {
      counts[b] = sums[2 * b].count + sums[2 * b + 1].count;
      masses[b] = sums[2 * b].mass + sums[2 * b + 1].mass;
    }
  }

  // Lists the tokens of a bucket.
  void open(uint16_t wanted) {
    tokens.clear();
    const uint16_t* bucket = buckets.data();
    for (int64_t start = 0; start < size; start += 64) {
      int64_t end = std::min(size, start + 64);
      int found = 0;
#pragma omp simd reduction(| : found)
      for (int64_t i = start; i < end; i++) found |= bucket[i] == wanted;
      for (int64_t i = start; found && i < end; i++)
        if (bucket[i] == wanted) tokens.push_back({scores[i], i});
    }
  }

  // The token that comes as number `count`; adds up the shares up to it. The end of the
  // row, if that is among those that are left out.
  Token token_at(int64_t count, double* mass) {
    int bucket = 0;
    double before = 0;
    while (bucket < LAST && count > counts[bucket]) {
      count -= counts[bucket];
      before += masses[bucket++];
    }
    if (bucket == LAST) return {-INFINITY, size};
    open(bucket);
    std::nth_element(tokens.begin(), tokens.begin() + count - 1, tokens.end(), better);
    for (int64_t i = 0; i < count; i++) before += shares[tokens[i].index];
    *mass = before;
    return tokens[count - 1];
  }

  // The first token up to which the shares add up to a mass.
  Token token_behind(double mass) {
    int bucket = 0, last = LAST;
    while (last > 0 && masses[last] == 0) last--;
    while (bucket < last && masses[bucket] < mass) mass -= masses[bucket++];
    open(bucket);
    std::sort(tokens.begin(), tokens.end(), better);
    size_t i = 0;
    while (i + 1 < tokens.size() && shares[tokens[i].index] < mass)
      mass -= shares[tokens[i++].index];
    return tokens[i];
  }

  // Leaves out what min_p, top_k and top_p say.
  void cut(float min_p, int64_t top_k, double top_p) {
    if (min_p > 0) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++)
        shares[i] = shares[i] >= min_p ? shares[i] : 0.0f;
    }
    if (top_k >= size && top_p >= 1) return;
    weigh();
    double total = 0;
    for (double mass : masses) total += mass;
    Token last = {-INFINITY, size};
    if (top_k < size) last = token_at(top_k, &total);
    if (top_p < 1) {
      Token first = token_behind(top_p * total);
      if (better(first, last)) last = first;
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      bool is_tie = scores[i] == last.score && i <= last.index;
      shares[i] = scores[i] > last.score || is_tie ? shares[i] : 0.0f;
    }
  }

  // The token on whose stretch a number falls, if the shares are laid end to end.
  int64_t draw(double number) {
    int64_t pages = (size + PAGE - 1) / PAGE, page = 0;
    std::vector<double> sums(pages);
    double total = 0;
    for (int64_t p = 0; p < pages; p++) {
      total += sums[p] = sum(p);
      if (sums[p] > 0) page = p;  // the last one with a token
    }
    double point = number * total, start = 0;
    for (int64_t p = 0; p < page; p++) {
      if (start + sums[p] > point) page = p;
      else start += sums[p];
    }
    // Within the page, sums are in another order: the point moves along in proportion.
    double length = 0, rest = (point - start) / sums[page];
    int64_t end = std::min(size, (page + 1) * PAGE), token = page * PAGE;
    for (int64_t i = page * PAGE; i < end; i++) length += shares[i];
    double behind = 0;
    for (int64_t i = page * PAGE; i < end; i++) {
      if (shares[i] == 0) continue;
      token = i;
      behind += shares[i];
      if (behind > rest * length) break;
    }
    return token;
  }

  double sum(int64_t page) {
    int64_t end = std::min(size, (page + 1) * PAGE);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = page * PAGE; i < end; i++) total += shares[i];
    return total;
  }
};

// Draws a token for some of the rows of logits; the first num_cut leave tokens out.
extern "C" void draw_float32(const float* logits, int64_t stride, int64_t size,
                             const float* largest, const int64_t* rows,
                             int64_t num_rows, const double* temperatures,
                             const double* uniforms, int64_t num_cut,
                             const double* min_p, const int64_t* top_k,
                             const double* top_p, int64_t* drawn, int threads) {
#pragma omp parallel num_threads(threads) if (num_rows * size > WORTH_THREADS)
  {
    Row row;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_rows; i++) {
      drawn[i] = 0;
      float best = largest[rows[i]];
      if (!std::isfinite(best)) continue;  // no numbers: any token
      row.fill(logits + rows[i] * stride, size, best, temperatures[i]);
      if (i < num_cut) row.cut(float(min_p[i]), top_k[i], top_p[i]);
      drawn[i] = row.draw(uniforms[i]);
    }
  }
}

// 1 - erf(z) for z >= 0, to about 1e-7 of its value: a polynomial of Chebyshev's kind
// (Numerical Recipes, erfcc).
static inline float complement_of_erf(float z) {
  float t = 1 / (1 + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * exponential(p - z * z);
}

struct Gelu {  // x * P(a normal random number < x)
  static inline float of(float x) {
    float of_distance = complement_of_erf(std::fabs(x) * 0.70710678f);
    return 0.5f * x * (x < 0 ? of_distance : 2 - of_distance);
  }
};

struct GeluTanh {  // 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
  static inline float of(float x) {
    float doubled = 1.59576912f * (x + 0.044715f * x * x * x);
    return doubled < -87.0f ? 0.0f : x / (1 + exponential(-doubled));
  }
};

#define GATED(T, name)                                                             \
  extern "C" void gelu_and_mul_##name(const T* gate_up, T* y, int64_t rows,        \
                                      int64_t size, int threads) {                 \
    act_and_mul<Gelu>(gate_up, y, rows, size, threads);                            \
  }                                                                                \
  extern "C" void gelu_tanh_and_mul_##name(const T* gate_up, T* y, int64_t rows,   \
                                           int64_t size, int threads) {            \
    act_and_mul<GeluTanh>(gate_up, y, rows, size, threads);                        \
  }
GATED(float, float32)
GATED(bfloat16, bfloat16)

// The experts of each token, best first and of equal ones the first, with their shares:
// a softmax over all experts, which may be made to sum to one over the chosen.
template <class T>
static void topk_softmax(const T* logits, float* weights, int64_t* experts,
                         int64_t tokens, int64_t num_experts, int64_t top_k,
                         int renormalize, int threads) {
#pragma omp parallel num_threads(threads) if (tokens * num_experts > WORTH_THREADS)
  {
    std::vector<float> shares(num_experts);
    std::vector<char> is_taken(num_experts);
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
      const T* scores = logits + token * num_experts;
      float most = load(scores[0]), sum = 0;
      for (int64_t i = 1; i < num_experts; i++) most = std::max(most, load(scores[i]));
      for (int64_t i = 0; i < num_experts; i++)
        sum += shares[i] = std::exp(load(scores[i]) - most);
      std::fill(is_taken.begin(), is_taken.end(), 0);
      float chosen_sum = 0;
      for (int64_t place = 0; place < top_k; place++) {
        int64_t best = -1;  // a NaN is never larger, but may be the only one left
        for (int64_t i = 0; i < num_experts; i++)
          if (!is_taken[i] && (best < 0 || shares[i] > shares[best])) best = i;
        is_taken[best] = 1;
        experts[token * top_k + place] = best;
        weights[token * top_k + place] = shares[best] / sum;
        chosen_sum += shares[best] / sum;
      }
      for (int64_t place = 0; renormalize && place < top_k; place++)
        weights[token * top_k + place] /= chosen_sum;
    }
  }
}

// Choices sorted by expert, those of an expert by number: counted, then put into place.
extern "C" void moe_permute_int64(const int64_t* experts, int64_t* order,
                                  int32_t* offsets, int64_t num_choices,
                                  int64_t num_experts) {
  std::fill(offsets, offsets + num_experts + 1, 0);
  for (int64_t i = 0; i < num_choices; i++) offsets[experts[i] + 1]++;
  for (int64_t e = 0; e < num_experts; e++) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + num_experts);
  for (int64_t i = 0; i < num_choices; i++) order[next[experts[i]]++] = i;
}

// out[token] = the sum of weight * y over its choices, in their order; row r of y is
// that of choice order[r].
template <class T>
static void moe_combine(const T* y, const int64_t* order, const float* weights, T* out,
                        int64_t tokens, int64_t top_k, int64_t size, int threads) {
  std::vector<int64_t> row_of(tokens * top_k);
  for (int64_t row = 0; row < tokens * top_k; row++) row_of[order[row]] = row;
#pragma omp parallel num_threads(threads) if (tokens * top_k * size > WORTH_THREADS)
  {
    std::vector<float> sum(size);
    float* to = sum.data();
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t choice = token * top_k; choice < (token + 1) * top_k; choice++) {
        const T* from = y + row_of[choice] * size;
        float weight = weights[choice];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] += weight * load(from[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < size; i++) store(out + token * size + i, to[i]);
    }
  }
}

#define EXPERT_OPS(name, T)                                                           \
  extern "C" void topk_softmax_##name(const T* logits, float* weights,                \
                                      int64_t* experts, int64_t tokens,               \
                                      int64_t num_experts, int64_t top_k,             \
                                      int renormalize, int threads) {                 \
    topk_softmax(logits, weights, experts, tokens, num_experts, top_k, renormalize,   \
                 threads);                                                            \
  }                                                                                   \
  extern "C" void moe_combine_##name(const T* y, const int64_t* order,                \
                                     const float* weights, T* out, int64_t tokens,    \
                                     int64_t top_k, int64_t size, int threads) {      \
    moe_combine(y, order, weights, out, tokens, top_k, size, threads);                \
  }
EXPERT_OPS(float32, float)
EXPERT_OPS(bfloat16, bfloat16)

// The products of experts: the rows of each, which lie together, with its panels.
#define GROUPED_LINEAR(name, T)                                                       \
  extern "C" void grouped_linear_##name(const T* x, const T* panels, T* y,            \
                                        const int32_t* offsets, int64_t num_experts,  \
                                        int64_t in, int64_t out, int threads) {       \
    int64_t size = (out + LANES - 1) / LANES * LANES * in;                            \
    for (int64_t expert = 0; expert < num_experts; expert++) {                        \
      int64_t first = offsets[expert], rows = offsets[expert + 1] - first;            \
      if (rows > 0)                                                                   \
        linear_##name(x + first * in, panels + expert * size, y + first * out, rows,  \
                      in, out, threads);                                              \
    }                                                                                 \
  }
GROUPED_LINEAR(float32, float)
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
GROUPED_LINEAR(bfloat16, bfloat16)
#endif
