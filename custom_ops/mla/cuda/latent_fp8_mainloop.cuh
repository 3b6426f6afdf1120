// The consumers of rows of fp8: eight warps. Scores are products of e4m3: queries are terms that add up to
// them, of which bfloat16 takes two and float16 three, side by side as columns of a product. Values are
// converted in registers to float16, which is exact.
//
// A step: a warpgroup has the scores of all keys, of the columns of two scales and half of the rotated ones,
// and multiplies them by its keys' scales. Then a warp adds those of ROWS / 8 rows for all keys and has their
// weights, times each of the scales. Then it has 64 value columns.
//
// Weights are relative to a row's level, a whole power of two, which rises where one is over MOST; those
// times scales to a unit, a power of two for each row and scale, which rises where one is over MOST_SCALED.
// So whatever the scales are, what is lost of small products is below 2^-22 of the largest ones, and what
// accumulators are multiplied by is exact. Queries are over a power of two for each row: of what is below
// 2^-14 of its largest number less than 2^-21 of that is lost, of the rest nothing.
#pragma once

#include "latent_epilogue.cuh"
#include "latent_fp8_load.cuh"

constexpr float MOST = 0x1p8f, MOST_SCALED = 0x1p14f;  // of a weight, and of one times a scale, over its unit
constexpr float NEXT_TERM = 0x1p-5f;  // of queries: what one term lacks is over this in the next one
constexpr int ALL_CONSUMERS = 1;  // a named barrier
constexpr int MY_TILES = 4;       // of 16 value columns, of a warp

