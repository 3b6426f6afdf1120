// Prefill's two warpgroup products of 64 query rows: scores (both operands in shared memory) and weighted values (weights in registers).
//
// A tile of keys or values in shared memory: groups of 8 tokens, in a group one 1 KB square of 8 tokens x 64 columns after the other, in a square
// a token's 128 bytes swizzled by the token modulo 8. So the distance of groups is the same within a block of the cache and across blocks, and
// one descriptor covers all tokens of the tile although every block came in a box of its own.
// Sources: PTX ISA, "asynchronous warpgroup level matrix", shared memory layouts. Macros: HALF. Needs sm_90a.
#pragma once

#include "wgmma.cuh"

constexpr int SQUARE = 1024;  // bytes of 8 tokens x 64 columns

// `groups`: bytes from one group of 8 tokens (or query rows) to the next; `columns`: from one square of 64 columns to the next, which only the second
// product uses: the first one's 16 columns lie in one square.
__device__ __forceinline__ u64 matrix(u32 at, int columns, int groups) {
  return (u64)(at >> 4 & 0x3fff) | (u64)(columns >> 4) << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d (+)= a @ b.T for 16 columns: 64 query rows of `a`, 128 or 64 keys of `b`, both with contiguous columns. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void scores16(float (&d)[64], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" R64 "}, %64, %65, %66, 1, 1, 0, 0;"
               : F16(0), F16(16), F16(32), F16(48) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void scores16(float (&d)[32], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" R32 "}, %32, %33, %34, 1, 1, 0, 0;"
               : F16(0), F16(16) : "l"(a), "l"(b), "n"(ADD));
}
// d += a @ b for 16 keys: weights of 64 query rows as mma.m16n8k16 has them, 128 or 64 value columns, contiguous in `b`.
__device__ __forceinline__ void values16(float (&d)[64], const u32 *a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : F16(0), F16(16), F16(32), F16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void values16(float (&d)[32], const u32 *a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" R32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : F16(0), F16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
