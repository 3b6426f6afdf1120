// What the linear kernels share: arguments, and the sums on their way from shared memory to out.
//
// A CTA's sums lie there as K_WARPS parts [token][row] of pitch PITCH; those of a cluster's CTAs are parts too. They are added in a fixed order.
#pragma once

#include "machine.cuh"

struct Params {
  const char *x, *weight, *bias, *residual, *norm_weight;
  char *out;
  i64 x_token, residual_token, out_token;  // strides, in numbers
  float eps, offset;
  int tokens, unused;
};

constexpr bool GATED = ACTIVATION != 0;
constexpr int TOKENS = NT * 8, PITCH = ROWS + 4;          // PITCH: of a token's sums in shared memory, no bank conflicts
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;         // columns of out per tile; GATED: as many gate rows, then as many up rows
constexpr int OUT_WIDTH = GATED ? OUT_FEATURES / 2 : OUT_FEATURES;
constexpr bool EDGE_N = OUT_WIDTH % OUT_ROWS != 0;
constexpr int SPREAD = 16;                                // neighbouring elements that one CTA of a cluster finishes
constexpr int CHUNKS = (IN_FEATURES + 63) / 64;
constexpr int LINE = 128;                                 // bytes of a chunk's 64 numbers
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// `real` of four numbers; the others 0.
__device__ __forceinline__ void load_four(float (&to)[4], const char *p, int real) {
#if ALIGNED
  u32 x, y;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "l"(p) : "memory");
  to[0] = to_float((u16)x); to[1] = to_float((u16)(x >> 16)); to[2] = to_float((u16)y); to[3] = to_float((u16)(y >> 16));
#else
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u16 x = 0;
    if (j < real) asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(p + j * 2) : "memory");
    to[j] = to_float(x);
  }
#endif
}
// Four sums of a part: of warp group `group` of CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_part(const float *at, int rank) {
#if CLUSTER > 1
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(in_cta(at, rank)) : "memory");
  return x;
#else
  return *(const float4 *)at;
#endif
}
__device__ __forceinline__ float load_square(const float *at, int rank) {
#if CLUSTER > 1
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(in_cta(at, rank)) : "memory");
  return x;
#else
  return *at;
#endif
}
__device__ __forceinline__ float4 sum_parts(const float *at) {
  constexpr int PARTS = CLUSTER * K_WARPS, AHEAD = PARTS < 8 ? PARTS : 8;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int begin = 0; begin < PARTS; begin += AHEAD) {
    float4 parts[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) parts[i] = load_part(at + (begin + i) % K_WARPS * TOKENS * PITCH, (begin + i) / K_WARPS);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) { sum.x += parts[i].x; sum.y += parts[i].y; sum.z += parts[i].z; sum.w += parts[i].w; }
  }
  return sum;
}
__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1
  return x / (1.f + exp2_(-x * LOG2E));
#elif ACTIVATION == 2
  return 0.5f * x * (1.f + tanh_(0.7978845608028654f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 3
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
#else
  return x;
#endif
}

// Add the parts, apply norm, bias, activation and residual, store. All threads; the parts are in place when the first call is made.
__device__ __forceinline__ void finish(const Params &p, const float *parts, [[maybe_unused]] const float (*squares)[TOKENS], int tile, int rank) {
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
  // The CTAs of a cluster share out the elements, four columns of a token at a time.
  for (int j = threadIdx.x;; j += THREADS) {
    const int e = (j / SPREAD * CLUSTER + rank) * SPREAD + j % SPREAD;
    if (e >= p.tokens * (OUT_ROWS / 4)) break;
    const int token = e / (OUT_ROWS / 4), row = e % (OUT_ROWS / 4) * 4, n = tile * OUT_ROWS + row;
    if (EDGE_N && n >= OUT_WIDTH) continue;
    [[maybe_unused]] const int real = EDGE_N ? min(4, OUT_WIDTH - n) : 4;
    [[maybe_unused]] float residual[4], bias[4], up_bias[4];
#if RESIDUAL
    load_four(residual, p.residual + (token * p.residual_token + n) * 2, real);
#endif
#if BIAS
    load_four(bias, p.bias + n * 2, real);
    if (GATED) load_four(up_bias, p.bias + (OUT_WIDTH + n) * 2, real);
#endif
    const float *at = parts + token * PITCH + row;
    float4 gate = sum_parts(at), up = gate;
    if (GATED) up = sum_parts(at + OUT_ROWS);
    float y[4] = {gate.x, gate.y, gate.z, gate.w}, z[4] = {up.x, up.y, up.z, up.w}, factor = 1.f;
#if NORM
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < CLUSTER * K_WARPS; ++i) total += load_square(&squares[i % K_WARPS][token], i / K_WARPS);
    factor = rsqrtf(total / IN_FEATURES + p.eps);
#endif
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      y[c] *= factor;
      z[c] *= factor;
#if BIAS
      y[c] += bias[c];
      z[c] += GATED ? up_bias[c] : 0.f;
#endif
      if (GATED) y[c] = activate(y[c]) * z[c];
#if RESIDUAL
      y[c] += residual[c];
#endif
    }
    char *out = p.out + (token * p.out_token + n) * 2;
#if ALIGNED
    *(uint2 *)out = make_uint2(pack_out(y[0], y[1]), pack_out(y[2], y[3]));
#else
    for (int c = 0; c < real; ++c) *(u16 *)(out + c * 2) = (u16)pack_out(y[c], 0.f);
#endif
  }
#if CLUSTER > 1
  cluster_arrive();  // nobody's shared memory goes before all have read it
  cluster_wait();
#endif
}
