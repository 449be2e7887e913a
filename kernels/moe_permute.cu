// The choices of a batch, sorted by expert: those of expert 0, those of expert 1, ...
// Choices of one expert keep their order, so that a batch is always sorted alike.
//
//   order    which choice stands where, [num_choices]
//   offsets  where the choices of each expert begin, and the end, [num_experts + 1]
//   experts  the choices, [num_choices]: of the first token, of the second, ...
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per expert             4,227,072    16,900   22,545        20,590
//   v2       a block counts, adds up, places    32,768    16,900    2,917           197
//   v3       many blocks                        36,864    20,996    3,571           273
//
// Counted by the emulator for 256 tokens that choose 8 of 128 experts: bytes that
// threads ask for and write, sectors of 32 bytes that memory moves for that, and loads
// and stores of warps; v3 has blocks of 512 choices. Not yet measured on a GPU.
// Source: appendix A26, "Kernels for experts".
#include "tokens.cuh"

// v1: one thread per expert. It walks along all choices, to count those of the experts
// before its own; then again, to write down where its own are.
__global__ void moe_permute_v1(int64_t* order, int* offsets, const int64_t* experts,
                               int num_choices, int num_experts) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert > num_experts) return;  // there is one more, behind the last: for the end
  int place = 0;
  for (int i = 0; i < num_choices; i++)
    if (experts[i] < expert) place++;
  offsets[expert] = place;
  for (int i = 0; i < num_choices; i++)
    if (experts[i] == expert) order[place++] = i;
}

// The three steps of a counting sort. How many choices from `start` to `end` go to each
// expert? Whole numbers, so threads may add in any order.
__device__ inline void count(int* counts, const int64_t* experts, int start, int end,
                             int num_experts) {
  for (int i = threadIdx.x; i < num_experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = start + threadIdx.x; i < end; i += blockDim.x)
    atomicAdd(&counts[experts[i]], 1);
  __syncthreads();
}

// Each number becomes the sum of those before it. `pass_on` gets every such sum, too.
template <typename PassOn>
__device__ void add_up(int* counts, int size, PassOn pass_on) {
  int before = 0;
  for (int start = 0; start < size; start += blockDim.x) {
    const int i = start + threadIdx.x;
    Mass total;
    const int sum = before + block_scan(i < size ? counts[i] : 0, total);
    if (i < size) {
      counts[i] = sum;
      pass_on(i, sum);
    }
    before += total;
  }
}

// Puts the choices from `start` to `end` in their places; those of an expert begin at
// its number in `starts`. A round takes PART choices, and each thread counts how many
// before its own in this round go to the same expert.
constexpr int PART = 256;

__device__ inline void place(int64_t* order, int* starts, const int64_t* experts,
                             int start, int end) {
  __shared__ int round[PART];
  for (; start < end; start += PART) {
    const int i = start + threadIdx.x, num = min(PART, end - start);
    if (threadIdx.x < num) round[threadIdx.x] = experts[i];
    __syncthreads();  // the round is complete, and so are the starts
    int expert = 0, rank = 0;
    if (threadIdx.x < num) {
      expert = round[threadIdx.x];
      for (int j = 0; j < threadIdx.x; j++) rank += round[j] == expert;
      order[starts[expert] + rank] = i;
    }
    __syncthreads();  // all have read where their expert starts
    if (threadIdx.x < num) atomicAdd(&starts[expert], 1);
  }
}

// v2: one block does the three steps, in shared memory.
__global__ void moe_permute_v2(int64_t* order, int* offsets, const int64_t* experts,
                               int num_choices, int num_experts) {
  extern __shared__ int starts[];  // [num_experts]
  count(starts, experts, 0, num_choices, num_experts);
  add_up(starts, num_experts, [&](int expert, int sum) { offsets[expert] = sum; });
  if (threadIdx.x == 0) offsets[num_experts] = num_choices;
  place(order, starts, experts, 0, num_choices);
}

// v3: a block for each part of the choices, and a launch for each step. The counts of
// an expert lie side by side, [num_experts, num_parts]: their running sums say where
// each part puts its choices of that expert.
__global__ void count_parts(int* counts, const int64_t* experts, int num_choices,
                            int num_experts, int part_size) {
  extern __shared__ int mine[];
  const int start = blockIdx.x * part_size;
  count(mine, experts, start, min(start + part_size, num_choices), num_experts);
  for (int i = threadIdx.x; i < num_experts; i += blockDim.x)
    counts[i * gridDim.x + blockIdx.x] = mine[i];
}

__global__ void add_up_parts(int* counts, int* offsets, int num_choices,
                             int num_experts, int num_parts) {
  add_up(counts, num_experts * num_parts, [&](int i, int sum) {
    if (i % num_parts == 0) offsets[i / num_parts] = sum;
  });
  if (threadIdx.x == 0) offsets[num_experts] = num_choices;
}

__global__ void moe_permute_v3(int64_t* order, const int* counts,
                               const int64_t* experts, int num_choices, int num_experts,
                               int part_size) {
  extern __shared__ int starts[];
  for (int i = threadIdx.x; i < num_experts; i += blockDim.x)
    starts[i] = counts[i * gridDim.x + blockIdx.x];
  const int start = blockIdx.x * part_size;
  place(order, starts, experts, start, min(start + part_size, num_choices));
}
