"""Planted bugs that change nothing, and why.

The tests demand that each is really there and that nothing notices it.
"""

EQUIVALENT = {
    # The same numbers in another way.
    "rounded down, it is the same number": [
        "common.cuh WIDEST: constexpr int WIDEST = 17 / sizeof(T);",
        "paged_attention.cu THREADS: constexpr int THREADS = 129;",
        "grouped_linear.cu STEP: constexpr int STEP = 129 / sizeof(T);",
    ],
    "all threads that may write it have the same number": [
        "reduce.cuh block_reduce: if (lane == 1) of_warps[warp] = value;",
        "paged_attention.cu put: if (lane == 1) {",
        "gated_mlp.cu gated_mlp: if (lane == 1)",
        "paged_attention.cu paged_attention_v4: if (threadIdx.x == 1) {",
        "grouped_linear.cu find_tile: if (threadIdx.x == 1) tile = {0, 0, 0};",
        "grouped_linear.cu grouped_linear_v2: if (lane == 1) out[place] = "
        "from_float<T>(sum);",
        "moe_permute.cu moe_permute_v2: "
        "if (threadIdx.x == 1) offsets[num_experts] = num_choices;",
        "moe_permute.cu add_up_parts: "
        "if (threadIdx.x == 1) offsets[num_experts] = num_choices;",
        "argmax.cu argmax_v2: if (threadIdx.x == 1) {",
        "argmax.cu argmax_v3: if (threadIdx.x == 1) "
        "bests[row * num_parts + blockIdx.x] = best;",
        "argmax.cu merge_bests: if (threadIdx.x == 1) {",
        "cut.cu cut_v2: if (threadIdx.x == 1) last_ids[request] = 0;",
        "cut.cu cut_v2: if (threadIdx.x == 1) last_ids[request] = last;",
        "cut.cu last_of_bucket: if (threadIdx.x == 1) size = 0;",
        "cut.cu cut_v3: if (threadIdx.x == 1) last_ids[request] = 0;",
        "cut.cu cut_v3: if (threadIdx.x == 1) last_ids[request] = last.id;",
        "draw.cu draw_v2: if (threadIdx.x == 1) drawn[request] = 0;",
        "draw.cu draw_v2: if (threadIdx.x == 1) drawn[request] = token;",
        "draw.cu page_masses: if (threadIdx.x % WARP == 1) "
        "masses[int64_t(request) * num_pages + page] = sum;",
        "draw.cu draw_v3: if (threadIdx.x == 1) drawn[request] = 0;",
        "draw.cu draw_v3: if (threadIdx.x == 1) drawn[request] = start + token;",
    ],
    "no token has a key below 2^54": [
        "tokens.cuh Best: static constexpr Key NOTHING = 1;",
        "argmax.cu best_of: Key best = 1;",
        "argmax.cu merge_bests: Key best = 1;",
        "cut.cu next_best: Key best = 1;",
        "draw.cu last_key: if (request >= num_cut) return 1;",
        "topk_softmax.cu topk_softmax_v1: Key best = 1;",
    ],
    "every token has a smaller key": [
        "cut.cu BEFORE_ALL: constexpr Key BEFORE_ALL = ~Key(1);",
    ],
    "nothing is added": [
        "cut.cu select: if (weight >= 0) "
        "atomicAdd(&sums[order >> shift & (DIGITS - 1)], weight);",
        "cut.cu select: if (true) "
        "atomicAdd(&sums[order >> shift & (DIGITS - 1)], weight);",
    ],
    "tokens without mass come behind the last that is kept": [
        "cut.cu cut_v2: "
        "const auto one = [&](float score) { return Mass(row.mass(score) >= 0); };",
    ],
    "what is then returned is this mass of 0": [
        "cut.cu last_of_bucket: "
        "return mass >= 0 && bucket_of(row, score) == bucket ? mass : Mass(0);",
    ],
    "all buckets with mass are there, and a few more or less": [
        "cut.cu PER_UNIT: constexpr int PER_UNIT = 15;",
        "cut.cu BUCKETS: constexpr int BUCKETS = 513;",
        "cut.cu BUCKETS: constexpr int BUCKETS = 511;",
    ],
    "the buckets are wider: what is in one is settled all the same, but more slowly": [
        "cut.cu bucket_of: return (row.top - score) / row.temperature / PER_UNIT;",
    ],
    "crowds of this size are settled in either way": [
        "cut.cu CROWD: constexpr int CROWD = 513;",
        "cut.cu CROWD: constexpr int CROWD = 511;",
        "cut.cu last_of_bucket: if (num >= CROWD) {",
    ],
    "the last page may be shorter, or empty": [
        "draw.cu PAGE: constexpr int PAGE = 257;",
    ],
    "nobody reads the pages of a row without a best score": [
        "draw.cu page_masses: if (false) return; (2)",
    ],
    "no lane is 32 places behind another": [
        "tokens.cuh block_scan: for (int offset = 1; offset <= WARP; offset *= 2) {",
    ],
    "it comes behind the last weight, and so behind the target": [
        "tokens.cuh reach: const Mass weight = i < size ? weigh(i) : 1;",
    ],
    "no score is better than itself": [
        "argmax.cu argmax_v1: for (int i = 0; i < size; i++) {",
    ],
    "the best token alone has a mass of 2^44": [
        "cut.cu share_of: return max(min(target, kept), Mass(2));",
    ],
    "all scores change by the same, and shares do not notice": [
        "paged_attention.cu dot: float sum = 1.0f;",
        "paged_attention.cu load_share: "
        "share[i] = dim < HEAD_DIM ? to_float(row[dim]) : 1.0f;",
        "paged_attention.cu paged_attention_v2: float score = 1.0f;",
        "paged_attention.cu attend: float score = 1.0f;",
        "paged_attention.cu load_part: Packed pack = {1.0f};",
    ],
    "both sides of the quotient change their sign": [
        "paged_attention.cu merged: for (int i = 0; i < num; i++) sum -= "
        "values[i * STRIDE] * __expf(tops[i] - top);",
    ],
    "the first score multiplies it by exp(LOWEST - score), which is 0": [
        "paged_attention.cu Running: float top = LOWEST, total = 1.0f, "
        "mixed[SIZE] = {};",
        "paged_attention.cu Running: float top = LOWEST, total = 0.0f, "
        "mixed[SIZE] = {1.0f};",
    ],
    "it is not read before it was written": [
        "topk_softmax.cu topk_softmax_v1: Key last = 1;",
        "moe_permute.cu place: int expert = 1, rank = 0;",
    ],
    # More than is needed.
    "the block has a thread for each number of a head": [
        "paged_attention.cu merge_splits: "
        "for (int dim = threadIdx.x; dim < HEAD_DIM; dim = blockDim.x) {",
    ],
    "the largest block that is started has 256 threads": [
        "rms_norm.cu MAX_THREADS: constexpr int MAX_THREADS = 1025;",
        "rms_norm.cu MAX_THREADS: constexpr int MAX_THREADS = 1023;",
    ],
    "a lane has room for more than there is, and skips what is behind the row": [
        f"paged_attention.cu {change}"
        for change in (
            "SHARE: constexpr int SHARE = (HEAD_DIM + WARP + 1) / WARP;",
            "SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 1) % WARP;",
            "SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 0) / WARP;",
            "paged_attention_v2: for (int i = 0; i <= SIZE; i++) {",
            "put: for (int i = 0; i <= PART<T, HEAD_DIM>; i++) {",
            "PACKS: constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> + 1) / "
            "(TEAM * WIDEST<T>);",
            "PACKS: constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> - 1) / "
            "(TEAM / WIDEST<T>);",
            "PACKS: constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> - 1) % "
            "(TEAM * WIDEST<T>);",
            "PACKS: constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> - 0) / "
            "(TEAM * WIDEST<T>);",
        )
    ],
    "it differs only for a HEAD_DIM of 32 n + 1, and heads are even": [
        "paged_attention.cu SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 2) / WARP;",
        "paged_attention.cu PACKS: "
        "constexpr int PACKS = (HEAD_DIM + TEAM * WIDEST<T> - 2) / "
        "(TEAM * WIDEST<T>);",
    ],
    "a pass has at most ROWS rows, so one round more does nothing": [
        "gated_mlp.cu gated_mlp: for (int row = 0; row <= ROWS; row++) {",
        "gated_mlp.cu gated_mlp: for (int row = 0; row <= ROWS; row++) { (2)",
    ],
    "of a tile without rows nothing else is read": [
        "grouped_linear.cu find_tile: if (threadIdx.x == 0) tile = {1, 0, 0};",
        "grouped_linear.cu find_tile: if (threadIdx.x == 0) tile = {0, 1, 0};",
    ],
    "the host allows for more tiles than there are then": [
        "grouped_linear.cu FEW: constexpr int FEW = 9;",
    ],
    "no tile has so many rows, so none of them is stored": [
        "grouped_linear.cu grouped_linear_v4: "
        "for (int i = 0; i <= HEIGHT / SIDE; i++) { (2)",
        "grouped_linear.cu grouped_linear_v3: for (int j = 0; j <= NUM; j++) { (2)",
        "grouped_linear.cu grouped_linear_v2: for (int row = 0; row <= FEW; row++) {",
        "grouped_linear.cu grouped_linear_v2: "
        "for (int row = 0; row <= FEW; row++) { (2)",
    ],
    "after a round that is not full, nobody reads where an expert starts": [
        "moe_permute.cu place: if (threadIdx.x <= num) atomicAdd(&starts[expert], 1);",
        "moe_permute.cu place: if (true) atomicAdd(&starts[expert], 1);",
        "moe_permute.cu place: if (0 < num) atomicAdd(&starts[expert], 1);",
    ],
    "a block without rows stores nothing": [
        "grouped_linear.cu grouped_linear_v2: "
        "if (tile.num < 0 || column >= out_size) return;",
        "grouped_linear.cu grouped_linear_v3: if (tile.num < 0) return;",
        "grouped_linear.cu grouped_linear_v3: if (false) return;",
        "grouped_linear.cu grouped_linear_v4: if (tile.num < 0) return;",
        "grouped_linear.cu grouped_linear_v4: if (false) return;",
    ],
    "an expert that there is not has no rows": [
        "grouped_linear.cu find_tile: const int row = is_there ? offsets[expert] : 1;",
    ],
    "one round more has nothing to do": [
        "grouped_linear.cu find_tile: "
        "for (int start = 0; start <= num_experts; start += blockDim.x) {",
        "moe_permute.cu add_up: "
        "for (int start = 0; start <= size; start += blockDim.x) {",
        "moe_permute.cu place: for (; start <= end; start += PART) {",
        "grouped_linear.cu grouped_linear_v3: "
        "for (int first = 0; first <= in_size; first += STEP<T>) {",
        "grouped_linear.cu grouped_linear_v4: "
        "for (int first = 0; first <= in_size; first += STEP<T>) {",
    ],
    "it comes behind the last count, where nobody reads a sum": [
        "moe_permute.cu add_up: "
        "const int sum = before + block_scan(i < size ? counts[i] : 1, total);",
    ],
    "a round takes one choice less, and the last thread waits": [
        "moe_permute.cu PART: constexpr int PART = 255;",
    ],
    "a lane has no expert of that number": [
        "topk_softmax.cu topk_softmax_v2: for (int i = 0; i <= SIZE; i++)",
    ],
    "the last choice is remembered by a lane that stores nothing, or by none": [
        "topk_softmax.cu topk_softmax_v2: "
        "for (int choice = 0; choice <= top_k; choice++) {",
    ],
    "a split without keys writes what nobody reads": [
        "paged_attention.cu paged_attention_v4: if (start > end) return;",
        "paged_attention.cu paged_attention_v4: if (false) return;",
    ],
}

