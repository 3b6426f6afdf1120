// The consumers of rows of fp8: one warpgroup. As latent_mainloop.cuh, but keys are numbers of e4m3 as float16,
// without their scales. Those of a key, one for each 128 columns, multiply the scores of these columns before
// they are added, and, over a power of two near the largest one so far, the weights of their values; a power
// of two that rises shrinks the sums, exactly. Queries of bfloat16 are float16 too, over a power of two for
// each row: of what is below 2^-24 of a row's largest number some bits are lost, of the rest none.
#pragma once

#include "latent_fp8.cuh"
#include "latent_fp8_products.cuh"
#include "latent_mainloop.cuh"

#if FP8
// The power of two at or below x, as far as it and its inverse are normal; and that inverse.
__device__ __forceinline__ float power_below(float x) {
  return __int_as_float(__float_as_int(fminf(fmaxf(x, 0x1p-100f), 0x1p100f)) & 0x7f800000);
}
__device__ __forceinline__ float inverse_power(float x) {
  return __int_as_float((254 << 23) - __float_as_int(x));
}

// Latents of the queries in shared memory, bfloat16, to float16 over a power of two, which goes to `back`.
__device__ __forceinline__ void scale_queries(char *queries, float *back, int warp, int lane) {
  for (int r = warp; r < ROWS; r += 4) {
    float most = 0.f;
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int chunk = n * 32 + lane;
      x[n] = *(const uint4 *)(queries + chunk / 8 * (ROWS * 128) + r * 128 + ((chunk ^ r) & 7) * 16);
      const u32 of[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        most = fmaxf(most, fmaxf(fabsf(to_float<false>((u16)of[i])), fabsf(to_float<false>((u16)(of[i] >> 16)))));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    const float power = power_below(most) * 0x1p-14f, by = inverse_power(power);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int chunk = n * 32 + lane;
      u32 of[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of[i] = pack<true>(to_float<false>((u16)of[i]) * by, to_float<false>((u16)(of[i] >> 16)) * by);
      *(uint4 *)(queries + chunk / 8 * (ROWS * 128) + r * 128 + ((chunk ^ r) & 7) * 16) =
          uint4{of[0], of[1], of[2], of[3]};
    }
    if (lane == 0) back[r] = power;
  }
}

// Scores of 64 keys without the softmax's scale; `scales`: of this lane's first key, the other one is 8 behind
// it; `back`: of its first row.
template <int J>
__device__ __forceinline__ void score_rows(float (&x)[J][4], u32 keys, u32 queries, const float *scales,
                                           const float *back) {
  constexpr int AT_ONCE = J > 2 ? 1 : SCALES;  // sums on their way, as registers allow
  clear(x);
#pragma unroll
  for (int first = 0; first < SCALES; first += AT_ONCE) {
    float d[AT_ONCE][J][4];
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g) clear(d[g]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int g = 0; g < AT_ONCE; ++g) {
        const int square = (first + g) * 2 + k / 4;
        half_product16<0>(d[g], operand(keys + square * 1024 + k % 4 * 32, GROUP_BYTES),
                          operand(queries + square * (ROWS * 128) + k % 4 * 32, 1024));
      }
      if (first == 0 && k % 2 == 0)  // rotated keys
        product16<0>(x, operand(keys + RANK / 64 * 1024 + k / 2 * 32, GROUP_BYTES),
                     operand(queries + RANK / 64 * (ROWS * 128) + k / 2 * 32, 1024));
    }
    wgmma_commit();
    float scale[2][AT_ONCE];
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h][g] = scales[h * 8 * SCALES + first + g];
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const float2 by = HALF ? float2{1.f, 1.f} : *(const float2 *)(back + j * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum = 0.f;
#pragma unroll
        for (int g = 0; g < AT_ONCE; ++g) sum += d[g][j][e] * scale[e / 2][g];
        x[j][e] += sum * (e % 2 ? by.y : by.x);
      }
    }
  }
}

