// Exponentials of float and double that compilers vectorise. Every translation unit has its own.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

template <typename A> struct Exponent;
template <> struct Exponent<float> {
  typedef int32_t bits;
  static constexpr float least = -87.3f, most = 88.7f, magic = 12582912.0f, ln2_high = 0.693359375f,
                         ln2_low = -2.12194440e-4f;
  static constexpr int terms = 8, bias = 127, mantissa = 23, log_terms = 5;
  static constexpr bits half_root = 0x3f3504f3;  // of the root of 1/2
};
template <> struct Exponent<double> {
  typedef int64_t bits;
  static constexpr double least = -708.0, most = 709.7, magic = 6755399441055744.0,
                          ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr int terms = 14, bias = 1023, mantissa = 52, log_terms = 12;
  static constexpr bits half_root = 0x3fe6a09e667f3bcd;
};

// exp(x) as keep + change: 1 and exp(x) - 1 where x is next to 0, else 0 and exp(x). A decay that is constant
// would else be rounded alike at every token, and its error add up. Not above 0: x, which saves steps. Loops
// over a call are not vectorised.
template <typename A, bool NOT_ABOVE_0 = false>
__attribute__((always_inline)) inline void split_exp(A x, A* keep, A* change) {
  typedef Exponent<A> E;
  const A clipped = x < E::least ? E::least : !NOT_ABOVE_0 && x > E::most ? E::most : x;
  const A rounded = (clipped * A(1.44269504088896340736) + E::magic) - E::magic;
  // a power above is infinite, exp(x) not yet
  const A n = !NOT_ABOVE_0 && rounded > E::bias ? A(E::bias) : rounded;
  const A r = (clipped - n * E::ln2_high) - n * E::ln2_low;
  A factorial = 1, p = 0;  // of the terms r^i / i!, from the last on: exp(r) - 1
  for (int i = 2; i <= E::terms; ++i) factorial *= i;
  for (int i = E::terms; i; factorial /= i--) p = p * r + 1 / factorial;
  p *= r;
  const typename E::bits power = (typename E::bits(n) + E::bias) << E::mantissa;
  A scale;
  std::memcpy(&scale, &power, sizeof scale);
  *keep = n == 0 ? A(1) : A(0);
  const A most = !NOT_ABOVE_0 && x > E::most ? A(__builtin_inf()) : scale + scale * p;
  *change = x < E::least ? A(0) : n == 0 ? p : most;
}

template <typename A>
__attribute__((always_inline)) inline A sigmoid(A x) {
  A keep, change;
  split_exp(-x, &keep, &change);
  return 1 / (1 + (keep + change));
}

}  // namespace