# Of prefill_attention.cu.
PREFILL = {
    "heads are even, so none is of 32 n + 1, where it differs": [
        "SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 2) / WARP;",
    ],
    "slower and not wrong: test_traffic.py counts how often a bank is asked": [
        "prefill_attention_v2: constexpr int STRIDE = HEAD_DIM + 4 * sizeof(T);",
        "prefill_attention_v2: constexpr int STRIDE = HEAD_DIM + 4 % sizeof(T);",
        "prefill_attention_v2: constexpr int STRIDE = HEAD_DIM + 5 / sizeof(T);",
        "prefill_attention_v2: constexpr int STRIDE = HEAD_DIM + 3 / sizeof(T);",
    ],
    "heads are whole packs, and for tensor cores multiples of 16": [
        "SOME: constexpr int SOME = HEAD_DIM * sizeof(T) > 513 ? 8 : 32;",
        "MANY: constexpr int MANY = HEAD_DIM > 129 ? 32 : 64;",
    ],
    "heads are even, so packs of two fit": [
        "prefill_attention_v2: load_queries<FEW, 2, HEAD_DIM>(query_tile, q, "
        "queries, q_stride);",
    ],
    "all scores of a query change by the same, and shares do not notice": [
        "load_share: share[i] = dim < HEAD_DIM ? to_float(row[dim]) : 1.0f;",
        "prefill_attention_v1: float score = 1.0f;",
        "prefill_attention_v2: float score = 1.0f;",
        "prefill_attention_v3: float scores[NUM / WARPS] = {1.0f};",
        "prefill_attention_v4: fill_fragment(matrix, 1.0f);",
    ],
    "the first score of a query multiplies it by exp(LOWEST - score), which is 0": [
        "Running: float top = LOWEST, total = 1.0f, mixed[SIZE] = {};",
        "Running: float top = LOWEST, total = 0.0f, mixed[SIZE] = {1.0f};",
        "prefill_attention_v4: for (auto& part : mixed) fill_fragment(part, 1.0f);",
        "prefill_attention_v4: float top = LOWEST, total = 1.0f;",
    ],
    "what stands behind the keys is masked, and behind the queries not stored": [
        "load_tile: Packed pack = {1.0f};",
        "load_queries: Packed pack = {1.0f};",
    ],
    "there is room for more than there is": [
        "SHARE: constexpr int SHARE = (HEAD_DIM + WARP + 1) / WARP;",
        "SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 1) % WARP;",
        "SHARE: constexpr int SHARE = (HEAD_DIM + WARP - 0) / WARP;",
        "store_share: for (int i = 0; i <= SHARE<HEAD_DIM>; i++) {",
        "prefill_attention_v2: Running<SIZE> seen[FEW * WARPS];",
        "prefill_attention_v2: float shares[FEW * WARPS];",
        "prefill_attention_v3: Running<SIZE> seen[NUM * WARPS];",
        "prefill_attention_v3: float shares[NUM * WARPS];",
        "prefill_attention_v3: float scores[NUM * WARPS] = {};",
    ],
    "no block has so many queries, so the last loop stores none of them": [
        "prefill_attention_v2: for (int j = 0; j < FEW * WARPS; j++) { (2)",
        "prefill_attention_v2: for (int j = 0; j <= FEW / WARPS; j++) { (2)",
        "prefill_attention_v3: for (int j = 0; j < NUM * WARPS; j++) { (4)",
        "prefill_attention_v3: for (int j = 0; j <= NUM / WARPS; j++) { (4)",
    ],
    "a block without queries stores nothing": [
        "prefill_attention_v2: if (false) return;",
        "prefill_attention_v2: if (queries.num < 0) return;",
        "prefill_attention_v3: if (false) return;",
        "prefill_attention_v3: if (queries.num < 0) return;",
        "prefill_attention_v4: if (false) return;",
        "prefill_attention_v4: if (queries.num < 0) return;",
    ],
    "a tile without keys adds shares of 0": [
        "prefill_attention_v2: for (int start = queries.first_key(0); start <= "
        "end; start += KEYS) {",
        "prefill_attention_v3: for (int start = queries.first_key(0); start <= "
        "end; start += KEYS) {",
        "prefill_attention_v4: for (int start = queries.first_key(0); start <= "
        "end; start += KEYS) {",
    ],
}
EQUIVALENT |= {
    why: [f"prefill_attention.cu {change}" for change in changes]
    for why, changes in PREFILL.items()
}
EQUIVALENT |= {
    "there is room for more sums than there are": [
        "grouped_linear.cu grouped_linear_v4: fragment<accumulator, SIDE, SIDE, SIDE, "
        "float> sums[HEIGHT * SIDE];",
    ],
}

