// The instructions of the sparse kernels for the host, in place of machine.cuh, wgmma.cuh and
// logits_instructions.cuh. What is asynchronous happens at once.
#pragma once
#include "hopper_on_host.h"

inline u32 atomicAdd(u32 *at, u32 x) {
  races::touch(at, 4, true, true);
  const races::Quiet quiet;
  return (*at += x) - x;
}
inline u32 ld_cluster_u32(u32 from) { return *(u32 *)(memories + from); }
inline float2 ld_cluster_float2(u32 from) { return *(float2 *)(memories + from); }
inline void st_cluster(u32 to, u32 x) { *(u32 *)(memories + to) = x; }
inline void prefetch_l2(const char *) {}
inline u64 read_once() { return 0; }
inline void cp_async_once_or_zero(u32 to, const char *from, bool real, u64) { cp_async_or_zero(to, from, real); }
inline float clipped(float x) { return x < 0.f ? 0.f : x; }
// ----------------------------------------------------------------------------------------------- matrices
inline u64 operand(u32 at) { return at; }  // lines of 128 bytes, swizzled, 8 of them 1024 bytes
template <bool FP16> float element(u64 of, int row, int k) {
  const u32 at = (u32)of + row * 128 + k * 2;
  return number<FP16>(half_at(at ^ (at >> 7 & 7) << 4));
}
template <bool FP16, int N> void multiply_rows(float (&d)[N][4], const float (&a)[2][16], u64 b) {
  const races::As product(races::PRODUCT);
  for (int n = 0; n < N; ++n)
    for (int e = 0; e < 2; ++e)
      for (int k = 0; k < 16; ++k) {
        const float y = element<FP16>(b, n * 8 + current % 4 * 2 + e, k);
        for (int r = 0; r < 2; ++r) d[n][r * 2 + e] += a[r][k] * y;
      }
}
template <int N> void product16(float (&d)[N][4], const u32 (&a)[4], u64 b) {
  float x[2][16];
  rows_of<true>(x, a);
  multiply_rows<true>(d, x, b);
}
template <bool FP16, int N> void wgmma(float (&d)[N][4], u64 a, u64 b) {
  const races::As product(races::PRODUCT);
  float x[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k)
      x[r][k] = element<FP16>(a, current % 128 / 32 * 16 + current % 32 / 4 + r * 8, k);
  multiply_rows<FP16>(d, x, b);
}
inline void wgmma_fence() {}
inline void wgmma_commit() { races::commit(races::PRODUCT); }
template <int N> void wgmma_wait() { races::wait(races::PRODUCT, N); }
