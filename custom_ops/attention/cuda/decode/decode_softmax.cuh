// What a warp computes of its keys: scores, masks, its softmax state, weighted values.
#pragma once
#include "decode_requests.cuh"

struct State {
  // of query rows 8 * c + 2 * (lane % 4) + {0, 1}; total: this thread's keys only
  float top[COLS][2], total[COLS][2];
  // O^T: value columns x query rows; of two heads' columns, a row's own are the result
  float acc[V_SLICES][COLS][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      top[c][0] = top[c][1] = FLOOR;
      total[c][0] = total[c][1] = 0.f;
#pragma unroll
      for (int d = 0; d < V_SLICES; ++d) acc[d][c][0] = acc[d][c][1] = acc[d][c][2] = acc[d][c][3] = 0.f;
    }
  }
};

// The queries of a pair as the B operand of S^T = K Q^T, with what turns a dot into a score in base 2, and
// each row's keys.
struct Queries {
  u32 b[DIM / 16][COLS][2];
  float scale[COLS][2];
  int low[COLS][2], end[COLS][2];  // not SAME_MASK
  int position[COLS][2];           // ALIBI or not SAME_MASK
  float slope[COLS][2];            // ALIBI
  u32 word[COLS][2];               // TREE: of the query tokens that the row sees

  __device__ __forceinline__ void load(const Params &p, const Cursor &c, int lane) {
    const int quad = lane % 4;
#pragma unroll
    for (int n = 0; n < COLS; ++n) {
      const int row = n * 8 + lane / 4;
      const bool real = row < TILE_Q && query_of(row) < c.r.query_len;
      const char *at = p.q + ((c.r.start + query_of(row)) * p.q_token +
                              (kv_head_of(c.pair, row) * GROUP + row % GROUP) * p.q_head) *
                                 2;
#pragma unroll
      for (int s = 0; s < DIM / 16; ++s) {
        if constexpr (KV_BYTES == 1) {  // the order of columns in which fp8 keys unpack
          const u64 x = real ? *(const u64 *)(at + (s * 16 + quad * 4) * 2) : 0;
          b[s][n][0] = (u32)x;
          b[s][n][1] = (u32)(x >> 32);
        } else {
          b[s][n][0] = real ? *(const u32 *)(at + (s * 16 + quad * 2) * 2) : 0;
          b[s][n][1] = real ? *(const u32 *)(at + (s * 16 + quad * 2 + 8) * 2) : 0;
        }
      }
      float fold = 1.f;
      if constexpr (KV_BYTES == 1 && !Q_HALF) {
        // fp8 converts to fp16 only: a power of two per row brings q into fp16's range; numbers below 2^-14
        // of a row's largest lose bits.
        float largest = 1e-30f;
#pragma unroll
        for (int s = 0; s < DIM / 16; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            largest = fmaxf(largest, fabsf(to_float<Q_HALF>((u16)b[s][n][h])));
            largest = fmaxf(largest, fabsf(to_float<Q_HALF>((u16)(b[s][n][h] >> 16))));
          }
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
        largest = fminf(largest, 1e37f);  // of an infinite q: finite, so that it stays infinite
        fold = __int_as_float((__float_as_int(largest) & 0x7f800000) + 0x00800000);  // the next power of two
        const float shrink = 1.f / fold;
#pragma unroll
        for (int s = 0; s < DIM / 16; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            b[s][n][h] = pack<HALF>(to_float<Q_HALF>((u16)b[s][n][h]) * shrink,
                                    to_float<Q_HALF>((u16)(b[s][n][h] >> 16)) * shrink);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // from here on rows as in the scores: two per thread
        const int mine = n * 8 + quad * 2 + i;
        float k_scale = 1.f;
        if (SCALES && mine < TILE_Q) k_scale = p.k_scale[kv_head_of(c.pair, mine) * p.ks_head];
        const float row_fold = KV_BYTES == 1 && !Q_HALF ? __shfl_sync(ALL, fold, (quad * 2 + i) * 4) : 1.f;
        scale[n][i] = p.scale * k_scale * row_fold * (SOFT_CAP || ALIBI ? 1.f : LOG2E);
        if constexpr (ALIBI || !SAME_MASK) position[n][i] = c.r.seq_len - c.r.query_len + query_of(mine);
        if constexpr (TREE) {
          // Positions are counted over what the row sees: the context, and the tokens of its word.
          const bool is_row = mine < TILE_Q && query_of(mine) < c.r.query_len;
          const u32 own = 1u << query_of(mine);
          word[n][i] = is_row ? ((u32)p.tree[c.r.start + query_of(mine)] & (own - 1)) | own : 0;
          position[n][i] = c.r.seq_len - c.r.query_len + __popc(word[n][i] & (own - 1));
          visible(position[n][i], c.r.seq_len, low[n][i], end[n][i]);
        } else if constexpr (!SAME_MASK) {
          visible(position[n][i], c.r.seq_len, low[n][i], end[n][i]);
          if (query_of(mine) >= c.r.query_len || mine >= TILE_Q) end[n][i] = low[n][i];
        }
        if constexpr (ALIBI)
          slope[n][i] = mine < TILE_Q ? p.slopes[kv_head_of(c.pair, mine) * GROUP + mine % GROUP] : 0.f;
      }
    }
  }
};

// TREE: the WARP_KEYS keys from `from` on, of a request whose query tokens' keys begin at `context`. The
// keys' bits are a row's word, shifted to where its first key lies, and set for those of the context.
template <bool WIDE> struct KeyBits { using type = u32; };
template <> struct KeyBits<true> { using type = u64; };
struct Branches {
  using Bits = KeyBits<(WARP_KEYS > 32)>::type;
  int from, token;  // the query token of the key at `from`, negative before the first
  int right, left;  // that words are shifted
  Bits set;

