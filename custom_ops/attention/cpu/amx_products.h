// The products of a work item by AMX, a part of attention_kernel_impl.h: a tile has 16 lines of 64 bytes, and
// one instruction, in 16 cycles, multiplies two of bf16 into 16 x 16 sums of float32: 512 products a cycle,
// of which vectors of float32 do 32.
//
// A number of another dtype goes in as terms of bf16 that add up to it: three of 8 bits for float32, two for
// float16. Products of two terms that together are below a float's last bit are left out: of the nine of
// float32, six remain. So a number and its largest term must be finite; where one isn't, vectors take over.
#pragma once
#include <immintrin.h>

namespace {

// What a tile is loaded from: 16 rows of the first factor, 32 numbers each; of the second factor 16 columns,
// two numbers of each in a line.
struct alignas(64) Tile { uint16_t lines[16][32]; };
struct alignas(64) Sums { float lines[16][16]; };

template <typename T> constexpr int TERMS = 3;
template <> constexpr int TERMS<fp16> = 2;
template <> constexpr int TERMS<bf16> = 1;

// Tiles of one factor of a product: how far apart, in tiles, are the next 16 of its rows (or columns), the
// next 32 numbers that are summed over, and the next term.
struct Factor { const Tile* first; int64_t tile, step, term; };

// C[i][j] += the sum over steps of A[i] B[j], for A x B = 4 tiles of sums: `c` has `line` floats a row, and
// its tiles lie `down` and `across` apart. Fresh: C was zero.
template <int N, int A, int B>
void multiply(const Factor& a, const Factor& b, int64_t steps, float* c, int64_t line, int64_t down,
              int64_t across, bool fresh) {
  static_assert(A * B == 4);
  // In this order a step loads few tiles twice.
  constexpr int PAIRS[6][2] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};
  const auto sums = [&](int i) { return c + i / B * down + i % B * across; };
  asm volatile("" ::: "memory");  // GCC's tile loads don't say that they read memory
  if (fresh) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  } else {
    _tile_loadd(0, sums(0), line * 4); _tile_loadd(1, sums(1), line * 4);
    _tile_loadd(2, sums(2), line * 4); _tile_loadd(3, sums(3), line * 4);
  }
  for (int64_t step = 0; step < steps; ++step) {
    int i = -1, j = -1;
#pragma GCC unroll 6
    for (int pair = 0; pair < 6; ++pair) {
      if (PAIRS[pair][0] + PAIRS[pair][1] >= N) continue;
      const bool other_a = i != PAIRS[pair][0], other_b = j != PAIRS[pair][1];
      i = PAIRS[pair][0], j = PAIRS[pair][1];
      const Tile *x = a.first + step * a.step + i * a.term, *y = b.first + step * b.step + j * b.term;
      if constexpr (A == 2) {
        if (other_a) { _tile_loadd(4, x, 64); _tile_loadd(5, x + a.tile, 64); }
        if (other_b) { _tile_loadd(6, y, 64); _tile_loadd(7, y + b.tile, 64); }
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
      } else if constexpr (A == 4) {
        if (other_b) _tile_loadd(6, y, 64);
        _tile_loadd(4, x, 64); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + a.tile, 64); _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, x + 2 * a.tile, 64); _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, x + 3 * a.tile, 64); _tile_dpbf16ps(3, 5, 6);
      } else {
        if (other_a) _tile_loadd(4, x, 64);
        _tile_loadd(6, y, 64); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, y + b.tile, 64); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, y + 2 * b.tile, 64); _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, y + 3 * b.tile, 64); _tile_dpbf16ps(3, 4, 7);
      }
    }
  }
  _tile_stored(0, sums(0), line * 4); _tile_stored(1, sums(1), line * 4);
  _tile_stored(2, sums(2), line * 4); _tile_stored(3, sums(3), line * 4);
}

// 16 x 16 numbers of 32 bits: blocks of 8, then of 4, 2 and 1 change places across the diagonal.
inline void transpose(__m512 (&x)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int size = 8; size > 0; size /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(size));
    const __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - size));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(size));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & size) continue;
      const __m512 a = x[i], b = x[i + size];
      x[i] = _mm512_permutex2var_ps(a, low, b);
      x[i + size] = _mm512_permutex2var_ps(a, high, b);
    }
  }
}

// Two times 16 numbers as terms, in the order that unpacking needs: fours of the one and of the other in
// turns. Whether all of them, and so the largest terms, are finite.
template <int N>
bool split(__m512 x, __m512 y, __m512i (&terms)[N]) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(0xffff0000);
  const __m512i most = _mm512_max_epu32(_mm512_slli_epi32(_mm512_castps_si512(x), 1),
                                        _mm512_slli_epi32(_mm512_castps_si512(y), 1));
