// Prefill's two warpgroup products of 64 query rows: scores (both operands in shared memory) and weighted
// values (weights in registers).
//
// A tile of keys or values in shared memory: groups of 8 tokens, in a group one square of 8 tokens x WIDTH
// columns after the other (WIDTH: the largest of 64, 32 and 16 that divides a head's), in a square a token's
// WIDTH * 2 bytes swizzled. So the distance of groups is the same within a block of the cache and across
// blocks, and one descriptor covers all tokens of the tile although every block came in a box of its own.
// Sources: PTX ISA, "asynchronous warpgroup level matrix", shared memory layouts. Needs sm_90a.
#pragma once

#include "../../../cuda/wgmma.cuh"
#include "prefill_config.cuh"

// `groups`: bytes from one group of 8 tokens (or query rows) to the next; `columns`: from one square of
// columns to the next, which only the second product uses: the first one's 16 columns lie in one square.
template <int LINE> __device__ __forceinline__ u64 matrix(u32 at, int columns, int groups) {
  static_assert(LINE == 128 || LINE == 64 || LINE == 32, "swizzles of so many bytes");
  return operand(at, groups, columns, LINE == 128 ? 1 : LINE == 64 ? 2 : 3);
}

// d (+)= a @ b.T for 16 columns: 64 query rows of `a`, as many keys of `b` as d is twice long, both with
// contiguous columns. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void scores16(float (&d)[32], u64 a, u64 b) {
  WGMMA(HALF, "m64n64k16", "{" R32 "}, %32, %33, %34, 1, 1, 0, 0;" : F32(0) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores16(float (&d)[64], u64 a, u64 b) {
  WGMMA(HALF, "m64n128k16", "{" R64 "}, %64, %65, %66, 1, 1, 0, 0;" : F64(0) : "l"(a), "l"(b), "n"(ADD));
}
// d += a @ b for 16 keys: weights of 64 query rows as mma.m16n8k16 has them; value columns, twice as many as
// d is long, contiguous in `b`.
#define VALUES16(n, columns, behind_d, ...) \
  __device__ __forceinline__ void values16(float (&d)[n], const u32 *a, u64 b) { \
    WGMMA(HALF, "m64n" #columns "k16", "{" R##n "}, " behind_d ", 1, 1, 1, 1;" : __VA_ARGS__ : A4, "l"(b)); \
  }
VALUES16(16, 32, "{%16,%17,%18,%19}, %20", F16(0))
VALUES16(24, 48, "{%24,%25,%26,%27}, %28", F16(0), F8(16))
VALUES16(32, 64, "{%32,%33,%34,%35}, %36", F32(0))
VALUES16(40, 80, "{%40,%41,%42,%43}, %44", F32(0), F8(32))
VALUES16(48, 96, "{%48,%49,%50,%51}, %52", F32(0), F16(32))
VALUES16(56, 112, "{%56,%57,%58,%59}, %60", F32(0), F16(32), F8(48))
VALUES16(64, 128, "{%64,%65,%66,%67}, %68", F64(0))
VALUES16(80, 160, "{%80,%81,%82,%83}, %84", F64(0), F16(64))
VALUES16(96, 192, "{%96,%97,%98,%99}, %100", F64(0), F32(64))
VALUES16(112, 224, "{%112,%113,%114,%115}, %116", F64(0), F32(64), F16(96))
VALUES16(128, 256, "{%128,%129,%130,%131}, %132", F64(0), F64(64))
#undef VALUES16
