// The bulk copy engine (TMA) and the barriers it reports to; compute capability 9.0 and later.
#pragma once

#include "machine.cuh"

struct alignas(64) Map {  // of a matrix in global memory; cuTensorMapEncodeTiled makes it
  char opaque[128];
};
__device__ __forceinline__ void mbarrier_init(u32 at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// An arrival when all that this thread asked for by cp.async is there.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// Waits for a phase of a barrier in this CTA's memory, completed by copies that this CTA asked for, its
// warps, or CTAs of its cluster.
__device__ __forceinline__ void mbarrier_wait(u32 at, int parity) {
  asm volatile(
      "{.reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra "
      "again%=;}" ::"r"(at),
      "r"(parity)
      : "memory");
}
// Four numbers into shared memory of any CTA of the cluster, which tells that CTA's barrier of 16 bytes.
__device__ __forceinline__ void st_async(u32 to, const float (&x)[4], u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier) : "memory");
}
// What st_async brought.
__device__ __forceinline__ float4 load_shared(u32 at) {
  LOADED(float4, "ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];", "r"(at), "=f"(x.x), "=f"(x.y), "=f"(x.z),
         "=f"(x.w))
}
__device__ __forceinline__ void fence_mbarrier_init() {  // the copy engine sees them
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ u64 read_again() {  // nothing is said to L2
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Bytes that lie one behind the other, into shared memory and back, with a policy of L2; multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void *from, int bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// Bytes asked into L2. Stores meet there, so that none is missed by who asks before it waits.
__device__ __forceinline__ void bulk_prefetch(const void *from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, u32 from, int bytes, u64 policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes), "l"(policy)
      : "memory");
}
// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// One load of a box of `map`; `places`: the rest of the instruction, whose operands follow.
#define L2_HINT ".L2::cache_hint"
#define TMA_LOAD(dims, hint, places, ...) \
  asm volatile("cp.async.bulk.tensor." dims ".shared::cluster.global.mbarrier::complete_tx::bytes" hint \
               " [%0], [%1, " places ::"r"(to), "l"(map), __VA_ARGS__ : "memory")
// A box of `map` from column k and row on, into shared memory.
__device__ __forceinline__ void tma_load_2d(u32 to, const void *map, int k, int row, u32 barrier) {
  TMA_LOAD("2d", "", "{%2, %3}], [%4];", "r"(k), "r"(row), "r"(barrier));
}
// The same with a policy of L2.
__device__ __forceinline__ void tma_load_2d(u32 to, const void *map, int k, int row, u32 barrier,
                                            u64 policy) {
  TMA_LOAD("2d", L2_HINT, "{%2, %3}], [%4], %5;", "r"(k), "r"(row), "r"(barrier), "l"(policy));
}
// The same in three dimensions: two boxes `apart` in the middle one, whose rows take turns.
__device__ __forceinline__ void tma_load_2d_pairs(u32 to, const void *map, int k, int row, u32 barrier,
                                                  u64 policy) {
  TMA_LOAD("3d", L2_HINT, "{%2, 0, %3}], [%4], %5;", "r"(k), "r"(row), "r"(barrier), "l"(policy));
}
// Boxes of three and four dimensions, from a place given for each.
__device__ __forceinline__ void tma_load_3d(u32 to, const void *map, int x, int y, int z, u32 barrier) {
  TMA_LOAD("3d", "", "{%2, %3, %4}], [%5];", "r"(x), "r"(y), "r"(z), "r"(barrier));
}
__device__ __forceinline__ void tma_load_4d(u32 to, const void *map, int x, int y, int z, int w,
                                            u32 barrier) {
  TMA_LOAD("4d", "", "{%2, %3, %4, %5}], [%6];", "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier));
}
// The same with a policy of L2.
__device__ __forceinline__ void tma_load_4d(u32 to, const void *map, int x, int y, int z, int w,
                                            u32 barrier, u64 policy) {
  TMA_LOAD("4d", L2_HINT, "{%2, %3, %4, %5}], [%6], %7;", "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier),
           "l"(policy));
}
__device__ __forceinline__ void prefetch_tensormap(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
