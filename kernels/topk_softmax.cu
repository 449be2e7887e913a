// Which experts does a token go to? The best ones; of equal ones the first.
// A weight is the expert's share of a softmax over all of them, or of the chosen ones.
//
//   weights  [num_tokens, top_k], the largest first
//   experts  like weights
//   logits   scores, [num_tokens, num_experts]
//
//   version  idea                                 read   written  sectors  instructions
//   v1       a thread per token                165,888     4,096   42,240         1,320
//   v2       a warp per token, registers        17,408     3,072      793           224
//
// Counted by the emulator for 32 tokens that choose 8 of 128 experts by floats: bytes
// that threads ask for and write, sectors of 32 bytes that memory moves for that, and
// loads and stores of warps. Not yet measured on a GPU.
// Source: appendix A26, "Kernels for experts".
#include "tokens.cuh"

// v1: one thread per token, the way a loop would do it. Each choice is one more walk
// along the scores, for the best key below the last one.
template <typename T>
__global__ void topk_softmax_v1(float* weights, int64_t* experts, const T* logits,
                                int num_tokens, int num_experts, int top_k,
                                int renormalize) {
  const int token = blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= num_tokens) return;
  const T* scores = logits + int64_t(token) * num_experts;
  weights += int64_t(token) * top_k;
  experts += int64_t(token) * top_k;

  float top = LOWEST;
  for (int i = 0; i < num_experts; i++) top = fmaxf(top, to_float(scores[i]));
  float total = 0.0f;
  for (int i = 0; i < num_experts; i++) total += expf(to_float(scores[i]) - top);

  float kept = 0.0f;
  Key last = 0;
  for (int choice = 0; choice < top_k; choice++) {
    Key best = 0;
    for (int i = 0; i < num_experts; i++) {
      const Key key = key_of(to_float(scores[i]), i);
      if (choice == 0 || key < last) best = max(best, key);
    }
    const float share = expf(to_float(scores[id_of(best)]) - top);
    experts[choice] = id_of(best);
    weights[choice] = share;
    kept += share;
    last = best;
  }
  for (int choice = 0; choice < top_k; choice++)
    weights[choice] /= renormalize ? kept : total;
}

// v2: one warp per token. A lane keeps the keys of SIZE experts in registers, and
// strikes out those that were chosen. Lane i remembers choice i, so at most 32.
template <typename T, int SIZE>
__global__ void topk_softmax_v2(float* weights, int64_t* experts, const T* logits,
                                int num_tokens, int num_experts, int top_k,
                                int renormalize) {
  const int token = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  if (token >= num_tokens) return;  // the whole warp
  const T* scores = logits + int64_t(token) * num_experts;

  Key keys[SIZE];
  float values[SIZE], top = LOWEST, total = 0.0f;
  for (int i = 0; i < SIZE; i++) {
    const int expert = lane + i * WARP;
    const bool is_there = expert < num_experts;
    values[i] = is_there ? to_float(scores[expert]) : LOWEST;
    keys[i] = is_there ? key_of(values[i], expert) : Key(Best::NOTHING);
    top = fmaxf(top, values[i]);
  }
  top = warp_reduce<Max>(top);
  for (int i = 0; i < SIZE; i++)
    if (lane + i * WARP < num_experts) total += expf(values[i] - top);
  total = warp_reduce<Sum>(total);

  Key mine = Best::NOTHING;
  for (int choice = 0; choice < top_k; choice++) {
    Key best = Best::NOTHING;
    for (int i = 0; i < SIZE; i++) best = max(best, keys[i]);
    best = warp_reduce<Best>(best);
    if (lane == choice) mine = best;
    for (int i = 0; i < SIZE; i++)
      if (keys[i] == best) keys[i] = Best::NOTHING;
  }
  const bool has_choice = lane < top_k;
  const float share = has_choice ? expf(to_float(scores[id_of(mine)]) - top) : 0.0f;
  const float kept = warp_reduce<Sum>(share);
  if (!has_choice) return;
  weights[int64_t(token) * top_k + lane] = share / (renormalize ? kept : total);
  experts[int64_t(token) * top_k + lane] = id_of(mine);
}
