// Numbers of any dtype to those of sums and back. VEC_WIDTH as in vec.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "operand.h"
#include "split_exp.h"
#include "vec.h"

namespace {

using namespace torchpaged;

// 64 bytes of numbers. A vector that is larger than a register GCC keeps in memory: there they are several.
#if VEC_WIDTH == 16
template <typename A> struct Wide {
  typedef A type __attribute__((vector_size(64), aligned(sizeof(A)), may_alias));
};
#else
template <typename A> struct __attribute__((may_alias)) Parts {
  typedef A Part __attribute__((vector_size(VEC_WIDTH * 4), aligned(sizeof(A)), may_alias));
  static constexpr int COUNT = 16 / VEC_WIDTH;
  Part parts[COUNT];

  template <typename F> static inline __attribute__((always_inline)) Parts of(const F& part) {
    Parts made;
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) made.parts[i] = part(i);
    return made;
  }
#define PARTS(declared, expression) \
  inline __attribute__((always_inline)) declared { return of([&](int i) { return expression; }); }
  PARTS(Parts operator+(const Parts& x) const, parts[i] + x.parts[i])
  PARTS(Parts operator-(const Parts& x) const, parts[i] - x.parts[i])
  PARTS(Parts operator*(const Parts& x) const, parts[i] * x.parts[i])
  PARTS(Parts operator*(A x) const, parts[i] * x)
  PARTS(friend Parts operator*(A x, const Parts& y), y.parts[i] * x)
  PARTS(friend Parts operator+(A x, const Parts& y), y.parts[i] + x)
#undef PARTS
  Parts& operator+=(const Parts& x) { return *this = *this + x; }
  Parts& operator-=(const Parts& x) { return *this = *this - x; }
  Parts& operator*=(A x) { return *this = *this * x; }
};
template <typename A> struct Wide { typedef Parts<A> type; };
#endif
template <typename A> using W = typename Wide<A>::type;
template <typename A> constexpr int64_t LANES = 64 / sizeof(A);
template <typename A> constexpr int64_t TILE = 4 * LANES<A>;  // value columns whose sums stay in registers

// Tokens that take a part of a weight together: as many as their sums stay in registers.
constexpr int64_t TOGETHER = VEC_WIDTH == 16 ? 7 : 1;

// Asks for the first line of each page of `bytes` from `at` on: there processors cease to fetch ahead by
// themselves.
inline void fetch_pages(const void* at, int64_t bytes) {
  constexpr uintptr_t PAGE = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  for (uintptr_t page = (begin + PAGE - 1) / PAGE * PAGE; page < begin + bytes; page += PAGE)
    __builtin_prefetch(reinterpret_cast<const void*>(page), 0, 2);
}

template <typename A> inline const W<A>& wide(const A* p) { return *reinterpret_cast<const W<A>*>(p); }
template <typename A> inline W<A>& wide(A* p) { return *reinterpret_cast<W<A>*>(p); }
template <typename A> inline A total(const W<A>& v) {
  A sums[LANES<A>];
  std::memcpy(sums, &v, sizeof sums);
  for (int64_t half = LANES<A> / 2; half; half /= 2)  // no chain of additions, each of which waits
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Of four vectors.
template <typename A> inline void totals(const W<A>* v, A* sums) {
  if constexpr (sizeof(A) == 4 && VEC_WIDTH >= 8) {
    vf parts[4];
    for (int i = 0; i < 4; ++i) {
      const float* const from = reinterpret_cast<const float*>(v + i);
      parts[i] = load(from);
      for (int64_t j = VEC_WIDTH; j < LANES<A>; j += VEC_WIDTH) parts[i] += load(from + j);
    }
    sum4(parts[0], parts[1], parts[2], parts[3], sums);
  } else for (int i = 0; i < 4; ++i) sums[i] = total<A>(v[i]);
}

template <typename A> inline A sum_of_squares(const A* x, int64_t n) {
  W<A> squares{};
  int64_t i = 0;
  for (; i + LANES<A> <= n; i += LANES<A>) squares += wide(x + i) * wide(x + i);
  A sum = total<A>(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

inline double to_float(double x) { return x; }
inline void from_float(double x, double* out) { *out = x; }

// A vector of numbers of any dtype as those of sums.
template <typename A, typename T>
__attribute__((always_inline)) inline void load_wide(const T* p, W<A>& to) {
  if constexpr (std::is_same_v<A, T>) to = wide(p);
  else if constexpr (sizeof(A) == 8) {
    A numbers[LANES<A>];
    for (int i = 0; i < LANES<A>; ++i) numbers[i] = to_float(p[i]);
    to = wide(numbers);
  } else for (int i = 0; i < LANES<A>; i += VEC_WIDTH) {
    const vf part = load(p + i);
    std::memcpy(reinterpret_cast<A*>(&to) + i, &part, sizeof part);
  }
}

template <typename A, typename F>
inline void by_dtype(Number dtype, const F& body) {
  if constexpr (sizeof(A) == 8) {
    if (dtype == Number::Float) body(static_cast<float*>(nullptr));
    else body(static_cast<double*>(nullptr));
  } else switch (dtype) {
    case Number::BFloat16: body(static_cast<bf16*>(nullptr)); return;
    case Number::Half: body(static_cast<fp16*>(nullptr)); return;
    default: body(static_cast<float*>(nullptr)); return;
  }
}

// n numbers at element `at`, with `stride` elements between them.
template <typename A>
inline void read(const Operand& t, int64_t at, int64_t n, A* to, int64_t stride = 1) {
  by_dtype<A>(t.dtype, [&](auto* dtype) {
    const auto* from = static_cast<decltype(dtype)>(t.data) + at;
    if (stride == 1)
      for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
    else
      for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i * stride]);
  });
}
template <typename A>
inline void write(const Operand& t, int64_t at, int64_t n, const A* from, int64_t stride = 1) {
  by_dtype<A>(t.dtype, [&](auto* dtype) {
    auto* to = static_cast<decltype(dtype)>(t.data) + at;
    if (stride == 1)
      for (int64_t i = 0; i < n; ++i) from_float(from[i], to + i);
    else
      for (int64_t i = 0; i < n; ++i) from_float(from[i], to + i * stride);
  });
}
// To the dtype of `t` and back.
template <typename A>
inline void round_to(const Operand& t, int64_t n, A* x) {
  by_dtype<A>(t.dtype, [&](auto* dtype) {
    for (int64_t i = 0; i < n; ++i) {
      std::remove_pointer_t<decltype(dtype)> rounded;
      from_float(x[i], &rounded);
      x[i] = to_float(rounded);
    }
  });
}

template <typename A, bool NOT_ABOVE_0 = false>
inline void split_exps(const A* x, int64_t n, A* keep, A* change) {
  for (int64_t i = 0; i < n; ++i) split_exp<A, NOT_ABOVE_0>(x[i], keep + i, change + i);
}

}  // namespace
