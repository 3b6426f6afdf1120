// A warpgroup's products whose left operand, 64 rows, is in registers, and other instructions of the kernel
// that goes from chunk to chunk of a gated delta net. Needs sm_90a.
#pragma once

#include "../../cuda/wgmma.cuh"

// Lines of 128 bytes, swizzled; `groups`: bytes from 8 lines to the next 8; `columns`: from a square of 64
// columns to the next one, where the instruction takes several.
__device__ __forceinline__ u64 operand(u32 at, int groups = 1024, int columns = 16) {
  return (u64)(at >> 4 & 0x3fff) | (u64)(columns >> 4) << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}
// Matrices of 8 x 8 numbers from a warp's fragments into shared memory, each on its side.
__device__ __forceinline__ void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define R32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 R32 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55" \
  ",%56,%57,%58,%59,%60,%61,%62,%63"
// d (+)= a @ b.T for 16 k: 64 lines of b. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
  WGMMA(false, "m64n64k16", "{" R32 "}, {%32,%33,%34,%35}, %36, %37, 1, 1, 0;"
        : F16(0), F16(16) : A4, "l"(b), "n"(ADD));
}
// d += a @ b for 16 lines of b, two squares wide.
__device__ __forceinline__ void multiply_lines(float (&d)[64], const u32 (&a)[4], u64 b) {
  WGMMA(false, "m64n128k16", "{" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : F16(0), F16(16), F16(32), F16(48) : A4, "l"(b));
}
#undef F4
#undef F16
#undef A4
#undef R32
#undef R64
