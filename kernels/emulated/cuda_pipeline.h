// Asynchronous copies from global into shared memory. Each is made as late as it may
// be, in __pipeline_wait_prior, so that a missing wait shows.
// Source: appendix A15, "A GPU in one header".
#pragma once
#include "cuda_on_cpu.h"

namespace emu {

constexpr int MAX_COPIES = 64;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int batch;
  void* code;
};

// The copies of one thread that have begun and not ended.
struct Pipeline {
  uint32_t block;
  int num_copies, batch;
  Copy copies[MAX_COPIES];
};

static Pipeline pipelines[MAX_THREADS];

EMU Pipeline& my_pipeline() {
  Pipeline& pipeline = pipelines[gpu.current->number];
  if (pipeline.block != gpu.block_number) {
    pipeline.num_copies = pipeline.batch = 0;
    pipeline.block = gpu.block_number;
  }
  return pipeline;
}

EMU void begin_copy(void* to, const void* from, size_t bytes, void* code) {
  Pipeline& pipeline = my_pipeline();
  if (bytes != 4 && bytes != 8 && bytes != 16)
    fail("__pipeline_memcpy_async of %zu bytes at @%x@: it copies 4, 8 or 16", bytes,
         code_offset(code));
  if ((uintptr_t(to) | uintptr_t(from)) % bytes)
    fail("misaligned __pipeline_memcpy_async of %zu bytes at @%x@", bytes,
         code_offset(code));
  if (pipeline.num_copies == MAX_COPIES)
    fail("more than %d copies on their way at @%x@", MAX_COPIES, code_offset(code));
#ifdef EMU_CHECK
  access(uintptr_t(to), bytes, COPY_BEGINS, code);
#endif
  pipeline.copies[pipeline.num_copies++] = {to, from, bytes, pipeline.batch, code};
}

// Make all copies but those of the latest batches.
EMU void end_copies(int num_batches) {
  Pipeline& pipeline = my_pipeline();
  int num_left = 0;
  for (int i = 0; i < pipeline.num_copies; i++) {
    Copy& copy = pipeline.copies[i];
    if (copy.batch >= pipeline.batch - num_batches) {
      pipeline.copies[num_left++] = copy;
      continue;
    }
#ifdef EMU_CHECK
    access(uintptr_t(copy.from), copy.bytes, READ, copy.code);
    access(uintptr_t(copy.to), copy.bytes, WRITE, copy.code);
#endif
    __builtin_memcpy(copy.to, copy.from, copy.bytes);
  }
  pipeline.num_copies = num_left;
}

}  // namespace emu

__noinline__ EMU_UNSEEN static void __pipeline_memcpy_async(void* to, const void* from,
                                                            size_t bytes) {
  emu::begin_copy(to, from, bytes, __builtin_return_address(0));
}
EMU void __pipeline_commit() { emu::my_pipeline().batch++; }
EMU void __pipeline_wait_prior(int num_batches) { emu::end_copies(num_batches); }
