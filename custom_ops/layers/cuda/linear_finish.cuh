// linear.cu's sums on their way from shared memory to out.
//
// A CTA's sums lie there as K_WARPS parts [token][row] of pitch PITCH; those of a cluster's CTAs are parts
// too. They are added in a fixed order.
#pragma once

#include "linear_params.cuh"

constexpr int PITCH = ROWS + 4;  // of a token's sums in shared memory, no bank conflicts
constexpr int SPREAD = 16;       // neighbouring elements that one CTA of a cluster finishes

// `real` of four numbers; the others 0.
__device__ __forceinline__ void load_four(float (&to)[4], const char *p, int real) {
  if constexpr (ALIGNED) {
    u32 x, y;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "l"(p) : "memory");
    to[0] = to_float<HALF>((u16)x); to[1] = to_float<HALF>((u16)(x >> 16));
    to[2] = to_float<HALF>((u16)y); to[3] = to_float<HALF>((u16)(y >> 16));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u16 x = 0;
      if (j < real) asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(p + j * 2) : "memory");
      to[j] = to_float<HALF>(x);
    }
  }
}
// `real` of four of the scale's numbers; the others 0.
__device__ __forceinline__ void load_scale(float (&to)[4], const float *p, int real) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    if constexpr (ALIGNED) {
      const float2 x = *(const float2 *)(p + j);
      to[j] = x.x; to[j + 1] = x.y;
    } else {
      to[j] = j < real ? p[j] : 0.f;
      to[j + 1] = j + 1 < real ? p[j + 1] : 0.f;
    }
  }
}
// Four sums of a part: of warp group `group` of CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_part(const float *at, int rank) {
  if constexpr (CLUSTER == 1) return *(const float4 *)at;
  return ld_cluster_float4(mapa(at, rank));
}
__device__ __forceinline__ float load_square(const float *at, int rank) {
  if constexpr (CLUSTER == 1) return *at;
  return ld_cluster_float(mapa(at, rank));
}
// The CTAs of a cluster share out a tile's elements, four columns of a token at a time. A thread asks for
// BATCH elements before it adds any up.
constexpr int PARTS = CLUSTER * K_WARPS, HALVES = GATED ? 2 : 1,
              ROUNDS = (TOKENS * OUT_ROWS / 4 + THREADS * CLUSTER - 1) / (THREADS * CLUSTER);
// Loads of four sums each that are on their way: fewer where a thread has 64 registers in all.
constexpr int FLIGHT = THREADS * CTAS_PER_SM < 1024 ? 16 : 8 / HALVES;
constexpr int MOST_AHEAD = FLIGHT / HALVES < 8 ? FLIGHT / HALVES : 8;
constexpr int AHEAD = PARTS < MOST_AHEAD ? PARTS : MOST_AHEAD, ROOM = FLIGHT / (AHEAD * HALVES),
              BATCH = ROUNDS < ROOM ? ROUNDS : ROOM;

// Which elements a thread finishes in a batch, and what is added to their sums or multiplies them.
struct Addends {
  int tokens[BATCH], rows[BATCH];
  bool mine[BATCH];
  float residual[BATCH][4], bias[BATCH][HALVES][4], scales[BATCH][HALVES][4];

  __device__ __forceinline__ void load(const Params &p, int tile, int rank, int round) {
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int j = (round + u) * THREADS + threadIdx.x,
                e = (j / SPREAD * CLUSTER + rank) * SPREAD + j % SPREAD;
      tokens[u] = e / (OUT_ROWS / 4);
      rows[u] = e % (OUT_ROWS / 4) * 4;
      [[maybe_unused]] const int n = tile * OUT_ROWS + rows[u], real = OUT_WIDTH - n;
      mine[u] = tokens[u] < p.tokens && (!EDGE_N || real > 0);
      if (!mine[u]) continue;
      if constexpr (RESIDUAL)
        load_four(residual[u], p.residual + (tokens[u] * p.residual_token + n) * 2, real);
      if constexpr (BIAS)
        for (int h = 0; h < HALVES; ++h) load_four(bias[u][h], p.bias + (h * OUT_WIDTH + n) * 2, real);
      if constexpr (SCALED)
        for (int h = 0; h < HALVES; ++h)
          load_scale(scales[u][h], (const float *)p.scale + h * OUT_WIDTH + n, real);
    }
  }
};
// Whether a thread has one batch, whose addends come while products are made.
constexpr bool ADDENDS_FIRST = ROUNDS <= BATCH;

