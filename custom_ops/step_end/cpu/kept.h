// Which tokens of a row may be drawn: a prefix of their order (larger z first, of equals the lower token).
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "sampler.h"
#include "../../cpu/split_exp.h"
#include "../../cpu/vec.h"

namespace {

using namespace torchpaged;

constexpr int64_t BLOCK = 4 * VEC_WIDTH;  // tokens that are looked at together; rows are padded to them
constexpr float INF = std::numeric_limits<float>::infinity();

inline bool any(vi mask) {
#if VEC_WIDTH == 16 && defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif VEC_WIDTH == 8 && defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  int32_t all = 0;
  for (int i = 0; i < VEC_WIDTH; ++i) all |= mask[i];
  return all;
#endif
}

// Float numbers of a row: z of its tokens, -inf behind them up to a whole block.
struct Scores {
  const float* z;
  int64_t size, padded;
  float largest;
};

struct Entry { double weight; float z; int32_t token; };
inline bool is_ahead(const Entry& a, const Entry& b) {
  return a.z > b.z || (a.z == b.z && a.token < b.token);
}

// exp((z - largest) / temperature), 1 for the largest.
struct Weight {
  double largest, rate;
  double operator()(float z) const __attribute__((always_inline)) {
    double keep, change;
    split_exp<double, true>(z == float(largest) ? 0.0 : (double(z) - largest) * rate, &keep, &change);
    return keep + change;
  }
};

inline double total_weight(const Scores& row, const Weight& weight) {
  double sums[8] = {}, sum = 0;
  for (int64_t i = 0; i < row.padded; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += weight(row.z[i + j]);
  for (double each : sums) sum += each;
  return sum;
}

// A number that the k largest are not below: blocks' maxima are as many different tokens.
inline float bound_of_largest(const Scores& row, int64_t k) {
  if (k > row.padded / BLOCK) return -INF;
  static thread_local std::vector<float> memory;
  std::vector<float>& maxima = memory;
  maxima.clear();
  for (int64_t i = 0; i < row.padded; i += VEC_WIDTH) {
    const vf z = load(row.z + i);
    float most = z[0];
    for (int j = 1; j < VEC_WIDTH; ++j) most = z[j] > most ? z[j] : most;
    if (i % BLOCK == 0) maxima.push_back(most);
    else if (most > maxima.back()) maxima.back() = most;
  }
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// The last token that is kept, in their order. Selected by halves: what lies ahead of the middle is either
// all kept or has the last one. Only tokens that may be kept are looked at: those behind have less than the
// mass that top_p leaves out, or less than min_p.
inline Entry last_kept(const LogitRow& p, const Scores& row) {
  const int64_t k = p.top_k > 0 && p.top_k < row.size ? p.top_k : row.size;
  const Weight weight{row.largest, 1.0 / p.temperature};
  const bool by_mass = p.top_p < 1;
  double total = 0, bound = -INF;
  if (k < row.size) bound = bound_of_largest(row, k);
  else if (by_mass) {
    total = total_weight(row, weight);
    const double out = (1 - double(p.top_p)) * total;
    bound = row.largest - p.temperature * (std::log(row.size / out) + 1e-3);
  }
  // What min_p leaves out counts for the mass of the top_k.
  if (p.min_p > 0 && !(by_mass && k < row.size))
    bound = std::max(bound, row.largest + p.temperature * (std::log(double(p.min_p)) - 1e-3));
  const float least = std::max(std::nextafter(float(bound), -INF), std::numeric_limits<float>::lowest());

  static thread_local std::vector<Entry> memory;
  std::vector<Entry>& entries = memory;
  entries.clear();
  for (int64_t i = 0; i < row.padded; i += VEC_WIDTH) {
    if (!any(load(row.z + i) >= splat(least))) continue;
    for (int64_t j = i; j < i + VEC_WIDTH; ++j)
      if (row.z[j] >= least) entries.push_back({weight(row.z[j]), row.z[j], int32_t(j)});
  }
  if (k < int64_t(entries.size())) {
    std::nth_element(entries.begin(), entries.begin() + k, entries.end(), is_ahead);
    entries.resize(k);
  }
  if (by_mass && k < row.size)
    for (const Entry& each : entries) total += each.weight;

  const double mass = by_mass ? p.top_p * total : std::numeric_limits<double>::infinity();
  auto first = entries.begin(), end = entries.end();
  double before = 0;  // the weight ahead of `first`, which is kept
  const auto weight_of = [](auto from, auto to) {
    double sum = 0;
    for (; from != to; ++from) sum += from->weight;
    return sum;
  };
  while (end - first > 1) {
    const auto middle = first + (end - first) / 2;
    std::nth_element(first, middle, end, is_ahead);
    const double here = before + weight_of(first, middle);
    if (here < mass && middle->weight >= p.min_p) { before = here; first = middle; }
    else end = middle;
  }
  return *first;
}

}  // namespace
