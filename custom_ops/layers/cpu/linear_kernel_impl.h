// The kernels behind linear_kernel.h; include once per translation unit after defining VEC_WIDTH.
#pragma once
#include <cmath>
#include <vector>

#include "linear_kernel.h"
#include "../../cpu/numbers.h"

namespace {

// Two ways to keep memory busy; sums are of one order in both.
//
// The first token goes along while a panel of the weight comes from memory, row by row, as processors fetch
// ahead by themselves where little is computed. The others find the panel in the second cache.
//
// Where that loses (`Linear::ahead`, instruction_set.h), several tokens go along at once, and each row asks
// for one that comes later: the second cache then has it in time. One token alone goes along several rows at
// once where that gives more of memory (`Linear::side_by_side`); the next ones are asked for if numbers have
// two bytes.
constexpr int64_t PANEL = int64_t(1) << 17;  // bytes
constexpr int64_t PANEL_ROWS = 48, AHEAD_ROWS = 24, SIDE_BY_SIDE = 8;
constexpr int64_t BLOCK = 2048;  // bytes of a row, so that as many of each token stay in the first cache

// Tokens that take a part of a weight together: as many as their sums stay in registers.
constexpr int64_t MOST = VEC_WIDTH == 16 ? 8 : VEC_WIDTH == 8 ? 2 : 1;

inline int64_t tokens_from(const Linear& p, int64_t t) {
  return t || p.ahead ? std::min(MOST, p.tokens - t) : 1;
}

// What a row and a token have in one vector, and its products.
template <typename A, typename T>
struct Step {
  typedef A Packed;
  typedef W<A> Row;
  __attribute__((always_inline)) static void load_row(const T* p, Row& to) { load_wide<A>(p, to); }
  __attribute__((always_inline)) static void add(W<A>& sum, const Row& w, const A* x) { sum += w * wide(x); }
};

#if defined(__AVX512BF16__)
template <>
struct Step<float, bf16> {
  typedef bf16 Packed;
  typedef __m512bh Row;
  __attribute__((always_inline)) static void load_row(const bf16* p, Row& to) {
    to = (Row)_mm512_loadu_si512(p);
  }
  __attribute__((always_inline)) static void add(W<float>& sum, const Row& w, const bf16* x) {
    sum = (W<float>)_mm512_dpbf16_ps((__m512)sum, w, (Row)_mm512_loadu_si512(x));
  }
};
#endif

template <typename X> constexpr int64_t NUMBERS = 64 / sizeof(X);

// Of each group of tokens NUMBERS of each, then the next NUMBERS.
template <typename A, typename X>
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
      X* to = static_cast<X*>(packed) + begin * size + t * NUMBERS<X>;
      for (int64_t i = 0; i < size; i += NUMBERS<X>, to += n * NUMBERS<X>)
        for (int64_t j = 0; j < NUMBERS<X>; ++j) from_float(x[i + j], to + j);
    }
  }
}

// Adds products of some rows with a group of packed tokens; asks for what lies `ahead` bytes from each row.
template <typename A, int TOKENS, int COUNT, typename T, typename X>
__attribute__((always_inline)) inline void add_products(const X* x, const T* const* rows, int64_t numbers,
                                                        int64_t ahead, W<A> (&sums)[TOKENS][COUNT]) {
  typedef Step<A, T> S;
  for (int64_t i = 0; i < numbers; i += NUMBERS<X>, x += TOKENS * NUMBERS<X>) {
    typename S::Row w[COUNT];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r) {
      S::load_row(rows[r] + i, w[r]);
      if (VEC_WIDTH == 16 && (TOKENS > 1 || (COUNT > 1 && sizeof(T) == 2)))
        __builtin_prefetch(reinterpret_cast<const char*>(rows[r] + i) + ahead, 0, 2);
    }
#pragma GCC unroll 8  // else sums go through memory
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
      for (int r = 0; r < COUNT; ++r) S::add(sums[t][r], w[r], x + t * NUMBERS<X>);
  }
}

// The same of rows of any size; `y` has the sums so far, of each token `pitch` rows.
template <typename A, int TOKENS, int COUNT, typename T, typename X>
void multiply(const X* x, const T* const* rows, int64_t numbers, int64_t ahead, W<A>* y, int64_t pitch) {
  W<A> sums[TOKENS][COUNT];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r) sums[t][r] = y[t * pitch + r];
  const int64_t whole = numbers / NUMBERS<X> * NUMBERS<X>, rest = numbers - whole;
  add_products<A, TOKENS, COUNT>(x, rows, whole, ahead, sums);
  if (rest) {
    T last[COUNT][NUMBERS<X>] = {};
    const T* padded[COUNT];
    for (int r = 0; r < COUNT; ++r) {
      std::copy_n(rows[r] + whole, rest, last[r]);
      padded[r] = last[r];
    }
    add_products<A, TOKENS, COUNT>(x + whole * TOKENS, padded, NUMBERS<X>, 0, sums);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r) y[t * pitch + r] = sums[t][r];
}