__device__ __forceinline__ void consume_rows(const Params &p, char *memory, Walk walk, int group, int thread) {
  constexpr int J = BLOCKS_8;
  const u32 shared = shared_address(memory);
  const int warp = thread / 32, lane = thread % 32, row_tile = walk.row_tile;
  float *maxima = (float *)(memory + MAXIMA_AT), *state = (float *)(memory + STATE_AT);
  const u32 weights = shared + WEIGHTS_AT;
  int stage = 0, phase = 0;
  Segment s;
  while (walk.next(s)) {
    load_queries(p, memory + Q_AT, s, row_tile, thread);
    if constexpr (!HALF) {
      barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // all of each row
      scale_queries(memory + Q_AT, (float *)(memory + BACK_AT), warp, lane);
    }
    fence_async();
    float powers[SCALES];
#pragma unroll
    for (int g = 0; g < SCALES; ++g) powers[g] = power_below(0.f);
    float maximum[J][2], total[J][2];
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        maximum[j][e] = FLOOR;
        total[j][e] = 0.f;
      }
    // keys below are seen by all rows
    const int seen_by_all = row_of(row_tile * ROWS, s.start, s.query_len, s.seq_len).end;
    float acc[VALUE_TILES][J][4];
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // the queries are there

    for (int tile = s.first; tile < s.last; ++tile) {
      const u32 keys = shared + stage * STAGE_BYTES;
      // arrive: the producer, with all bytes of the stage
      mbarrier_wait(shared + FULL_AT + stage * 8, phase);
      const float *const scales =
          (const float *)(memory + SCALES_AT) + (stage * TILE_KV + warp * 16 + lane / 4) * SCALES;
      float ratio[SCALES];
#pragma unroll
      for (int g = 0; g < SCALES; ++g) {
        float top = powers[g];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          top = fmaxf(top, ((const float *)(memory + TOPS_AT))[(stage * 4 + w) * SCALES + g]);
        top = power_below(top);
        ratio[g] = powers[g] * inverse_power(top);
        powers[g] = top;
      }
      float x[J][4];
      score_rows<J>(x, keys, shared + Q_AT, scales, (const float *)(memory + BACK_AT) + lane % 4 * 2);

      const int key = tile * TILE_KV + warp * 16 + lane / 4;
      const bool all_seen = (tile + 1) * TILE_KV <= seen_by_all;
#pragma unroll
      for (int j = 0; j < J; ++j) {
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
      float shrink[J][2];
      bool rose = false;
#pragma unroll
      for (int j = 0; j < J; ++j) {
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
      }
      // a row's 64 weights are a line: of this warp, 16-byte columns 2 * warp and 2 * warp + 1
      const u32 line = weights + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
      for (int g = 0; g < SCALES; ++g) {
        const float by = inverse_power(powers[g]), by_low = scales[g] * by, by_high = scales[8 * SCALES + g] * by;
        rose |= ratio[g] != 1.f;
        u32 packed[J][2];
#pragma unroll
        for (int j = 0; j < J; ++j) {
          packed[j][0] = pack<true>(x[j][0] * by_low, x[j][1] * by_low);
          packed[j][1] = pack<true>(x[j][2] * by_high, x[j][3] * by_high);
        }
        if constexpr (J == 1) stmatrix_x2_trans(line + g * P_BYTES, packed[0][0], packed[0][1]);
        else
#pragma unroll
          for (int j = 0; j < J; j += 2)
            stmatrix_x4_trans(line + g * P_BYTES + (j + lane / 16) * 1024, packed[j][0], packed[j][1],
                              packed[j + 1][0], packed[j + 1][1]);
      }
      fence_async();
      barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // the weights are there
      if (__any_sync(ALL, rose)) {
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
          for (int j = 0; j < J; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] *= shrink[j][e % 2] * ratio[i / 2];
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILE_KV / 16; ++k)
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i)
          half_product16<1>(acc[i], operand(keys + i * 1024 + k * 2 * GROUP_BYTES, GROUP_BYTES),
                            operand(weights + i / 2 * P_BYTES + k * 32, 1024));
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + stage * 8);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }

#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] *= powers[i / 2];
    // sums of the rows over all warps, then known to all warps
#pragma unroll
    for (int j = 0; j < J; ++j) {
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
      for (int j = 0; j < J; ++j) {
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
      for (int j = 0; j < J; ++j) {
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
          store_turned(p, row, i * 64 + warp * 16, lane, y);
        }
      }
    } else {
      float *slot = slot_of(p, group, s.slot, row_tile);
      if (thread < ROWS)
        *(float2 *)(slot + UNITS * 512 + thread * 2) = *(const float2 *)(state + thread * 2);
#pragma unroll
      for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
        for (int j = 0; j < J; ++j)
          ((float4 *)slot)[(i * J + j) * 128 + thread] =
              float4{acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]};
    }
  }
}
#endif