  __device__ __forceinline__ Branches(int context, int from) : from(from), token(from - context) {
    constexpr int MOST = sizeof(Bits) * 8 - 1;
    right = min(max(token, 0), 31);
    left = min(max(-token, 0), MOST);
    set = token < -MOST ? ~(Bits)0 : ((Bits)1 << left) - 1;
  }
  __device__ __forceinline__ Bits seen(u32 word) const { return (Bits)(word >> right) << left | set; }
  // Where the key `key` places behind `from` counts: positions are counted over what the row sees.
  __device__ __forceinline__ int position(u32 word, int key) const {
    return from - max(token, 0) + __popc(word & ((1u << right) - 1)) +
           __popcll(seen(word) & (((Bits)1 << key) - 1));
  }
};

// One warp's WARP_KEYS keys at `key`: scores, softmax, weighted values.
__device__ __forceinline__ void attend(State &state, const Queries &queries, const Params &p, const Cursor &c,
                                       u32 stage, int key, int lane) {
  float s[SUBS][COLS][4];
#pragma unroll
  for (int m = 0; m < SUBS; ++m) {
    float other[COLS][4];  // two chains of dependent mma instead of one; or the second head's dots
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = other[n][j] = 0.f;
    const u32 at = stage + (m * 16 + lane % 16) * K_ROW_BYTES,
              odd = (lane / 16 ^ swizzle<K_PADDED>(lane % 16)) * 16;
    if constexpr (KV_BYTES == 1) {
#pragma unroll
      for (int d = 0; d < (DIM + 31) / 32; ++d) {
        u32 raw[4], a[4];
        ldmatrix_x4(raw, chunk_pair<K_PADDED>(at, odd, d));
        unpack_fp8<E5M2>(raw[0], a[0], a[2]);
        unpack_fp8<E5M2>(raw[1], a[1], a[3]);
#pragma unroll
        for (int n = 0; n < COLS; ++n) mma<HALF>(s[m][n], a, queries.b[2 * d][n][0], queries.b[2 * d][n][1]);
        if (2 * d + 1 < DIM / 16) {
          unpack_fp8<E5M2>(raw[2], a[0], a[2]);
          unpack_fp8<E5M2>(raw[3], a[1], a[3]);
#pragma unroll
          for (int n = 0; n < COLS; ++n) {
            const u32(&b)[2] = queries.b[(2 * d + 1) % (DIM / 16)][n];
            mma<HALF>(other[n], a, b[0], b[1]);
          }
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < PAIR_HEADS * DIM / 16; ++d) {
        u32 a[4];
        ldmatrix_x4(a, chunk_pair<K_PADDED>(at, odd, d));
        const int head = d / (DIM / 16), at_d = d % (DIM / 16);
#pragma unroll
        for (int n = 0; n < COLS; ++n)
          if (holds(n, head))
            mma<HALF>((SHARED ? head : d % 2) ? other[n] : s[m][n], a, queries.b[at_d][n][0],
                      queries.b[at_d][n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!SHARED) s[m][n][j] += other[n][j];
        else if (kv_head_of(0, lane % 4 * 2 + j % 2)) s[m][n][j] = other[n][j];
  }
  const bool whole = SAME_MASK && key + WARP_KEYS <= c.r.end && key >= c.r.low;  // no key of these is masked
  constexpr bool HIDES_FIRST_KEYS = WINDOW_LEFT >= 0 || CHUNK > 0;  // rows may not see the first keys
  [[maybe_unused]] const Branches branches(c.r.seq_len - c.r.query_len, key + lane / 4);
  bool moved = false;
  float top[COLS][2];
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = state.top[n][i];
#pragma unroll
      for (int m = 0; m < SUBS; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x = s[m][n][2 * h + i] * queries.scale[n][i];
          const int at = key + m * 16 + h * 8 + lane / 4;
          if constexpr (SOFT_CAP) x = soft_capped(x, p.soft_cap, inverse_of(p.soft_cap));
          if constexpr (ALIBI && TREE)
            x += queries.slope[n][i] * (float)(branches.position(queries.word[n][i], m * 16 + h * 8) -
                                               queries.position[n][i]);
          else if constexpr (ALIBI) x += queries.slope[n][i] * (float)(at - queries.position[n][i]);
          if constexpr (SOFT_CAP || ALIBI) x *= LOG2E;
          if constexpr (TREE) {
            const u32 word = queries.word[n][i];
            const bool sees = branches.seen(word) >> (m * 16 + h * 8) & 1;
            x = sees && (!HIDES_FIRST_KEYS || branches.position(word, m * 16 + h * 8) >= queries.low[n][i])
                    ? x
                    : -INF;
          } else if constexpr (!SAME_MASK) x = at < queries.end[n][i] && at >= queries.low[n][i] ? x : -INF;
          else if (!whole) x = at < c.r.end && at >= c.r.low ? x : -INF;
          s[m][n][2 * h + i] = x;
          most = fmaxf(most, x);
        }
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 4));
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 8));
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 16));
      moved |= most > state.top[n][i];
      top[n][i] = most;
    }
  if (__any_sync(ALL, moved)) {
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float shrink = exp2_(state.top[n][i] - top[n][i]);
        state.top[n][i] = top[n][i];
        state.total[n][i] *= shrink;
#pragma unroll
        for (int d = 0; d < V_SLICES; ++d) {
          state.acc[d][n][i] *= shrink;
          state.acc[d][n][i + 2] *= shrink;
        }
      }
  }
