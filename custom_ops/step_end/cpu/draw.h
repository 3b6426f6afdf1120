// The draw of a row: its largest z / temperature + noise among the tokens that are kept.
#pragma once
#include "kept.h"

namespace {

typedef uint64_t vq __attribute__((vector_size(VEC_WIDTH * 4), aligned(4)));  // half as many lanes

// Products of the lower halves of 64-bit lanes.
inline vq multiply(vq x, uint32_t by) {
#if VEC_WIDTH == 16 && defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(by));
#elif VEC_WIDTH == 8 && defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(by));
#else
  return (x & 0xffffffffu) * uint64_t(by);
#endif
}

// Philox4x32-10 of tokens [4 * quarter, 4 * quarter + BLOCK), in their order.
inline void random_bits(uint32_t quarter, uint64_t seed, uint64_t counter, uint32_t* bits) {
  vu c0 = vu{} + quarter, c1 = vu{} + uint32_t(counter), c2 = vu{} + uint32_t(counter >> 32), c3{};
  for (int i = 0; i < VEC_WIDTH; ++i) c0[i] += i;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  const auto product = [](vu x, uint32_t by, vu* high, vu* low) {
    const vq even = multiply((vq)x, by), odd = multiply((vq)x >> 32, by), lower = vq{} + 0xffffffffu;
    *high = (vu)((even >> 32) | (odd & ~lower));
    *low = (vu)((even & lower) | (odd << 32));
  };
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    vu high_a, low_a, high_b, low_b;
    product(c0, 0xd2511f53u, &high_a, &low_a);
    product(c2, 0xcd9e8d57u, &high_b, &low_b);
    c0 = high_b ^ c1 ^ k0; c1 = low_b;
    c2 = high_a ^ c3 ^ k1; c3 = low_a;
  }
  for (int i = 0; i < VEC_WIDTH; ++i) {
    bits[4 * i] = c0[i]; bits[4 * i + 1] = c1[i]; bits[4 * i + 2] = c2[i]; bits[4 * i + 3] = c3[i];
  }
}

inline double gumbel_noise(uint32_t bits) {
  return -std::log(-std::log1p(-(bits + 0.5) * 0x1p-32));
}

// With w the bits as a number in (0, 1), noise is below -log(w): a token that beats the best so far has w
// below exp((z - best) / temperature). That is computed in float32; the few tokens that may have it are
// scored in float64, as the reference scores all.
inline int64_t draw(const LogitRow& p, const Scores& row, const Entry& last) {
  // a temperature that is next to 0 or infinity, as its inverse: every token may be the best
  const float rate = p.temperature > 1e-30f && p.temperature < 1e30f ? 1 / p.temperature : 0.0f;
  double best = -INF;
  float below = -INF;  // at most `best`
  int64_t token = NO_TOKEN;
  alignas(64) uint32_t bits[BLOCK];
  for (int64_t i = 0; i < row.padded; i += BLOCK) {
    vi kept{};
    for (int64_t j = 0; j < BLOCK; j += VEC_WIDTH) kept |= (vi)(load(row.z + i + j) >= splat(last.z));
    if (!any(kept)) continue;
    random_bits(uint32_t(i / 4), uint64_t(p.seed), uint64_t(p.counter), bits);
    for (int64_t j = i; j < i + BLOCK; j += VEC_WIDTH) {
      vu drawn;
      std::memcpy(&drawn, bits + (j - i), sizeof drawn);
      const vf z = load(row.z + j), x = (z - splat(below)) * splat(rate);
      const vi less = ~(vi)(x > splat(0.0f));  // NaN stays: it is looked at
      const vf bound = exp_vec((vf)((vi)x & less)) * splat(1.0001f);
      const vf w = __builtin_convertvector(drawn, vf) * splat(0x1p-32f);
      if (!any(~(vi)(w > bound) & (vi)(z >= splat(last.z)))) continue;
      for (int64_t at = j; at < j + VEC_WIDTH; ++at) {
        if (row.z[at] < last.z || (row.z[at] == last.z && at > last.token)) continue;
        const double score = double(row.z[at]) + double(p.temperature) * gumbel_noise(bits[at - i]);
        if (score > best) { best = score; token = at; }
      }
      below = float(best);
      if (below > best) below = std::nextafter(below, -INF);
    }
  }
  return token;
}

}  // namespace
