// CUDA C++ on the host, in place of machine.cuh: the threads of all CTAs of a cluster are coroutines that
// take turns by chance, so that the kernels' own sources are what runs. latent_on_host.h and sparse_on_host.h
// add the matrix instructions and copies of their kernels. A wait that nothing can end is noticed, since no
// coroutine moves.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "races_on_host.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define ALL 0xffffffffu
#define INF __builtin_inff()
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f, FLOOR = -1.0e30f;
using std::max;
using std::min;

// ---------------------------------------------------------------------------------------------- coroutines
struct Thread {
  ucontext_t context;
  char *stack = nullptr;
  bool ended;
};
constexpr int MOST_WARPS = 512, MOST_CTAS = 16, STACK_BYTES = 1 << 17;
inline Thread threads[MOST_WARPS * 32];
inline int current, moved, cta_threads, cta_count, first_cta, num_ctas;
inline ucontext_t scheduler;
struct Index { int x; };
inline int cta() { return current / cta_threads; }
inline Index thread_index() { return {current % cta_threads}; }
inline Index block_index() { return {first_cta + cta()}; }
inline Index grid_size() { return {num_ctas}; }
#define threadIdx (thread_index())
#define blockIdx (block_index())
#define gridDim (grid_size())

template <class F> void wait_until(F done) {
  while (!done()) swapcontext(&threads[current].context, &scheduler);
  ++moved;
}
struct Meeting { int count = 0, generation = 0; };
inline void meet(Meeting &m, int wanted, bool orders = true) {
  const int generation = m.generation;
  if (orders) races::arrive(&m);
  if (++m.count == wanted) {
    m.count = 0;
    ++m.generation;
    ++moved;
    if (orders) races::complete(&m);
  } else {
    wait_until([&] { return m.generation != generation; });
  }
  if (orders) races::pass(&m);
}
inline Meeting of_warps[MOST_WARPS], named[MOST_CTAS][16], of_cluster;
inline u64 given[MOST_WARPS][2][32];
inline int turns[MOST_WARPS][32];
inline const u64 *exchange(u64 x) {  // what all lanes of the warp gave
  const int warp = current / 32, lane = current % 32, turn = turns[warp][lane]++ & 1;
  given[warp][turn][lane] = x;
  meet(of_warps[warp], 32, false);
  return given[warp][turn];
}
template <class T> T shuffled(T x, int from) {
  u64 bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = exchange(bits)[from];
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T> T __shfl_sync(u32, T x, int lane) { return shuffled(x, lane & 31); }
template <class T> T __shfl_xor_sync(u32, T x, int mask) { return shuffled(x, current % 32 ^ mask); }
template <class T> T __shfl_up_sync(u32, T x, int step) {
  const int lane = current % 32;
  return shuffled(x, lane >= step ? lane - step : lane);
}
inline u32 __ballot_sync(u32, bool x) {
  const u64 *all = exchange(x);
  u32 votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (u32)(all[lane] != 0) << lane;
  return votes;
}
inline bool __any_sync(u32, bool x) { return __ballot_sync(ALL, x); }
inline void __syncwarp() { meet(of_warps[current / 32], 32); }
inline u32 __byte_perm(u32 x, u32 y, u32 chosen) {
  const u64 bytes = x | (u64)y << 32;
  u32 z = 0;
  for (int i = 0; i < 4; ++i) z |= (u32)(bytes >> (chosen >> i * 4 & 7) * 8 & 255) << i * 8;
  return z;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline void __syncthreads() { meet(named[cta()][0], cta_threads); }
template <int COUNT> void barrier(int id) { meet(named[cta()][id], COUNT); }
template <int COUNT> void barrier_arrive(int id) {
  Meeting &m = named[cta()][id];
  races::arrive(&m);
  if (++m.count < COUNT) return;
  races::complete(&m);
  m.count = 0;
  ++m.generation;
  ++moved;
}
template <int COUNT> bool barrier_or(int id, bool mine) {
  static bool any[MOST_CTAS][2];
  const int turn = named[cta()][id].generation & 1;
  if (mine) any[cta()][turn] = true;
  barrier<COUNT>(id);
  const bool found = any[cta()][turn];
  barrier<COUNT>(id);
  any[cta()][turn] = false;
  return found;
}
template <int CTAS> void meet_cluster() { meet(of_cluster, cta_threads * cta_count); }
inline void end_with_cluster() { meet(of_cluster, cta_threads * cta_count); }
inline int arrived;  // threads of a cluster, whose CTAs meet once
inline void cluster_arrive() {
  races::arrive(&arrived);
  if (++arrived == cta_threads * cta_count) races::complete(&arrived);
  ++moved;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  wait_until([] { return arrived == cta_threads * cta_count; });
  races::pass(&arrived);
}
inline void fence_mbarrier_init() {}

// ------------------------------------------------------------------------------------------ shared memory
constexpr u32 CTA_BYTES = 1 << 18;
alignas(1024) inline char memories[MOST_CTAS * CTA_BYTES];
inline char *cta_memory() { return memories + cta() * CTA_BYTES; }
inline u32 shared_address(const void *p) { return (u32)((const char *)p - memories); }
inline u32 mapa(u32 mine, int rank) { return mine % CTA_BYTES + (u32)rank * CTA_BYTES; }
inline u32 mapa(const void *mine, int rank) { return mapa(shared_address(mine), rank); }
inline float4 ld_cluster_float4(u32 from) { return *(float4 *)(memories + from); }
inline float4 ld_cluster_float4_or_zero(u32 from, bool real) {
  return real ? ld_cluster_float4(from) : float4{0.f, 0.f, 0.f, 0.f};
}
inline void cp_async_or_zero(u32 to, const char *from, bool real) {
  const races::As copy(races::COPY);
  if (real) memcpy(memories + to, from, 16);
  else memset(memories + to, 0, 16);
}
inline void cp_async_commit() { races::commit(races::COPY); }
template <int N> void cp_async_wait() { races::wait(races::COPY, N); }
inline void fence_async() { races::fence(); }
inline int count_arrival(int *semaphore) {
  races::touch(semaphore, 4, true, true);
  races::count(semaphore);
  const races::Quiet quiet;
  return (*semaphore)++;
}
inline void griddepcontrol_wait() { races::waited_for_kernels_ahead(); }
inline void griddepcontrol_launch_dependents() {}
template <class T> T load_l2(const T *p) { return *p; }
inline int load_and_forget_l1(const int *p) { return *p; }

// ------------------------------------------------------------------------------------------------ numbers
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline float exp2_(float x) { return std::exp2(x); }
inline float log2_(float x) { return std::log2(x); }
inline float tanh_(float x) { return std::tanh(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <bool FP16> float number(u16 x) {
  if (!FP16) return __int_as_float((u32)x << 16);
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
template <bool FP16> u16 rounded(float x) {
  u16 r;
  if (FP16) {
    const _Float16 y = (_Float16)x;
    memcpy(&r, &y, 2);
    return r;
  }
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <bool FP16> u32 pack(float low, float high) {
  return rounded<FP16>(low) | (u32)rounded<FP16>(high) << 16;
}
template <bool FP16> float to_float(u16 x) { return number<FP16>(x); }
inline float from_e4m3(u32 x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float y = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  if ((x & 127) == 127) y = __builtin_nanf("");
  return x & 128 ? -y : y;
}
inline u32 to_e4m3(float x) {  // the nearest, of two the even one
  u32 best = 127;
  for (u32 n = 0; n < 127; ++n) {
    const float off = std::fabs(from_e4m3(n) - std::fabs(x)),
                least = std::fabs(from_e4m3(best) - std::fabs(x));
    if (best == 127 ? x == x : off < least || (off == least && n % 2 == 0)) best = n;
  }
  return best | (std::signbit(x) ? 128 : 0);
}
inline u32 pack_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}
template <bool> void unpack_fp8(u32 x, u32 &low, u32 &high) {
  low = pack<true>(from_e4m3(x), from_e4m3(x >> 8));
  high = pack<true>(from_e4m3(x >> 16), from_e4m3(x >> 24));
}

// ----------------------------------------------------------------------------------------------- matrices
inline u16 half_at(u32 at) { u16 x; memcpy(&x, memories + at, 2); return x; }
inline void ldmatrix_x4(u32 (&r)[4], u32 at) {
  const u64 *all = exchange(at);
  const int lane = current % 32;
  for (int i = 0; i < 4; ++i) memcpy(&r[i], memories + all[i * 8 + lane / 4] + lane % 4 * 4, 4);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 at) {
  const u64 *all = exchange(at);
  const int lane = current % 32, row = lane % 4 * 2, column = lane / 4 * 2;
  for (int i = 0; i < 4; ++i)
    r[i] = half_at(all[i * 8 + row] + column) | (u32)half_at(all[i * 8 + row + 1] + column) << 16;
}
inline u32 movmatrix_trans(u32 x) {
  const u64 *all = exchange(x);
  const int row = current % 32 / 4, column = current % 4 * 2;
  u32 y = 0;
  for (int i = 0; i < 2; ++i) y |= (u32)(u16)(all[(column + i) * 4 + row / 2] >> row % 2 * 16) << i * 16;
  return y;
}
// Rows lane / 4 and lane / 4 + 8 of fragments of 16 x 16.
template <bool FP16> void rows_of(float (&x)[2][16], const u32 (&a)[4]) {
  const int row = current % 32 / 4;
  for (int i = 0; i < 4; ++i) {
    const u64 *all = exchange(a[i]);
    for (int q = 0; q < 4; ++q)
      for (int e = 0; e < 2; ++e)
        x[i % 2][i / 2 * 8 + q * 2 + e] = number<FP16>((u16)(all[row * 4 + q] >> e * 16));
  }
}
template <bool FP16> void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  float x[2][16], y[2][16];
  rows_of<FP16>(x, a);
  const int column = current % 4 * 2;
  for (int i = 0; i < 2; ++i) {
    const u64 *all = exchange(i ? b1 : b0);
    for (int e = 0; e < 2; ++e)
      for (int k = 0; k < 8; ++k)
        y[e][i * 8 + k] = number<FP16>((u16)(all[(column + e) * 4 + k / 2] >> k % 2 * 16));
  }
  for (int r = 0; r < 2; ++r)
    for (int e = 0; e < 2; ++e)
      for (int k = 0; k < 16; ++k) c[r * 2 + e] += x[r][k] * y[e][k];
}

// ------------------------------------------------------------------------------------------------- launch
inline void (*forget)() = [] {};  // what a header keeps of the cluster before
template <class F> int launch(int ctas, int count, int cluster, unsigned seed, F kernel) {
  static F *now;
  now = &kernel;
  std::mt19937 chance(seed);
  cta_threads = count;
  cta_count = cluster;
  num_ctas = ctas;
  const int all = count * cluster;
  for (first_cta = 0; first_cta < ctas; first_cta += cluster) {
    memset(memories, 0xff, cluster * CTA_BYTES);  // NaN
    for (Meeting &m : of_warps) m = {};
    for (auto &of_cta : named)
      for (Meeting &m : of_cta) m = {};
    of_cluster = {};
    arrived = 0;
    forget();
    memset(turns, 0, sizeof turns);
    races::begin(cluster, first_cta, count);
    std::vector<int> order(all);
    for (int i = 0; i < all; ++i) {
      Thread &t = threads[i];
      order[i] = i;
      if (!t.stack) t.stack = (char *)malloc(STACK_BYTES);
      t.ended = false;
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack;
      t.context.uc_stack.ss_size = STACK_BYTES;
      t.context.uc_link = &scheduler;
      void (*body)() = [] {
        (*now)();
        threads[current].ended = true;
        ++moved;
      };
      makecontext(&t.context, body, 0);
    }
    for (int left = all, before = -1; left;) {
      if (moved == before) {
        printf("CTA %d of %d: no thread moves\n", first_cta, ctas);
        return 1;
      }
      before = moved;
      std::shuffle(order.begin(), order.end(), chance);
      for (const int i : order) {
        if (threads[i].ended) continue;
        current = i;
        swapcontext(&scheduler, &threads[i].context);
        left -= threads[i].ended;
      }
    }
    races::end();
  }
  for (int i = 0; i < all; ++i) free(std::exchange(threads[i].stack, nullptr));
  return 0;
}
