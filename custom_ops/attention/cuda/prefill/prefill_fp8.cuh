// Prefill with fp8 queries: products of e4m3 numbers, and what has to be done to values for that.
//
// These products take their second operand with contiguous k alone: a column's keys side by side. Values come
// with a token's columns side by side, so that the producer's other warps turn those of every step
// (prefill_layout.cuh).
//
// Sources: FlashAttention-3 (arXiv:2407.08608, 3.3) for turning values while products run, in an order that
// suits the weights; PTX ISA, "asynchronous warpgroup level matrix", register fragments of 8-bit types.
#pragma once

#include "prefill_params.cuh"

// Weights of a row are at most 2 to this power, not 1: the sum grows alike, and e4m3, whose largest number is
// 448, has its steps where the weights are.
constexpr float WEIGHT_BITS = Q_FP8 ? 8.f : 0.f;

// d (+)= a @ b.T for 32 columns: 64 query rows, as many keys as d is twice long. ADD: 0 starts from zeros.
#define SCORES32(n, keys, behind_d, ...) \
  template <int ADD> __device__ __forceinline__ void scores32(float (&d)[n], u64 a, u64 b) { \
    WGMMA8("m64n" #keys "k32", "{" R##n "}, " behind_d ", 1, 1;" : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADD)); \
  }
SCORES32(32, 64, "%32, %33, %34", F32(0))
SCORES32(64, 128, "%64, %65, %66", F64(0))
SCORES32(80, 160, "%80, %81, %82", F64(0), F16(64))
SCORES32(96, 192, "%96, %97, %98", F64(0), F32(64))
SCORES32(128, 256, "%128, %129, %130", F64(0), F64(64))
#undef SCORES32
// d += a @ b.T for 32 keys: weights of 64 query rows; turned values, twice as many rows as d is long.
// Declared for every width: a call in a discarded branch is checked all the same. fp8 queries
// come in the widths below alone.
template <int N> __device__ void values32(float (&d)[N], const u32 *a, u64 b);
#define VALUES32(n, rows, behind_d, ...) \
  __device__ __forceinline__ void values32(float (&d)[n], const u32 *a, u64 b) { \
    WGMMA8("m64n" #rows "k32", "{" R##n "}, " behind_d ", 1, 1, 1;" : __VA_ARGS__ : A4, "l"(b)); \
  }
VALUES32(32, 64, "{%32,%33,%34,%35}, %36", F32(0))
VALUES32(64, 128, "{%64,%65,%66,%67}, %68", F64(0))
VALUES32(128, 256, "{%128,%129,%130,%131}, %132", F64(0), F64(64))
#undef VALUES32

// The first product of either kind: for 32 bytes of each row and each key.
template <int ADD, int N> __device__ __forceinline__ void scores(float (&d)[N], u64 a, u64 b) {
  if constexpr (Q_FP8) scores32<ADD>(d, a, b);
  else scores16<ADD>(d, a, b);
}

// A step's values, from the squares in which they come; `warp`: of CONVERTERS, each with groups of 16 keys of
// its own. Several matrices are on their way at once.
__device__ __forceinline__ void turn_values(u32 from, u32 to, int warp, int lane) {
  constexpr int AHEAD = TURN_WIDE < 4 ? TURN_WIDE : 4;
#pragma unroll 1
  for (int group = warp; group < TILE_KV / 16; group += CONVERTERS) {
    const u32 source = from + turn_from(group, 0, lane), target = to + turn_to(group, 0, lane);
#pragma unroll
    for (int begin = 0; begin < TURN_WIDE; begin += AHEAD) {
      u32 x[AHEAD][4];  // two columns of two keys, of each matrix
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) ldmatrix_x4_trans(x[i], turn_from_next(source, begin + i));
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const u32 y[4] = {__byte_perm(x[i][0], x[i][1], 0x6420), __byte_perm(x[i][0], x[i][1], 0x7531),
                          __byte_perm(x[i][2], x[i][3], 0x6420), __byte_perm(x[i][2], x[i][3], 0x7531)};
        stmatrix_x4(target + (begin + i) * 32 * TURNED_LINE, y);
      }
    }
  }
}