#pragma GCC unroll 3
  for (int n = 0; n < N; ++n) {  // rounded, halves away from zero
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(x), half),
                  b = _mm512_add_epi32(_mm512_castps_si512(y), half);
    terms[n] = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
    y = _mm512_sub_ps(y, _mm512_castsi512_ps(_mm512_and_si512(b, upper)));
  }
  return !_mm512_cmpge_epu32_mask(most, _mm512_set1_epi32(0xfe000000));  // from 2^127 on
}

// 32 numbers at p as terms, zeros where `there` has no bit. Of one term anything is as good as finite.
inline bool load_terms(const bf16* p, __mmask32 there, __m512i (&terms)[1]) {
  terms[0] = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                      _mm512_maskz_loadu_epi16(there, p));
  return true;
}
inline bool load_terms(const fp16* p, __mmask32 there, __m512i (&terms)[2]) {
  const __m512i x = _mm512_maskz_loadu_epi16(there, p);
  return split<2>(_mm512_cvtph_ps(_mm512_castsi512_si256(x)),
                  _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)), terms);
}
inline bool load_terms(const float* p, __mmask32 there, __m512i (&terms)[3]) {
  return split<3>(_mm512_maskz_loadu_ps(__mmask16(there), p),
                  _mm512_maskz_loadu_ps(__mmask16(there >> 16), p + 16), terms);
}
// Of a row of `width` numbers from column d on, of which there may be none.
inline __mmask32 columns(int64_t width, int64_t d) {
  return width - d >= 32 ? ~__mmask32(0) : d < width ? (__mmask32(1) << (width - d)) - 1 : 0;
}

struct TileScratch { std::vector<Tile> q, k, v, weights; std::vector<Sums> sums; };
thread_local TileScratch tile_scratch;

// A work item's queries, and its tile of keys and values.
template <typename T>
class Products {
  static constexpr int N = TERMS<T>;

 public:
  static constexpr int64_t KEYS = TILE_KV * (N == 1 ? 4 : 2);  // of a tile
  static constexpr int64_t ROWS = 16;                          // that they come in
  // Fewer rows are as fast by vectors, which pack nothing.
  static bool worth(int64_t rows) { return rows >= (N == 1 ? 8 : N == 2 ? 16 : 48); }
  // Floats of a row of sums over values; rows of a power of two would share the lines of a cache.
  static int64_t row_size(int64_t width) { return (width + 63) / 64 * 64 + 16; }

  Products(const Problem& p, const WorkItem& w)
      : p(p), w(w), row_tiles((w.rows() + 15) / 16), steps((p.head_dim + 31) / 32),
        value_tiles((p.head_dim_v + 63) / 64 * 4), usable(worth(w.rows())) {
    if (!usable) return;
    struct { uint8_t palette = 1, rest[15] = {}; uint16_t bytes[16] = {}; uint8_t lines[16] = {}; } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.lines[i] = 16;
    _tile_loadconfig(&shape);
    s.q.resize(N * row_tiles * steps);
    s.k.resize(N * KEY_TILES * steps);
    s.v.resize(N * KEY_STEPS * value_tiles);
    s.weights.resize(N * row_tiles * KEY_STEPS);
    s.sums.resize(row_tiles * KEY_TILES);
    for (int64_t tile = 0; tile < row_tiles; ++tile)
      for (int64_t step = 0; step < steps; ++step) {
        __m512 x[N][16] = {};
        for (int64_t i = 0; i < 16 && tile * 16 + i < w.rows(); ++i) {
          __m512i terms[N];
          const T* q = query_at<T>(p, w, tile * 16 + i) + step * 32;
          usable &= load_terms(q, columns(p.head_dim, step * 32), terms);
          for (int n = 0; n < N; ++n) x[n][i] = _mm512_castsi512_ps(terms[n]);
        }
        for (int n = 0; n < N; ++n) {
          transpose(x[n]);
          for (int i = 0; i < 16; ++i)
            _mm512_store_ps(s.q[(n * row_tiles + tile) * steps + step].lines[i], x[n][i]);
        }
      }
  }
  ~Products() { if (worth(w.rows())) _tile_release(); }