// The power of two at or below x, as far as it and its inverse are normal; and that inverse.
__device__ __forceinline__ float power_below(float x) {
  return __int_as_float(__float_as_int(fminf(fmaxf(x, 0x1p-100f), 0x1p100f)) & 0x7f800000);
}
__device__ __forceinline__ float inverse_power(float x) {
  return __int_as_float((254 << 23) - __float_as_int(x));
}
__device__ __forceinline__ float warps_most(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

// Scores, weights and the keys of a product with values have one order of each 16 keys, in pairs that lie in
// other banks and in one lane: the key of a pair's first place, and of its second one.
__device__ __forceinline__ int first_key(int pair) { return pair; }
__device__ __forceinline__ int second_key(int pair) { return 8 + (pair ^ 4); }

__device__ __forceinline__ void load4(float (&x)[4], const char *from) {
  const float4 all = *(const float4 *)from;
  x[0] = all.x;
  x[1] = all.y;
  x[2] = all.z;
  x[3] = all.w;
}

struct RowConsumer {
  const Params &p;
  char *memory;
  const u32 shared;
  const int warp, lane;

  // Queries of a segment, over a power of two for each row, by which scores of row `warp * BLOCKS_8 + r` have
  // to be multiplied: `back[r]`. A row's lanes have 16 columns each, or 32.
  __device__ __forceinline__ void load_queries(const Segment &s, int first_row,
                                               float (&back)[BLOCKS_8]) const {
    constexpr int LANES = 32 / BLOCKS_8, COPIES = RANK / 16 / LANES;
    const int in = warp * BLOCKS_8 + lane / LANES, part = lane % LANES;
    const Row row = row_of(first_row + in, s.start, s.query_len, s.seq_len);
    const char *const from = p.q + (row.real ? (row.token * p.q_token + row.head * p.q_head) * 2 : 0);
    u32 x[COPIES][8], rotated[BLOCKS_8];
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 y = *(const uint4 *)(from + (part + i * LANES) * 32 + h * 16);
        x[i][h * 4] = y.x;
        x[i][h * 4 + 1] = y.y;
        x[i][h * 4 + 2] = y.z;
        x[i][h * 4 + 3] = y.w;
      }
#pragma unroll
    for (int n = 0; n < BLOCKS_8; ++n)
      rotated[n] = *(const u32 *)(from + RANK * 2 + (part * BLOCKS_8 + n) * 4);
    float most = 0.f;
    const auto larger = [&](u32 pair) {
      most = fmaxf(most, fmaxf(fabsf(to_float<HALF>((u16)pair)), fabsf(to_float<HALF>((u16)(pair >> 16)))));
    };
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
#pragma unroll
      for (int n = 0; n < 8; ++n) larger(x[i][n]);
#pragma unroll
    for (int n = 0; n < BLOCKS_8; ++n) larger(rotated[n]);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    const float unit = power_below(most) * 0x1p-7f, by = row.real ? inverse_power(unit) : 0.f;
#pragma unroll
    for (int r = 0; r < BLOCKS_8; ++r)  // e4m3 has no infinity
      back[r] = __shfl_sync(ALL, most < 0x1p101f ? unit : INF, r * LANES);
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int copy = part + i * LANES;
      char *const to = memory + Q_AT + copy / 8 * Q_GROUP_BYTES + in * 128 + (copy ^ in) % 8 * 16;
      u32 terms[TERMS][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = to_float<HALF>((u16)(x[i][n * 2 + e / 2] >> e % 2 * 16)) * by;
#pragma unroll
        for (int t = 0; t < TERMS; ++t) {
          u32 halves[2];
          terms[t][n] = pack_e4m3(y[0], y[1], y[2], y[3]);
          unpack_fp8<false>(terms[t][n], halves[0], halves[1]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            y[e] = (y[e] - to_float<true>((u16)(halves[e / 2] >> e % 2 * 16))) * (1.f / NEXT_TERM);
        }
      }
#pragma unroll
      for (int t = 0; t < TERMS; ++t)
        *(uint4 *)(to + t * (ROWS * 128)) = uint4{terms[t][0], terms[t][1], terms[t][2], terms[t][3]};
    }
#pragma unroll
    for (int n = 0; n < BLOCKS_8; ++n) {
      const int column = part * BLOCKS_8 + n;  // a pair
      *(u32 *)(memory + Q_ROTATED_AT + in * 128 + (column / 4 ^ in % 8) * 16 + column % 4 * 4) = pack<HALF>(
          to_float<HALF>((u16)rotated[n]) * by, to_float<HALF>((u16)(rotated[n] >> 16)) * by);
    }
    fence_async();
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
  }
  // Behind the last key may stand anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_tail(const Segment &s, int tile, int stage) const {
    const int real = s.seq_len - tile * TILE_KV;
    if (real >= TILE_KV) return;
    uint4 *const rows = (uint4 *)(memory + stage * STAGE_BYTES);
    for (int i = real * (ROW_BYTES / 16) + warp * 32 + lane; i < STAGE_BYTES / 16; i += CONSUMER_THREADS)
      rows[i] = uint4{0, 0, 0, 0};
    fence_async();
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
  }
  // Of 16 keys and all rows, by the columns of this warpgroup.
  __device__ __forceinline__ void score(int stage) const {
    const int half = warp / 4, first = warp % 4 * 16, of = lane % 8,
              line = lane / 8 % 2 ? second_key(of) : first_key(of);
    const char *const scales = memory + stage * STAGE_BYTES + first * ROW_BYTES + SCALES_IN + half * 8;
    const u32 at = shared + stage * STAGE_BYTES + (first + line) * ROW_BYTES + lane / 16 * 16;
    const u64 queries = operand(shared + Q_AT + half * 2 * Q_GROUP_BYTES),
              turned = operand(shared + Q_ROTATED_AT + half * 64);
    float x[BLOCKS_8][4];
    {
      u32 a[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ldmatrix_x4(a[n], at + ROPE_IN + half * 64 + n * 32);
        if constexpr (HALF)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            a[n][i] = pack<true>(to_float<false>((u16)a[n][i]), to_float<false>((u16)(a[n][i] >> 16)));
      }
      wgmma_fence();
      product16<0>(x, a[0], turned);
      product16<1>(x, a[1], behind(turned, 32));
      wgmma_commit();
      wgmma_wait<0>();
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      u32 a[4][4];
      float d[TERMS * BLOCKS_8][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) ldmatrix_x4(a[k], at + (half * 2 + g) * 128 + k * 32);
      wgmma_fence();
      product32<0>(d, a[0], behind(queries, g * Q_GROUP_BYTES));
#pragma unroll
      for (int k = 1; k < 4; ++k) product32<1>(d, a[k], behind(queries, g * Q_GROUP_BYTES + k * 32));
      wgmma_commit();
      const float low = *(const float *)(scales + first_key(lane / 4) * ROW_BYTES + g * 4),
                  high = *(const float *)(scales + second_key(lane / 4) * ROW_BYTES + g * 4);
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float sum = d[(TERMS - 1) * BLOCKS_8 + j][e];
#pragma unroll
          for (int t = TERMS - 2; t >= 0; --t) sum = sum * NEXT_TERM + d[t * BLOCKS_8 + j][e];
          x[j][e] += sum * (e < 2 ? low : high);
        }
    }
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // weights of the step before were read
    char *const to = memory + WEIGHTS_AT + lane % 4 * 2 * ROW_LINE + half * (TILE_KV * 4) +
                     (first + lane / 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        *(float2 *)(to + (j * 8 + e) * ROW_LINE) = float2{x[j][e], x[j][e + 2]};
  }
  // Of this warp's rows, from `mine` on, whose scores are times `back`; true: accumulators have to be
  // multiplied by factors.
  __device__ __forceinline__ bool weigh(const Segment &s, int first_row, int tile, int stage,
                                        const float (&back)[BLOCKS_8], float (&level)[BLOCKS_8],
                                        float (&total)[BLOCKS_8]) const {
    const int mine = warp * BLOCKS_8, key[2] = {lane / 8 * 16 + first_key(lane % 8),
                                                lane / 8 * 16 + second_key(lane % 8)};
    float scale[2][GROUPS], x[BLOCKS_8][2], weight[BLOCKS_8][2], scaled[BLOCKS_8][2][GROUPS];
    float *const units = (float *)(memory + UNITS_AT) + mine * GROUPS,
                *const factors = (float *)(memory + FACTORS_AT) + mine * GROUPS;
    bool over = false;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      load4(scale[e], memory + stage * STAGE_BYTES + key[e] * ROW_BYTES + SCALES_IN);
#pragma unroll
    for (int r = 0; r < BLOCKS_8; ++r) {
      const char *const scores = memory + WEIGHTS_AT + (mine + r) * ROW_LINE + lane * 8;
      const float2 of[2] = {*(const float2 *)scores, *(const float2 *)(scores + TILE_KV * 4)};
      x[r][0] = (of[0].x + of[1].x) * back[r];
      x[r][1] = (of[0].y + of[1].y) * back[r];
      if ((tile + 1) * TILE_KV > row_of(first_row, s.start, s.query_len, s.seq_len).end) {
        const int end = row_of(first_row + mine + r, s.start, s.query_len, s.seq_len).end - tile * TILE_KV;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (key[e] >= end) x[r][e] = -INF;
      }
      float unit[GROUPS], most = 0.f;
      load4(unit, (const char *)(units + r * GROUPS));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weight[r][e] = exp2_(x[r][e] - level[r]);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          scaled[r][e][g] = weight[r][e] * scale[e][g] * unit[g];
          most = fmaxf(most, fabsf(scaled[r][e][g]));
        }
      }
      over |= most > MOST_SCALED || fmaxf(weight[r][0], weight[r][1]) > MOST;
    }
    const bool rose = __any_sync(ALL, over);
    if (rose) {
#pragma unroll
      for (int r = 0; r < BLOCKS_8; ++r) {
        const float top = warps_most(fmaxf(x[r][0], x[r][1])), now = top > level[r] ? ceilf(top) : level[r],
                    by = exp2_(level[r] - now);
        level[r] = now;
        total[r] *= by;
#pragma unroll
        for (int e = 0; e < 2; ++e) weight[r][e] = exp2_(x[r][e] - now);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
          for (int e = 0; e < 2; ++e) scaled[r][e][g] = weight[r][e] * scale[e][g];
          const float before = inverse_power(units[r * GROUPS + g]) * by,
                      largest = warps_most(fmaxf(fabsf(scaled[r][0][g]), fabsf(scaled[r][1][g]))),
                      unit = inverse_power(fmaxf(before, power_below(largest)));
#pragma unroll
          for (int e = 0; e < 2; ++e) scaled[r][e][g] *= unit;
          __syncwarp();  // all lanes have read it
          if (lane == 0) {
            units[r * GROUPS + g] = unit;
            factors[r * GROUPS + g] = before * unit;
          }
        }
      }
    } else if (lane < BLOCKS_8 * GROUPS) {
      factors[lane] = 1.f;
    }
    __syncwarp();  // scores were read
