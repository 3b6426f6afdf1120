// Products of float16 whatever the queries are: those of latent_instructions.cuh otherwise.
#pragma once

#include "latent_instructions.cuh"

#if FP8
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
template <int TURNED> __device__ __forceinline__ void half_product16(float (&d)[1][4], u64 a, u64 b) {
  WGMMA(true, "m64n8k16", "{%0,%1,%2,%3}, %4, %5, 1, 1, 1, %6, 0;" : D4(0) : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void half_product16(float (&d)[2][4], u64 a, u64 b) {
  WGMMA(true, "m64n16k16", "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, %10, 0;" : D4(0), D4(1)
               : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void half_product16(float (&d)[4][4], u64 a, u64 b) {
  WGMMA(true, "m64n32k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, %18, 0;"
        : D4(0), D4(1), D4(2), D4(3) : "l"(a), "l"(b), "n"(TURNED));
}
#undef D4

// Zeros, in registers before what is written next: set between two products they would make one wait.
template <int J> __device__ __forceinline__ void clear(float (&x)[J][4]) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[j][e] = 0.f;
      asm volatile("" : "+f"(x[j][e]));
    }
}
#endif
