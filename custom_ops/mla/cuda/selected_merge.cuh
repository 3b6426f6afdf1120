// The parts of a token's keys put together: each CTA of the cluster takes a share of the columns.
#pragma once

#include "selected_tile.cuh"

// Of CTAs of the cluster, all asked for at once.
__device__ __forceinline__ void load_parts(float2 (&states)[CLUSTER], const void *state,
                                           float4 (&sums)[CLUSTER], const void *sum) {
#if CLUSTER > 1
#pragma unroll
  for (int cta = 0; cta < CLUSTER; ++cta) states[cta] = ld_cluster_float2(mapa(state, cta));
#pragma unroll
  for (int cta = 0; cta < CLUSTER; ++cta) sums[cta] = ld_cluster_float4(mapa(sum, cta));
#else
  states[0] = *(const float2 *)state;
  sums[0] = *(const float4 *)sum;
#endif
}

// Sums and softmax states of this CTA into its shared memory, in place of the stages.
__device__ __forceinline__ void leave_part(char *memory, const Softmax &s,
                                           const float (&acc)[M_TILES][PAIRS * 2][4], int tiles, int warp,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < Softmax::TURNS; ++i) {
    float total = s.total[i];
#pragma unroll
    for (int step = 1; step < Softmax::LANES; step *= 2) total += __shfl_xor_sync(ALL, total, step);
    if (lane % Softmax::LANES == 0)
      ((float2 *)(memory + STATE_AT))[Softmax::row(i, warp, lane)] =
          float2{s.maximum[i], tiles > 0 ? total : -1.f};
  }
  float *sums = (float *)memory + lane / 4 * O_LINE + warp * (RANK / WARPS) + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < PAIRS * 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        *(float2 *)(sums + (m * 16 + e / 2 * 8) * O_LINE + n * 8) = float2{acc[m][n][e], acc[m][n][e + 1]};
}

__device__ __forceinline__ void store_merged(const Params &p, char *memory, int token, int head_tile,
                                             int rank, int thread) {
  constexpr int LINE = RANK / CLUSTER / 4;  // groups of 4 columns of this CTA's share
  meet_cluster<CLUSTER>();                  // all parts are left
#pragma unroll 1
  for (int i = thread; i < ROWS * LINE; i += THREADS) {
    const int r = i / LINE, column = (rank * LINE + i % LINE) * 4, head = head_tile * ROWS + r;
    float2 states[CLUSTER];
    float4 sums[CLUSTER];
    load_parts(states, memory + STATE_AT + r * 8, sums, memory + (r * O_LINE + column) * 4);
    float top = FLOOR, total = 0.f;
    bool seen = false;
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta) {
      top = fmaxf(top, states[cta].x);
      seen = seen || !(states[cta].y < 0.f);
    }
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta) {
      const float factor = states[cta].y < 0.f ? 0.f : exp2_(states[cta].x - top);
      total += factor * states[cta].y;
      sum.x += sums[cta].x * factor;
      sum.y += sums[cta].y * factor;
      sum.z += sums[cta].z * factor;
      sum.w += sums[cta].w * factor;
    }
    const float by = seen ? 1.f / total : 0.f;
    if (head < NUM_HEADS) {
      *(uint2 *)(p.out + (token * p.o_token + head * p.o_head + column) * 2) =
          uint2{pack<HALF>(sum.x * by, sum.y * by), pack<HALF>(sum.z * by, sum.w * by)};
      if (LSE && column == 0)
        p.lse[token * p.l_token + head * p.l_head] = seen ? (top + log2_(total)) * LN2 : -INF;
    }
  }
  if constexpr (CLUSTER > 1) meet_cluster<CLUSTER>();  // no CTA leaves while others read its part
}
