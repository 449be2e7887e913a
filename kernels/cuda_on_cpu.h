// A GPU in one header: CUDA kernels on a CPU.
//
// Every thread of a block is a fiber: a function with a stack of its own, which can
// stop in the middle and go on later. One fiber runs at a time, until it comes to a
// barrier (__syncthreads, __syncwarp, a shuffle, a vote) or returns; then a scheduler
// picks the next, in one of four orders. Blocks run one after another. A barrier that
// cannot complete is reported, not waited for.
//
// In check mode (-DEMU_CHECK -fsanitize=thread, compiled but never linked with that
// flag) the compiler puts a call before every load and store of the kernel. The calls
// arrive in this header: they find accesses out of bounds, reads of shared memory that
// nobody wrote, and races.
//
// Included before a kernel by minivllm/ops/emulate.py, whose classes mirror the structs
// Region, Access, Turn and Launch. No other file is needed, and no library.
// Source: appendix A15, "A GPU in one header".
#pragma once

#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

// ---- CUDA's words ----

#define __CUDA_ON_CPU__ 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// The functions of this header that a kernel calls: the compiler must not watch them.
#define EMU_UNSEEN __attribute__((no_sanitize("thread", "undefined")))
#define EMU inline EMU_UNSEEN
#define EMU_COLD __attribute__((noinline, cold, no_sanitize("thread", "undefined")))
#define EMU_EXPORT \
  extern "C" __attribute__((visibility("default"), no_sanitize("thread", "undefined")))
#define EMU_HERE (emu::Place{__FILE__, __LINE__})

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- What there is: threads, a block, a launch ----

