// The consumers, one warpgroup.
//
// A step: scores of 64 keys x ROWS rows; maxima of the rows over all warps, through shared memory; weights,
// as an operand in shared memory; the accumulator, RANK value columns x ROWS rows, shrunk where a maximum
// rose (which is exact), plus the transpose of the same 64 keys times the weights.
#pragma once

#include "latent_epilogue.cuh"
#include "latent_load.cuh"

constexpr int ALL_CONSUMERS = 1;  // a named barrier
constexpr int VALUE_TILES = RANK / 64;

// Queries of a tile of rows into shared memory, as the products read them; zeros behind the last row.
__device__ __forceinline__ void load_queries(const Params &p, char *to, const Segment &s, int row_tile,
                                             int thread) {
  const int warp = thread / 32, lane = thread % 32;  // a warp takes a row, a lane 16 bytes of four squares
#pragma unroll
  for (int r = warp; r < ROWS; r += CONSUMER_WARPS) {
    const Row row = row_of(row_tile * ROWS + r, s.start, s.query_len, s.seq_len);
    const char *from = p.q + (row.real ? (row.token * p.q_token + row.head * p.q_head) * 2 + lane * 16 : 0);
    const u32 begin = shared_address(to) + lane / 8 * (ROWS * 128) + r * 128 + ((lane ^ r) & 7) * 16;
#pragma unroll
    for (int square = 0; square < SQUARES; square += 4)
      if (square + lane / 8 < SQUARES)
        cp_async_or_zero(begin + square * (ROWS * 128), from + (row.real ? square * 128 : 0), row.real);
  }
  cp_async_commit();
  cp_async_wait<0>();
}

__device__ __forceinline__ void consume(const Params &p, char *memory, Walk walk, int group, int thread) {
  const u32 shared = shared_address(memory);
  const int warp = thread / 32, lane = thread % 32, row_tile = walk.row_tile;
  float *maxima = (float *)(memory + MAXIMA_AT), *state = (float *)(memory + STATE_AT);
  const u32 weights = shared + P_AT;
  int stage = 0, phase = 0;
  Segment s;
  bool more = walk.next(s);
  wait_for_kernels_ahead();
  for (; more; more = walk.next(s)) {
    load_queries(p, memory + Q_AT, s, row_tile, thread);
    fence_async();
    float maximum[BLOCKS_8][2], total[BLOCKS_8][2];
#pragma unroll
    for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        maximum[j][e] = FLOOR;
        total[j][e] = 0.f;
      }
    // keys below are seen by all rows
    const int seen_by_all = row_of(row_tile * ROWS, s.start, s.query_len, s.seq_len).end;
    float acc[VALUE_TILES][BLOCKS_8][4];
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // the queries are there

    for (int tile = s.first; tile < s.last; ++tile) {
      const u32 keys = shared + stage * TILE_BYTES;
      // arrive: the producer, with all bytes of the stage
      mbarrier_wait(shared + FULL_AT + stage * 8, phase);
      // behind the last key may stand anything, and 0 * NaN is NaN
      if (s.seq_len - tile * TILE_KV < TILE_KV) {
        const int real = s.seq_len - tile * TILE_KV;
        for (int i = real * SQUARES * 8 + thread; i < TILE_KV * SQUARES * 8; i += CONSUMER_THREADS) {
          const int key = i / (SQUARES * 8), in = i - key * (SQUARES * 8);
          *(uint4 *)(memory + stage * TILE_BYTES + key / 8 * GROUP_BYTES + in / 8 * 1024 + key % 8 * 128 +
                     in % 8 * 16) = uint4{0, 0, 0, 0};
        }
        fence_async();
        barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
      }
      float x[BLOCKS_8][4];
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[j][e] = 0.f;
      const u32 queries = shared + Q_AT;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < WIDTH / 16; ++k)
        product16<0>(x, operand(keys + k / 4 * 1024 + k % 4 * 32, GROUP_BYTES),
                     operand(queries + k / 4 * (ROWS * 128) + k % 4 * 32, 1024));
      wgmma_commit();
      wgmma_wait<0>();

      const int key = tile * TILE_KV + warp * 16 + lane / 4;
      const bool all_seen = (tile + 1) * TILE_KV <= seen_by_all;
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j) {
        float2 top;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[j][e] *= p.scale;
          x[j][e + 2] *= p.scale;
          if (!all_seen) {
            const int r = row_tile * ROWS + j * 8 + lane % 4 * 2 + e,
                      end = row_of(r, s.start, s.query_len, s.seq_len).end;
            if (key >= end) x[j][e] = -INF;
            if (key + 8 >= end) x[j][e + 2] = -INF;
          }
          float most = fmaxf(x[j][e], x[j][e + 2]);
#pragma unroll
          for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
          (e ? top.y : top.x) = most;
        }
        if (lane < 4) *(float2 *)(maxima + warp * ROWS + j * 8 + lane * 2) = top;
      }
      // all: products with the weights of the step before have ended, too
      barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
      float shrink[BLOCKS_8][2];
      bool rose = false;
      u32 packed[BLOCKS_8][2];
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j) {
        float top[2] = {maximum[j][0], maximum[j][1]};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 of_warp = *(const float2 *)(maxima + w * ROWS + j * 8 + lane % 4 * 2);
          top[0] = fmaxf(top[0], of_warp.x);
          top[1] = fmaxf(top[1], of_warp.y);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float factor = exp2_(maximum[j][e] - top[e]);
          maximum[j][e] = top[e];
          x[j][e] = exp2_(x[j][e] - top[e]);
          x[j][e + 2] = exp2_(x[j][e + 2] - top[e]);
          total[j][e] = total[j][e] * factor + (x[j][e] + x[j][e + 2]);
          shrink[j][e] = factor;
          rose |= factor != 1.f;
        }
        packed[j][0] = pack<HALF>(x[j][0], x[j][1]);
        packed[j][1] = pack<HALF>(x[j][2], x[j][3]);
      }
      // a row's 64 weights are a line: of this warp, 16-byte columns 2 * warp and 2 * warp + 1
      const u32 line = weights + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
      if constexpr (BLOCKS_8 == 1) stmatrix_x2_trans(line, packed[0][0], packed[0][1]);
      else
