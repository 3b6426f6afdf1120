// The instructions of the sparse kernels for the host, in place of machine.cuh, wgmma.cuh and
// logits_instructions.cuh. What is asynchronous happens at once.
#pragma once
#include "hopper_on_host.h"

inline u32 atomicAdd(u32 *at, u32 x) { return (*at += x) - x; }
inline u32 mapa(const void *mine, int rank) {
  return shared_address(mine) % CTA_BYTES + (u32)rank * CTA_BYTES;
}
inline u32 ld_cluster_u32(u32 from) { return *(u32 *)(memories + from); }
inline float2 ld_cluster_float2(u32 from) { return *(float2 *)(memories + from); }
inline float4 ld_cluster_float4(u32 from) { return *(float4 *)(memories + from); }
inline void st_cluster(u32 to, u32 x) { *(u32 *)(memories + to) = x; }
inline void prefetch_l2(const char *) {}
inline float clipped(float x) { return x < 0.f ? 0.f : x; }
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
inline u64 matrix(u32 at) { return at; }  // lines of 128 bytes, swizzled, 8 of them 1024 bytes
template <bool FP16> float element(u64 of, int row, int k) {
  const u32 at = (u32)of + row * 128 + k * 2;
  return number<FP16>(half_at(at ^ (at >> 7 & 7) << 4));
}
template <bool FP16, int N> void multiply_rows(float (&d)[N][4], const float (&a)[2][16], u64 b) {
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
  float x[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k)
      x[r][k] = element<FP16>(a, current % 128 / 32 * 16 + current % 32 / 4 + r * 8, k);
  multiply_rows<FP16>(d, x, b);
}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