namespace emu {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;  // of a block
constexpr int MAX_WARPS = MAX_THREADS / WARP;
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr size_t GUARD_BYTES = 64 * 1024;  // whole pages, however large they are

enum Order : int32_t { FORWARD, REVERSE, ROUND_ROBIN, RANDOM };
enum State : uint16_t { RUNNABLE, AT_BLOCK_BARRIER, AT_WARP_BARRIER, RETURNED };

// Which bit that is 1 is the lowest, and which the highest.
EMU int lowest(unsigned bits) { return __builtin_ctz(bits); }
EMU int highest(unsigned bits) { return 31 - __builtin_clz(bits); }

struct Place {
  const char* file;
  int line;
};

EMU bool operator==(Place a, Place b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

struct Thread {
  uint3 index;          // threadIdx
  int number;           // in its block; number / 32 is its warp, number % 32 its lane
  State state;
  void* stack_pointer;  // where it goes on

  const char* waits_in;  // the function, and where it was called
  Place waits_at;
  unsigned mask;         // the lanes that it waits for
  bool vote;

  uint64_t given;           // what it gives to its warp
  uint64_t received[WARP];  // what the lanes gave
  unsigned joined;          // the lanes that gave something

  uint32_t known[WARP];  // how much of each lane's past is over for it; see is_over
};

struct Cell;

// The memory of an argument, or of several that overlap.
struct Region {
  uint64_t base, bytes;
  Cell* cells;        // who wrote and read it, a cell for each granule
  uint32_t granule;   // bytes
  uint32_t writable;  // not if the kernel declares it const
};

// One load or store, for a trace.
struct Access {
  uint64_t offset;  // in its memory
  uint32_t block;
  uint32_t code;  // address of the code, from the beginning of this library
  uint32_t bytes;
  uint16_t thread;
  int16_t memory;  // a region, or -1 - n for variable n of shared memory
  uint16_t kind;   // READ, WRITE, ATOMIC
};

// What a fiber did from when it was picked until it stopped.
struct Turn {
  const char* waits_in;
  const char* file;
  uint64_t num_accesses;  // of all threads so far
  int32_t line;
  uint32_t block;
  uint16_t thread;
};

struct Launch {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes, shared_limit;
  uint64_t seed, timeout_us;
  Order order;
  int32_t yield_at_atomics, blocks_may_share;
  int32_t num_regions;
  Region* regions;
  char* stacks;
  Access* accesses;  // null: no trace
  Turn* turns;
  uint64_t max_accesses, max_turns, num_accesses, num_turns;
};

struct Machine {
  Launch* launch;
  dim3 grid, block;
  void (*kernel)(void* arguments);
  void* arguments;

  uint3 block_index;
  uint32_t linear_block;  // of this launch, from 0
  uint32_t block_number;  // of all blocks that ever ran, from 1
  int num_threads, num_alive, num_at_barrier;
  int vote_any, vote_all, vote_count;
  uint32_t epoch;  // how many block barriers there were

  Thread threads[MAX_THREADS];
  Thread* current;
  void* scheduler;  // its stack pointer
  int last_picked;
  uint64_t random;
  // A bit per lane, for each warp.
  unsigned runnable[MAX_WARPS], alive[MAX_WARPS], at_warp_barrier[MAX_WARPS];
  uint32_t warp_time[MAX_WARPS];  // how many __syncwarp there were

  bool failed;
  char error[1024], described[200];
  void* last_code;  // of the latest access

  size_t output_bytes;
  char output[1 << 20];
};

static Machine gpu;

// ---- Fibers: to stop in the middle of a function ----

// emu_switch(&mine, other) puts the registers that a function must preserve on the
// stack, and the stack pointer into `mine`; then it takes `other` for its stack, and
// the registers from there. It returns to whoever called emu_switch on that stack.
extern "C" void emu_switch(void** mine, void* other);

#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
constexpr size_t SAVED_BYTES = 64;  // six registers, where to return, and alignment
constexpr int RETURN_SLOT = 6;

#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, %function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch, .-emu_switch
)");
constexpr size_t SAVED_BYTES = 160;
constexpr int RETURN_SLOT = 11;  // x30
#else
#error "emu_switch is written for x86-64 and aarch64: add it for this processor"
#endif

// The stacks lie in a row, each above a guard that may not be touched.
EMU char* stack_of(int thread) {
  return gpu.launch->stacks + thread * (STACK_BYTES + GUARD_BYTES) + GUARD_BYTES;
}

// A stack that looks as if `entry` were about to be called on it.
EMU void* fresh_stack(int thread, void (*entry)()) {
  char* pointer = stack_of(thread) + STACK_BYTES - SAVED_BYTES;
  memset(pointer, 0, SAVED_BYTES);
  reinterpret_cast<void**>(pointer)[RETURN_SLOT] = reinterpret_cast<void*>(entry);
  return pointer;
}

EMU_COLD void fail(const char* format, ...);

// Stop here: go on in the scheduler.
EMU void stop() {
  Thread& me = *gpu.current;
  Launch& launch = *gpu.launch;
  if (launch.turns && !gpu.failed) {
    if (launch.num_turns == launch.max_turns)
      return fail("more than %zu turns to trace: launch fewer threads",
                  size_t(launch.max_turns));
    Turn& turn = launch.turns[launch.num_turns++];
    turn.waits_in = me.waits_in;
    turn.file = me.waits_at.file;
    turn.line = me.waits_at.line;
    turn.num_accesses = launch.num_accesses;
    turn.block = gpu.linear_block;
    turn.thread = uint16_t(me.number);
  }
  emu_switch(&me.stack_pointer, gpu.scheduler);
}

// Go on with a thread: returns when it stops.
EMU void resume(Thread& thread) {
  gpu.current = &thread;
  emu_switch(&gpu.scheduler, thread.stack_pointer);
}

// Keep what is wrong, and leave the kernel for good. In the text, @1f@ stands for an
// address of code and $1$ for an argument: Python puts file, line and names there.
EMU_COLD void fail(const char* format, ...) {
  if (!gpu.failed) {
    int length = 0;
    const Thread* me = gpu.current;
    if (me)
      length = snprintf(gpu.error, sizeof gpu.error,
                        "block (%u,%u,%u) thread (%u,%u,%u): ", gpu.block_index.x,
                        gpu.block_index.y, gpu.block_index.z, me->index.x, me->index.y,
                        me->index.z);
    va_list values;
    va_start(values, format);
    vsnprintf(gpu.error + length, sizeof gpu.error - length, format, values);
    va_end(values);
  }
  gpu.failed = true;
  if (gpu.current && gpu.scheduler)
    emu_switch(&gpu.current->stack_pointer, gpu.scheduler);
}

EMU void set_runnable(Thread& thread) {
  thread.state = RUNNABLE;
  gpu.runnable[thread.number / WARP] |= 1u << thread.number % WARP;
}

EMU void set_waiting(Thread& thread, State state, const char* name, Place place) {
  thread.state = state;
  thread.waits_in = name;
  thread.waits_at = place;
  gpu.runnable[thread.number / WARP] &= ~(1u << thread.number % WARP);
}

// ---- Barriers of a block and of a warp ----

// Let the block go on if every thread that has not returned has come.
EMU void release_block_if_complete() {
  if (gpu.num_alive == 0 || gpu.num_at_barrier < gpu.num_alive) return;
  const Thread* first = nullptr;
  int count = 0;
  for (int i = 0; i < gpu.num_threads; i++) {
    Thread& thread = gpu.threads[i];
    if (thread.state != AT_BLOCK_BARRIER) continue;
    if (!first) first = &thread;
    if (!(thread.waits_at == first->waits_at))
      return fail("divergent barrier: thread %d waits in %s at %s:%d, thread %d in %s "
                  "at %s:%d",
                  first->number, first->waits_in, first->waits_at.file,
                  first->waits_at.line, thread.number, thread.waits_in,
                  thread.waits_at.file, thread.waits_at.line);
    count += thread.vote;
  }
  gpu.vote_any = count > 0;
  gpu.vote_all = count == gpu.num_at_barrier;
  gpu.vote_count = count;
  gpu.num_at_barrier = 0;
  gpu.epoch++;
  for (int i = 0; i < gpu.num_threads; i++)
    if (gpu.threads[i].state == AT_BLOCK_BARRIER) set_runnable(gpu.threads[i]);
}

EMU void block_barrier(Place place, const char* name, bool vote = false) {
  gpu.current->vote = vote;
  set_waiting(*gpu.current, AT_BLOCK_BARRIER, name, place);
  gpu.num_at_barrier++;
  release_block_if_complete();
  stop();
}

// What a barrier of a warp does besides waiting.
enum Meeting { ORDERS_MEMORY, EXCHANGES };

// All that the threads did before is over, and each knows what the others knew.
EMU void share_knowledge(unsigned lanes, Thread* warp, uint32_t now) {
  uint32_t known[WARP] = {};
  for (int lane = 0; lane < WARP; lane++) {
    if (!(lanes >> lane & 1)) continue;
    for (int k = 0; k < WARP; k++)
      if (warp[lane].known[k] > known[k]) known[k] = warp[lane].known[k];
  }
  for (int lane = 0; lane < WARP; lane++)
    if (lanes >> lane & 1) known[lane] = now;
  for (int lane = 0; lane < WARP; lane++)
    if (lanes >> lane & 1) memcpy(warp[lane].known, known, sizeof known);
}

// Let the lanes go on that a thread waits for, if all have come that have not returned.
EMU void release_warp_if_complete(Thread& thread, Meeting meeting) {
  int number = thread.number / WARP;
  Thread* warp = gpu.threads + number * WARP;
  unsigned lanes = thread.mask & gpu.alive[number];
  if (lanes & ~gpu.at_warp_barrier[number]) return;
  for (int lane = 0; lane < WARP; lane++) {
    const Thread& other = warp[lane];
    if (!(lanes >> lane & 1)) continue;
    if (other.mask != thread.mask || !(other.waits_at == thread.waits_at)) return;
  }
  uint64_t given[WARP];
  for (int lane = 0; lane < WARP; lane++)
    if (lanes >> lane & 1) given[lane] = warp[lane].given;
  for (int lane = 0; lane < WARP; lane++) {
    if (!(lanes >> lane & 1)) continue;
    warp[lane].joined = lanes;
    if (meeting == EXCHANGES) memcpy(warp[lane].received, given, sizeof given);
    set_runnable(warp[lane]);
  }
  gpu.at_warp_barrier[number] &= ~lanes;
  if (meeting == ORDERS_MEMORY)
    share_knowledge(lanes, warp, ++gpu.warp_time[number]);
}

EMU void warp_barrier(Place place, const char* name, unsigned mask, Meeting meeting) {
  Thread& me = *gpu.current;
  int lane = me.number % WARP;
  if (!(mask >> lane & 1))
    fail("%s at %s:%d: mask %08x does not name the calling lane %d", name, place.file,
         place.line, mask, lane);
  me.mask = mask;
  set_waiting(me, AT_WARP_BARRIER, name, place);
  gpu.at_warp_barrier[me.number / WARP] |= 1u << lane;
  release_warp_if_complete(me, meeting);
  stop();
}

// ---- What the lanes of a warp tell each other ----

// Give a value, meet the others, and have theirs in `received`.
template <class T>
EMU Thread& exchange(Place place, const char* name, unsigned mask, T value) {
  static_assert(sizeof(T) <= 8, "a lane gives at most 8 bytes");
  Thread& me = *gpu.current;
  me.given = 0;
  memcpy(&me.given, &value, sizeof value);
  warp_barrier(place, name, mask, EXCHANGES);
  return me;
}

template <class T>
EMU T received_from(const Thread& me, int lane) {
  T value;
  memcpy(&value, &me.received[lane], sizeof value);
  return value;
}

// `source` outside of the lane's group of `width`: the lane keeps its own value.
template <class T>
EMU T shuffle(Place place, const char* name, unsigned mask, T value, int source,
              bool is_outside, int width) {
  if (width < 1 || width > WARP || width & (width - 1))
    fail("%s at %s:%d: width %d is not a power of two up to 32", name, place.file,
         place.line, width);
  const Thread& me = exchange(place, name, mask, value);
  if (is_outside) return value;
  if (!(me.joined >> source & 1)) {
    int first = me.number / WARP * WARP;
    const char* why = first + source >= gpu.num_threads ? "the block does not have"
                      : mask >> source & 1              ? "has returned"
                                                        : "the mask does not name";
    fail("%s at %s:%d reads lane %d, which %s", name, place.file, place.line, source,
         why);
  }
  return received_from<T>(me, source);
}

EMU int lane() { return gpu.current->number % WARP; }

template <class T>
EMU T shuffle_index(Place place, unsigned mask, T value, int index, int width = WARP) {
  int group = lane() & ~(width - 1);
  int source = group | (index & (width - 1));
  return shuffle(place, "__shfl_sync", mask, value, source, false, width);
}

template <class T>
EMU T shuffle_xor(Place place, unsigned mask, T value, int bits, int width = WARP) {
  int source = lane() ^ (bits & (WARP - 1));
  bool is_outside = source > (lane() | (width - 1));
  return shuffle(place, "__shfl_xor_sync", mask, value, source, is_outside, width);
}

template <class T>
EMU T shuffle_down(Place place, unsigned mask, T value, unsigned by, int width = WARP) {
  int source = lane() + int(by);
  bool is_outside = source > (lane() | (width - 1));
  return shuffle(place, "__shfl_down_sync", mask, value, source, is_outside, width);
}

template <class T>
EMU T shuffle_up(Place place, unsigned mask, T value, unsigned by, int width = WARP) {
  int source = lane() - int(by);
  bool is_outside = source < (lane() & ~(width - 1));
  return shuffle(place, "__shfl_up_sync", mask, value, source, is_outside, width);
}

EMU unsigned ballot(Place place, const char* name, unsigned mask, bool vote) {
  const Thread& me = exchange(place, name, mask, vote);
  unsigned votes = 0;
  for (int lane = 0; lane < WARP; lane++)
    if (me.joined >> lane & 1 && received_from<bool>(me, lane)) votes |= 1u << lane;
  return votes;
}

EMU bool all(Place place, unsigned mask, bool vote) {
  unsigned votes = ballot(place, "__all_sync", mask, vote);
  return votes == gpu.current->joined;
}

template <class T, class Combine>
EMU T reduce(Place place, const char* name, unsigned mask, T value, Combine combine) {
  static_assert(std::is_integral<T>::value && sizeof(T) == 4, "int or unsigned");
  const Thread& me = exchange(place, name, mask, value);
  T result = value;
  for (int lane = 0; lane < WARP; lane++)
    if (me.joined >> lane & 1 && lane != me.number % WARP)
      result = combine(result, received_from<T>(me, lane));
  return result;
}

EMU void synchronise_warp(Place place, unsigned mask = 0xffffffffu) {
  warp_barrier(place, "__syncwarp", mask, ORDERS_MEMORY);
}

EMU int synchronise_or(Place place, bool vote) {
  block_barrier(place, "__syncthreads_or", vote);
  return gpu.vote_any;
}

EMU int synchronise_and(Place place, bool vote) {
  block_barrier(place, "__syncthreads_and", vote);
  return gpu.vote_all;
}

EMU int synchronise_count(Place place, bool vote) {
  block_barrier(place, "__syncthreads_count", vote);
  return gpu.vote_count;
}

EMU uint3 thread_index() { return gpu.current->index; }
EMU uint3 block_index() { return gpu.block_index; }
EMU dim3 block_dim() { return gpu.block; }
EMU dim3 grid_dim() { return gpu.grid; }

// ---- Shared memory ----

constexpr int MAX_VARIABLES = 64;
constexpr size_t GAP = 128;  // between variables, so that a step too far meets nobody
constexpr size_t STATIC_LIMIT = 48 * 1024;
constexpr size_t ARENA_BYTES = 320 * 1024;  // a block has 227 KiB at most; and the gaps

struct Variable {
  const char *function, *name;
  int id;  // which declaration of the source
  size_t offset, bytes;
};

static Variable variables[MAX_VARIABLES];
static int num_variables;
static const char* declared_outside;  // the name of a variable that is in no kernel
static size_t arena_used, static_bytes;
alignas(4096) static char arena[ARENA_BYTES];  // shared memory of the block that runs
enum Content : uint8_t { NOTHING, WRITTEN, COPY_ON_ITS_WAY };
static Content arena_content[ARENA_BYTES];

// A block finds nothing that means anything: as floats, all NaN.
EMU void clear_shared(size_t offset, size_t bytes) {
  memset(arena + offset, 0xff, bytes);
  memset(arena_content + offset, NOTHING, bytes);
}

EMU char* new_variable(const char* function, int id, const char* name, size_t bytes) {
  size_t offset = (arena_used + GAP - 1) / GAP * GAP;
  if (num_variables == MAX_VARIABLES || offset + bytes + GAP > ARENA_BYTES)
    fail("'%s': too many variables in shared memory", name);
  arena_used = offset + bytes + GAP;
  clear_shared(offset, bytes);
  variables[num_variables++] = {function, name, id, offset, bytes};
  return arena + offset;
}

// Python makes `T (&x)[N] = emu::shared<T[N]>(__PRETTY_FUNCTION__, 7, "x");` out of
// `__shared__ T x[N];`. A template has its variables once per instance, so the name of
// the function belongs to the key.
template <class T>
EMU T& shared(const char* function, int id, const char* name) {
  if (!gpu.current) {  // it runs while the library is loaded, so in no kernel
    declared_outside = name;
    return *reinterpret_cast<T*>(arena);
  }
  for (int i = 0; i < num_variables; i++)
    if (variables[i].id == id && strcmp(variables[i].function, function) == 0)
      return *reinterpret_cast<T*>(arena + variables[i].offset);
  static_bytes += sizeof(T);
  if (static_bytes > STATIC_LIMIT)
    fail("'%s': %zu bytes of static shared memory, and %zu are allowed: make some of "
         "it dynamic",
         name, static_bytes, STATIC_LIMIT);
  size_t needed = static_bytes + gpu.launch->shared_bytes;
  if (needed > gpu.launch->shared_limit)
    fail("'%s': the block needs %zu bytes of shared memory, and has %zu", name, needed,
         size_t(gpu.launch->shared_limit));
  return *reinterpret_cast<T*>(new_variable(function, id, name, sizeof(T)));
}

// `extern __shared__ T x[];`: the first variable, if there is one.
template <class T>
EMU T* dynamic_shared(const char* name) {
  if (!gpu.current) {
    declared_outside = name;
    return nullptr;
  }
  if (gpu.launch->shared_bytes == 0)
    fail("'%s': the kernel was launched without dynamic shared memory (shared_bytes)",
         name);
  if (!*variables[0].name) variables[0].name = name;
  return reinterpret_cast<T*>(arena + variables[0].offset);
}

// ---- What lies where ----

// Where this library lies in memory; the linker knows.
extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

EMU uint32_t code_offset(void* code) {
  return uint32_t(static_cast<char*>(code) - __ehdr_start);
}

// "byte 8 of shared 'partial'", or what lies nearest.
EMU_COLD const char* describe(uintptr_t address) {
  size_t best = 1 << 20;
  char* text = gpu.described;
  snprintf(text, sizeof gpu.described, "address 0x%zx, which belongs to no argument",
           size_t(address));
  for (int i = -num_variables; i < gpu.launch->num_regions; i++) {
    uintptr_t base, bytes;
    char name[80];
    if (i < 0) {
      const Variable& variable = variables[-1 - i];
      base = uintptr_t(arena) + variable.offset;
      bytes = variable.bytes;
      snprintf(name, sizeof name, "shared '%.60s'", variable.name);
    } else {
      base = gpu.launch->regions[i].base;
      bytes = gpu.launch->regions[i].bytes;
      snprintf(name, sizeof name, "$%d$", i);
    }
    bool is_inside = address - base < bytes, is_before = address < base;
    size_t distance = is_before ? base - address : address - base - bytes;
    if (!is_inside && distance >= best) continue;
    best = distance;
    const char* format = is_inside   ? "byte %zu of %s"
                         : is_before ? "%zu bytes before %s"
                                     : "%zu bytes past the end of %s";
    if (is_inside) distance = address - base;
    snprintf(text, sizeof gpu.described, format, distance, name);
    if (is_inside) break;
  }
  return text;
}

// ---- The scheduler: which thread next? ----

EMU uint64_t next_random() {  // xorshift64
  gpu.random ^= gpu.random << 13;
  gpu.random ^= gpu.random >> 7;
  gpu.random ^= gpu.random << 17;
  return gpu.random;
}

// The next thread that can run, or -1.
EMU int pick() {
  int num_warps = (gpu.num_threads + WARP - 1) / WARP;
  Order order = gpu.launch->order;
  if (order == FORWARD) {
    for (int warp = 0; warp < num_warps; warp++)
      if (gpu.runnable[warp]) return warp * WARP + lowest(gpu.runnable[warp]);
    return -1;
  }
  if (order == REVERSE) {
    for (int warp = num_warps - 1; warp >= 0; warp--)
      if (gpu.runnable[warp]) return warp * WARP + highest(gpu.runnable[warp]);
    return -1;
  }
  // The first that can run from some thread on, around the block.
  int start = order == RANDOM ? int(next_random() % gpu.num_threads)
                              : (gpu.last_picked + 1) % gpu.num_threads;
  for (int step = 0; step <= num_warps; step++) {
    int warp = (start / WARP + step) % num_warps;
    unsigned lanes = gpu.runnable[warp];
    if (step == 0) lanes &= ~0u << start % WARP;
    if (lanes) return gpu.last_picked = warp * WARP + lowest(lanes);
  }
  return -1;
}

// Where a fiber begins. When the kernel has returned, it stops for good.
EMU_UNSEEN static void fiber() {
  gpu.kernel(gpu.arguments);
  Thread& me = *gpu.current;
  int warp = me.number / WARP;
  set_waiting(me, RETURNED, "", {"", 0});
  gpu.num_alive--;
  gpu.alive[warp] &= ~(1u << me.number % WARP);
  release_block_if_complete();
  for (int lane = 0; lane < WARP; lane++)  // some may have waited for this one
    if (gpu.at_warp_barrier[warp] >> lane & 1) {
      Thread& other = gpu.threads[warp * WARP + lane];
      bool orders = strcmp(other.waits_in, "__syncwarp") == 0;
      release_warp_if_complete(other, orders ? ORDERS_MEMORY : EXCHANGES);
    }
  stop();
}

EMU bool waits_elsewhere(const Thread& a, const Thread& b) {
  if (a.state != b.state || !(a.waits_at == b.waits_at)) return true;
  return a.state == AT_WARP_BARRIER && a.mask != b.mask;
}

EMU_COLD int describe_wait(char* text, size_t size, const Thread& thread) {
  int length = snprintf(text, size, "thread %d waits in %s at %s:%d", thread.number,
                        thread.waits_in, thread.waits_at.file, thread.waits_at.line);
  if (thread.state == AT_WARP_BARRIER)
    length += snprintf(text + length, size - length, " with mask %08x", thread.mask);
  return length;
}

// Nobody can run, and not all have returned: say of two threads where they wait, if
// possible of one that waits for its warp.
EMU_COLD void report_deadlock() {
  const Thread *first = nullptr, *other = nullptr;
  for (int state = AT_WARP_BARRIER; state >= AT_BLOCK_BARRIER; state--)
    for (int i = 0; i < gpu.num_threads; i++) {
      const Thread& thread = gpu.threads[i];
      if (thread.state != state) continue;
      if (!first) first = &thread;
      if (!other && waits_elsewhere(*first, thread)) other = &thread;
    }
  char text[500];
  int length = describe_wait(text, sizeof text, *first);
  if (other) {
    length += snprintf(text + length, sizeof text - length, ", ");
    describe_wait(text + length, sizeof text - length, *other);
  }
  gpu.current = nullptr;
  fail("block (%u,%u,%u): deadlock: %s", gpu.block_index.x, gpu.block_index.y,
       gpu.block_index.z, text);
}

EMU void run_block() {
  clear_shared(0, arena_used);
  gpu.block_number++;
  gpu.epoch = 0;
  gpu.num_at_barrier = 0;
  gpu.num_alive = gpu.num_threads;
  gpu.last_picked = gpu.num_threads - 1;
  memset(gpu.runnable, 0, sizeof gpu.runnable);
  memset(gpu.alive, 0, sizeof gpu.alive);
  memset(gpu.at_warp_barrier, 0, sizeof gpu.at_warp_barrier);
  memset(gpu.warp_time, 0, sizeof gpu.warp_time);
  for (int i = 0; i < gpu.num_threads; i++) {
    Thread& thread = gpu.threads[i];
    unsigned x = gpu.block.x, y = gpu.block.y;
    thread.number = i;
    thread.index = {i % x, i / x % y, i / (x * y)};
    thread.waits_in = "";
    thread.waits_at = {"", 0};
    memset(thread.known, 0, sizeof thread.known);
    thread.stack_pointer = fresh_stack(i, fiber);
    gpu.alive[i / WARP] |= 1u << i % WARP;
    set_runnable(thread);
  }
  while (gpu.num_alive > 0 && !gpu.failed) {
    int next = pick();
    if (next < 0) return report_deadlock();
    resume(gpu.threads[next]);
  }
  gpu.current = nullptr;
}

// ---- A launch: all blocks, and what can go wrong outside of our sight ----

static sigjmp_buf way_out;
static volatile sig_atomic_t is_running, is_interrupted;
static pthread_t runner;
static int fault_signal;
static uintptr_t fault_address;
static void* fault_code;

// The system's complaint about an address, a division by zero, the end of the time, or
// somebody who does not want to wait for it.
EMU_UNSEEN static void on_signal(int signal_number, siginfo_t* info, void* context) {
  if (signal_number == SIGINT) is_interrupted = 1;  // even if nothing runs any more
  if (!is_running || !pthread_equal(pthread_self(), runner)) {
    if (signal_number == SIGVTALRM || signal_number == SIGINT) {
      if (is_running) pthread_kill(runner, signal_number);  // any thread may get it
    } else {
      signal(signal_number, SIG_DFL);  // not ours: it happens again, and ends as ever
    }
    return;
  }
  fault_signal = signal_number;
  fault_address = uintptr_t(info->si_addr);
  auto* registers = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  fault_code = reinterpret_cast<void*>(registers->gregs[REG_RIP]);
#elif defined(__aarch64__)
  fault_code = reinterpret_cast<void*>(registers->pc);
#endif
  siglongjmp(way_out, 1);
}

EMU_COLD void report_signal() {
  gpu.scheduler = nullptr;  // the fiber has been left already
  // @a|b@: b is the latest access, in case that a is in this header.
  uint32_t code = code_offset(fault_code) + 1;
  uint32_t last = gpu.last_code ? code_offset(gpu.last_code) : code;
  size_t in_stacks = fault_address - uintptr_t(gpu.launch->stacks);
  if (fault_signal == SIGVTALRM)
    fail("still runs after %.3g s of processor time, at @%x|%x@: does it wait for "
         "something that nobody will do? Blocks run one after another, and a thread "
         "only stops at barriers (the limit is timeout_s)",
         double(gpu.launch->timeout_us) / 1e6, code, last);
  else if (fault_signal == SIGINT)
    fail("interrupted at @%x|%x@", code, last);
  else if (fault_signal == SIGFPE)
    fail("division by zero at @%x|%x@", code, last);
  else if (in_stacks < MAX_THREADS * (STACK_BYTES + GUARD_BYTES))
    fail("the local variables need more than %zu bytes, at @%x|%x@", STACK_BYTES, code,
         last);
  else
    fail("illegal access, %s, at @%x|%x@", describe(fault_address), code, last);
}

EMU uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

EMU void run_blocks() {
  const Launch& launch = *gpu.launch;
  uint64_t num_blocks = uint64_t(gpu.grid.x) * gpu.grid.y * gpu.grid.z;
  // In random order: start + i * stride comes to each block once.
  uint64_t stride = 1, start = 0;
  if (launch.order == RANDOM) {
    start = next_random() % num_blocks;
    do stride = next_random() % num_blocks + 1;
    while (greatest_common_divisor(stride, num_blocks) != 1);
  }
  for (uint64_t i = 0; i < num_blocks && !gpu.failed; i++) {
    uint64_t number = launch.order == REVERSE ? num_blocks - 1 - i
                                              : (start + i * stride) % num_blocks;
    gpu.linear_block = uint32_t(number);
    gpu.block_index = {unsigned(number % gpu.grid.x),
                       unsigned(number / gpu.grid.x % gpu.grid.y),
                       unsigned(number / (uint64_t(gpu.grid.x) * gpu.grid.y))};
    run_block();
  }
}

EMU bool is_valid(const Launch& launch) {
  uint64_t threads = uint64_t(gpu.block.x) * gpu.block.y * gpu.block.z;
  bool fits = threads >= 1 && threads <= MAX_THREADS && gpu.block.z <= 64 &&
              gpu.grid.x >= 1 && gpu.grid.x <= 0x7fffffff && gpu.grid.y >= 1 &&
              gpu.grid.y <= 65535 && gpu.grid.z >= 1 && gpu.grid.z <= 65535;
  if (!fits)
    fail("no such launch: grid (%u,%u,%u), block (%u,%u,%u); a block has 1 to 1024 "
         "threads, at most 64 in z, and a grid at most 65535 blocks in y and in z",
         gpu.grid.x, gpu.grid.y, gpu.grid.z, gpu.block.x, gpu.block.y, gpu.block.z);
  else if (launch.shared_bytes > launch.shared_limit)
    fail("no such launch: %zu bytes of dynamic shared memory, and %zu are allowed "
         "(shared_limit)",
         size_t(launch.shared_bytes), size_t(launch.shared_limit));
  return !gpu.failed;
}

EMU_UNSEEN static int run_grid(Launch* launch, void (*kernel)(void*), void* arguments) {
  is_interrupted = 0;
  gpu.launch = launch;
  gpu.kernel = kernel;
  gpu.arguments = arguments;
  gpu.grid = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
  gpu.block = dim3(launch->block[0], launch->block[1], launch->block[2]);
  gpu.current = nullptr;
  gpu.scheduler = nullptr;
  gpu.last_code = nullptr;
  gpu.failed = false;
  gpu.error[0] = 0;
  gpu.output_bytes = 0;
  gpu.random = launch->seed * 2654435761u + 88172645463325252ull;
  for (int i = 0; i < 10; i++) next_random();  // seeds that are alike drift apart
  num_variables = 0;
  arena_used = static_bytes = 0;
  if (!is_valid(*launch)) return 1;
  gpu.num_threads = int(gpu.block.x * gpu.block.y * gpu.block.z);
  if (launch->shared_bytes) new_variable("", -1, "", launch->shared_bytes);

  // Signals run on a stack of their own: that of a fiber may be what is wrong.
  static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM, SIGINT};
  static char signal_stack[64 * 1024];
  stack_t stack = {}, old_stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_actions[5];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &action, &old_actions[i]);
  runner = pthread_self();
  itimerval limit = {}, old_limit = {};  // of processor time, so a busy machine is fine
  limit.it_value.tv_sec = launch->timeout_us / 1000000;
  limit.it_value.tv_usec = launch->timeout_us % 1000000;

  if (sigsetjmp(way_out, 1) == 0) {
    is_running = 1;
    setitimer(ITIMER_VIRTUAL, &limit, &old_limit);
    run_blocks();
    is_running = 0;
  } else {
    is_running = 0;
    report_signal();
  }
  setitimer(ITIMER_VIRTUAL, &old_limit, nullptr);
  for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  gpu.current = nullptr;
  return gpu.failed;
}