#pragma unroll
  for (int m = 0; m < SUBS; ++m) {
    u32 b[COLS][2];
#pragma unroll
    for (int n = 0; n < COLS; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = exp2_(s[m][n][j] - state.top[n][j % 2]);
      state.total[n][0] += s[m][n][0] + s[m][n][2];
      state.total[n][1] += s[m][n][1] + s[m][n][3];
      b[n][0] = movmatrix_trans(pack<HALF>(s[m][n][0], s[m][n][1]));
      b[n][1] = movmatrix_trans(pack<HALF>(s[m][n][2], s[m][n][3]));
    }
    const u32 values = stage + WARP_KEYS * K_ROW_BYTES;
    if constexpr (KV_BYTES == 1) {
      const u32 at = values + (m * 16 + lane % 16) * V_ROW_BYTES,
                odd = (lane / 16 ^ swizzle<V_PADDED>(lane % 16)) * 16;
#pragma unroll
      for (int d = 0; d < DIM_V / 16; d += 2) {
        u32 raw[4], a[4];
        ldmatrix_x4_trans(raw, chunk_pair<V_PADDED>(at, odd, d / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = __byte_perm(raw[i], 0, 0x3120);
        unpack_fp8<E5M2>(raw[0], a[0], a[1]);
        unpack_fp8<E5M2>(raw[1], a[2], a[3]);
#pragma unroll
        for (int n = 0; n < COLS; ++n) mma<HALF>(state.acc[d][n], a, b[n][0], b[n][1]);
        if (d + 1 < DIM_V / 16) {
          unpack_fp8<E5M2>(raw[2], a[0], a[1]);
          unpack_fp8<E5M2>(raw[3], a[2], a[3]);
#pragma unroll
          for (int n = 0; n < COLS; ++n) mma<HALF>(state.acc[(d + 1) % (DIM_V / 16)][n], a, b[n][0], b[n][1]);
        }
      }
    } else {
      const int value = lane % 8 + lane / 16 * 8;
      const u32 at = values + (m * 16 + value) * V_ROW_BYTES,
                odd = (lane / 8 % 2 ^ swizzle<V_PADDED>(value)) * 16;
#pragma unroll
      for (int d = 0; d < V_SLICES; ++d) {
        u32 a[4];
        ldmatrix_x4_trans(a, chunk_pair<V_PADDED>(at, odd, d));
#pragma unroll
        for (int n = 0; n < COLS; ++n)
          if (holds(n, d / (DIM_V / 16))) mma<HALF>(state.acc[d][n], a, b[n][0], b[n][1]);
      }
    }
  }
}

// A warp's state to shared memory: acc [TILE_Q][STATE_ROW] into a stage of its own, top [TILE_Q] and total
// [TILE_Q] into arrays of their own.
__device__ __forceinline__ void leave_state(State &state, float *to, float *tops, float *totals, int lane) {
  const int quad = lane % 4, r = lane / 4;
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = state.total[n][i];
      total += __shfl_xor_sync(ALL, total, 4);
      total += __shfl_xor_sync(ALL, total, 8);
      total += __shfl_xor_sync(ALL, total, 16);
      const int row = n * 8 + quad * 2 + i;
      if (row < TILE_Q) {
#pragma unroll
        for (int d = 0; d < DIM_V / 16; ++d) {
          // fp8 values unpack in pairs of neighbours, 16-bit ones as columns r and r + 8
          const bool second = kv_head_of(0, row);
          const float(&acc)[4] = state.acc[d][n], (&others)[4] = state.acc[V_SLICES - DIM_V / 16 + d][n];
          to[row * STATE_ROW + d * 16 + (KV_BYTES == 1 ? 2 * r : r)] = second ? others[i] : acc[i];
          to[row * STATE_ROW + d * 16 + (KV_BYTES == 1 ? 2 * r + 1 : r + 8)] =
              second ? others[i + 2] : acc[i + 2];
        }
        if (r == 0) {
          tops[row] = state.top[n][i];
          totals[row] = total;
        }
      }
    }
}
