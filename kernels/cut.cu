// Cuts: from the best token to the worst, which is the last that min_p, top_k and top_p
// keep? So it says which tokens may be drawn: this one and all better ones.
//
//   last_ids      the answers, [num_cut]
//   logits        rows, `stride` apart, each [size]
//   largest       the largest score of each row
//   rows          row of each request, [num_cut]
//   temperatures  like rows; so are min_p, top_k and top_p
//
//   version  idea                                 read   written  sectors  instructions
//   v1       the next best, again and again  1,865,820        48  464,632       234,504
//   v2       radix select, digit by digit      106,496        48    2,350           718
//   v3       buckets: one pass for all cuts     53,056        48      622           286
//
// Counted by the emulator for 3 requests with 512 floats each, cut by top_p 0.75, by
// top_k 5 and by min_p 0.02: bytes that threads ask for and write, sectors of 32 bytes
// that memory moves for that, and loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A19, "Sampling kernels".
#include "tokens.cuh"

// The mass at which top_p is reached.
__device__ inline Mass share_of(Mass kept, double top_p) {
  const Mass target = ceil(top_p * double(kept));
  return max(min(target, kept), Mass(1));  // a double may be rounded beyond
}

// v1: one thread per row, and no order at hand: it looks for the best token, then for
// the best of those behind it.
template <typename T>
__device__ Key next_best(const Row<T>& row, Key last) {
  Key best = 0;
  for (int i = 0; i < row.size; i++) {
    const Key key = key_of(row.score(i), i);
    if (key < last) best = max(best, key);
  }
  return best;
}

constexpr Key BEFORE_ALL = ~Key(0);

template <typename T>
__global__ void cut_v1(int64_t* last_ids, const T* logits, int64_t stride, int size,
                       const T* largest, const int64_t* rows,
                       const double* temperatures, const double* min_p,
                       const int64_t* top_k, const double* top_p, int num_cut) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;
  if (request >= num_cut) return;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  last_ids[request] = 0;
  if (!row.has_numbers()) return;

  // What top_k and min_p keep.
  Mass kept = 0;
  Key last = BEFORE_ALL;
  for (int64_t count = 0; count < min(top_k[request], int64_t(size)); count++) {
    last = next_best(row, last);
    const float score = row.score(id_of(last));
    if (row.share(score) < float(min_p[request]) || row.mass(score) == 0) break;
    kept += row.mass(score);
  }
  // And of that, what top_p keeps.
  const Mass target = share_of(kept, top_p[request]);
  last = BEFORE_ALL;
  for (Mass sum = 0; sum < target; sum += row.mass(row.score(id_of(last))))
    last = next_best(row, last);
  last_ids[request] = id_of(last);
}

// v2: one block per row. It finds the order of the last score digit by digit, the first
// digit first: threads add up what the tokens with each value of it weigh, and the sums
// from the largest value on tell where the target lies. A digit has eight bits. A token
// weighs one, or its mass; tokens without mass do not count.
constexpr int DIGITS = 256;  // values of a digit, and threads

template <typename T, typename Weigh>
__device__ int select(const Row<T>& row, Mass target, Weigh weigh) {
  __shared__ Mass sums[DIGITS];
  unsigned known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    sums[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.size; i += DIGITS) {
      const float score = row.score(i);
      const unsigned order = order_of(score);
      if (order >> shift >> 8 != known) continue;
      const Mass weight = weigh(score);
      if (weight > 0) atomicAdd(&sums[order >> shift & (DIGITS - 1)], weight);
    }
    __syncthreads();
    const Place place =
        reach(target, DIGITS, [&](int i) { return sums[DIGITS - 1 - i]; });
    target -= place.before;
    known = known << 8 | (DIGITS - 1 - place.index);
  }
  // The score is known. Of the tokens that have it, the lower ids come first.
  return reach(target, row.size, [&](int i) {
           const float score = row.score(i);
           return order_of(score) == known ? weigh(score) : Mass(0);
         }).index;
}

// The mass of the tokens up to one.
template <typename T, typename Weigh>
__device__ Mass mass_until(const Row<T>& row, int last, Weigh weigh) {
  const Key key = key_of(row.score(last), last);
  Mass mass = 0;
  for (int i = threadIdx.x; i < row.size; i += blockDim.x) {
    const float score = row.score(i);
    if (key_of(score, i) >= key) mass += weigh(score);
  }
  return block_reduce<Sum>(mass);
}

// How many tokens top_k and min_p keep.
template <typename T>
__device__ Mass num_kept(const Row<T>& row, int64_t top_k, double min_p) {
  Mass count = 0;
  for (int i = threadIdx.x; i < row.size; i += blockDim.x) {
    const float score = row.score(i);
    if (row.share(score) >= float(min_p) && row.mass(score) > 0) count++;
  }
  return min(block_reduce<Sum>(count), Mass(top_k));
}

