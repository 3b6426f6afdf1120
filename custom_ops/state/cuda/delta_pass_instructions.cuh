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

// d (+)= a @ b.T for 16 k: 64 lines of b. ADD: 0 starts from zeros.
template <int ADD> __device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
  WGMMA(false, "m64n64k16", "{" R32 "}, {%32,%33,%34,%35}, %36, %37, 1, 1, 0;"
        : F32(0) : A4, "l"(b), "n"(ADD));
}
// d += a @ b for 16 lines of b, two squares wide.
__device__ __forceinline__ void multiply_lines(float (&d)[64], const u32 (&a)[4], u64 b) {
  WGMMA(false, "m64n128k16", "{" R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" : F64(0) : A4, "l"(b));
}
