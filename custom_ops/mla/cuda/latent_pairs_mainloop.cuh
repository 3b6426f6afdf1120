// The consumers of latent_pairs.cu: two warpgroups, for 64 query rows. Tiles of keys come in pairs. A
// warpgroup has the scores and weights of one tile of a pair (the first one of the even tiles) and half of
// the value columns of both: its own weights are in registers, those of the other one lie in shared memory.
// So the softmax of one runs while products of the other do.
//
// A row's weights are relative to its level, which both share, and which rises only where a score is more
// than LAZY (in base 2) above it: no weight is over 2^LAZY, and accumulators seldom have to shrink.
#pragma once

#include "latent_epilogue.cuh"
#include "latent_pairs_load.cuh"

constexpr float LAZY = 8.f;
constexpr int WEIGHTS = 1, SUMS = 3, OF_WARPGROUP = 4;  // named barriers: two, one, two

// SELECTED: keys are gathered by positions, halves of tiles at once (latent_selected_load.cuh).
template <int ME, bool SELECTED = false> struct Warpgroup {
  static constexpr int OTHER = 1 - ME;
  static constexpr bool BY_LANES = SELECTED || FP8;  // keys, halves of tiles at once, zeros behind the last
  const Params &p;
  char *memory;
  const u32 shared;
  const int thread, warp, lane;  // of the warpgroup
  float acc[128], level[2], total[2];  // of rows `row(0)` and `row(1)`
  int phases;  // of full squares: a bit for each tile of the pair

  __device__ __forceinline__ int row(int e) const { return warp * 16 + lane / 4 + e * 8; }
  // The same, by all lanes, where it is seldom wanted: what follows from it takes no registers elsewhere.
  __device__ __forceinline__ int row_anew(int e) const { return __shfl_sync(ALL, row(e), lane); }
  __device__ __forceinline__ u32 square_at(int slot, int square) const {
    return shared + slot * TILE_BYTES + square * SQUARE_BYTES;
  }
  __device__ __forceinline__ void wait_full(int slot, int square) const {
    // a half is told of at its first square; the rotated keys come with the half that comes last
    if (BY_LANES && (square % HALF_SQUARES || square == SQUARES - 1)) return;
    // arrive: the producer, with all bytes of the square; or the producers' threads, with those of the half
    mbarrier_wait(full_at(shared, slot, square), phases >> slot & 1);
    if (BY_LANES) fence_async();  // lanes copied them, not the copy engine
  }
  __device__ __forceinline__ void release(int slot) const {
    if (lane == 0) mbarrier_arrive(empty_at(shared, slot, ME));
  }
  __device__ __forceinline__ void release_queries() const {
    if (lane == 0) mbarrier_arrive(shared + Q_EMPTY_AT);
  }
  // Behind the last key may stand anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_tail(const Segment &s, int tile) const {
    const int real = s.seq_len - tile * TILE_KV;
    if (real >= TILE_KV) return;
    for (int square = 0; square < SQUARES; ++square) wait_full(ME, square);
#pragma unroll 1
    for (int i = thread; i < (TILE_KV - real) * SQUARES * 8; i += 128) {
      const int key = real + i / (SQUARES * 8), in = i % (SQUARES * 8);
      *(uint4 *)(memory + ME * TILE_BYTES + in / 8 * SQUARE_BYTES + key * 128 + in % 8 * 16) =
          uint4{0, 0, 0, 0};
    }
    fence_async();
    barrier<128>(OF_WARPGROUP + ME);
  }
  // Of a tile, by squares in the order in which they come.
  __device__ __forceinline__ void scores(float (&x)[32]) const {
    const u64 first_queries = operand(shared + Q_AT), first_keys = operand(square_at(ME, 0));
#pragma unroll
    for (int n = 0; n < SQUARES; ++n) {
      const int square = n < SQUARES - 1 ? n ^ ME * HALF_SQUARES : n;
      const u64 queries = behind(first_queries, square * (ROWS * 128)),
                keys = behind(first_keys, square * SQUARE_BYTES);
      wait_full(ME, square);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (n + k == 0) scores16<0>(x, queries, keys);
        else scores16<1>(x, behind(queries, k * 32), behind(keys, k * 32));
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ u64 values(int slot) const {
    return operand(square_at(slot, ME * HALF_SQUARES), 1024, SQUARE_BYTES);
  }
  __device__ __forceinline__ void my_values(const u32 (&weights)[4][4]) {
    wgmma_fence();
    const u64 first = values(ME);
#pragma unroll
    for (int k = 0; k < 4; ++k) values16(acc, weights[k], behind(first, k * 2048), SQUARE_BYTES);
    wgmma_commit();
  }
  __device__ __forceinline__ void other_values() {
#pragma unroll
    for (int n = 0; n < HALF_SQUARES; ++n) wait_full(OTHER, ME * HALF_SQUARES + n);
    wgmma_fence();
    const u64 weights = operand(square_at(OTHER, SQUARES - 1)), first = values(OTHER);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      values16(acc, behind(weights, k * 32), behind(first, k * 2048), SQUARE_BYTES);
    wgmma_commit();
  }
  __device__ __forceinline__ void shrink(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] *= factor[i / 2 % 2];
  }
  // To the level of the other warpgroup's weights, which are there.
  __device__ __forceinline__ void follow() {
    const float *levels = (const float *)(memory + LEVEL_AT) + OTHER * ROWS;
    float factor[2];
    bool rose = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float now = levels[row(e)];
      rose |= now != level[e];
      factor[e] = exp2_(level[e] - now);
      level[e] = now;
      total[e] *= factor[e];
    }
    if (__any_sync(ALL, rose)) shrink(factor);
  }
  // Of a tile's scores the rows' maxima, keys that a row does not see left out. `first_row`: of the tile of
  // rows.
  __device__ __forceinline__ void mask(float (&x)[32], float (&top)[2], const Segment &s, int tile,
                                       int first_row) const {
    if constexpr (SELECTED) {
      const u64 seen = *(const u64 *)(memory + SEEN_AT + ME * TILE_KV / 8) >> lane % 4 * 2;
      if (__any_sync(ALL, (seen & 0x0303030303030303) != 0x0303030303030303)) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (!(seen >> (i / 4 * 8 + i % 2) & 1)) x[i] = -INF;
      }
    } else if ((tile + 1) * TILE_KV > s.seq_len - s.query_len + 1) {  // what the first query token sees
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int end =
            row_of(first_row + row_anew(e), s.start, s.query_len, s.seq_len).end - tile * TILE_KV;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + lane % 4 * 2 + i >= end) x[n * 4 + e * 2 + i] = -INF;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float most[2] = {x[e * 2], x[e * 2 + 1]};