#pragma unroll
        for (int j = 0; j < BLOCKS_8; j += 2)
          stmatrix_x4_trans(line + (j + lane / 16) * 1024, packed[j][0], packed[j][1], packed[j + 1][0],
                            packed[j + 1][1]);
      fence_async();
      barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // the weights are there
      if (__any_sync(ALL, rose)) {
#pragma unroll
        for (int j = 0; j < BLOCKS_8; ++j) {
#pragma unroll
          for (int i = 0; i < VALUE_TILES; ++i) {
            acc[i][j][0] *= shrink[j][0];
            acc[i][j][1] *= shrink[j][1];
            acc[i][j][2] *= shrink[j][0];
            acc[i][j][3] *= shrink[j][1];
          }
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILE_KV / 16; ++k)
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i)
          product16<1>(acc[i], operand(keys + i * 1024 + k * 2 * GROUP_BYTES, GROUP_BYTES),
                       operand(weights + k * 32, 1024));
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + stage * 8);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }

    // sums of the rows over all warps, then known to all warps
#pragma unroll
    for (int j = 0; j < BLOCKS_8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          total[j][e] += __shfl_xor_sync(ALL, total[j][e], step);
      if (lane < 4)
        *(float2 *)(maxima + warp * ROWS + j * 8 + lane * 2) = float2{total[j][0], total[j][1]};
    }
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
    if (thread < 4)
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j) {
        float2 sum = {0.f, 0.f};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 of_warp = *(const float2 *)(maxima + w * ROWS + j * 8 + lane * 2);
          sum.x += of_warp.x;
          sum.y += of_warp.y;
        }
        *(float4 *)(state + (j * 8 + lane * 2) * 2) =
            float4{maximum[j][0], sum.x, maximum[j][1], sum.y};
      }
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);
    if (s.whole) {
      if (LSE && thread < ROWS)
        store_lse(p, row_of(row_tile * ROWS + thread, s.start, s.query_len, s.seq_len), state[thread * 2],
                  state[thread * 2 + 1]);
#pragma unroll
      for (int j = 0; j < BLOCKS_8; ++j) {
        float factor[2];
        bool sees[2];
        const Row row = row_of(row_tile * ROWS + j * 8 + lane / 4, s.start, s.query_len, s.seq_len);
        const float4 both = *(const float4 *)(state + (j * 8 + lane % 4 * 2) * 2);
        factor[0] = 1.f / both.y;
        factor[1] = 1.f / both.w;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          sees[e] =
              row_of(row_tile * ROWS + j * 8 + lane % 4 * 2 + e, s.start, s.query_len, s.seq_len).end > 0;
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i) {
          float y[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) y[e] = sees[e % 2] ? acc[i][j][e] * factor[e % 2] : 0.f;
          store_turned(p, row, (i) * 64 + warp * 16, lane, y);
        }
      }
    } else {
      // of a cluster: where the keys were
      float *slot = CLUSTER > 1 ? (float *)memory : slot_of(p, group, s.slot, row_tile);
      if (thread < ROWS)
        *(float2 *)(slot + UNITS * 512 + thread * 2) = *(const float2 *)(state + thread * 2);
#pragma unroll
      for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
        for (int j = 0; j < BLOCKS_8; ++j)
          ((float4 *)slot)[((i) * BLOCKS_8 + j) * 128 + thread] =
              float4{acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]};
    }
  }
}
