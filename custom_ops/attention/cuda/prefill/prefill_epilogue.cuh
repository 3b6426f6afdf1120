// The end of a tile of prefill: a thread's two rows are weighed and stored, with the sink's share and the
// LSE.
#pragma once

#include "prefill_params.cuh"

// Word `lane % 4` of four lanes' blocks of columns for word 0..3 of this lane's block: afterwards the lane
// holds 16 contiguous bytes.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = lane & step;
      const u32 got = __shfl_xor_sync(ALL, upper ? w[i] : w[i + step], step);
      if (upper) w[i] = got;
      else w[i + step] = got;
    }
}

// Whether a lane has columns of a head in the four blocks from `block` on: the last blocks may be two.
__device__ __forceinline__ bool has_columns(int block, int lane) {
  return DIM_V % 32 == 0 || (block + lane % 4) * 8 < DIM_V;
}

// As store_rows below, which gives the weights, the rows that see keys and those that are written. Both rows'
// pairs of columns are transposed at once.
template <int N>
__device__ __forceinline__ void store_fp8(const Params &p, const float (&acc)[N * 4],
                                          const float (&weight)[2], const bool (&sees)[2],
                                          const bool (&written)[2], char *const (&at)[2], int lane,
                                          int block) {
  const float inverse = inverse_of(load_l2(p.output_scale));
  const auto number = [&](int i, int r) { return sees[r] ? acc[i] * weight[r] * inverse : 0.f; };
  if constexpr (Q_FP8) {  // four columns side by side of two blocks (prefill_fp8.cuh)
#pragma unroll
    for (int n = 0; n < N; n += 2)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int a = n * 4 + r * 2, b = a + 4;
        const u32 packed = pack_e4m3(number(a, r), number(b, r), number(a + 1, r), number(b + 1, r));
        if (written[r]) *(u32 *)(at[r] + (block + n) * 8 - lane % 4 * 4) = packed;
      }
  } else {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int a = (n + i) * 4;
        w[i] = 0;
        if (n + i < N) w[i] = pack_e4m3(number(a, 0), number(a + 1, 0), number(a + 2, 1), number(a + 3, 1));
      }
      transpose_quad(w, lane);
      const uint2 packed[2] = {make_uint2(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410)),
                               make_uint2(__byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632))};
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (written[r] && has_columns(block + n, lane)) *(uint2 *)(at[r] + (block + n) * 8) = packed[r];
    }
  }
}

// N blocks of 8 columns from block `block` on, of rows `first` and `first` + 8 of a tile. `tops`: maxima in
// base 2; `totals`: of this thread's columns; `acc`: as the second product leaves it (struct
// Softmax). Block 0 brings the LSE along.
template <int N>
__device__ __forceinline__ void store_rows(const Params &p, const QueryTile &tile, int first, int lane,
                                           const float (&tops)[2], const float (&totals)[2],
                                           const float (&acc)[N * 4], int block) {
  float weight[2];
  int token[2];
  // the sum does not tell: it is NaN where a score was NaN or +inf, and 0 where all were -inf, which makes 0
  // / 0
  bool sees[2];
  char *at[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = totals[r];
    total += __shfl_xor_sync(ALL, total, 1);
    total += __shfl_xor_sync(ALL, total, 2);
    const int row = first + r * 8;
    token[r] = row < TILE_TOKENS * GROUP ? tile.index * TILE_TOKENS + row / GROUP : tile.query_len;
    const i64 line = tile.start + token[r], head = tile.head * GROUP + row % GROUP;
    const int position = tile.seq_len - tile.query_len + token[r];
    sees[r] = end_key(position, tile.seq_len) > first_key(position);
    float top = tops[r];
    float mine = 1.f;
    if constexpr (SINKS) {
      if (sees[r]) {
        const float sink = to_float<HALF>(p.sinks[head]) * LOG2E;
        top = fmaxf(tops[r], sink);
        mine = exp2_(tops[r] - top);
        total = fmaf(total, mine, exp2_(sink - top));
      }
    }
    weight[r] = mine / total;
    if constexpr (SCALES) weight[r] *= load_l2(p.v_scale + tile.head * p.vs_head);
    at[r] = p.out + (line * p.o_token + head * p.o_head + lane % 4 * 8) * OUT_BYTES;
    if (LSE && block == 0 && token[r] < tile.query_len && lane % 4 == 0)
      p.lse[line * p.l_token + head * p.l_head] = sees[r] ? (top + log2_(total)) * LN2 : -INF;
  }
  if constexpr (FP8_RESULTS) {
    store_fp8<N>(p, acc, weight, sees, {token[0] < tile.query_len, token[1] < tile.query_len}, at, lane,
                 block);
  } else if constexpr (Q_FP8) {  // four columns side by side of two blocks (prefill_fp8.cuh)
#pragma unroll
    for (int n = 0; n < N; n += 2)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float *a = acc + n * 4 + r * 2, *b = a + 4;
        const float w = weight[r];
        const u32 low = sees[r] ? pack<HALF>(a[0] * w, b[0] * w) : 0,
                  high = sees[r] ? pack<HALF>(a[1] * w, b[1] * w) : 0;
        if (token[r] < tile.query_len)
          *(uint2 *)(at[r] + (block + n) * 16 - lane % 4 * 8) = make_uint2(low, high);
      }
  } else {
#pragma unroll
    for (int n = 0; n < N; n += 4)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float *pair = acc + (n + i) * 4 + r * 2;
          w[i] = n + i < N && sees[r] ? pack<HALF>(pair[0] * weight[r], pair[1] * weight[r]) : 0;
        }
        transpose_quad(w, lane);
        if (token[r] < tile.query_len && has_columns(block + n, lane))
          *(uint4 *)(at[r] + (block + n) * 16) = make_uint4(w[0], w[1], w[2], w[3]);
      }
  }
}

// What prefill_merge.cu puts together: nothing is weighed or summed over threads yet.
__device__ __forceinline__ void store_partial(const Params &p, const float (&tops)[2],
                                              const float (&totals)[2], const float (&acc)[DIM_V / 2],
                                              int partial) {
  float4 *to = partial_of(p, partial) + threadIdx.x - 128;
#pragma unroll
  for (int n = 0; n < DIM_V / 8; ++n)
    to[n * CONSUMER_THREADS] = make_float4(acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]);
  to[DIM_V / 8 * CONSUMER_THREADS] = make_float4(tops[0], tops[1], totals[0], totals[1]);
}
