// The instructions of the indexer's scores that C++ has no words for, besides those of custom_ops/cuda. Needs
// sm_90a.
#pragma once

#include "../../cuda/wgmma.cuh"
#include "logits_config.cuh"

__device__ __forceinline__ float clipped(float x) {  // NaN stays
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// d += a @ b.T for 16 k of float16, keys from registers; d[n] is the fragment of heads n * 8 .. n * 8 + 7.
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
__device__ __forceinline__ void product16(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n16k16", "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;" : D4(0), D4(1)
               : A4, "l"(b));
}
__device__ __forceinline__ void product16(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n32k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3) : A4, "l"(b));
}
__device__ __forceinline__ void product16(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n64k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, "
        "0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7) : A4, "l"(b));
}
#undef A4
#undef D4