// Add the parts, apply norm, bias, scale, activation and residual, store. All threads; the parts are in place
// when the first call is made. `addends`: of the first batch, if ADDENDS_FIRST.
__device__ __forceinline__ void store_output(const Params &p, const float *parts,
                                             [[maybe_unused]] const float (*squares)[TOKENS], int tile,
                                             int rank, Addends &addends) {
  // every thread of every CTA comes here and to the end of this function, whatever tokens and rows it has
  meet_cluster<CLUSTER>();
  const auto &[tokens, rows, mine, residual, bias, scales] = addends;
  for (int round = 0; round < ROUNDS; round += BATCH) {
    if constexpr (!ADDENDS_FIRST) addends.load(p, tile, rank, round);
    float4 sums[BATCH][HALVES] = {}, got[BATCH][HALVES][AHEAD];
    [[maybe_unused]] float squared[BATCH] = {};
#pragma unroll
    for (int begin = 0; begin < PARTS; begin += AHEAD) {
#pragma unroll
      for (int u = 0; u < BATCH; ++u)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
          for (int i = 0; i < AHEAD; ++i)
            if (mine[u]) {
              const float *group = parts + (begin + i) % K_WARPS * TOKENS * PITCH;
              got[u][h][i] =
                  load_part(group + tokens[u] * PITCH + rows[u] + h * OUT_ROWS, (begin + i) / K_WARPS);
            }
      if constexpr (NORM) {
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
#pragma unroll
          for (int i = 0; i < AHEAD; ++i)
            if (mine[u])
              squared[u] += load_square(&squares[(begin + i) % K_WARPS][tokens[u]], (begin + i) / K_WARPS);
      }
#pragma unroll
      for (int u = 0; u < BATCH; ++u)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            const float4 x = got[u][h][i];
            float4 &sum = sums[u][h];
            sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
          }
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      if (!mine[u]) continue;
      const float4 gate = sums[u][0], up = sums[u][HALVES - 1];
      float y[4] = {gate.x, gate.y, gate.z, gate.w}, z[4] = {up.x, up.y, up.z, up.w}, factor = 1.f;
      if constexpr (NORM) factor = rsqrtf(squared[u] / IN_FEATURES + p.eps);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        y[c] *= factor;
        z[c] *= factor;
        if constexpr (BIAS) {
          y[c] += bias[u][0][c];
          z[c] += bias[u][HALVES - 1][c];
        }
        if constexpr (SCALED) {
          y[c] *= scales[u][0][c];
          z[c] *= scales[u][HALVES - 1][c];
        }
        if (GATED) y[c] = activate<ACTIVATION>(y[c]) * z[c];
        if constexpr (RESIDUAL) y[c] += residual[u][c];
      }
      const int n = tile * OUT_ROWS + rows[u];
      char *out = p.out + (tokens[u] * p.out_token + n) * 2;
      if constexpr (ALIGNED) {
        *(uint2 *)out = make_uint2(pack<HALF>(y[0], y[1]), pack<HALF>(y[2], y[3]));
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (n + c < OUT_WIDTH) *(u16 *)(out + c * 2) = (u16)pack<HALF>(y[c], 0.f);
      }
    }
  }
  if constexpr (CLUSTER > 1) meet_cluster<CLUSTER>();  // no CTA's shared memory goes before all have read it
}
