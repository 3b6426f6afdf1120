// Hopper's warpgroup products, and what orders them. Needs sm_90a. FP16: numbers are float16, else bfloat16.
#pragma once

#include "machine.cuh"

// One instruction; `shape` and what follows the types, operands included. A macro, since its text must be a
// literal.
#define WGMMA(FP16, shape, ...)                                                                    \
  do {                                                                                             \
    if constexpr (FP16)                                                                            \
      asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.f16.f16 " __VA_ARGS__);             \
    else                                                                                           \
      asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 " __VA_ARGS__);           \
  } while (0)

// Descriptor of lines of 128 bytes, 16-byte columns swizzled by the line modulo 8. `at`: a multiple of 1024
// plus the k's offset; `groups`: bytes from 8 lines to the next 8; `columns`: from a square of 64 columns to
// the next one, where the instruction takes several.
__device__ __forceinline__ u64 operand(u32 at, int groups = 1024, int columns = 16) {
  return (u64)(at >> 4 & 0x3fff) | (u64)(columns >> 4) << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}
// The same so many bytes behind, a multiple of 16: one addition.
__device__ __forceinline__ u64 behind(u64 operand, int bytes) { return operand + (bytes >> 4); }

// A warpgroup takes registers, or gives them to those of its CTA that take.
template <int N> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// d += a @ b.T for 16 k of 64 rows, both from shared memory; d[n] is the fragment of b's rows n * 8 .. n * 8
// + 7, as mma.m16n8k16 has it, warp w of the four with rows w * 16 ... of a.
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[1][4], u64 a, u64 b) {
  WGMMA(FP16, "m64n8k16", "{%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;" : D4(0) : "l"(a), "l"(b));
}
template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[2][4], u64 a, u64 b) {
  WGMMA(FP16, "m64n16k16", "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;" : D4(0), D4(1) : "l"(a),
        "l"(b));
}
template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[4][4], u64 a, u64 b) {
  WGMMA(FP16, "m64n32k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"
        : D4(0), D4(1), D4(2), D4(3) : "l"(a), "l"(b));
}
template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[8][4], u64 a, u64 b) {
  WGMMA(FP16, "m64n64k16",
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7) : "l"(a), "l"(b));
}
#undef D4
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
