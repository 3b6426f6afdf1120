// The kernel behind attention_kernel.h; include once per translation unit after defining VEC_WIDTH and
// ROW_TILE. ROW_TILE x 4 accumulators must fit the register file (16 of 32 with AVX-512, 8 of 16 with AVX2).
#include <algorithm>
#include <cmath>
#include <new>
#include <type_traits>
#include <vector>

#include "attention_kernel.h"
#include "../../cpu/vec.h"

namespace {

using namespace torchpaged;

constexpr float NEG_INF = -__builtin_inff();
constexpr int64_t WIDE_ROWS = 2 * ROW_TILE;  // query rows for which a tile's numbers are converted once

// Memory from a line of cache on: loads of vectors that cross lines take up to 2.5 times as long.
template <typename T>
struct FromLine {
  typedef T value_type;
  FromLine() = default;
  template <typename U> FromLine(const FromLine<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  template <typename U> bool operator==(const FromLine<U>&) const { return true; }
  template <typename U> bool operator!=(const FromLine<U>&) const { return false; }
};
template <typename T> using Aligned = std::vector<T, FromLine<T>>;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch that lives as long as its thread: allocation per work item would cost more than a short decode.
struct Scratch {
  Aligned<float> q, scores, acc, keys, values;
  std::vector<float> maximum, total;
};
thread_local Scratch scratch;

template <typename T>
const T* row_at(const void* base, const Problem& p, const int32_t* table, int64_t key, int64_t head,
                bool values) {
  const int64_t block = table[key / p.block_size], slot = key % p.block_size;
  const int64_t at = values ? block * p.v_block + slot * p.v_slot + head * p.v_head
                            : block * p.k_block + slot * p.k_slot + head * p.k_head;
  return static_cast<const T*>(base) + at;
}

template <typename T>
const T* query_at(const Problem& p, const WorkItem& w, int64_t row) {
  return static_cast<const T*>(p.q) + (p.query_start_loc[w.request] + w.token(row)) * p.q_token +
         w.head(row) * p.q_head;
}

// Rows of a tile as floats in `memory`, `at` their places: where many query rows read them, each number is
// converted once. Of fp16, which a load converts, it pays where numbers are read one by one alone.
template <typename T>
void widen(const T* const* rows, int64_t count, int64_t width, Aligned<float>* memory, const float** at) {
  memory->resize(count * width);
  for (int64_t i = 0; i < count; ++i) {
    float* const to = memory->data() + i * width;
    int64_t d = 0;
    for (; d + VEC_WIDTH <= width; d += VEC_WIDTH) store(to + d, load(rows[i] + d));
    for (; d < width; ++d) to[d] = to_float(rows[i][d]);
    at[i] = to;
  }
}

}  // namespace

#ifdef __AMX_BF16__
#include "amx_products.h"
#else
#include "float_products.h"
#ifdef __AVX512BF16__
#include "bf16_products.h"
#endif
#endif

namespace {

int64_t first_bit(uint64_t word) { return __builtin_ctzll(word); }
int64_t behind_last_bit(uint64_t word) { return 64 - __builtin_clzll(word); }

// scores[r][0..3] = q[r] . k[0..3] for ROWS rows; q is padded to whole vectors with zeros, k is not.
// Always inlined: for heads of 128 columns a call takes an eighth of the time.
template <typename T, int KEYS, int ROWS>
__attribute__((always_inline)) inline void dot_tile(const float* q, int64_t q_stride, const T* const* keys,
                                                    int64_t head_dim, float* scores) {
  vf acc[ROWS][4] = {};
  int64_t d = 0;
  for (; d + VEC_WIDTH <= head_dim; d += VEC_WIDTH) {
    const vf k0 = load(keys[0] + d), k1 = load(keys[1] + d), k2 = load(keys[2] + d), k3 = load(keys[3] + d);
    for (int r = 0; r < ROWS; ++r) {
      const vf x = load(q + r * q_stride + d);
      acc[r][0] += x * k0; acc[r][1] += x * k1; acc[r][2] += x * k2; acc[r][3] += x * k3;
    }
  }
  if (d < head_dim) {
    const int n = int(head_dim - d);
    const vf k0 = load_tail(keys[0] + d, n), k1 = load_tail(keys[1] + d, n), k2 = load_tail(keys[2] + d, n),
             k3 = load_tail(keys[3] + d, n);
    for (int r = 0; r < ROWS; ++r) {
      const vf x = load(q + r * q_stride + d);
      acc[r][0] += x * k0; acc[r][1] += x * k1; acc[r][2] += x * k2; acc[r][3] += x * k3;
    }
  }
  for (int r = 0; r < ROWS; ++r)
    sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * KEYS);
}

// acc[r] += sum over keys of weight[r][key] * v[key], for ROWS rows and VECS vectors of the value's width.
template <typename T, int KEYS, int ROWS, int VECS>
void weigh_tile(const float* weights, const T* const* values, int64_t num_keys, float* acc,
                int64_t acc_stride, int tail) {
  vf sums[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECS; ++c) sums[r][c] = load(acc + r * acc_stride + c * VEC_WIDTH);
  for (int64_t key = 0; key < num_keys; ++key) {
    vf v[VECS];
    for (int c = 0; c < VECS; ++c)
      v[c] = tail && c == VECS - 1 ? load_tail(values[key] + c * VEC_WIDTH, tail)
                                   : load(values[key] + c * VEC_WIDTH);
    for (int r = 0; r < ROWS; ++r) {
      const vf w = splat(weights[r * KEYS + key]);
      for (int c = 0; c < VECS; ++c) sums[r][c] += w * v[c];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECS; ++c) store(acc + r * acc_stride + c * VEC_WIDTH, sums[r][c]);
}

template <typename T, int KEYS, int ROWS>
void weigh_rows(const float* weights, const T* const* values, int64_t num_keys, float* acc, int64_t stride,
                int64_t head_dim_v) {
  const T* shifted[TILE_KV];
  int64_t c = 0;
  auto at = [&](int64_t column) {
    for (int64_t key = 0; key < num_keys; ++key) shifted[key] = values[key] + column;
    return static_cast<const T* const*>(shifted);
  };
  for (; c + 4 * VEC_WIDTH <= head_dim_v; c += 4 * VEC_WIDTH)
    weigh_tile<T, KEYS, ROWS, 4>(weights, at(c), num_keys, acc + c, stride, 0);
  for (; c + VEC_WIDTH <= head_dim_v; c += VEC_WIDTH)
    weigh_tile<T, KEYS, ROWS, 1>(weights, at(c), num_keys, acc + c, stride, 0);
  if (c < head_dim_v)
    weigh_tile<T, KEYS, ROWS, 1>(weights, at(c), num_keys, acc + c, stride, int(head_dim_v - c));
}

template <typename T>
void finish_row(const Problem& p, int64_t token, int64_t head, bool sees, const float* acc, float maximum,
                float total) {
  const int64_t at = token * p.o_token + head * p.o_head;
  float shrink = 1.0f;
  if (p.sinks) {
    const float sink = p.sinks[head], top = std::max(maximum, sink);
    shrink = std::exp(maximum - top);
    total = total * shrink + std::exp(sink - top);
    maximum = top;
  }
  const float factor = shrink / total;
  if (p.output_scale)
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      static_cast<uint8_t*>(p.out)[at + d] = to_e4m3(sees ? acc[d] * factor / *p.output_scale : 0.0f);
  else
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      from_float(sees ? acc[d] * factor : 0.0f, static_cast<T*>(p.out) + at + d);
  if (p.lse) p.lse[token * p.lse_token + head * p.lse_head] = sees ? maximum + std::log(total) : NEG_INF;
}

// Whether any of `count` values holds NaN or inf.
template <typename T>
bool any_nonfinite(const T* const* values, int64_t count, int64_t head_dim_v) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr Bits exponent = std::is_same_v<T, fp16> ? 0x7c00 : Bits(0x7f800000 >> (32 - 8 * sizeof(T)));
  for (int64_t key = 0; key < count; ++key) {
    Bits most = 0;
    for (int64_t d = 0; d < head_dim_v; ++d) {
      Bits bits;
      std::memcpy(&bits, values[key] + d, sizeof bits);
      most = std::max<Bits>(most, bits & exponent);
    }
    if (most == exponent) return true;
  }
  return false;
}

template <typename T>
void scale_queries(const Problem& p, const WorkItem& w, int64_t padded_dim, int64_t padded_rows) {
  scratch.q.assign(padded_rows * padded_dim, 0.0f);
  for (int64_t r = 0; r < w.rows(); ++r) {
    const T* x = query_at<T>(p, w, r);
    for (int64_t d = 0; d < p.head_dim; ++d) scratch.q[r * padded_dim + d] = to_float(x[d]) * p.scale;
  }
}

// body(row, rows) for the rows that see any key of a tile: ROW_TILE at once, or one by one where that is less
// work, since heads of one kv head may see different blocks.
template <typename Body>
void each_seeing(const uint64_t* seen, int64_t rows, Body body) {
  for (int64_t r = 0; r < rows; r += ROW_TILE) {
    const int64_t last = std::min<int64_t>(r + ROW_TILE, rows);
    const int64_t seeing = std::count_if(seen + r, seen + last, [](uint64_t word) { return word != 0; });
    if (2 * seeing > ROW_TILE) {
      body(r, std::integral_constant<int, ROW_TILE>{});
    } else {
      for (int64_t i = r; i < last; ++i)
        if (seen[i]) body(i, std::integral_constant<int, 1>{});
    }
  }
}

template <typename T>
void run_item(const Problem& p, const WorkItem& w) {
  const int64_t rows = w.rows(), kv_head = w.first_head / (p.num_heads / p.num_kv_heads);
  const int64_t padded_dim = round_up(p.head_dim, VEC_WIDTH);
  const int64_t stride = Products<T>::row_size(p.head_dim_v), tile_rows = Products<T>::ROWS;
  const int64_t padded_rows = round_up(rows, tile_rows);
  const int64_t start = p.query_start_loc[w.request], query_len = p.query_start_loc[w.request + 1] - start;
  const int64_t seq_len = p.seq_lens[w.request];
  const int32_t* table = p.block_table + w.request * p.table_row;
  Scratch& s = scratch;
  Products<T> products(p, w);
  constexpr int64_t KEYS = Products<T>::KEYS, WORDS = KEYS / TILE_KV;
  s.q.clear();
  s.scores.resize(padded_rows * KEYS);
  s.acc.assign(padded_rows * stride, 0.0f);
  s.maximum.assign(padded_rows, FLOOR);
  s.total.assign(padded_rows, 0.0f);
  RowMask masks[MAX_ROWS];
  uint64_t seen[WORDS][MAX_ROWS];  // of the keys of a tile
  float slopes[MAX_ROWS];
  for (int64_t r = 0; r < rows; ++r) {
    masks[r] = RowMask(p, w, r, start, query_len, seq_len);
    slopes[r] = p.alibi_slopes ? p.alibi_slopes[w.head(r)] : 0.0f;
  }
  const T *keys[KEYS + 3], *values[KEYS];
  const float *wide_keys[KEYS + 3], *wide_values[KEYS];
  const bool widens = std::is_same_v<T, bf16> && rows >= WIDE_ROWS;
  for (int64_t tile = w.first_key; tile < w.end_key; tile += KEYS) {
    const int64_t count = std::min(KEYS, w.end_key - tile);
    uint64_t any[WORDS] = {}, any_word = 0;  // of the keys that any row sees
    for (int64_t word = 0; word < WORDS; ++word) {
      for (int64_t r = 0; r < rows; ++r) any[word] |= seen[word][r] = masks[r].of(tile + word * TILE_KV);
      any_word |= any[word];
    }
    if (!any_word) continue;
    const int64_t seeing = rows - std::count(seen[0], seen[0] + rows, uint64_t(0));
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = row_at<T>(p.k_cache, p, table, tile + i, kv_head, false);
      values[i] = row_at<T>(p.v_cache, p, table, tile + i, kv_head, true);
    }
    const bool in_tiles = products.score(keys, values, any, count, seeing, s.scores.data());
    if (!in_tiles) {
      if (s.q.empty()) scale_queries<T>(p, w, padded_dim, padded_rows);
      const auto score = [&](auto** rows_of_keys) {
        using Key = std::remove_const_t<std::remove_pointer_t<std::remove_pointer_t<decltype(rows_of_keys)>>>;
        for (int64_t i = count; i < count + 3; ++i) rows_of_keys[i] = rows_of_keys[count - 1];
        for (int64_t word = 0; word < WORDS; ++word)
          each_seeing(seen[word], rows, [&](int64_t r, auto at_once) {
            for (int64_t i = word * TILE_KV; i < std::min(count, (word + 1) * TILE_KV); i += 4)
              dot_tile<Key, KEYS, at_once()>(s.q.data() + r * padded_dim, padded_dim, rows_of_keys + i,
                                             p.head_dim, s.scores.data() + r * KEYS + i);
          });
      };
      if (widens) {
        widen(keys, count, p.head_dim, &s.keys, wide_keys);
        if (values[0] == keys[0]) std::copy_n(wide_keys, count, wide_values);  // the first columns of latents
        else widen(values, count, p.head_dim_v, &s.values, wide_values);
        score(wide_keys);
      } else score(keys);
    }
    bool same = true;  // all rows see the same keys
    for (int64_t r = 0; r < padded_rows; ++r) {
      float* const row = s.scores.data() + r * KEYS;
      uint64_t sees = 0;
      for (int64_t word = 0; word < WORDS && r < rows; ++word) {
        sees |= seen[word][r];
        same = same && seen[word][r] == any[word];
      }
      if (!sees) {  // nothing visible for this row in this tile
        std::fill(row, row + KEYS, 0.0f);
        continue;
      }
      for (int64_t word = 0; word < WORDS; ++word) {
        float* const x = row + word * TILE_KV;
        const uint64_t own = seen[word][r];
        const int64_t first = tile + word * TILE_KV, from = own ? first_bit(own) : 0,
                      to = own ? behind_last_bit(own) : 0;
        if (p.soft_cap > 0)
          for (int64_t i = from; i < to; ++i) x[i] = p.soft_cap * std::tanh(x[i] / p.soft_cap);
        if (p.alibi_slopes) {
          const int64_t position = seq_len - query_len + w.token(r);
          if (p.tree_mask) {
            const Branch branch(p, start, seq_len - query_len, w.token(r));
            for (int64_t i = from; i < to; ++i)
              x[i] += slopes[r] * float(branch.position(first + i) - branch.position(position));
          } else {
            for (int64_t i = from; i < to; ++i) x[i] += slopes[r] * float(first + i - position);
          }
        }
        std::fill(x, x + from, NEG_INF);
        std::fill(x + to, x + TILE_KV, NEG_INF);
        if (own != bits(from, to))
          for (int64_t i = from; i < to; ++i)
            if (!(own >> i & 1)) x[i] = NEG_INF;
      }
      vf tops = splat(s.maximum[r]);
      // passes over NaN, which the sum below keeps
      for (int64_t i = 0; i < KEYS; i += VEC_WIDTH) tops = load(row + i) > tops ? load(row + i) : tops;
      float top = tops[0];
      for (int i = 1; i < VEC_WIDTH; ++i) top = std::max(top, tops[i]);
      vf sums = {};
      for (int64_t i = 0; i < KEYS; i += VEC_WIDTH) {
        const vf e = exp_vec(load(row + i) - top);
        store(row + i, e);
        sums += e;
      }
      const float shrink = top == s.maximum[r] ? 1.0f : std::exp(s.maximum[r] - top);
      s.total[r] = s.total[r] * shrink + sum(sums);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < stride; d += VEC_WIDTH)
          store(&s.acc[r * stride + d], load(&s.acc[r * stride + d]) * shrink);
      s.maximum[r] = top;
    }
    // 0 * NaN is NaN: no row may touch what it does not see
    if (in_tiles && (same || !any_nonfinite<T>(values, count, p.head_dim_v))) {
      products.weigh(s.scores.data(), s.acc.data(), stride);
      continue;
    }
    for (int64_t word = 0; word < WORDS; ++word)
      each_seeing(seen[word], rows, [&](int64_t r, auto at_once) {
        const int64_t last = std::min<int64_t>(r + at_once(), rows), base = word * TILE_KV;
        uint64_t some = 0, all = ~uint64_t(0);  // keys that any of these rows sees, and that all of them see
        for (int64_t i = r; i < last; ++i) { some |= seen[word][i]; all &= seen[word][i]; }
        const int64_t first = first_bit(some), upto = behind_last_bit(some);
        auto weigh = [&](int64_t row, int64_t begin, int64_t end_at, auto rows_at_once) {
          constexpr int ROWS = decltype(rows_at_once)::value;
          const float* const weights = s.scores.data() + row * KEYS + base + begin;
          float* const acc = s.acc.data() + row * stride;
          const int64_t at = base + begin, n = end_at - begin;
          if (widens && !in_tiles)
            weigh_rows<float, KEYS, ROWS>(weights, wide_values + at, n, acc, stride, p.head_dim_v);
          else weigh_rows<T, KEYS, ROWS>(weights, values + at, n, acc, stride, p.head_dim_v);
        };
        if (all != bits(first, upto) && any_nonfinite<T>(values + base + first, upto - first, p.head_dim_v)) {
          for (int64_t i = r; i < last; ++i)
            for (int64_t begin = 0, stop; begin < TILE_KV; begin = stop + 1) {
              for (stop = begin; stop < TILE_KV && (seen[word][i] >> stop & 1); ++stop) {}
              if (begin < stop) weigh(i, begin, stop, std::integral_constant<int, 1>{});
            }
        } else {
          weigh(r, first, upto, at_once);
        }
      });
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (w.partial) {
      float* state = w.partial + r * (p.head_dim_v + 2);
      std::copy_n(s.acc.data() + r * stride, p.head_dim_v, state);
      state[p.head_dim_v] = s.maximum[r];
      state[p.head_dim_v + 1] = s.total[r];
    } else {
      finish_row<T>(p, start + w.token(r), w.head(r), masks[r].low < masks[r].end, s.acc.data() + r * stride,
                    s.maximum[r], s.total[r]);
    }
  }
}

Kernels kernels_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16: return {run_item<bf16>, finish_row<bf16>};
    case Dtype::Half: return {run_item<fp16>, finish_row<fp16>};
    default: return {run_item<float>, finish_row<float>};
  }
}

}  // namespace