template <typename T>
__global__ void cut_v2(int64_t* last_ids, const T* logits, int64_t stride, int size,
                       const T* largest, const int64_t* rows,
                       const double* temperatures, const double* min_p,
                       const int64_t* top_k, const double* top_p) {
  const int request = blockIdx.x;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  if (threadIdx.x == 0) last_ids[request] = 0;
  if (!row.has_numbers()) return;

  const auto one = [&](float score) { return Mass(row.mass(score) > 0); };
  const auto mass = [&](float score) { return row.mass(score); };
  const Mass count = num_kept(row, top_k[request], min_p[request]);
  const Mass kept = mass_until(row, select(row, count, one), mass);
  const int last = select(row, share_of(kept, top_p[request]), mass);
  if (threadIdx.x == 0) last_ids[request] = last;
}

// v3: buckets instead of digits, each a sixteenth of a temperature wide. One pass fills
// all of them, with numbers of tokens and with masses, so it serves all cuts. A bucket
// is left to look into, and its tokens are so few that each is compared with each.
constexpr int PER_UNIT = 16;
constexpr int BUCKETS = 512;  // 32 temperatures: farther than 30.5 there is no mass
constexpr int CROWD = 512;    // of more tokens than these, v2 finds the last

template <typename T>
__device__ int bucket_of(const Row<T>& row, float score) {
  return (row.top - score) / row.temperature * PER_UNIT;
}

struct Last {
  int id;
  Mass mass;  // up to this token, within its bucket
};

// The last of the best tokens of a bucket, as many as the target says, or as much.
template <typename T>
__device__ Last last_of_bucket(const Row<T>& row, int bucket, int num, Mass target,
                               bool is_count) {
  const auto mass_inside = [&](float score) {
    const Mass mass = row.mass(score);
    return mass > 0 && bucket_of(row, score) == bucket ? mass : Mass(0);
  };
  const auto weight = [&](Mass mass) { return is_count ? min(mass, Mass(1)) : mass; };
  if (num > CROWD) {
    const auto weigh = [&](float score) { return weight(mass_inside(score)); };
    const int id = select(row, target, weigh);
    return {id, mass_until(row, id, mass_inside)};
  }

  __shared__ int size;
  __shared__ Key keys[CROWD];
  __shared__ Mass masses[CROWD];
  __shared__ Last last;
  if (threadIdx.x == 0) size = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.size; i += blockDim.x) {
    const float score = row.score(i);
    const Mass mass = mass_inside(score);
    if (mass == 0) continue;
    const int place = atomicAdd(&size, 1);
    keys[place] = key_of(score, i);
    masses[place] = mass;
  }
  __syncthreads();
  for (int mine = threadIdx.x; mine < size; mine += blockDim.x) {
    Mass before = 0, mass = 0;
    for (int i = 0; i < size; i++) {
      if (keys[i] <= keys[mine]) continue;
      before += weight(masses[i]);
      mass += masses[i];
    }
    const bool is_reached = target <= before + weight(masses[mine]);
    if (before < target && is_reached) last = {id_of(keys[mine]), mass + masses[mine]};
  }
  __syncthreads();
  return last;
}

template <typename T>
__global__ void cut_v3(int64_t* last_ids, const T* logits, int64_t stride, int size,
                       const T* largest, const int64_t* rows,
                       const double* temperatures, const double* min_p,
                       const int64_t* top_k, const double* top_p) {
  const int request = blockIdx.x;
  const auto row = row_of(request, logits, stride, size, largest, rows, temperatures);
  if (threadIdx.x == 0) last_ids[request] = 0;
  if (!row.has_numbers()) return;

  __shared__ int counts[BUCKETS];
  __shared__ Mass masses[BUCKETS];
  for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x) counts[i] = masses[i] = 0;
  __syncthreads();
  Mass num = 0;  // that min_p keeps
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const float score = row.score(i);
    const Mass mass = row.mass(score);
    if (mass == 0) continue;
    const int bucket = bucket_of(row, score);
    atomicAdd(&counts[bucket], 1);
    atomicAdd(&masses[bucket], mass);
    if (row.share(score) >= float(min_p[request])) num++;
  }
  // Behind the barriers of this sum, the buckets are filled.
  num = min(block_reduce<Sum>(num), Mass(top_k[request]));

  // What top_k and min_p keep. A bucket that is kept as a whole needs no second look.
  Place end = reach(num, BUCKETS, [&](int i) { return Mass(counts[i]); });
  Mass kept = 0;
  for (int i = threadIdx.x; i < end.index; i += blockDim.x) kept += masses[i];
  kept = block_reduce<Sum>(kept);
  num -= end.before;
  if (num == counts[end.index])
    kept += masses[end.index];
  else
    kept += last_of_bucket(row, end.index, counts[end.index], num, true).mass;

  // And of that, what top_p keeps.
  const Mass target = share_of(kept, top_p[request]);
  end = reach(target, BUCKETS, [&](int i) { return masses[i]; });
  const Last last =
      last_of_bucket(row, end.index, counts[end.index], target - end.before, false);
  if (threadIdx.x == 0) last_ids[request] = last.id;
}
