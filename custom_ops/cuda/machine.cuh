// The instructions that C++ has no words for. FP16: 16-bit numbers are float16, else bfloat16.
//
// Who waits for whom, in all kernels here. A comment at each wait says why it ends; these hold for every one:
// - A CTA waits for warps of its own, for CTAs of its cluster, and for whole kernels ahead
//   (griddepcontrol.wait); never for another CTA of its grid, for a kernel behind it, or for the host. The
//   hardware places a cluster whole or refuses the launch, under MPS and MIG as well, so that no wait needs
//   room for a CTA which is not there. Work shared by CTAs of different clusters is finished by the CTA
//   that comes last.
// - griddepcontrol.wait ends because a kernel is placed early only when all CTAs of the one ahead run or have
//   ended: one that waits keeps no room from one it waits for. Every kernel here waits for those ahead before
//   it ends, so that "the one ahead has ended" holds for all further ahead.
// - Loading a module, lazily or not, may wait for the device. No kernel waits for one that is launched later,
//   so that this ends too.
// - nvcc and NVRTC put no barrier of a CTA into code by themselves: the order of barriers is that of the
//   source.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr float LOG2E = 1.4426950408889634f;
[[maybe_unused]] constexpr float LN2 = 0.6931471805599453f;
constexpr float FLOOR = -1.0e30f;  // finite, so that a warp without keys makes no inf - inf
#define INF __int_as_float(0x7f800000)
#define ALL 0xffffffffu

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void cp_async_or_zero(u32 to, const char *from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
// Weights, keys and values are read once per step: they leave L2 first, what other CTAs still need stays. On
// Ampere, where this was not measured, the policy's registers make a kernel spill.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_once(u32 to, const char *from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void cp_async_once_or_zero(u32 to, const char *from, bool real, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0), "l"(policy)
               : "memory");
}
#else
__device__ __forceinline__ u64 read_once() { return 0; }
__device__ __forceinline__ void cp_async_once(u32 to, const char *from, u64) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
#endif
__device__ __forceinline__ void prefetch_l2(const char *at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(u32 at, const u32 (&r)[4]) {  // compute capability 9.0
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// Each matrix of 8 x 8 numbers on its side.
__device__ __forceinline__ void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ u32 movmatrix_trans(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
template <bool FP16> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (FP16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <bool FP16> __device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  if constexpr (FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <bool FP16> __device__ __forceinline__ float to_float(u16 x) {
  if constexpr (FP16) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
  } else {
    return __int_as_float((u32)x << 16);
  }
}
// Four numbers as e4m3, the first in the lowest byte; what is beyond 448 is 448, NaN stays NaN.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; "
      "mov.b32 %0, {l, h};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
// What results are multiplied by to be over `scale`: finite, so that a zero stays one.
__device__ __forceinline__ float inverse_of(float scale) {
  return fminf(__frcp_rn(scale), __int_as_float(0x7f7fffff));
}
template <bool E5M2> __device__ __forceinline__ void unpack_fp8(u32 x, u32 &low, u32 &high) {  // to float16
  if constexpr (E5M2)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e5m2x2 %0, l; cvt.rn.f16x2.e5m2x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(x));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(x));
}
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_(float x) {  // a series near 0, where the formula with exp cancels
  const float x2 = x * x;
  const float tail = -0.33333333333f + x2 * (0.13333333333f + x2 * (-0.05396825397f + x2 * 0.02186948854f));
  const float series = x * (1.f + x2 * tail);
  const float far = 1.f - 2.f / (exp2_(2.f * LOG2E * x) + 1.f);
  return fabsf(x) < 0.3f ? series : far;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// cap * tanh(x / cap), `inverse` being inverse_of(cap). What counts of a score is how far it is off: from
// where the formula with exp begins, 1e-7 of the cap. So the series needs two terms, and divisions none.
__device__ __forceinline__ float soft_capped(float x, float cap, float inverse) {
  const float part = x * inverse;
  const float near = part * fmaf(part * part, -0.33333333333f, 1.f);
  const float far = fmaf(reciprocal(exp2_(2.f * LOG2E * part) + 1.f), -2.f, 1.f);
  return cap * (fabsf(part) < 0.03f ? near : far);
}
// Of one load: what stands in a function that gives it.
#define LOADED(type, text, from, ...) \
  type x; \
  asm volatile(text : __VA_ARGS__ : from : "memory"); \
  return x;
// Lengths, query starts and block tables are read before griddepcontrol.wait, where this multiprocessor's L1
// may still hold an older step's: a program that starts early is not known to find L1 emptied. They are not
// written while the kernel runs. So the first reads come from L2, and the last of them is an acquire, which
// empties L1: what a thread reads behind its own is as new, at the price of L1.
__device__ __forceinline__ int load_l2(const int *p) {
  int x;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(p));
#else  // no kernel starts early there
  x = *p;
#endif
  return x;
}
__device__ __forceinline__ int load_and_forget_l1(const int *p) {
  int x;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
#else
  x = *p;
#endif
  return x;
}
__device__ __forceinline__ u16 load_l2(const u16 *p) {
  LOADED(u16, "ld.global.cg.u16 %0, [%1];", "l"(p), "=h"(x))
}
__device__ __forceinline__ u32 load_l2(const u32 *p) {
  LOADED(u32, "ld.global.cg.u32 %0, [%1];", "l"(p), "=r"(x))
}
__device__ __forceinline__ float load_l2(const float *p) {  // other CTAs wrote it: L1 must not answer
  LOADED(float, "ld.global.cg.f32 %0, [%1];", "l"(p), "=f"(x))
}
__device__ __forceinline__ float2 load_l2(const float2 *p) {
  LOADED(float2, "ld.global.cg.v2.f32 {%0,%1}, [%2];", "l"(p), "=f"(x.x), "=f"(x.y))
}
__device__ __forceinline__ float4 load_l2(const float4 *p) {
  LOADED(float4, "ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];", "l"(p),
         "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w))
}
__device__ __forceinline__ uint2 load_l2(const uint2 *p) {
  LOADED(uint2, "ld.global.cg.v2.u32 {%0,%1}, [%2];", "l"(p), "=r"(x.x), "=r"(x.y))
}
__device__ __forceinline__ uint4 load_l2(const uint4 *p) {
  LOADED(uint4, "ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];", "l"(p),
         "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w))
}

// Programmatic dependent launch; compute capability 9.0 and later. What is read before the wait was complete
// when the kernel ahead began.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <int THREADS_IN> __device__ __forceinline__ void barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS_IN) : "memory");
}
template <int THREADS_IN> __device__ __forceinline__ bool barrier_or(int id, bool mine) {  // anyone's
  u32 any;
  asm volatile("{.reg .pred m, a; setp.ne.u32 m, %1, 0; bar.red.or.pred a, %2, %3, m; selp.u32 %0, 1, 0, a;}"
               : "=r"(any) : "r"((u32)mine), "r"(id), "n"(THREADS_IN) : "memory");
  return any;
}
// Arrives there and goes on; of THREADS_IN threads in all, the others wait.
template <int THREADS_IN> __device__ __forceinline__ void barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS_IN) : "memory");
}
__device__ __forceinline__ void fence_async() {  // what was stored is seen by products and copies
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// CTAs of a cluster write into each other's shared memory: parts of a pair then meet without a trip through
// L2.
// the address of `mine` in CTA `rank` of the cluster
__device__ __forceinline__ u32 mapa(u32 mine, int rank) {
  u32 theirs;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
  return theirs;
}
__device__ __forceinline__ u32 mapa(const void *mine, int rank) { return mapa(shared_address(mine), rank); }
__device__ __forceinline__ void st_cluster(u32 to, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void st_cluster(u32 to, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void st_cluster(u32 to, u32 x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ u32 ld_cluster_u32(u32 from) {
  LOADED(u32, "ld.shared::cluster.u32 %0, [%1];", "r"(from), "=r"(x))
}
__device__ __forceinline__ float ld_cluster_float(u32 from) {
  LOADED(float, "ld.shared::cluster.f32 %0, [%1];", "r"(from), "=f"(x))
}
__device__ __forceinline__ float2 ld_cluster_float2(u32 from) {
  LOADED(float2, "ld.shared::cluster.v2.f32 {%0,%1}, [%2];", "r"(from), "=f"(x.x), "=f"(x.y))
}
__device__ __forceinline__ float4 ld_cluster_float4(u32 from) {
  LOADED(float4, "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];", "r"(from),
         "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w))
}
__device__ __forceinline__ float4 ld_cluster_float4_or_zero(u32 from, bool real) {
  float4 x = {0.f, 0.f, 0.f, 0.f};
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];}"
               : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
               : "r"(from), "r"((u32)real)
               : "memory");
  return x;
}
__device__ __forceinline__ void red_release_cluster(u32 counter) {
  asm volatile("red.release.cluster.shared::cluster.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}
// One more comes to a number that starts at 0; how many came before. What CTAs read ahead of it, and have
// used behind a barrier, they have read when the last one comes; what they wrote it may not see. To order
// writes as well, by acq_rel, waits for all loads of the thread, those of a state too
// (docs/log/states_chain.md).
__device__ __forceinline__ int count_arrival(int *semaphore) {
  int before;
  asm volatile("atom.global.relaxed.gpu.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(semaphore) : "memory");
  return before;
}
// a spin; decode.cu, where it stands, says who comes
__device__ __forceinline__ void wait_for_count(const u32 *counter, u32 wanted) {
  u32 seen;
  do
    asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];"
                 : "=r"(seen)
                 : "r"(shared_address(counter))
                 : "memory");
  while (seen != wanted);
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// All threads of a cluster of so many CTAs.
template <int CTAS> __device__ __forceinline__ void meet_cluster() {
  if constexpr (CTAS > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}
// All threads of a cluster, before it ends: until then others may read a CTA's memory. Nothing that was
// stored need be seen, so no store is waited for.
__device__ __forceinline__ void end_with_cluster() {
  cluster_arrive_relaxed();
  cluster_wait();
}