# Of the kernels of delta nets.
DELTA_NET = {
    "no number of a block is as large as those behind the last text": [
        "causal_conv1d.cu text_of: int low = 0, high = num_texts + 1;",
        "causal_conv1d.cu text_of: int low = 0, high = num_texts - 0;",
    ],
    "halving asks for another text, and ends at the same": [
        "causal_conv1d.cu text_of: const int middle = (low + high + 2) / 2;",
    ],
    "a part without columns stores nothing": [
        "delta_rule.cuh find: return first <= value_head_dim;",
    ],
    "there is no such row": [
        "delta_rule.cuh store: for (int i = 0; i <= ROWS; i++)",
    ],
    "a column that there is not is not stored": [
        "delta_rule.cuh step: "
        "const float value = is_there ? to_float(v[column + j]) : 1.0f;",
        "chunked_delta_rule.cu chunked_delta_rule_v2: const float value = "
        "is_there ? to_float(values[column]) : 1.0f;",
    ],
    "all teams have the same number": [
        "delta_rule.cuh step: if (is_there && row == 1) "
        "head.out_of(token)[column + j] = from_float<T>(read);",
        "chunked_delta_rule.cu chunked_delta_rule_v2: if (is_there && part.row == 1)",
    ],
    "chunks of another size do the same": [
        "chunked_delta_rule.cu CHUNK: constexpr int CHUNK = 17, THREADS = 128;",
        "chunked_delta_rule.cu CHUNK: constexpr int CHUNK = 15, THREADS = 128;",
    ],
    "a chunk without tokens changes nothing": [
        "chunked_delta_rule.cu chunked_delta_rule_v2: for (int first = "
        "query_start_loc[blockIdx.x]; first <= end; first += CHUNK) {",
    ],
}
EQUIVALENT |= DELTA_NET