// ---- Between Python and a kernel ----

template <class... P>
struct Call {
  void (*kernel)(P...);
  void** arguments;  // pointers to the values
};

template <class... P, size_t... I>
EMU void call_with(Call<P...>& call, std::index_sequence<I...>) {
  call.kernel(*static_cast<std::remove_reference_t<P>*>(call.arguments[I])...);
}

template <class... P>
EMU void call_kernel(void* call) {
  call_with(*static_cast<Call<P...>*>(call), std::index_sequence_for<P...>{});
}

// Python has read the parameters from the source; the compiler makes sure that each
// value has the size that the kernel will read.
template <size_t... BYTES, class... P>
EMU int launch_kernel(void (*kernel)(P...), Launch* launch, void** arguments) {
  static_assert(sizeof...(P) == sizeof...(BYTES) && ((sizeof(P) == BYTES) && ...),
                "the parameters of this kernel are not what they seem to be");
  Call<P...> call{kernel, arguments};
  return run_grid(launch, call_kernel<P...>, &call);
}

EMU_COLD int print(const char* format, ...) {
  va_list values;
  va_start(values, format);
  size_t room = sizeof gpu.output - gpu.output_bytes;
  int length = vsnprintf(gpu.output + gpu.output_bytes, room, format, values);
  va_end(values);
  if (length > 0) gpu.output_bytes += size_t(length) < room ? size_t(length) : room - 1;
  return length;
}

}  // namespace emu

