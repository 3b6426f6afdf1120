// Products of bf16 by AMX, a part of linear_kernel_impl.h: a tile has 16 rows of a weight as they lie in
// memory, 32 numbers each; another one the same numbers of up to 16 tokens, two of each in a line. Sums of a
// token are of one order, however many tokens there are.
#pragma once
#include <immintrin.h>

namespace {

constexpr int64_t SIDE = 16, STEP = 32;  // rows or tokens of a tile, and numbers of each
constexpr int64_t GROUP = 2 * SIDE;      // tokens that take a part of a weight together

// How many tokens the two tiles of a group have.
struct Widths {
  int64_t first, second;
  Widths(const Linear& p, int64_t t)
      : first(std::min(SIDE, p.tokens - t)), second(std::clamp<int64_t>(p.tokens - t - SIDE, 0, SIDE)) {}
};

// Of each group, and of each STEP of its tokens' numbers: the first tile, then the second.
void pack_pairs(const Linear& p, void* packed) {
  const int64_t size = packed_size(p);
  std::vector<float> x(size);
  for (int64_t t = 0; t < p.tokens; ++t) {
    read(p.x, t * p.x.token, p.inputs, x.data());
    const int64_t group = t / GROUP * GROUP;
    const Widths n(p, group);
    const bool is_first = t - group < SIDE;
    const int64_t width = is_first ? n.first : n.second, line = 2 * width;
    bf16* to = static_cast<bf16*>(packed) + group * size + (is_first ? 0 : SIDE * STEP) + t % SIDE * 2;
    for (int64_t i = 0; i < size; i += STEP, to += (n.first + n.second) * STEP)
      for (int64_t j = 0; j < STEP; ++j) from_float(x[i + j], to + j / 2 * line + j % 2);
  }
}

void shape_tiles(const Widths& n) {
  struct { uint8_t palette = 1, rest[15] = {}; uint16_t bytes[16] = {}; uint8_t lines[16] = {}; } shape;
  const int64_t widths[8] = {n.first, n.second, n.first, n.second, SIDE, SIDE, n.first, n.second};
  for (int i = 0; i < 8; ++i) shape.bytes[i] = uint16_t(4 * widths[i]), shape.lines[i] = widths[i] ? SIDE : 0;
  _tile_loadconfig(&shape);
}

// Sums of A tiles of rows with B tiles of tokens; `rows` may be fewer.
template <int A, int B>
void sum_tiles(const bf16* weight, int64_t stride, int64_t rows, int64_t inputs, const bf16* x,
               const Widths& n, float (*sums)[SIDE][SIDE]) {
  alignas(64) bf16 padded[A * SIDE][STEP] = {};
  _tile_zero(0);
  if constexpr (B == 2) _tile_zero(1);
  if constexpr (A == 2) _tile_zero(2);
  if constexpr (A == 2 && B == 2) _tile_zero(3);
  for (int64_t i = 0; i < inputs; i += STEP, x += (n.first + n.second) * STEP) {
    const bf16* w = weight + i;
    int64_t pitch = stride;
    if (rows < A * SIDE || i + STEP > inputs) {
      const int64_t count = std::min(STEP, inputs - i);
      if (count < STEP) std::fill_n(padded[0], A * SIDE * STEP, bf16{});
      for (int64_t r = 0; r < rows; ++r) std::copy_n(w + r * stride, count, padded[r]);
      w = padded[0];
      pitch = STEP;
    }
    asm volatile("" ::: "memory");  // GCC's tile loads don't say that they read memory
    _tile_loadd(6, x, 4 * n.first);
    if constexpr (B == 2) _tile_loadd(7, x + SIDE * STEP, 4 * n.second);
    _tile_loadd(4, w, 2 * pitch);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (A == 2) {
      _tile_loadd(5, w + SIDE * pitch, 2 * pitch);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (B == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (B == 2) _tile_stored(1, sums[1], 64);
  if constexpr (A == 2) _tile_stored(2, sums[2], 64);
  if constexpr (A == 2 && B == 2) _tile_stored(3, sums[3], 64);
  asm volatile("" ::: "memory");
}

void sum_products_by_tiles(const Linear& p, const void* packed, void* sums, int64_t first, int64_t end) {
  const bf16* const weight = static_cast<const bf16*>(p.weight.data);
  const int64_t stride = p.weight.token, bytes = std::max<int64_t>(2 * stride, 1),
                panel = std::max(PANEL / bytes / GROUP * GROUP, GROUP);
  alignas(64) float tiles[4][SIDE][SIDE];
  for (int64_t begin = first; begin < end; begin += panel)
    for (int64_t t = 0; t < p.tokens; t += GROUP) {
      const Widths n(p, t);
      const bf16* const x = static_cast<const bf16*>(packed) + t * packed_size(p);
      shape_tiles(n);
      for (int64_t r = begin, last = std::min(begin + panel, end); r < last; r += 2 * SIDE) {
        const int64_t rows = std::min(2 * SIDE, last - r);
        const auto sum = rows > SIDE ? n.second ? &sum_tiles<2, 2> : &sum_tiles<2, 1>
                                     : n.second ? &sum_tiles<1, 2> : &sum_tiles<1, 1>;
        sum(weight + r * stride, stride, rows, p.inputs, x, n, tiles);
        for (int64_t token = 0; token < n.first + n.second; ++token) {
          float* const y = static_cast<float*>(sums) + (t + token) * p.outputs + r;
          for (int64_t i = 0; i < rows; ++i)
            y[i] = tiles[i / SIDE * 2 + token / SIDE][i % SIDE][token % SIDE];
        }
      }
    }
  _tile_release();
}

}  // namespace
