// out = x' @ weight.T for a handful of tokens: weights stream from memory once, as fast as it gives them.
//
// The dots are transposed: weight rows are the 16 rows of mma.m16n8k16, tokens its 8 columns. A CTA owns ROWS weight rows and a share of K; the
// shares of a tile are the CTAs of a cluster. Inside a CTA the chunks of 64 k go round the groups of warps, each with a ring of STAGES chunks of its own
// (cp.async), so that no barrier of the whole CTA stands in the loop. The parts meet once, in (distributed) shared memory, in a fixed order.
//
// Weights are constants: with programmatic dependent launch the ring is filled before griddepcontrol.wait; only x and the residual wait for
// the kernels before. So a chain of these kernels hardly stops reading weights.
//
// WGMMA: the four warps of a group compute 64 rows at once straight from shared memory (Hopper). Without it each warp has rows of its own.
//
// RMSNorm (not with WGMMA): x is scaled by the norm's weight between shared memory and the tensor cores, whose products of x with itself give the sums of squares
// (on the diagonal); 1 / rms is one factor per token, applied to the sums. Activation, bias and residual come after it, all in float32.
//
// Compiled at run time by NVRTC, one specialisation per layer shape; macros: custom_ops/cuda/linear_shape.py.

#include "machine.cuh"
#if WGMMA
#include "wgmma.cuh"
#endif

struct Params {
  const char *x, *weight, *bias, *residual, *norm_weight;
  char *out;
  i64 x_token, residual_token, out_token;  // strides, in numbers
  float eps, offset;
  int tokens, unused;
};

constexpr int THREADS = ROW_WARPS * K_WARPS * 32;
constexpr int MEMBERS = ROW_WARPS * 32;                   // threads of a group: its warps share chunks, each has MT * 16 of the rows
constexpr int ROWS = ROW_WARPS * MT * 16, TOKENS = NT * 8;
constexpr int LINE = 128;                                 // bytes of 64 numbers
constexpr int CHUNKS = (IN_FEATURES + 63) / 64;
constexpr int STAGE = (ROWS + TOKENS + NORM) * LINE;      // weight rows, tokens, the norm's weight
constexpr bool GATED = ACTIVATION != 0;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;         // columns of out per tile; GATED: as many gate rows, then as many up rows
constexpr int OUT_WIDTH = GATED ? OUT_FEATURES / 2 : OUT_FEATURES;
constexpr bool EDGE_N = OUT_WIDTH % OUT_ROWS != 0, EDGE_K = IN_FEATURES % 64 != 0;
constexpr int STEP = MEMBERS / 8;                         // rows that a group copies at once, 16 bytes a thread
constexpr int PITCH = ROWS + 4;                           // of a token's sums in shared memory: no bank conflicts
constexpr int SPREAD = 16;                                // neighbouring elements that one CTA of a cluster finishes
constexpr int X_COPIES = (TOKENS * 8 + MEMBERS - 1) / MEMBERS;