// What Python calls. EMU_KERNEL(0, (copy<float>), 8, 8, 4) makes emu_launch_0, for a
// kernel with two pointers and an int.
#define EMU_KERNEL(number, kernel, ...)                                       \
  EMU_EXPORT int emu_launch_##number(emu::Launch* launch, void** arguments) { \
    return emu::launch_kernel<__VA_ARGS__>(kernel, launch, arguments);        \
  }

EMU_EXPORT const char* emu_error() { return emu::gpu.error; }
EMU_EXPORT const char* emu_output() { return emu::gpu.output; }
EMU_EXPORT int emu_interrupted() { return emu::is_interrupted; }
EMU_EXPORT const char* emu_outside() { return emu::declared_outside; }
EMU_EXPORT int emu_num_variables() { return emu::num_variables; }
EMU_EXPORT const char* emu_variable(int number) { return emu::variables[number].name; }

// Made once per process: they are too large to have them for every library.
EMU_EXPORT char* emu_new_stacks() {
  size_t each = emu::STACK_BYTES + emu::GUARD_BYTES;
  void* memory = mmap(nullptr, emu::MAX_THREADS * each, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  char* stacks = static_cast<char*>(memory);
  for (int i = 0; i < emu::MAX_THREADS; i++)
    mprotect(stacks + i * each, emu::GUARD_BYTES, PROT_NONE);
  return stacks;
}

// ---- Check mode: is the access legal, and ordered with the others? ----

namespace emu {

enum Kind : int { READ, WRITE, ATOMIC, COPY_BEGINS };

// When and by whom.
struct Stamp {
  uint32_t block, epoch, time, code;
  uint16_t thread;
};

// A byte of shared memory or an element of an argument: its last write, and its reads
// since then.
struct Cell {
  Stamp write, read;
  Stamp other_atomic;     // an atomic write that need not be over when `write` was made
  uint32_t lanes;         // that read it, in the warp of `read`
  uint16_t other_reader;  // in another warp or block
  bool written_atomically, read_by_warps, read_by_blocks;
};

static Cell arena_cells[ARENA_BYTES];

// Is an earlier access over for this thread, in whatever order the threads may run?
EMU bool is_over(const Stamp& earlier, bool is_shared) {
  const Thread& me = *gpu.current;
  if (earlier.block == 0) return true;
  if (earlier.block != gpu.block_number)
    return is_shared || gpu.launch->blocks_may_share;
  if (earlier.thread == me.number || earlier.epoch < gpu.epoch) return true;
  return earlier.thread / WARP == me.number / WARP &&
         earlier.time < me.known[earlier.thread % WARP];
}

EMU Stamp stamp_now(void* code) {
  const Thread& me = *gpu.current;
  return {gpu.block_number, gpu.epoch, gpu.warp_time[me.number / WARP],
          code_offset(code), uint16_t(me.number)};
}

EMU_COLD void report_race(const Stamp& earlier, const char* did, const char* does,
                          uintptr_t address, void* code) {
  const char* where = earlier.block != gpu.block_number ? "in another block"
                      : earlier.thread / WARP == gpu.current->number / WARP
                          ? "in the same warp"
                          : "in another warp";
  const char* way_out = earlier.block == gpu.block_number
                            ? ""
                            : " (blocks_may_share, if the kernel orders its blocks)";
  fail("race: %s %s at @%x@, which thread %d %s %s at @%x@, with nothing between that "
       "orders the two%s",
       does, describe(address), code_offset(code), earlier.thread, where, did,
       earlier.code, way_out);
}

EMU void check_read(Cell& cell, bool is_shared, uintptr_t address, void* code) {
  const Stamp& write = is_over(cell.write, is_shared) ? cell.other_atomic : cell.write;
  if (!is_over(write, is_shared)) report_race(write, "wrote", "reads", address, code);

  // Remember this read, beside those that are not over for this thread.
  const Thread& me = *gpu.current;
  Stamp now = stamp_now(code);
  Stamp& read = cell.read;
  uint32_t my_bit = 1u << me.number % WARP;
  bool same_epoch = read.block == now.block && read.epoch == now.epoch;
  if (!is_shared && read.block && read.block != now.block) {
    cell.read_by_blocks = true;
    cell.other_reader = read.thread;
  }
  if (!same_epoch) cell.read_by_warps = false;
  if (same_epoch && read.thread / WARP != now.thread / WARP) {
    // Enough to know: a writer of this epoch cannot be ordered with both warps.
    cell.read_by_warps = true;
    cell.other_reader = now.thread;
    return;
  }
  uint32_t open = same_epoch ? cell.lanes & ~my_bit : 0;
  for (uint32_t left = open; left; left &= left - 1)
    if (read.time < me.known[lowest(left)]) open &= ~(left & -left);  // over by now
  cell.lanes = open | my_bit;
  if (!open) read = now;
}

EMU void check_write(Cell& cell, bool is_shared, bool is_atomic, uintptr_t address,
                     void* code) {
  // First: is the last write over?
  const Thread& me = *gpu.current;
  bool write_is_over = is_over(cell.write, is_shared);
  if (is_atomic && cell.written_atomically) {
    if (!write_is_over) cell.other_atomic = cell.write;  // fine among atomics
  } else {
    const Stamp& last = write_is_over ? cell.other_atomic : cell.write;
    if (!is_over(last, is_shared)) report_race(last, "wrote", "writes", address, code);
    cell.other_atomic = {};
  }

  // Then: are all reads since then over? If not, `reader` becomes one that is not.
  Stamp reader = cell.read;
  bool same_epoch = reader.block == gpu.block_number && reader.epoch == gpu.epoch;
  bool is_race = !is_over(reader, is_shared);
  if (cell.read_by_blocks && !gpu.launch->blocks_may_share) {
    is_race = true;
    if (reader.block == gpu.block_number) {  // that one may be fine, the other is not
      reader.block = 0;
      reader.thread = cell.other_reader;
    }
  } else if (same_epoch && reader.thread / WARP == me.number / WARP) {
    uint32_t others = cell.lanes & ~(1u << me.number % WARP);
    for (; others && !is_race; others &= others - 1)
      if (reader.time >= me.known[lowest(others)]) {
        is_race = true;
        reader.thread = reader.thread / WARP * WARP + lowest(others);
      }
    if (cell.read_by_warps && !is_race) {
      is_race = true;
      reader.thread = cell.other_reader;
    }
  }
  if (is_race) report_race(reader, "read", "writes", address, code);

  cell.write = stamp_now(code);
  cell.written_atomically = is_atomic;
}

EMU void note_access(uint64_t offset, size_t bytes, int memory, int kind, void* code) {
  Launch& launch = *gpu.launch;
  if (!launch.accesses || kind == COPY_BEGINS) return;
  if (launch.num_accesses == launch.max_accesses)
    fail("more than %zu accesses to trace: launch fewer blocks",
         size_t(launch.max_accesses));
  Access& access = launch.accesses[launch.num_accesses++];
  access.offset = offset;
  access.block = gpu.linear_block;
  access.code = code_offset(code);
  access.bytes = uint32_t(bytes);
  access.thread = uint16_t(gpu.current->number);
  access.memory = int16_t(memory);
  access.kind = uint16_t(kind);
}

EMU void access_shared(int number, size_t first, size_t bytes, int kind, void* code) {
  size_t end = first + bytes;
  for (size_t i = first; i < end; i++) {
    uintptr_t address = uintptr_t(arena) + i;
    if (kind == READ && arena_content[i] == NOTHING)
      fail("reads %s at @%x@, which no thread of the block has written",
           describe(address), code_offset(code));
    if (kind == READ && arena_content[i] == COPY_ON_ITS_WAY)
      fail("reads %s at @%x@ before the asynchronous copy into it was waited for",
           describe(address), code_offset(code));
    if (kind == READ) {
      check_read(arena_cells[i], true, address, code);
    } else {
      check_write(arena_cells[i], true, kind == ATOMIC, address, code);
      arena_content[i] = kind == COPY_BEGINS ? COPY_ON_ITS_WAY : WRITTEN;
    }
  }
  note_access(first - variables[number].offset, bytes, -1 - number, kind, code);
}

EMU void access_region(int number, size_t offset, size_t bytes, int kind, void* code) {
  const Region& region = gpu.launch->regions[number];
  uintptr_t address = region.base + offset;
  if (kind != READ && !region.writable)
    fail("writes %s at @%x@, which the kernel declares const", describe(address),
         code_offset(code));
  for (size_t i = offset / region.granule; i * region.granule < offset + bytes; i++) {
    uintptr_t where = region.base + i * region.granule;
    if (kind == READ)
      check_read(region.cells[i], false, where, code);
    else
      check_write(region.cells[i], false, kind == ATOMIC, where, code);
  }
  note_access(offset, bytes, number, kind, code);
}

// Every load and store of the kernel comes here.
EMU void access(uintptr_t address, size_t bytes, int kind, void* code) {
  if (!gpu.current) return;  // the host's
  uintptr_t my_stack = uintptr_t(stack_of(gpu.current->number));
  if (address - my_stack < STACK_BYTES) return;  // a local variable
  gpu.last_code = code;
  for (int i = 0; i < num_variables; i++) {
    const Variable& variable = variables[i];
    size_t offset = address - uintptr_t(arena) - variable.offset;
    if (offset < variable.bytes && offset + bytes <= variable.bytes)
      return access_shared(i, variable.offset + offset, bytes, kind, code);
  }
  for (int i = 0; i < gpu.launch->num_regions; i++) {
    size_t offset = address - gpu.launch->regions[i].base;
    size_t available = gpu.launch->regions[i].bytes;
    if (offset < available && offset + bytes <= available)
      return access_region(i, offset, bytes, kind, code);
  }
  const char* what = kind == READ ? "read" : "write";
  size_t in_stacks = address - uintptr_t(gpu.launch->stacks);
  if (in_stacks < MAX_THREADS * (STACK_BYTES + GUARD_BYTES))
    fail("%s of a local variable of thread %zu at @%x@", what,
         in_stacks / (STACK_BYTES + GUARD_BYTES), code_offset(code));
  bool is_in_arena = address - uintptr_t(arena) < ARENA_BYTES;
  bool is_ours = address - uintptr_t(__ehdr_start) < size_t(_end - __ehdr_start);
  if (is_ours && !is_in_arena) return;  // a constant of the source
  fail("illegal %s of %zu bytes, %s, at @%x@", what, bytes, describe(address),
       code_offset(code));
}

EMU void atomic_access(const void* pointer, size_t bytes, void* code) {
  gpu.last_code = code;
#ifdef EMU_CHECK
  access(uintptr_t(pointer), bytes, ATOMIC, code);
#endif
  if (!gpu.launch->yield_at_atomics) return;
  gpu.current->waits_in = "an atomic operation";
  gpu.current->waits_at = {"", 0};
  stop();
}

}  // namespace emu

EMU_EXPORT size_t emu_cell_bytes() { return sizeof(emu::Cell); }

// ---- The compiler's calls, in check mode ----

#ifdef EMU_CHECK
#define EMU_HOOK \
  extern "C" __attribute__((visibility("hidden"), no_sanitize("thread", "undefined")))
#define EMU_CALLER __builtin_return_address(0)

#define EMU_HOOKS(size)                                                \
  EMU_HOOK void __tsan_read##size(void* pointer) {                     \
    emu::access(uintptr_t(pointer), size, emu::READ, EMU_CALLER);      \
  }                                                                    \
  EMU_HOOK void __tsan_write##size(void* pointer) {                    \
    emu::access(uintptr_t(pointer), size, emu::WRITE, EMU_CALLER);     \
  }                                                                    \
  EMU_HOOK void __tsan_unaligned_read##size(void* pointer) {           \
    emu::access(uintptr_t(pointer), size, emu::READ, EMU_CALLER);      \
  }                                                                    \
  EMU_HOOK void __tsan_unaligned_write##size(void* pointer) {          \
    emu::access(uintptr_t(pointer), size, emu::WRITE, EMU_CALLER);     \
  }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
