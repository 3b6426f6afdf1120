// The products of a work item of bf16 by AVX-512's own, a part of attention_kernel_impl.h: an instruction
// adds 16 sums of two products each, twice as many as of float32.
#pragma once
#include <immintrin.h>

namespace {

// Queries, padded with zeros; pairs of values of two keys, by column; pairs of weights.
struct PairScratch { Aligned<uint16_t> q; Aligned<uint32_t> values, weights; };
thread_local PairScratch pair_scratch;

// The first n of 16 numbers at p, zeros behind them.
inline __m512i load_words(const bf16* p, int64_t n) {
  const __mmask16 there = n >= 16 ? ~__mmask16(0) : __mmask16((1u << n) - 1);
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
}

template <>
class Products<bf16> {
 public:
  static constexpr int64_t KEYS = TILE_KV, ROWS = ROW_TILE;
  static int64_t row_size(int64_t width) { return (width + 63) / 64 * 64; }

  Products(const Problem& p, const WorkItem& w)
      : p(p), rows((w.rows() + ROWS - 1) / ROWS * ROWS), line((p.head_dim + 31) / 32 * 32),
        columns(row_size(p.head_dim_v)), usable(w.rows() >= WIDE_ROWS) {
    if (!usable) return;
    PairScratch& s = pair_scratch;
    s.q.assign(rows * line, 0);
    s.values.resize(PAIRS * columns);
    s.weights.resize(rows * PAIRS);
    q = s.q.data(), pairs_of_values = s.values.data(), pairs_of_weights = s.weights.data();
    for (int64_t r = 0; r < w.rows(); ++r)
      std::memcpy(q + r * line, query_at<bf16>(p, w, r), p.head_dim * sizeof(bf16));
  }

  // Whether scores [rows, KEYS] are those of the `count` keys that have a bit in `any`. What stands in the
  // others' places means nothing.
  bool score(const bf16* const* keys, const bf16* const* values, const uint64_t* any, int64_t count,
             int64_t /*seeing*/, float* scores) {
    if (!usable) return false;
    pairs = (count + 1) / 2;
    for (int64_t i = 0; i < pairs; ++i) pack(values, *any >> 2 * i, 2 * i);
    for (int64_t r = 0; r < rows; r += ROWS)
      for (int64_t i = 0; i < count; i += 4)
        if (*any >> i & 15) dot(keys, r, i, count, scores);
    return true;
  }

  // acc += weights [rows, KEYS] times the values that were packed with the keys.
  void weigh(const float* weights, float* acc, int64_t stride) {
    for (int64_t i = 0; i < rows * KEYS; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs_of_weights + i / 2),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i)));
    for (int64_t r = 0; r < rows; r += ROWS)
      for (int64_t c = 0; c < columns; c += 64) {
        __m512 sums[ROWS][4];
        for (int i = 0; i < ROWS; ++i)
          for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_loadu_ps(acc + (r + i) * stride + c + 16 * j);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          __m512bh v[4];
          for (int j = 0; j < 4; ++j)
            v[j] = (__m512bh)_mm512_loadu_si512(pairs_of_values + pair * columns + c + 16 * j);
          for (int i = 0; i < ROWS; ++i) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(int(pairs_of_weights[(r + i) * PAIRS + pair]));
            for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, v[j]);
          }
        }
        for (int i = 0; i < ROWS; ++i)
          for (int j = 0; j < 4; ++j) _mm512_storeu_ps(acc + (r + i) * stride + c + 16 * j, sums[i][j]);
      }
  }

 private:
  static constexpr int64_t PAIRS = KEYS / 2;
  const Problem& p;
  const int64_t rows, line, columns;
  uint16_t* q = nullptr;
  uint32_t *pairs_of_values = nullptr, *pairs_of_weights = nullptr;
  int64_t pairs = 0;
  const bool usable;

  // Values of keys i and i + 1, zeros where `which` has no bit.
  void pack(const bf16* const* values, uint64_t which, int64_t i) {
    uint32_t* const to = pairs_of_values + i / 2 * columns;
    for (int64_t c = 0; c < columns; c += 16) {
      __m512i x[2] = {};
      for (int j = 0; j < 2; ++j)
        if (which >> j & 1 && c < p.head_dim_v) x[j] = load_words(values[i + j] + c, p.head_dim_v - c);
      _mm512_storeu_si512(to + c, _mm512_or_si512(x[0], _mm512_slli_epi32(x[1], 16)));
    }
  }

  // Four keys from i on, of which there may be fewer, and ROWS query rows.
  void dot(const bf16* const* keys, int64_t r, int64_t i, int64_t count, float* scores) {
    const bf16* k[4];
    for (int j = 0; j < 4; ++j) k[j] = keys[std::min(i + j, count - 1)];
    __m512 sums[ROWS][4] = {};
    const auto add = [&](int64_t d, __mmask32 there) {
      __m512bh y[4];
      for (int j = 0; j < 4; ++j) y[j] = (__m512bh)_mm512_maskz_loadu_epi16(there, k[j] + d);
      for (int n = 0; n < ROWS; ++n) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(q + (r + n) * line + d);
        for (int j = 0; j < 4; ++j) sums[n][j] = _mm512_dpbf16_ps(sums[n][j], x, y[j]);
      }
    };
    int64_t d = 0;
    for (; d + 32 <= p.head_dim; d += 32) add(d, ~__mmask32(0));
    if (d < p.head_dim) add(d, (__mmask32(1) << (p.head_dim - d)) - 1);
    for (int n = 0; n < ROWS; ++n) {
      float* const to = scores + (r + n) * KEYS + i;
      sum4((vf)sums[n][0], (vf)sums[n][1], (vf)sums[n][2], (vf)sums[n][3], to);
      for (int j = 0; j < 4; ++j) to[j] *= p.scale;
    }
  }
};

}  // namespace
