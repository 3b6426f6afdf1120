// The parts of a token's keys put together: each CTA of the cluster takes a share of the columns.
#pragma once

#include "selected_tile.cuh"

__device__ __forceinline__ float4 load_of(const void *mine, int cta) {  // of a CTA of the cluster
#if CLUSTER > 1
  return ld_cluster_float4(mapa(mine, cta));
#else
  return *(const float4 *)mine;
#endif
}

// Sums and softmax states of this CTA into its shared memory, in place of the stages.
__device__ __forceinline__ void leave_part(char *memory, const Softmax &s,
                                           const float (&acc)[M_TILES][PAIRS * 2][4], int tiles, int warp,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < MY_ROWS; ++i) {
    float total = s.total[i];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(ALL, total, step);
    if (lane == 0)
      ((float4 *)(memory + STATE_AT))[warp * MY_ROWS + i] =
          float4{s.maximum[i], total, tiles > 0 ? 1.f : 0.f, 0.f};
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
  float *factors = (float *)(memory + FACTOR_AT);
  meet_cluster<CLUSTER>();  // all parts are left
  if (thread < ROWS) {
    float4 state[CLUSTER];
    float top = FLOOR, total = 0.f, seen = 0.f;
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta) {
      state[cta] = load_of(memory + STATE_AT + thread * 16, cta);
      top = fmaxf(top, state[cta].x);
      seen += state[cta].z;
    }
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta) {
      state[cta].x = exp2_(state[cta].x - top);
      total += state[cta].x * state[cta].y;
    }
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta)
      factors[cta * ROWS + thread] = seen > 0.f ? state[cta].x / total : 0.f;
    const int head = head_tile * ROWS + thread;
    if (LSE && rank == 0 && head < NUM_HEADS)
      p.lse[token * p.l_token + head * p.l_head] = seen > 0.f ? (top + log2_(total)) * LN2 : -INF;
  }
  __syncthreads();
  for (int i = thread; i < ROWS * LINE; i += THREADS) {
    const int r = i / LINE, column = (rank * LINE + i % LINE) * 4, head = head_tile * ROWS + r;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int cta = 0; cta < CLUSTER; ++cta) {
      const float4 x = load_of(memory + (r * O_LINE + column) * 4, cta);
      const float factor = factors[cta * ROWS + r];
      sum.x += x.x * factor;
      sum.y += x.y * factor;
      sum.z += x.z * factor;
      sum.w += x.w * factor;
    }
    if (head < NUM_HEADS)
      *(uint2 *)(p.out + (token * p.o_token + head * p.o_head + column) * 2) =
          uint2{pack<HALF>(sum.x, sum.y), pack<HALF>(sum.z, sum.w)};
  }
  meet_cluster<CLUSTER>();  // no CTA leaves while others read its part
}