  // Whether scores [rows, KEYS] are those of the `count` keys that have a bit in `any`. What stands in the
  // others' places means nothing.
  bool score(const T* const* keys, const T* const* values, const uint64_t* any, int64_t count,
             int64_t /*seeing*/, float* scores) {
    if (!usable) return false;
    bool finite = true;
    const bool latent = keys[0] == values[0];
    key_steps = (count + 31) / 32;
    for (int64_t i = 0; i < key_steps * 32; i += 2) {
      const uint64_t which = any[i / TILE_KV] >> i % TILE_KV;
      finite &= pack(keys, which, i, count, p.head_dim, true, latent);
      if (!latent) finite &= pack(values, which, i, count, p.head_dim_v, false, true);
    }
    if (!finite) return false;
    for (int64_t tile = 0; tile < row_tiles; tile += 2) {
      const bool last = tile + 1 == row_tiles;
      const Factor q{&s.q[tile * steps], steps, 1, row_tiles * steps};
      for (int64_t at = 0; at < key_steps * 2; at += last ? 4 : 2) {
        const Factor k{&s.k[at * steps], steps, 1, KEY_TILES * steps};
        float* sums = s.sums[tile * KEY_TILES + at].lines[0];
        if (last) multiply<N, 4, 1>(k, q, steps, sums, 16, 256, 0, true);
        else multiply<N, 2, 2>(k, q, steps, sums, 16, 256, KEY_TILES * 256, true);
      }
    }
    for (int64_t tile = 0; tile < row_tiles; ++tile)
      for (int64_t at = 0; at < key_steps * 2; ++at) {
        __m512 x[16];
        for (int i = 0; i < 16; ++i) x[i] = _mm512_load_ps(s.sums[tile * KEY_TILES + at].lines[i]);
        transpose(x);
        for (int i = 0; i < 16; ++i) {
          const __m512 scaled = _mm512_mul_ps(x[i], _mm512_set1_ps(p.scale));
          _mm512_storeu_ps(scores + (tile * 16 + i) * KEYS + at * 16, scaled);
        }
      }
    return true;
  }

  // acc += weights [rows, KEYS] times the values that were packed with the keys.
  void weigh(const float* weights, float* acc, int64_t stride) {
    for (int64_t row = 0; row < row_tiles * 16; ++row)
      for (int64_t step = 0; step < key_steps; ++step) {
        const float* x = weights + row * KEYS + step * 32;
        __m512i terms[N];
        split<N>(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), terms);
        for (int n = 0; n < N; ++n) {
          __m512i* line = (__m512i*)s.weights[(n * row_tiles + row / 16) * KEY_STEPS + step].lines[row % 16];
          *line = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), terms[n]);
        }
      }
    // 64 rows at a time: their weights, and two tiles of values a step, lie in the first cache.
    for (int64_t row = 0; row < row_tiles; row += 4)
      for (int64_t column = 0; column < value_tiles; column += 4)
        for (int64_t tile = row; tile < std::min(row + 4, row_tiles); tile += 2) {
          const Factor x{&s.weights[tile * KEY_STEPS], KEY_STEPS, 1, row_tiles * KEY_STEPS};
          Factor v{&s.v[column], 1, value_tiles, KEY_STEPS * value_tiles};
          float* sums = acc + tile * 16 * stride + column * 16;
          if (tile + 1 == row_tiles) {
            multiply<N, 1, 4>(x, v, key_steps, sums, stride, 0, 16, false);
            continue;
          }
          multiply<N, 2, 2>(x, v, key_steps, sums, stride, 16 * stride, 16, false);
          v.first += 2;
          multiply<N, 2, 2>(x, v, key_steps, sums + 32, stride, 16 * stride, 16, false);
        }
  }

 private:
  static constexpr int64_t KEY_TILES = KEYS / 16, KEY_STEPS = KEYS / 32;
  const Problem& p;
  const WorkItem& w;
  TileScratch& s = tile_scratch;
  const int64_t row_tiles, steps, value_tiles;
  int64_t key_steps = 0;
  bool usable;

  // Rows i and i + 1 of the tile, zeros where `which` has no bit, into k and v.
  bool pack(const T* const* rows, uint64_t which, int64_t i, int64_t count, int64_t width, bool keys,
            bool values) {
    bool finite = true;
    constexpr int64_t AHEAD = 4;  // rows to fetch from memory meanwhile
    const T *a = rows[std::min(i + AHEAD, count - 1)], *b = rows[std::min(i + AHEAD + 1, count - 1)];
    const int64_t most = std::max(keys ? steps : 0, values ? value_tiles / 2 : 0);
    for (int64_t step = 0; step < most; ++step) {
      for (int64_t d = step * 32; d < std::min(step * 32 + 32, width); d += 64 / sizeof(T)) {
        _mm_prefetch(reinterpret_cast<const char*>(a + d), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(b + d), _MM_HINT_T0);
      }
      __m512i x[2][N] = {};
      for (int j = 0; j < 2; ++j)
        if (which >> j & 1) finite &= load_terms(rows[i + j] + step * 32, columns(width, step * 32), x[j]);
      for (int n = 0; n < N; ++n) {
        if (keys && step < steps) {
          Tile& k = s.k[(n * KEY_TILES + i / 16) * steps + step];
          _mm512_store_si512(k.lines[i % 16], x[0][n]);
          _mm512_store_si512(k.lines[i % 16 + 1], x[1][n]);
        }
        if (values && step < value_tiles / 2) {
          Tile* v = &s.v[(n * KEY_STEPS + i / 32) * value_tiles + 2 * step];
          _mm512_store_si512(v[0].lines[i % 32 / 2], _mm512_unpacklo_epi16(x[0][n], x[1][n]));
          _mm512_store_si512(v[1].lines[i % 32 / 2], _mm512_unpackhi_epi16(x[0][n], x[1][n]));
        }
      }
    }
    return finite;
  }
};

}  // namespace