EMU_HOOK void __tsan_read_range(void* pointer, unsigned long bytes) {
  emu::access(uintptr_t(pointer), bytes, emu::READ, EMU_CALLER);
}
EMU_HOOK void __tsan_write_range(void* pointer, unsigned long bytes) {
  emu::access(uintptr_t(pointer), bytes, emu::WRITE, EMU_CALLER);
}
EMU_HOOK void __tsan_init() {}

// The other sanitizer, for undefined behaviour, says itself where it happened.
struct EmuSource {
  const char* file;
  unsigned line, column;
};
#define EMU_UNDEFINED(name, text, ...)                                 \
  EMU_HOOK void __ubsan_handle_##name(EmuSource* source __VA_ARGS__) { \
    if (emu::gpu.current)                                              \
      emu::fail(text " at %s:%u", source->file, source->line);         \
  }
EMU_UNDEFINED(missing_return, "function that ends without a return")
EMU_UNDEFINED(shift_out_of_bounds, "shift by more bits than there are", , void*, void*)
EMU_UNDEFINED(add_overflow, "integer overflow", , void*, void*)
EMU_UNDEFINED(sub_overflow, "integer overflow", , void*, void*)
EMU_UNDEFINED(mul_overflow, "integer overflow", , void*, void*)
EMU_UNDEFINED(negate_overflow, "integer overflow", , void*)
EMU_UNDEFINED(divrem_overflow, "integer division by zero, or overflow", , void*, void*)

