// nvcuda::wmma: a warp multiplies small matrices. Which lane holds which element is
// nobody's business on a GPU; here lane l holds num_elements in a row, from
// l * num_elements of the tile, row by row.
// Source: appendix A15, "A GPU in one header".
#pragma once
#include "cuda_on_cpu.h"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

// a is M x K, b is K x N, the accumulator M x N.
template <class Use, int M, int N, int K>
struct EmuTile {
  static constexpr int rows = M, columns = N;
};
template <int M, int N, int K>
struct EmuTile<matrix_a, M, N, K> {
  static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct EmuTile<matrix_b, M, N, K> {
  static constexpr int rows = K, columns = N;
};

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  using Tile = EmuTile<Use, M, N, K>;
  static constexpr int num_elements = Tile::rows * Tile::columns / emu::WARP;
  static constexpr bool is_by_columns = std::is_same<Layout, col_major>::value;
  T x[num_elements];
};

template <class Fragment, class T>
EMU void fill_fragment(Fragment& fragment, T value) {
  for (auto& element : fragment.x) element = value;
}

EMU void emu_need_all(emu::Place place, const char* name) {
  if (emu::gpu.current->joined != 0xffffffffu)
    emu::fail("%s at %s:%d needs all 32 lanes of its warp", name, place.file,
              place.line);
}

// Does something with each element of this lane and its place in memory.
template <class Fragment, class T, class Do>
__forceinline__ void emu_for_each(emu::Place place, const char* name,
                                  Fragment& fragment, T* memory, unsigned stride,
                                  bool by_columns, Do act) {
  using Tile = typename Fragment::Tile;
  if (stride * sizeof(T) % 16 || uintptr_t(memory) % 32)
    emu::fail("%s at %s:%d: the tile must be aligned to 32 bytes, and its stride to 16",
              name, place.file, place.line);
  emu::warp_barrier(place, name, 0xffffffffu, emu::EXCHANGES);
  emu_need_all(place, name);
  for (int e = 0; e < Fragment::num_elements; e++) {
    int number = emu::lane() * Fragment::num_elements + e;
    int row = number / Tile::columns, column = number % Tile::columns;
    unsigned offset = by_columns ? column * stride + row : row * stride + column;
    act(fragment.x[e], memory[offset]);
  }
}

struct EmuLoad {
  template <class A, class B>
  __forceinline__ void operator()(A& element, const B& memory) const {
    element = memory;
  }
};
struct EmuStore {
  template <class A, class B>
  __forceinline__ void operator()(A& element, B& memory) const {
    memory = element;
  }
};

template <class Fragment, class T>
__forceinline__ void emu_load(emu::Place place, Fragment& fragment, const T* memory,
                              unsigned stride) {
  emu_for_each(place, "load_matrix_sync", fragment, memory, stride,
               Fragment::is_by_columns, EmuLoad{});
}

template <class Fragment, class T>
__forceinline__ void emu_load(emu::Place place, Fragment& fragment, const T* memory,
                              unsigned stride, layout_t layout) {
  emu_for_each(place, "load_matrix_sync", fragment, memory, stride,
               layout == mem_col_major, EmuLoad{});
}

template <class Fragment, class T>
__forceinline__ void emu_store(emu::Place place, T* memory, Fragment& fragment,
                               unsigned stride, layout_t layout) {
  emu_for_each(place, "store_matrix_sync", fragment, memory, stride,
               layout == mem_col_major, EmuStore{});
}

// The fragments of all lanes, and an element of the whole tile.
template <class Fragment>
struct EmuWarp {
  const Fragment* lanes[emu::WARP];

  EMU EmuWarp(emu::Place place, const Fragment& mine) {
    const emu::Thread& me = emu::exchange(place, "mma_sync", 0xffffffffu, &mine);
    emu_need_all(place, "mma_sync");
    __builtin_memcpy(lanes, me.received, sizeof lanes);
  }

  EMU float at(int row, int column) const {
    int number = row * Fragment::Tile::columns + column;
    return lanes[number / Fragment::num_elements]->x[number % Fragment::num_elements];
  }
};

template <class C, class A, class B>
EMU void emu_multiply(emu::Place place, C& d, const A& a, const B& b, const C& c) {
  EmuWarp<A> all_a(place, a);
  EmuWarp<B> all_b(place, b);
  C result;
  for (int e = 0; e < C::num_elements; e++) {
    int number = emu::lane() * C::num_elements + e;
    int row = number / C::Tile::columns, column = number % C::Tile::columns;
    float sum = c.x[e];
    for (int k = 0; k < A::Tile::columns; k++)
      sum += all_a.at(row, k) * all_b.at(k, column);
    result.x[e] = sum;
  }
  // Nobody may change a fragment before all have read it.
  emu::warp_barrier(place, "mma_sync", 0xffffffffu, emu::EXCHANGES);
  d = result;
}

}  // namespace wmma
}  // namespace nvcuda

#define load_matrix_sync(...) emu_load(EMU_HERE, __VA_ARGS__)
#define store_matrix_sync(...) emu_store(EMU_HERE, __VA_ARGS__)
#define mma_sync(...) emu_multiply(EMU_HERE, __VA_ARGS__)
