// Programmatic dependent launch under its names, and shared memory of other CTAs of a cluster. Compute
// capability 9.0 and later.
#pragma once

#include "machine.cuh"

// What is read before the first one was complete when the kernel ahead began.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ u32 ld_cluster_u32(u32 from) {
  u32 x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ float4 ld_cluster_float4(u32 from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void st_cluster_u32(u32 to, u32 x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ u32 atomic_add_cluster(u32 at, u32 x) {
  u32 before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(at), "r"(x)
               : "memory");
  return before;
}
__device__ __forceinline__ void fence_async() {  // what was stored is seen by products and copies
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