template <typename A, typename T, int TOKENS = MOST, typename X>
void multiply_group(int64_t tokens, bool side_by_side, const X* x, const T* const* rows, int64_t numbers,
                    int64_t ahead, W<A>* y, int64_t pitch) {
  if (VEC_WIDTH == 16 && side_by_side)
    multiply<A, 1, SIDE_BY_SIDE>(x, rows, numbers, ahead, y, pitch);
  else if (TOKENS == 1 || tokens == TOKENS)
    multiply<A, TOKENS, TOKENS == 1 ? 1 : ROWS>(x, rows, numbers, ahead, y, pitch);
  else if constexpr (TOKENS > 1)
    multiply_group<A, T, TOKENS - 1>(tokens, false, x, rows, numbers, ahead, y, pitch);
}

template <typename A, typename T>
void sum_products_of(const Linear& p, const void* packed, void* sums, int64_t first, int64_t end) {
  typedef typename Step<A, T>::Packed X;
  const T* const weight = static_cast<const T*>(p.weight.data);
  const int64_t stride = p.weight.token, bytes = stride * int64_t(sizeof(T)),
                fit = PANEL / std::max<int64_t>(bytes, 1) / ROWS * ROWS,
                panel = p.side_by_side                ? PANEL_ROWS
                        : p.ahead && p.tokens <= MOST ? AHEAD_ROWS
                                                      : std::clamp(fit, ROWS, PANEL_ROWS);
  alignas(64) A kept[(MOST * PANEL_ROWS + 3) * LANES<A>];  // four are added up together
  W<A>* const y = reinterpret_cast<W<A>*>(kept);
  for (int64_t begin = first; begin < end; begin += panel) {
    const int64_t count = std::min(panel, end - begin);
    for (int64_t t = 0, n; t < p.tokens; t += n) {
      n = tokens_from(p, t);
      const X* const x = static_cast<const X*>(packed) + t * packed_size(p);
      const int64_t together = p.side_by_side ? SIDE_BY_SIDE : n == 1 ? 1 : ROWS,
                    block = n == 1 ? p.inputs : BLOCK / int64_t(sizeof(T));
      std::fill_n(kept, (n * panel + 3) * LANES<A>, A(0));
      for (int64_t i = 0; i < p.inputs; i += block) {
        const int64_t next = i + block < p.inputs ? BLOCK : panel * bytes - i * int64_t(sizeof(T)),
                      ahead = p.side_by_side ? SIDE_BY_SIDE * bytes : p.ahead && !t ? next : 0;
        for (int64_t r = 0; r < count; r += together) {
          const T* rows[SIDE_BY_SIDE];
          for (int64_t j = 0; j < SIDE_BY_SIDE; ++j)
            rows[j] = weight + std::min(begin + r + j, p.outputs - 1) * stride + i;
          if (!t && n == 1 && !p.side_by_side) fetch_pages(rows[0] + stride, bytes);
          multiply_group<A, T>(n, p.side_by_side, x + i * n, rows, std::min(block, p.inputs - i), ahead,
                               y + r, panel);
        }
      }
      for (int64_t token = t; token < t + n; ++token)
        for (int64_t r = 0; r < count; r += 4) {
          A four[4];
          totals<A>(y + (token - t) * panel + r, four);
          std::copy_n(four, std::min<int64_t>(4, count - r),
                      static_cast<A*>(sums) + token * p.outputs + begin + r);
        }
    }
  }
}

template <typename A>
void sum_products(const Linear& p, const void* packed, void* sums, int64_t first, int64_t end) {
  by_dtype<A>(p.weight.dtype, [&](auto* dtype) {
    typedef std::remove_pointer_t<decltype(dtype)> T;
    sum_products_of<A, T>(p, packed, sums, first, end);
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
    A* const y = static_cast<A*>(sums) + t * p.outputs;
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

#if defined(__AVX512BF16__)
LinearKernels kernels_for_bf16() {
  return {&pack_inputs<float, bf16>, &sum_products_of<float, bf16>, &finish<float>};
}
#elif !defined(__AMX_BF16__)
template <typename A>
LinearKernels kernels_of() {
  return {&pack_inputs<A, A>, &sum_products<A>, &finish<A>};
}

LinearKernels kernels_for(bool is_double) { return is_double ? kernels_of<double>() : kernels_of<float>(); }
#endif

}  // namespace
