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
__device__ __forceinline__ void product16(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n16k16", "{" R8 "}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;" : D4(0), D4(1) : A4, "l"(b));
}
__device__ __forceinline__ void product16(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n32k16", "{" R16 "}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;" : D16(0) : A4, "l"(b));
}
__device__ __forceinline__ void product16(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  WGMMA(true, "m64n64k16", "{" R32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" : D16(0), D16(4) : A4, "l"(b));
}