struct EmuType {
  uint16_t kind, info;
  char name[];  // "'float [4]'"
};
struct EmuPlace {
  EmuSource source;
  const EmuType* type;
  unsigned char log2_alignment, is_write;  // of an access
};
EMU_HOOK void __ubsan_handle_out_of_bounds(EmuPlace* place, long index) {
  const char* length = strchr(place->type->name, '[');
  if (emu::gpu.current)
    emu::fail("index %ld is out of the bounds of an array of %d at %s:%u", index,
              length ? atoi(length + 1) : 0, place->source.file, place->source.line);
}
// Of two checks: that of an alignment knows one, that of a variable's size does not.
EMU_HOOK void __ubsan_handle_type_mismatch_v1(EmuPlace* place, void*) {
  const char* what = place->log2_alignment ? "misaligned access"
                     : place->is_write ? "illegal write out of the bounds of its array"
                                       : "illegal read out of the bounds of its array";
  if (emu::gpu.current)
    emu::fail("%s at %s:%u", what, place->source.file, place->source.line);
}
#endif

// ---- The functions of CUDA that need the machine ----

#define threadIdx emu::thread_index()
#define blockIdx emu::block_index()
#define blockDim emu::block_dim()
#define gridDim emu::grid_dim()
static constexpr int warpSize = 32;