#pragma unroll
    for (int r = 0; r < BLOCKS_8; ++r) {
      total[r] += weight[r][0] + weight[r][1];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
        *(u32 *)(memory + WEIGHTS_AT + (mine + r) * ROW_LINE + g * (TILE_KV * 2) + lane * 4) =
            pack<true>(scaled[r][0][g], scaled[r][1][g]);
    }
    return rose;
  }
  // By factors of rows and scales.
  __device__ __forceinline__ void multiply(float (&acc)[MY_TILES][BLOCKS_8][4], int at) const {
    const float *const factors = (const float *)(memory + at) + lane % 4 * 2 * GROUPS + warp / 2;
#pragma unroll
    for (int j = 0; j < BLOCKS_8; ++j) {
      const float by[2] = {factors[j * 8 * GROUPS], factors[(j * 8 + 1) * GROUPS]};
#pragma unroll
      for (int i = 0; i < MY_TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] *= by[e % 2];
    }
  }
  // Rows of a product are value columns: those of lane / 4 and the 8th behind it are neighbours.
  __device__ __forceinline__ void add_values(float (&acc)[MY_TILES][BLOCKS_8][4], int stage) const {
    const int place = lane / 8 % 2 * 8 + lane % 8,
              key = place % 2 ? second_key(place / 2) : first_key(place / 2);
    const u32 values = shared + stage * STAGE_BYTES + key * ROW_BYTES + warp * 64 + lane / 16 * 16,
              weights = shared + WEIGHTS_AT + lane % 8 * ROW_LINE + warp / 2 * (TILE_KV * 2) +
                        lane / 8 % 2 * 16 + lane / 16 * (BLOCKS_8 == 2 ? 8 * ROW_LINE : 32);
    u32 b[4];
#pragma unroll
    for (int k = 0; k < TILE_KV / 16; ++k) {
      if (BLOCKS_8 == 2 || k % 2 == 0) ldmatrix_x4(b, weights + k * 32);  // of 8 rows for two k
#pragma unroll
      for (int i = 0; i < MY_TILES; i += 2) {
        u32 raw[4], a[4];
        ldmatrix_x4_trans(raw, values + k * 16 * ROW_BYTES + i * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // two columns of two keys: as pairs of keys
          unpack_fp8<false>(__byte_perm(raw[h * 2], 0, 0x3120), a[0], a[1]);
          unpack_fp8<false>(__byte_perm(raw[h * 2 + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
          for (int j = 0; j < BLOCKS_8; ++j) {
            const int n = BLOCKS_8 == 2 ? j * 2 : k % 2 * 2;
            mma<true>(acc[i + h][j], a, b[n], b[n + 1]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void finish(const Segment &s, int group, int row_tile,
                                         float (&acc)[MY_TILES][BLOCKS_8][4], const float (&level)[BLOCKS_8],
                                         float (&total)[BLOCKS_8]) const {
    float *const slot = CLUSTER > 1 ? (float *)memory : slot_of(p, group, s.slot, row_tile);
#pragma unroll
    for (int r = 0; r < BLOCKS_8; ++r) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) total[r] += __shfl_xor_sync(ALL, total[r], step);
      const int row = warp * BLOCKS_8 + r;
      if (lane < GROUPS) {
        float &unit = ((float *)(memory + UNITS_AT))[row * GROUPS + lane];
        unit = inverse_power(unit) * (s.whole ? 1.f / total[r] : 1.f);
      }
      if (lane == 0 && s.whole)
        store_lse(p, row_of(row_tile * ROWS + row, s.start, s.query_len, s.seq_len), level[r], total[r]);
    }
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // units are there, and no stage is read
    multiply(acc, UNITS_AT);
#pragma unroll
    for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Row row =
            row_of(row_tile * ROWS + j * 8 + lane % 4 * 2 + e, s.start, s.query_len, s.seq_len);
        char *const to =
            p.out + (row.token * p.o_token + row.head * p.o_head + warp * 64 + lane / 4 * 2) * 2;
#pragma unroll
        for (int i = 0; i < MY_TILES; ++i)
          if (s.whole && row.real)
            *(u32 *)(to + i * 32) = row.end > 0 ? pack<HALF>(acc[i][j][e], acc[i][j][e + 2]) : 0;
      }
    if (s.whole) return;
    if (lane == 0)
#pragma unroll
      for (int r = 0; r < BLOCKS_8; ++r)
        *(float2 *)(slot + UNITS * 512 + (warp * BLOCKS_8 + r) * 2) = float2{level[r], total[r]};
    // as latent_merge.cu has them: column n % 8 of 16 in lanes n % 8 * 4 ..., the eighth behind it there too
#pragma unroll
    for (int i = 0; i < MY_TILES; ++i)
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = lane / 4 * 2 + h;
          float *const to = slot + ((warp * BLOCKS_8 + j) * 128 + i * 32 + column % 8 * 4 + lane % 4) * 4;
          *(float2 *)(to + column / 8 * 2) = float2{acc[i][j][h * 2], acc[i][j][h * 2 + 1]};
        }
  }
  __device__ __forceinline__ void run(Walk walk, int group) const {
    int stage = 0, phase = 0;
    const int first_row = walk.row_tile * ROWS;
    Segment s;
    bool more = walk.next(s);
    wait_for_kernels_ahead();
    for (; more; more = walk.next(s)) {
      float acc[MY_TILES][BLOCKS_8][4] = {}, back[BLOCKS_8], level[BLOCKS_8], total[BLOCKS_8];
      load_queries(s, first_row, back);
#pragma unroll
      for (int r = 0; r < BLOCKS_8; ++r) {
        level[r] = FLOOR;
        total[r] = 0.f;
        back[r] *= p.scale;
      }
      for (int tile = s.first; tile < s.last; ++tile) {
        // arrive: the producer, with all bytes of the stage
        mbarrier_wait(shared + FULL_AT + stage * 8, phase);
        clear_tail(s, tile, stage);
        score(stage);
        barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // scores are there; weights of the step before were read
        if (tile == s.first) {
          if (lane < GROUPS)
#pragma unroll
            for (int r = 0; r < BLOCKS_8; ++r)
              ((float *)(memory + UNITS_AT))[(warp * BLOCKS_8 + r) * GROUPS + lane] = 0x1p100f;
          __syncwarp();
        }
        const bool rose = weigh(s, first_row, tile, stage, back, level, total);
        if (barrier_or<CONSUMER_THREADS>(ALL_CONSUMERS, rose)) multiply(acc, FACTORS_AT);
        // weights are there
        add_values(acc, stage);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + stage * 8);
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
      finish(s, group, walk.row_tile, acc, level, total);
    }
  }
};
