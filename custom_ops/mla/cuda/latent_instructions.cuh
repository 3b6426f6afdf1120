// The instructions of latent attention that C++ has no words for, besides those of custom_ops/cuda: all of
// them stand here. Needs sm_90a.
//
// Of its two products the operands are swapped: 64 keys (or, of their transpose, value columns) are the rows
// of a warpgroup's instruction, query rows its columns, so that few query rows are padded to 8 and not to
// 64.
#pragma once

#include "../../cuda/bulk.cuh"
#include "../../cuda/wgmma.cuh"
#include "latent_config.cuh"

template <int N> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Lines of 128 bytes, swizzled; `groups`: bytes from 8 lines to the next 8.
__device__ __forceinline__ u64 operand(u32 at, int groups) {
  return (u64)(at >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}

// d += a @ b.T for 16 k, both in shared memory; TURNED: `a` lies as its transpose. d[n] is the fragment of
// b's rows n * 8 .. n * 8 + 7, as mma.m16n8k16 has it; warp w of the four has rows w * 16 ... of a.
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[1][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n8k16", "{%0,%1,%2,%3}, %4, %5, 1, 1, 1, %6, 0;" : D4(0) : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[2][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n16k16", "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, %10, 0;" : D4(0), D4(1)
               : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[4][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n32k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, %18, 0;"
        : D4(0), D4(1), D4(2), D4(3) : "l"(a), "l"(b), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void product16(float (&d)[8][4], u64 a, u64 b) {
  WGMMA(HALF, "m64n64k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, %34, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7) : "l"(a), "l"(b), "n"(TURNED));
}
#undef D4

// Matrices of 8 x 8 numbers from a warp's fragments into shared memory, each on its side.
__device__ __forceinline__ void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b)
               : "memory");
}