#define __syncthreads() emu::block_barrier(EMU_HERE, "__syncthreads")
#define __syncthreads_or(vote) emu::synchronise_or(EMU_HERE, vote)
#define __syncthreads_and(vote) emu::synchronise_and(EMU_HERE, vote)
#define __syncthreads_count(vote) emu::synchronise_count(EMU_HERE, vote)
#define __syncwarp(...) emu::synchronise_warp(EMU_HERE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) emu::shuffle_index(EMU_HERE, __VA_ARGS__)
#define __shfl_xor_sync(...) emu::shuffle_xor(EMU_HERE, __VA_ARGS__)
#define __shfl_down_sync(...) emu::shuffle_down(EMU_HERE, __VA_ARGS__)
#define __shfl_up_sync(...) emu::shuffle_up(EMU_HERE, __VA_ARGS__)
#define __ballot_sync(mask, vote) emu::ballot(EMU_HERE, "__ballot_sync", mask, vote)
#define __any_sync(mask, vote) (emu::ballot(EMU_HERE, "__any_sync", mask, vote) != 0)
#define __all_sync(mask, vote) emu::all(EMU_HERE, mask, vote)
#define __reduce_add_sync(mask, value) \
  emu::reduce(EMU_HERE, "__reduce_add_sync", mask, value, emu::Add{})
#define __reduce_max_sync(mask, value) \
  emu::reduce(EMU_HERE, "__reduce_max_sync", mask, value, emu::Max{})
#define __reduce_min_sync(mask, value) \
  emu::reduce(EMU_HERE, "__reduce_min_sync", mask, value, emu::Min{})

