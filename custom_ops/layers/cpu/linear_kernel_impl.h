// The kernels behind linear_kernel.h; include once per translation unit after defining VEC_WIDTH.
#pragma once
#include <cmath>
#include <vector>

#include "linear_kernel.h"
#include "../../cpu/numbers.h"

namespace {

// The first token goes along while a panel of the weight comes from memory, which keeps many lines on their
// way only where little is computed. The others find the panel in the second cache.
constexpr int64_t PANEL = int64_t(1) << 17;  // bytes

inline int64_t tokens_from(const Linear& p, int64_t t) { return t ? std::min(TOGETHER, p.tokens - t) : 1; }

// Of each group of tokens LANES numbers of each, then the next LANES.
template <typename A>
void pack_inputs(const Linear& p, void* packed) {
  const int64_t size = packed_size(p);
  std::vector<A> numbers(2 * size);
  A *const __restrict x = numbers.data(), *const __restrict weight = x + size;
  if (p.norm_weight.data) read(p.norm_weight, 0, p.inputs, weight);
  for (int64_t begin = 0, n; begin < p.tokens; begin += n) {
    n = tokens_from(p, begin);
    for (int64_t t = 0; t < n; ++t) {
      read(p.x, (begin + t) * p.x.token, p.inputs, x);
      if (p.norm_weight.data) {
        const A factor = 1 / std::sqrt(sum_of_squares<A>(x, p.inputs) / A(p.inputs) + A(p.norm_eps));
        for (int64_t i = 0; i < p.inputs; ++i) x[i] *= factor * (A(p.norm_offset) + weight[i]);
      }
      A* to = static_cast<A*>(packed) + begin * size + t * LANES<A>;
      for (int64_t i = 0; i < size; i += LANES<A>, to += n * LANES<A>) std::copy_n(x + i, LANES<A>, to);
    }
  }
}

template <typename A, typename T>
__attribute__((always_inline)) inline void load_wide(const T* p, W<A>& to) {
  if constexpr (std::is_same_v<A, T>) to = wide(p);
  else if constexpr (sizeof(A) == 8) for (int i = 0; i < LANES<A>; ++i) to[i] = to_float(p[i]);
  else for (int i = 0; i < LANES<A>; i += VEC_WIDTH) {
    const vf part = load(p + i);
    std::memcpy(reinterpret_cast<A*>(&to) + i, &part, sizeof part);
  }
}

// Sums of products of ROWS rows with a group of packed tokens.
template <typename A, int TOKENS, typename T>
__attribute__((always_inline)) inline void add_products(const A* x, const T* const* rows, int64_t inputs,
                                                        W<A> (&sums)[TOKENS][ROWS]) {
  for (int64_t i = 0; i < inputs; i += LANES<A>, x += TOKENS * LANES<A>) {
    W<A> w[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) load_wide<A>(rows[r] + i, w[r]);
#pragma GCC unroll 8  // else sums go through memory
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[t][r] += w[r] * wide(x + t * LANES<A>);
  }
}

template <typename A, int TOKENS, typename T>
void multiply(const A* x, const T* const* rows, int64_t inputs, A* y, int64_t pitch) {
  W<A> sums[TOKENS][ROWS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sums[t][r] = W<A>{};
  const int64_t whole = inputs / LANES<A> * LANES<A>, rest = inputs - whole;
  add_products<A, TOKENS>(x, rows, whole, sums);
  if (rest) {
    T last[ROWS][LANES<A>] = {};
    const T* padded[ROWS];
    for (int r = 0; r < ROWS; ++r) padded[r] = std::copy_n(rows[r] + whole, rest, last[r]) - rest;
    add_products<A, TOKENS>(x + whole * TOKENS, padded, LANES<A>, sums);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t) totals<A>(sums[t], y + t * pitch);
}

template <typename A, typename T, int TOKENS = TOGETHER>
void multiply_group(int64_t tokens, const A* x, const T* const* rows, int64_t inputs, A* y, int64_t pitch) {
  if (TOKENS == 1 || tokens == TOKENS) multiply<A, TOKENS>(x, rows, inputs, y, pitch);
  else if constexpr (TOKENS > 1) multiply_group<A, T, TOKENS - 1>(tokens, x, rows, inputs, y, pitch);
}

template <typename A>
void sum_products(const Linear& p, const void* packed, void* sums, int64_t first, int64_t end) {
  by_dtype<A>(p.weight.dtype, [&](auto* dtype) {
    typedef std::remove_pointer_t<decltype(dtype)> T;
    const int64_t stride = p.weight.token, bytes = stride * int64_t(sizeof(T)),
                  panel = std::max(ROWS, PANEL / std::max<int64_t>(bytes, 1) / ROWS * ROWS);
    for (int64_t begin = first; begin < end; begin += panel)
      for (int64_t t = 0, n; t < p.tokens; t += n) {
        n = tokens_from(p, t);
        for (int64_t r = begin; r < std::min(begin + panel, end); r += ROWS) {
          const T* rows[ROWS];
          for (int64_t i = 0; i < ROWS; ++i)
            rows[i] = static_cast<const T*>(p.weight.data) + std::min(r + i, p.outputs - 1) * stride;
          if (!t) fetch_pages(rows[0] + ROWS * stride, ROWS * bytes);
          multiply_group<A, T>(n, static_cast<const A*>(packed) + t * packed_size(p), rows, p.inputs,
                               static_cast<A*>(sums) + t * sums_size(p) + r, sums_size(p));
        }
      }
  });
}

// x times act(gate), of n numbers.
template <typename A>
void apply_gate(Gate gate, int64_t n, A* __restrict x, const A* __restrict up) {
  if (gate == Gate::Silu) for (int64_t i = 0; i < n; ++i) x[i] *= sigmoid(x[i]) * up[i];
  else if (gate == Gate::GeluTanh)  // (1 + tanh(z)) / 2 is sigmoid(2 z)
    for (int64_t i = 0; i < n; ++i)
      x[i] *= sigmoid(A(1.5957691216057308) * (x[i] + A(0.044715) * x[i] * x[i] * x[i])) * up[i];
  else for (int64_t i = 0; i < n; ++i) x[i] *= (1 + std::erf(x[i] * A(0.70710678118654752))) / 2 * up[i];
}

constexpr int64_t RESULTS = 256;  // numbers that are taken together

template <typename A>
void finish(const Linear& p, void* sums, int64_t first, int64_t end) {
  const int64_t width = p.gate == Gate::None ? p.outputs : p.outputs / 2;
  A other[RESULTS];
  for (int64_t t = first; t < end; ++t) {
    A* const y = static_cast<A*>(sums) + t * sums_size(p);
    for (int64_t c = 0; c < p.outputs; c += RESULTS) {
      const int64_t n = std::min(RESULTS, p.outputs - c);
      if (p.bias.data) {
        read(p.bias, c, n, other);
        for (int64_t i = 0; i < n; ++i) y[c + i] += other[i];
      }
      if (p.scale.data) {
        read(p.scale, c, n, other);
        for (int64_t i = 0; i < n; ++i) y[c + i] *= other[i];
      }
    }
    for (int64_t c = 0; c < width; c += RESULTS) {
      const int64_t n = std::min(RESULTS, width - c);
      if (p.gate != Gate::None) apply_gate(p.gate, n, y + c, y + width + c);
      if (p.residual.data) {
        read(p.residual, t * p.residual.token + c, n, other);
        for (int64_t i = 0; i < n; ++i) y[c + i] += other[i];
      }
      write(p.out, t * p.out.token + c, n, y + c);
    }
  }
}

template <typename A>
LinearKernels kernels_of() {
  return {&pack_inputs<A>, &sum_products<A>, &finish<A>};
}

LinearKernels kernels_for(bool is_double) { return is_double ? kernels_of<double>() : kernels_of<float>(); }

}  // namespace