#pragma unroll
      for (int i = 2; i < 16; ++i) most[i % 2] = fmaxf(most[i % 2], x[i / 2 * 4 + e * 2 + i % 2]);
      most[0] = fmaxf(most[0], most[1]);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(ALL, most[0], step));
      top[e] = most[0] * p.scale;
    }
  }
  // The weights; true: accumulators, which may be in use, have to shrink by `factor`.
  __device__ __forceinline__ bool weigh(float (&x)[32], const float (&top)[2], u32 (&weights)[4][4],
                                        float (&factor)[2]) {
    bool rose = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float now = top[e] > level[e] + LAZY ? top[e] : level[e];
      rose |= now != level[e];
      factor[e] = exp2_(level[e] - now);
      level[e] = now;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = exp2_(x[i] * p.scale - level[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i / 4][i % 4] = pack<HALF>(x[i * 2], x[i * 2 + 1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i % 2] += x[i / 2 * 4 + e * 2 + i % 2];
      total[e] = total[e] * factor[e] + (sum[0] + sum[1]);
    }
    return __any_sync(ALL, rose);
  }
  // Weights for the other warpgroup, which waits for them, in place of the tile's rotated keys.
  __device__ __forceinline__ void hand_over(const u32 (&weights)[4][4]) {
    barrier<128>(OF_WARPGROUP + ME);  // all warps' scores are there: their rotated keys may be written over
    const int line = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      stmatrix_x4(square_at(ME, SQUARES - 1) + line * 128 + ((k * 2 + lane / 16) ^ line % 8) * 16,
                  weights[k]);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (lane % 4 == 0) ((float *)(memory + LEVEL_AT))[ME * ROWS + row(e)] = level[e];
    fence_async();
    barrier_arrive<CONSUMER_THREADS>(WEIGHTS + ME);
  }
  // The even tiles' warpgroup over a segment, and the odd ones'.
  __device__ __forceinline__ void even_tiles(const Segment &s, int first_row) {
    float x[32], top[2], factor[2];
    u32 weights[4][4];
    for (int tile = s.first; tile < s.last; tile += 2) {
      if constexpr (!BY_LANES) clear_tail(s, tile);
      scores(x);
      wgmma_wait<0>();
      if (tile + 2 >= s.last) release_queries();
      mask(x, top, s, tile, first_row);
      const bool rose = weigh(x, top, weights, factor);
      hand_over(weights);
      if (rose) shrink(factor);
      my_values(weights);
      wgmma_wait<0>();
      release(ME);
      phases ^= 1 << ME;
      if (tile + 1 == s.last) break;
      barrier<CONSUMER_THREADS>(WEIGHTS + OTHER);  // arrive: the other warpgroup, with its weights
      follow();
      other_values();
      wgmma_wait<0>();
      release(OTHER);
      phases ^= 1 << OTHER;
    }
  }
  __device__ __forceinline__ void odd_tiles(const Segment &s, int first_row) {
    float x[32], top[2], factor[2];
    u32 weights[4][4];
    int tile = s.first;
    for (; tile + 1 < s.last; tile += 2) {
      if constexpr (!BY_LANES) clear_tail(s, tile + 1);
      scores(x);
      wgmma_wait<0>();
      if (tile + 2 >= s.last) release_queries();
      mask(x, top, s, tile + 1, first_row);
      barrier<CONSUMER_THREADS>(WEIGHTS + OTHER);  // arrive: the other warpgroup, with its weights
      follow();
      other_values();
      phases ^= 1 << OTHER;
      const bool rose = weigh(x, top, weights, factor);
      hand_over(weights);
      wgmma_wait<0>();
      release(OTHER);
      if (rose) shrink(factor);
      my_values(weights);
      wgmma_wait<0>();
      release(ME);
      phases ^= 1 << ME;
    }
    if (tile == s.last) return;
    release_queries();
    barrier<CONSUMER_THREADS>(WEIGHTS + OTHER);
    follow();
    other_values();
    phases ^= 1 << OTHER;
    wgmma_wait<0>();
    release(OTHER);
  }
  // Of row e: factors of this CTA's sums and of the other's, whose level and total came; what came with them.
  __device__ __forceinline__ float join_state(u32 states, int e, float (&sum)[2], float (&mine)[2],
                                              float (&others)[2]) {
    const float4 state = load_shared(states + row(e) * 16);
    const float now = fmaxf(level[e], state.x);
    mine[e] = exp2_(level[e] - now);
    others[e] = exp2_(state.x - now);
    level[e] = now;
    sum[e] = sum[e] * mine[e] + state.y * others[e];
    return state.z;
  }
  // Two CTAs took turns at the tiles: each has the result of half of the columns, those of one warpgroup, to
  // which the other CTA's sends its sums and its rows' states; sums as float16 over a power of two for each
  // row, which its largest finite number gives. The CTAs meet from the begin of `finish` on. False: this one
  // has sent.
  //
  // A power of two rounds nothing by itself, and makes of the largest number one of 2^14 to 2^15, which does
  // not round to infinity. Normal numbers of float16 begin at 2^-14, so of columns as far apart as 2^28 to
  // 2^29 each keeps 11 bits; of one further down an error of 2^-39 of the largest at most is left.
  __device__ __forceinline__ bool join(float (&sum)[2]) {
    constexpr int STATES_AT = 16 * 128 * 16;  // behind the sums: level, total and power of each row
    cluster_wait();  // no tile is read any more
    if (ME != blockIdx.x % 2) {
      const u32 theirs = mapa(shared, ME), told = mapa(shared + JOINED_AT, ME);
      float by[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          const float x = fabsf(acc[i / 2 * 4 + e * 2 + i % 2]);
          most = fmaxf(most, x < INF ? x : 0.f);
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
        const int exponent = min(268 - (__float_as_int(most) >> 23), 253);  // both powers are normal
        by[e] = __int_as_float(exponent << 23);                             // most * by < 2^15
        if (lane % 4 == 0)
          st_async(theirs + STATES_AT + row(e) * 16,
                   {level[e], sum[e], __int_as_float((254 - exponent) << 23), 0.f}, told);
      }
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          y[i] = __int_as_float(
              pack<true>(acc[n * 8 + i * 2] * by[i % 2], acc[n * 8 + i * 2 + 1] * by[i % 2]));
        st_async(theirs + (n * 128 + thread) * 16, y, told);
      }
      return false;
    }
    if (thread == 0) mbarrier_arrive_expect_tx(shared + JOINED_AT, STATES_AT + ROWS * 16);
    // arrive: the other CTA's warpgroup, with all bytes, and this thread
    mbarrier_wait(shared + JOINED_AT, 0);
    float mine[2], others[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float power = join_state(shared + STATES_AT, e, sum, mine, others);
      others[e] *= power;
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float4 x = load_shared(shared + (n * 128 + thread) * 16);
      const float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 both = __float_as_int(y[i / 2]);
        acc[n * 8 + i] = acc[n * 8 + i] * mine[i / 2 % 2] +
                         to_float<true>((u16)(both >> i % 2 * 16)) * others[i / 2 % 2];
      }
    }
    return true;
  }
  // The same of two neighbouring parts of a request, with sums as they are, in halves: what is there of the
  // first one is stored, unless it is the whole result, while the second one comes.
  __device__ __forceinline__ bool join_parts(float (&sum)[2], float *slot) {
    constexpr int STATES_AT = 32 * 128 * 16;  // behind the sums: levels and totals of rows
    cluster_wait();  // no tile is read any more
    if (ME != blockIdx.x % 2) {
      const u32 theirs = mapa(shared, ME), told = mapa(shared + PART_AT, ME);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (lane % 4 == 0) st_async(theirs + STATES_AT + row(e) * 16, {level[e], sum[e], 0.f, 0.f}, told);
#pragma unroll
      for (int n = 0; n < 32; ++n)
        st_async(theirs + (n * 128 + thread) * 16,
                 {acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]}, told + n / 16 * 8);
      return false;
    }
    if (thread == 0) {
      mbarrier_arrive_expect_tx(shared + PART_AT, STATES_AT / 2 + ROWS * 16);
      mbarrier_arrive_expect_tx(shared + PART_AT + 8, STATES_AT / 2);
    }
    float mine[2], others[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // arrive: the other CTA's warpgroup, with all bytes of the half, and this thread
      mbarrier_wait(shared + PART_AT + half * 8, 0);
      if (half == 0)
#pragma unroll
        for (int e = 0; e < 2; ++e) join_state(shared + STATES_AT, e, sum, mine, others);
#pragma unroll
      for (int n = half * 16; n < half * 16 + 16; ++n) {
        const float4 x = load_shared(shared + (n * 128 + thread) * 16);
        acc[n * 4] = acc[n * 4] * mine[0] + x.x * others[0];
        acc[n * 4 + 1] = acc[n * 4 + 1] * mine[0] + x.y * others[0];
        acc[n * 4 + 2] = acc[n * 4 + 2] * mine[1] + x.z * others[1];
        acc[n * 4 + 3] = acc[n * 4 + 3] * mine[1] + x.w * others[1];
      }
      if (slot) store_sums(slot, half * 16, half * 16 + 16);
    }
    return true;
  }
  __device__ __forceinline__ void store_sums(float *slot, int first, int last) const {
#pragma unroll
    for (int n = first; n < last; ++n)
      ((float4 *)slot)[(ME * 32 + n) * 128 + thread] =
          float4{acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]};
  }
  // `sums`: of this segment; they are still read while those of the next one are written.
  __device__ __forceinline__ void finish(const Segment &s, int group, int row_tile, int joined, float *sums) {
    if constexpr (SELECTED && CLUSTER == 2) cluster_arrive_relaxed();
    else if (PAIRED && joined) {
      __syncwarp();
      cluster_arrive_relaxed();
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) total[e] += __shfl_xor_sync(ALL, total[e], step);
      if (lane % 4 == 0) sums[ME * ROWS + row(e)] = total[e];
    }
    barrier<CONSUMER_THREADS>(SUMS);
    float *slot = slot_of(p, group, s.slot, row_tile), both[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) both[e] = sums[row(e)] + sums[ROWS + row(e)];
    bool whole = s.whole;
    if constexpr (SELECTED) {
      if (CLUSTER == 2 && !join(both)) return;
    } else if (PAIRED && joined) {
      whole = joined == 2;
      slot = slot_of(p, group & ~1, 0, row_tile);
      if (!join_parts(both, whole ? nullptr : slot)) return;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = both[e];
      if (whole) {
        const Row r = row_of(row_tile * ROWS + row_anew(e), s.start, s.query_len, s.seq_len);
        const float by = 1.f / sum;
        if (ME == 0 && lane % 4 == 0) store_lse(p, r, level[e], sum);
        char *to = p.out + (r.token * p.o_token + r.head * p.o_head + ME * COLUMNS + lane % 4 * 8) * 2;
#pragma unroll
        for (int n = 0; n < 32; n += 4) {
          u32 y[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            y[i] = pack<HALF>(acc[(n + i) * 4 + e * 2] * by, acc[(n + i) * 4 + e * 2 + 1] * by);
          turn_quad(y, lane);
          if (r.real) *(uint4 *)(to + n * 16) = r.end > 0 ? uint4{y[0], y[1], y[2], y[3]} : uint4{0, 0, 0, 0};
        }
      } else {
        if (ME == 0 && lane % 4 == 0)
          *(float2 *)(slot + ROWS * RANK + row(e) * 2) = float2{level[e], sum};
      }
    }
    if (!whole && (SELECTED || !PAIRED || !joined)) store_sums(slot, 0, 32);
  }
  template <class W> __device__ __forceinline__ void run(W walk, int group, int joined = 0) {
    int parity = 0;
    bool first = !SELECTED;
    phases = 0;
    Segment s;
    while (walk.next(s)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        level[e] = FLOOR;
        total[e] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] = 0.f;
      // arrive: the warps that copy queries; of the first segment all but the one that asks for keys
      mbarrier_wait(shared + (first ? Q_FIRST_AT : Q_FULL_AT), SELECTED ? parity : first ? 0 : parity ^ 1);
      if (first || FP8) fence_async();  // lanes copied them
      first = false;
      if constexpr (ME == 0) even_tiles(s, walk.row_tile * ROWS);
      else odd_tiles(s, walk.row_tile * ROWS);
      finish(s, group, walk.row_tile, joined, (float *)(memory + SUM_AT) + parity * 2 * ROWS);
      parity ^= 1;
    }
  }
};
