// The products of a work item of many rows in float32, a part of attention_kernel_impl.h: a number of one
// factor times vectors of the other. Scores come by key and are transposed: queries are laid by column once,
// keys are read as they lie, and no sum goes across a vector.
#pragma once

namespace {

// Queries by column; scores by key; rows of a tile as floats; a row of zeros.
struct ColumnScratch { Aligned<float> q, by_key, keys, values, zeros; };
thread_local ColumnScratch column_scratch;

// sums[i] = (their own, if ADD) + a[i][0] * b(0) + ... + a[i][n - 1] * b(n - 1), COUNT rows of VECS vectors.
template <int COUNT, int VECS, bool ADD, typename Row>
__attribute__((always_inline)) inline void outer(const float* const* a, int64_t n, Row b, float* sums,
                                                 int64_t stride) {
  vf acc[COUNT][VECS];
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < VECS; ++j) acc[i][j] = ADD ? load(sums + i * stride + j * VEC_WIDTH) : vf{};
  for (int64_t k = 0; k < n; ++k) {
    const float* const row = b(k);
    vf y[VECS];
    for (int j = 0; j < VECS; ++j) y[j] = load(row + j * VEC_WIDTH);
    for (int i = 0; i < COUNT; ++i) {
      const vf x = splat(a[i][k]);
      for (int j = 0; j < VECS; ++j) acc[i][j] += x * y[j];
    }
  }
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < VECS; ++j) store(sums + i * stride + j * VEC_WIDTH, acc[i][j]);
}

// body(first, how many) over `n` rows, a multiple of 4: MOST at a time, 4 of what these leave.
template <int MOST, typename Body>
void in_groups(int64_t n, Body body) {
  for (int64_t i = 0; i < n;)
    if ((n - i) % MOST) body(i, std::integral_constant<int, 4>{}), i += 4;
    else body(i, std::integral_constant<int, MOST>{}), i += MOST;
}

// to[j][i] = from[i][j], four by four.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__SSE__)
  __m128 x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(from + i * from_stride);
  _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
  for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * to_stride, x[i]);
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

template <typename T>
class Products {
 public:
  static constexpr int64_t KEYS = TILE_KV, ROWS = 4;
  // Rows of a power of two would share few lines of the first cache.
  static int64_t row_size(int64_t width) { return round_up(width, VEC_WIDTH) + (width >= 256 ? 16 : 0); }

  Products(const Problem& p, const WorkItem& w)
      : p(p), rows(round_up(w.rows(), ROWS)), line(round_up(w.rows(), VEC_WIDTH)),
        usable(w.rows() >= 2 * VEC_WIDTH && p.head_dim_v % VEC_WIDTH == 0) {
    if (!usable) return;
    ColumnScratch& s = column_scratch;
    s.q.resize(p.head_dim * line);
    s.by_key.resize(KEYS * line);
    q = s.q.data(), by_key = s.by_key.data();
    for (int64_t r = 0; r < line; r += 4)
      for (int64_t d = 0; d < p.head_dim; d += 4) {
        float x[4][4] = {}, columns[4][4];
        const int64_t n = std::min<int64_t>(4, p.head_dim - d);
        for (int64_t i = 0; i < 4 && r + i < w.rows(); ++i)
          for (int64_t k = 0; k < n; ++k) x[i][k] = to_float(query_at<T>(p, w, r + i)[d + k]) * p.scale;
        transpose(x[0], 4, columns[0], 4);
        for (int64_t k = 0; k < n; ++k) std::copy_n(columns[k], 4, q + (d + k) * line + r);
      }
  }

  // Whether scores [rows, KEYS] are those of the `count` keys; not where less than half the rows see any.
  bool score(const T* const* keys, const T* const* values, const uint64_t* any, int64_t count, int64_t seeing,
             float* scores) {
    if (!usable || 2 * seeing < rows) return false;
    this->count = count;
    const int64_t padded = round_up(count, 4);
    as_floats(keys, p.head_dim, &column_scratch.keys, key_rows);
    if (static_cast<const void*>(values[0]) == keys[0]) std::copy_n(key_rows, count, value_rows);
    else as_floats(values, p.head_dim_v, &column_scratch.values, value_rows);
    if (*any != bits(0, count)) {  // 0 * NaN is NaN
      column_scratch.zeros.resize(p.head_dim_v);
      for (int64_t i = 0; i < count; ++i)
        if (!(*any >> i & 1)) value_rows[i] = column_scratch.zeros.data();
    }
    int64_t r = 0;
    const auto dots = [&](auto vecs) {
      constexpr int VECS = decltype(vecs)::value;
      in_groups<VECS == WIDE ? 6 : 12>(padded, [&](int64_t i, auto at_once) {
        constexpr int COUNT = decltype(at_once)::value;
        const float *a[COUNT], *next[COUNT];
        for (int n = 0; n < COUNT; ++n) {
          a[n] = key_rows[std::min(i + n, count - 1)];
          next[n] = key_rows[std::min(i + n + COUNT, count - 1)];
        }
        const auto queries = [&](int64_t d) {
          if (d % 16 == 0 && r == 0)
            for (int n = 0; n < COUNT; ++n) __builtin_prefetch(next[n] + d);
          return q + d * line + r;
        };
        outer<COUNT, VECS, false>(a, p.head_dim, queries, by_key + i * line + r, line);
      });
      r += VECS * VEC_WIDTH;
    };
    while (r + WIDE * VEC_WIDTH <= line) dots(std::integral_constant<int, WIDE>{});
    if (WIDE > 2 && r + 2 * VEC_WIDTH <= line) dots(std::integral_constant<int, 2>{});
    if (r < line) dots(std::integral_constant<int, 1>{});
    for (int64_t i = 0; i < padded; i += 4)
      for (r = 0; r < rows; r += 4) transpose(by_key + i * line + r, line, scores + r * KEYS + i, KEYS);
    return true;
  }

  // acc += weights [rows, KEYS] times the values that came with the keys.
  void weigh(const float* weights, float* acc, int64_t stride) {
    const float* at[KEYS];
    int64_t c = 0;
    const auto add = [&](auto vecs) {
      constexpr int VECS = decltype(vecs)::value;
      for (int64_t i = 0; i < count; ++i) at[i] = value_rows[i] + c;
      in_groups<6>(rows, [&](int64_t r, auto at_once) {
        constexpr int COUNT = decltype(at_once)::value;
        const float* a[COUNT];
        for (int n = 0; n < COUNT; ++n) a[n] = weights + (r + n) * KEYS;
        outer<COUNT, VECS, true>(a, count, [&](int64_t i) { return at[i]; }, acc + r * stride + c, stride);
      });
      c += VECS * VEC_WIDTH;
    };
    while (c + WIDE * VEC_WIDTH <= p.head_dim_v) add(std::integral_constant<int, WIDE>{});
    while (c < p.head_dim_v) add(std::integral_constant<int, 1>{});
  }

 private:
  // Six rows of these, and vectors of both factors, fill the registers.
  static constexpr int WIDE = VEC_WIDTH == 16 ? 4 : 2;
  const Problem& p;
  const int64_t rows, line;
  float *q = nullptr, *by_key = nullptr;
  const float *key_rows[KEYS], *value_rows[KEYS];
  int64_t count = 0;
  const bool usable;

  void as_floats(const T* const* from, int64_t width, Aligned<float>* memory, const float** to) {
    if constexpr (std::is_same_v<T, float>) std::copy_n(from, count, to);
    else widen(from, count, width, memory, to);
  }
};

}  // namespace
