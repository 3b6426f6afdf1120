// The instructions of latent attention that C++ has no words for, besides those of custom_ops/cuda: all of
// them stand here. Needs sm_90a.
//
// Of up to 32 query rows the operands of both products are swapped: 64 keys (or, of their transpose, value
// columns) are the rows of a warpgroup's instruction, query rows its columns, so that few query rows are
// padded to 8 and not to 64. In tiles of 64 query rows these are the rows (latent_pairs.cu).
#pragma once

#include "../../cuda/bulk.cuh"
#include "../../cuda/wgmma.cuh"
#include "latent_config.cuh"

// d += a @ b.T for 16 k, both in shared memory; TURNED: `a` lies as its transpose. d[n] is the fragment of
// b's rows n * 8 .. n * 8 + 7, as mma.m16n8k16 has it; warp w of the four has rows w * 16 ... of a.
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[1][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n8k16", "{" R4 "}, %4, %5, 1, 1, 1, %6, 0;" : D4(0) : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[2][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n16k16", "{" R8 "}, %8, %9, 1, 1, 1, %10, 0;" : D4(0), D4(1) : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[4][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n32k16", "{" R16 "}, %16, %17, 1, 1, 1, %18, 0;" : D16(0) : "l"(a), "l"(b), "n"(TURNED));
}

// The same with `a` in registers, as mma.m16n8k16's fragments; ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void product16(float (&d)[1][4], const u32 (&a)[4], u64 b) {
  WGMMA(HALF, "m64n8k16", "{" R4 "}, {%4,%5,%6,%7}, %8, %9, 1, 1, 0;" : D4(0) : A4, "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void product16(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  WGMMA(HALF, "m64n16k16", "{" R8 "}, {%8,%9,%10,%11}, %12, %13, 1, 1, 0;"
               : D4(0), D4(1) : A4, "l"(b), "n"(ADD));
}
// For 32 k of e4m3, four in a register.
template <int ADD> __device__ __forceinline__ void product32(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  WGMMA8("m64n16k32", "{" R8 "}, {%8,%9,%10,%11}, %12, %13, 1, 1;" : D4(0), D4(1) : A4, "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void product32(float (&d)[3][4], const u32 (&a)[4], u64 b) {
  WGMMA8("m64n24k32", "{" R8 ",%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, %17, 1, 1;"
         : D4(0), D4(1), D4(2) : A4, "l"(b), "n"(ADD));
}
template <int ADD> __device__ __forceinline__ void product32(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  WGMMA8("m64n32k32", "{" R16 "}, {%16,%17,%18,%19}, %20, %21, 1, 1;" : D16(0) : A4, "l"(b), "n"(ADD));
}

// Matrices of 8 x 8 numbers from a warp's fragments into shared memory, each on its side.
__device__ __forceinline__ void stmatrix_x2_trans(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b)
               : "memory");
}

// d (+)= a @ b.T for 16 columns: 64 rows, 64 keys. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void scores16(float (&d)[32], u64 a, u64 b) {
  WGMMA(HALF, "m64n64k16", "{" R32 "}, %32, %33, %34, 1, 1, 0, 0;" : F32(0) : "l"(a), "l"(b), "n"(ADD));
}
// d += a @ b for 16 keys: 64 rows, 256 value columns contiguous in `b`, in squares of so many bytes; weights
// in registers, or in shared memory. Rows of fp8: by halves of the columns, since ptxas wants all sums of an
// instruction within the registers that a thread starts with, 128 in a CTA of 512 threads.
__device__ __forceinline__ void values16(float (&d)[128], const u32 (&a)[4], u64 b, int square) {
  if constexpr (FP8) {
    WGMMA(HALF, "m64n128k16", "{" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" : F64(0) : A4, "l"(b));
    WGMMA(HALF, "m64n128k16", "{" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : F64(64) : A4, "l"(behind(b, 2 * square)));
  } else {
    WGMMA(HALF, "m64n256k16", "{" R128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
                 : F64(0), F64(64) : A4, "l"(b));
  }
}
__device__ __forceinline__ void values16(float (&d)[128], u64 a, u64 b, int square) {
  if constexpr (FP8) {
    WGMMA(HALF, "m64n128k16", "{" R64 "}, %64, %65, 1, 1, 1, 0, 1;" : F64(0) : "l"(a), "l"(b));
    WGMMA(HALF, "m64n128k16", "{" R64 "}, %64, %65, 1, 1, 1, 0, 1;"
                 : F64(64) : "l"(a), "l"(behind(b, 2 * square)));
  } else {
    WGMMA(HALF, "m64n256k16", "{" R128 "}, %128, %129, 1, 1, 1, 0, 1;" : F64(0), F64(64) : "l"(a), "l"(b));
  }
}