#undef assert
#define assert(condition)                                                       \
  ((condition) ? void()                                                         \
               : emu::fail("assertion failed at %s:%d: %s", __FILE__, __LINE__, \
                           #condition))
#define __trap() emu::fail("__trap() at %s:%d", __FILE__, __LINE__)
#define printf emu::print

// One thread runs at a time, and sees what the others wrote.
inline void __threadfence() {}
inline void __threadfence_block() {}

// Hints for the caches, of which there are none.
template <class T>
__forceinline__ T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
__forceinline__ T __ldcs(const T* pointer) {
  return *pointer;
}
template <class T>
__forceinline__ void __stcs(T* pointer, T value) {
  *pointer = value;
}

namespace emu {
struct Add {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return T(a + b);
  }
};
struct Max {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

template <class T>
struct Same {
  using type = T;
};
}  // namespace emu

// Read, combine, write: nothing can come between, since only one thread runs. The
// second argument is converted to the type of the first.
#define EMU_ATOMIC(name, is_allowed, expression)                              \
  template <class T>                                                          \
  __noinline__ EMU_UNSEEN T name(T* pointer, typename emu::Same<T>::type b) { \
    static_assert(is_allowed, #name " of this type is not in CUDA");          \
    emu::atomic_access(pointer, sizeof(T), __builtin_return_address(0));      \
    T a = *pointer;                                                           \
    *pointer = T(expression);                                                 \
    return a;                                                                 \
  }
#define EMU_WHOLE std::is_integral<T>::value && sizeof(T) >= 4
EMU_ATOMIC(atomicAdd, !std::is_integral<T>::value || sizeof(T) >= 4, a + b)
EMU_ATOMIC(atomicExch, sizeof(T) >= 4, b)
EMU_ATOMIC(atomicSub, EMU_WHOLE, a - b)
EMU_ATOMIC(atomicMax, EMU_WHOLE, a > b ? a : b)
EMU_ATOMIC(atomicMin, EMU_WHOLE, a < b ? a : b)
EMU_ATOMIC(atomicAnd, EMU_WHOLE, a & b)
EMU_ATOMIC(atomicOr, EMU_WHOLE, a | b)
EMU_ATOMIC(atomicXor, EMU_WHOLE, a ^ b)
EMU_ATOMIC(atomicInc, std::is_unsigned<T>::value, a >= b ? 0 : a + 1)
EMU_ATOMIC(atomicDec, std::is_unsigned<T>::value, a == 0 || a > b ? b : a - 1)

template <class T>
__noinline__ EMU_UNSEEN T atomicCAS(T* pointer, typename emu::Same<T>::type expected,
                                    typename emu::Same<T>::type b) {
  static_assert(EMU_WHOLE, "atomicCAS of this type is not in CUDA");
  emu::atomic_access(pointer, sizeof(T), __builtin_return_address(0));
  T a = *pointer;
  if (a == expected) *pointer = b;
  return a;
}

// ---- Vectors ----

#define EMU_VECTOR(T, name)                                                      \
  struct alignas(2 * sizeof(T)) name##2 {                                        \
    T x, y;                                                                      \
  };                                                                             \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 {              \
    T x, y, z, w;                                                                \
  };                                                                             \
  __forceinline__ name##2 make_##name##2(T x, T y) { return {x, y}; }            \
  __forceinline__ name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)

struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};
__forceinline__ float3 make_float3(float x, float y, float z) { return {x, y, z}; }
__forceinline__ int3 make_int3(int x, int y, int z) { return {x, y, z}; }
__forceinline__ uint3 make_uint3(unsigned x, unsigned y, unsigned z) {
  return {x, y, z};
}

// ---- Arithmetic ----

using std::isfinite;
using std::isinf;
using std::isnan;

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return emu::Max{}.template operator()<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return emu::Min{}.template operator()<std::common_type_t<A, B>>(a, b);
}

// On a GPU these are faster and a little less exact; here they are exact.
__forceinline__ float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
__forceinline__ float __expf(float x) { return std::exp(x); }
__forceinline__ float __exp10f(float x) { return std::pow(10.0f, x); }
__forceinline__ float __logf(float x) { return std::log(x); }
__forceinline__ float __log2f(float x) { return std::log2(x); }
__forceinline__ float __powf(float x, float y) { return std::pow(x, y); }
__forceinline__ float __sinf(float x) { return std::sin(x); }
__forceinline__ float __cosf(float x) { return std::cos(x); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__forceinline__ float __fsqrt_rn(float x) { return std::sqrt(x); }
__forceinline__ float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
__forceinline__ float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__forceinline__ int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}

namespace emu {
template <class To, class From>
__forceinline__ To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emu
__forceinline__ int __float_as_int(float x) { return emu::same_bits<int>(x); }
__forceinline__ float __int_as_float(int x) { return emu::same_bits<float>(x); }
__forceinline__ unsigned __float_as_uint(float x) {
  return emu::same_bits<unsigned>(x);
}
__forceinline__ float __uint_as_float(unsigned x) { return emu::same_bits<float>(x); }
__forceinline__ long long __double_as_longlong(double x) {
  return emu::same_bits<long long>(x);
}
__forceinline__ double __longlong_as_double(long long x) {
  return emu::same_bits<double>(x);
}

// ---- Numbers of 16 bits ----

namespace emu {

struct Bfloat16 {  // the upper half of a float
  static float widen(uint16_t bits) { return same_bits<float>(uint32_t(bits) << 16); }

  static uint16_t narrow(float value) {
    uint32_t bits = same_bits<uint32_t>(value);
    if (value != value) return 0x7fff;  // NaN
    bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, in the middle to the even one
    return uint16_t(bits >> 16);
  }
};

struct Float16 {  // 1 bit sign, 5 exponent, 10 fraction
  static float widen(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00)  // infinity or NaN
      return same_bits<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // The exponent is 112 too small: a product mends it, for the smallest numbers too.
    float value = same_bits<float>(rest << 13) * 0x1p112f;
    return same_bits<float>(sign | same_bits<uint32_t>(value));
  }

  static uint16_t narrow(float value) {
    uint32_t bits = same_bits<uint32_t>(value);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return 0x7fff;                    // NaN
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 or more: infinity
    if (rest < 0x38800000) {
      // Below 2^-14: a multiple of 2^-24, to which this addition rounds.
      float small = same_bits<float>(rest) + 0.5f;
      return uint16_t(sign | (same_bits<uint32_t>(small) - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);  // to the nearest, as above
    return uint16_t(sign | (rest - 0x38000000) >> 13);
  }
};

// A number that is kept in 16 bits, and reckoned with in 32.
template <class Format>
struct alignas(2) Small {
  uint16_t bits;

  Small() = default;
  __forceinline__ Small(float value) : bits(Format::narrow(value)) {}
  __forceinline__ Small(double value) : Small(float(value)) {}
  __forceinline__ Small(int value) : Small(float(value)) {}
  __forceinline__ operator float() const { return Format::widen(bits); }

  friend __forceinline__ Small operator+(Small a, Small b) {
    return float(a) + float(b);
  }
  friend __forceinline__ Small operator-(Small a, Small b) {
    return float(a) - float(b);
  }
  friend __forceinline__ Small operator*(Small a, Small b) {
    return float(a) * float(b);
  }
  friend __forceinline__ Small operator/(Small a, Small b) {
    return float(a) / float(b);
  }
  friend __forceinline__ Small operator-(Small a) { return -float(a); }
  __forceinline__ Small& operator+=(Small other) { return *this = *this + other; }
  __forceinline__ Small& operator-=(Small other) { return *this = *this - other; }
  __forceinline__ Small& operator*=(Small other) { return *this = *this * other; }
};

template <class Format>
struct alignas(4) SmallPair {
  Small<Format> x, y;
};

}  // namespace emu

using __half = emu::Small<emu::Float16>;
using __half2 = emu::SmallPair<emu::Float16>;
using __nv_bfloat16 = emu::Small<emu::Bfloat16>;
using __nv_bfloat162 = emu::SmallPair<emu::Bfloat16>;
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

__forceinline__ float __half2float(__half x) { return x; }
__forceinline__ __half __float2half(float x) { return x; }
__forceinline__ __half __float2half_rn(float x) { return x; }
__forceinline__ float2 __half22float2(__half2 a) { return {a.x, a.y}; }
__forceinline__ __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
__forceinline__ __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }

__forceinline__ float __bfloat162float(__nv_bfloat16 x) { return x; }
__forceinline__ __nv_bfloat16 __float2bfloat16(float x) { return x; }
__forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
__forceinline__ float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
__forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {a, b};
}
__forceinline__ __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }

// ---- Copies by a function of C, which the compiler does not announce ----

#ifdef EMU_CHECK
namespace emu {
EMU_COLD void* copy_bytes(void* to, const void* from, size_t bytes) {
  access(uintptr_t(from), bytes, READ, EMU_CALLER);
  access(uintptr_t(to), bytes, WRITE, EMU_CALLER);
  return memcpy(to, from, bytes);
}
EMU_COLD void* fill_bytes(void* to, int value, size_t bytes) {
  access(uintptr_t(to), bytes, WRITE, EMU_CALLER);
  return memset(to, value, bytes);
}
}  // namespace emu
#define memcpy emu::copy_bytes
#define memset emu::fill_bytes
#endif
