// A warpgroup's products whose left operand, 64 rows, is in registers, and other instructions of the kernel
// that goes from chunk to chunk of long rows. Needs sm_90a.
#pragma once

#include "../../cuda/wgmma.cuh"

// Blocks of 8 x 8 numbers, 128 bytes each: of 16 columns, one beside the other, lines one below the other.
__device__ __forceinline__ u64 blocks(u32 at) {
  return operand(at, 256, 128, 0);
}
// A box of shared memory, swizzled, to `map`.
__device__ __forceinline__ void tma_store_3d(const void *map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               "cp.async.bulk.commit_group;" ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
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
