// Prefill with fp8 queries: products of e4m3 numbers, and what has to be done to values for that.
//
// These products take their second operand with contiguous k alone: a column's keys side by side. Values come
// with a token's columns side by side, so that the warps beside the loader's turn every step's, 16 keys x 32
// columns at a time. Two orders are left as they fall out, since both can be had for nothing where they are
// used:
// - of 16 keys of a column, byte 4 * t + i is key 2 * t + i % 2 + i / 2 * 8. That is the order in which a
//   thread holds its scores of 16 keys, so that weights go from accumulators to operands by conversion alone.
// - of 16 columns, row 8 * h + j of what is turned is column 2 * j + h. So a quad's accumulators of two
//   blocks are 16 columns side by side, four of each thread (prefill_store.cuh).
//
// Sources: FlashAttention-3 (arXiv:2407.08608, 3.3) for turning values beside the products, in an order that
// suits the weights; PTX ISA, "asynchronous warpgroup level matrix", register fragments of 8-bit types.
#pragma once

#include "prefill_shapes.cuh"

// Weights of a row are at most 2 to this power, not 1: the sum grows alike, and e4m3, whose largest number is
// 448, has its steps where the weights are.
constexpr float WEIGHT_BITS = Q_FP8 ? 8.f : 0.f;

// Four numbers as e4m3, the first in the lowest byte; none is above 448.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; "
      "mov.b32 %0, {l, h};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

#define WGMMA8(shape, ...) \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 " __VA_ARGS__)

// d (+)= a @ b.T for 32 columns: 64 query rows, as many keys as d is twice long. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void scores32(float (&d)[32], u64 a, u64 b) {
  WGMMA8("m64n64k32", "{" R32 "}, %32, %33, %34, 1, 1;" : F32(0) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores32(float (&d)[64], u64 a, u64 b) {
  WGMMA8("m64n128k32", "{" R64 "}, %64, %65, %66, 1, 1;" : F64(0) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores32(float (&d)[80], u64 a, u64 b) {
  WGMMA8("m64n160k32", "{" R80 "}, %80, %81, %82, 1, 1;" : F64(0), F16(64) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores32(float (&d)[96], u64 a, u64 b) {
  WGMMA8("m64n192k32", "{" R96 "}, %96, %97, %98, 1, 1;" : F64(0), F32(64) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores32(float (&d)[128], u64 a, u64 b) {
  WGMMA8("m64n256k32", "{" R128 "}, %128, %129, %130, 1, 1;" : F64(0), F64(64) : "l"(a), "l"(b), "n"(ADD));
}
// d += a @ b.T for 32 keys: weights of 64 query rows; turned values, twice as many rows as d is long.
__device__ __forceinline__ void values32(float (&d)[32], const u32 *a, u64 b) {
  WGMMA8("m64n64k32", "{" R32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1;"
         : F32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void values32(float (&d)[64], const u32 *a, u64 b) {
  WGMMA8("m64n128k32", "{" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1;"
         : F64(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void values32(float (&d)[128], const u32 *a, u64 b) {
  WGMMA8("m64n256k32", "{" R128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1;"
         : F64(0), F64(64) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The first product of either kind: for 32 bytes of each row and each key.
template <int ADD, int N> __device__ __forceinline__ void scores(float (&d)[N], u64 a, u64 b) {
  if constexpr (Q_FP8) scores32<ADD>(d, a, b);
  else scores16<ADD>(d, a, b);
}

// Where byte `at` of swizzled lines of LINE bytes lies.
template <int LINE> __device__ __forceinline__ u32 swizzled(u32 at) {
  return at ^ (at >> 3 & (LINE == 128 ? 0x70 : 0x30));
}

// Where key `key` of row `row` of a step's turned values lies.
__device__ __forceinline__ u32 turned_at(int row, int key) {
  const int in_unit = key % 16, byte = in_unit % 8 / 2 * 4 + in_unit / 8 * 2 + in_unit % 2;
  const int place = key / 16 * 16 + byte;
  return swizzled<TURNED_LINE>((place / TURNED_LINE * DIM_V + row) * TURNED_LINE + place % TURNED_LINE);
}

// A step's values, from the squares in which they come; `warp`: of CONVERTERS.
__device__ __forceinline__ void turn_values(u32 from, u32 to, int warp, int lane) {
  constexpr int WIDE = DIM_V / 32, UNITS = KEYS / 16 * WIDE;
#pragma unroll 4
  for (int unit = warp; unit < UNITS; unit += CONVERTERS) {
    const int keys = unit / WIDE, columns = unit % WIDE;
    // the lane's row of 8 x 16 bytes: of two times 8 keys, for the first 16 columns, then for the others
    const int group = keys * 2 + lane / 8 % 2, chunk = columns * 2 + lane / 16;
    const u32 source = (group * V_SQUARES + chunk / (V_LINE / 16)) * V_SQUARE + lane % 8 * V_LINE +
                       chunk % (V_LINE / 16) * 16;
    u32 x[4];  // each: two columns of two keys
    ldmatrix_x4_trans(x, from + swizzled<V_LINE>(source));
    const u32 y[4] = {__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[0], x[1], 0x7531),
                      __byte_perm(x[2], x[3], 0x6420), __byte_perm(x[2], x[3], 0x7531)};
    const int place = keys * 16;
    const u32 target = (place / TURNED_LINE * DIM_V + columns * 32 + lane) * TURNED_LINE + place % TURNED_LINE;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + swizzled<TURNED_LINE>(target)),
                 "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3])
                 : "memory");
  }
}