// Byte offset of the m-th step's rows from the first step's.
__device__ __forceinline__ constexpr i64 step_offset(int m) {
  return ((i64)m * STEP + (GATED && m >= MT * 2 ? OUT_FEATURES / 2 - OUT_ROWS : 0)) * W_ROW * 2;
}
__device__ __forceinline__ uint4 load_l2(const uint4 *p) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}
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
// Two numbers of x times theirs of the norm's weight.
__device__ __forceinline__ u32 scale(u32 x, float low, float high) {
  return pack(to_float((u16)x) * low, to_float((u16)(x >> 16)) * high);
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM) linear(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  [[maybe_unused]] __shared__ float squares[K_WARPS][TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / ROW_WARPS, row_warp = warp % ROW_WARPS, member = threadIdx.x % MEMBERS;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
  const int first = rank * CHUNKS / CLUSTER + group, end = (rank + 1) * CHUNKS / CLUSTER;  // this group's chunks: every K_WARPS-th
  const int count = first < end ? (end - first + K_WARPS - 1) / K_WARPS : 0;
#if PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // Thread `member` copies 16 bytes, column `member % 8` of a line, of every STEP-th row, to a place swizzled by the row.
  const int copy_row = member / 8, column = member % 8;
  const char *weight = p.weight + ((i64)(tile * OUT_ROWS + copy_row) * W_ROW + first * 64 + column * 8) * 2;
  const char *x = p.x + (copy_row * p.x_token + first * 64 + column * 8) * 2;
  const u32 ring = shared_address(shared) + group * STAGES * STAGE;
  const u32 place = copy_row * LINE + ((column ^ (copy_row & 7)) * 16);
    auto place_of = [&](int m) {  // the swizzle repeats every 8 rows; STEP may be 4
    return STEP % 8 == 0 ? place + m * STEP * LINE : (copy_row + m * STEP) * LINE + ((column ^ ((copy_row + m * STEP) & 7)) * 16);
  };
  auto in_k = [&](int i) { return !EDGE_K || (first + i * K_WARPS) * 64 + column * 8 < IN_FEATURES; };

  auto load_weights = [&](int i, int slot) {
    if (i >= count) return;
    const char *from = weight + i * (K_WARPS * LINE);
    const u32 to = ring + slot * STAGE;
#pragma unroll
    for (int m = 0; m < MT * 4; ++m) {
      const int row = m % (GATED ? MT * 2 : MT * 4) * STEP + copy_row;
      if (EDGE_N || EDGE_K) copy16_or_zero(to + place_of(m), from + step_offset(m), (!EDGE_N || tile * OUT_ROWS + row < OUT_WIDTH) && in_k(i));
      else copy16(to + place_of(m), from + step_offset(m));
    }
#if NORM
    if (member < 8)
      copy16_or_zero(to + (ROWS + TOKENS) * LINE + member * 16, p.norm_weight + ((first + i * K_WARPS) * 64 + member * 8) * 2, in_k(i));
#endif
  };
  auto load_x = [&](int i, int slot) {
    if (i >= count) return;
    const char *from = x + i * (K_WARPS * LINE);
    const u32 to = ring + slot * STAGE + ROWS * LINE;
#pragma unroll
    for (int m = 0; m < X_COPIES; ++m) {
      const int token = m * STEP + copy_row;  // columns of tokens that are not there hold anything: they mix with no other
      if (token < p.tokens && token < TOKENS) copy16_or_zero(to + place_of(m), from + (i64)m * STEP * p.x_token * 2, in_k(i));
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    load_weights(s, s);
    commit();
  }
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  {  // not by cp.async: its groups complete in order, and these would wait for all weights on their way
    uint4 early[STAGES - 1][X_COPIES];
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
#pragma unroll
      for (int m = 0; m < X_COPIES; ++m) {
        early[s][m] = make_uint4(0, 0, 0, 0);
        if (s < count && m * STEP + copy_row < p.tokens && in_k(s))
          early[s][m] = load_l2((const uint4 *)(x + s * (K_WARPS * LINE) + (i64)m * STEP * p.x_token * 2));
      }
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
#pragma unroll
      for (int m = 0; m < X_COPIES; ++m)
        if (m * STEP + copy_row < TOKENS)
          *(uint4 *)(shared + (group * STAGES + s) * STAGE + ROWS * LINE + place_of(m)) = early[s][m];
  }

  float sums[MT][NT][4] = {};
  [[maybe_unused]] float square[NT][4] = {};
#if !WGMMA
  const u32 a_row = (row_warp * MT * 16 + lane % 16) * LINE;
  const u32 b_row = ROWS * LINE + (NT == 1 ? lane % 8 : lane % 8 + lane / 16 * 8) * LINE;
#endif
  int slot = 0;
  for (int i = 0; i < count; ++i) {
    wait_groups<STAGES - 2>();
#if WGMMA
    wgmma_wait();  // of the last round: what it read may be overwritten when all four warps are here
    wgmma_sees();
#endif
    if (ROW_WARPS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(MEMBERS) : "memory");
    auto refill = [&] {
      const int free = slot == 0 ? STAGES - 1 : slot - 1;  // what the last round used up
      load_weights(i + STAGES - 1, free);
      load_x(i + STAGES - 1, free);
      commit();  // an empty group keeps the count
    };
    const u32 at = ring + slot * STAGE;
#if WGMMA
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int m = 0; m < MT; ++m) wgmma(sums[m], matrix(at + m * 64 * LINE + step * 32), matrix(at + ROWS * LINE + step * 32));
    wgmma_commit();
    refill();
#else
    refill();
    u32 b[NT][2], both[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (NT == 1) {
        if (step % 2 == 0) load_matrices(both, at + b_row + (((step * 2 + lane / 8) ^ (lane & 7)) * 16));
        b[0][0] = both[step % 2 * 2];
        b[0][1] = both[step % 2 * 2 + 1];
      } else {
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) {
          load_matrices(both, at + b_row + n * 16 * LINE + (((step * 2 + lane / 8 % 2) ^ (lane & 7)) * 16));
          b[n * 2][0] = both[0]; b[n * 2][1] = both[1]; b[n * 2 + 1 < NT ? n * 2 + 1 : 0][0] = both[2]; b[n * 2 + 1 < NT ? n * 2 + 1 : 0][1] = both[3];
        }
      }
#if NORM
      {
        const char *line = shared + (group * STAGES + slot) * STAGE + (ROWS + TOKENS) * LINE + (step * 16 + lane % 4 * 2) * 2;
        const u32 w0 = *(const u32 *)line, w1 = *(const u32 *)(line + 16);
        const float f0 = to_float((u16)w0) + p.offset, f1 = to_float((u16)(w0 >> 16)) + p.offset;
        const float f2 = to_float((u16)w1) + p.offset, f3 = to_float((u16)(w1 >> 16)) + p.offset;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const u32 a[4] = {b[n][0], 0, b[n][1], 0};
          mma(square[n], a, b[n][0], b[n][1]);
          b[n][0] = scale(b[n][0], f0, f1);
          b[n][1] = scale(b[n][1], f2, f3);
        }
      }
#endif
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        u32 a[4];
        load_matrices(a, at + a_row + m * 16 * LINE + (((step * 2 + lane / 16) ^ (lane & 7)) * 16));
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(sums[m][n], a, b[n][0], b[n][1]);
      }
    }
#endif
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // Every group leaves its sums as [token][row] where the rings were.
  constexpr int TILE = WGMMA ? 64 : 16;  // rows between a warp's m-tiles
#if WGMMA
  wgmma_wait();
#endif
  wait_groups<0>();
  __syncthreads();
  float *part = (float *)shared + group * TOKENS * PITCH + row_warp * (WGMMA ? 16 : MT * 16) + lane / 4;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) part[(n * 8 + lane % 4 * 2 + j % 2) * PITCH + m * TILE + j / 2 * 8] = sums[m][n][j];
#if NORM
#pragma unroll
  for (int n = 0; n < NT; ++n)
    if (row_warp == 0 && lane / 8 == lane % 4) squares[group][n * 8 + lane / 4] = lane / 4 % 2 ? square[n][1] : square[n][0];
#endif
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
    const float *at = (const float *)shared + token * PITCH + row;
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
