// The instructions of linear_wide.cu for the host, in place of machine.cuh, bulk.cuh and wgmma.cuh: those of
// latent attention, and what CTAs of a cluster send each other, which arrives at once.
#pragma once
#include "latent_on_host.h"

inline void tma_load_2d(u32 to, const Map *map, int k, int row, u32 barrier, u64 = 0) {
  tma_load_4d(to, map, k, row, 0, 0, barrier);
}
inline void tma_load_2d_pairs(u32 to, const Map *map, int k, int row, u32 barrier, u64) {
  tma_load_4d(to, map, k, 0, row, 0, barrier);
}
inline void st_async(u32 to, const float (&x)[4], u32 barrier) {
  if (to / CTA_BYTES == (u32)cta() || to / CTA_BYTES != barrier / CTA_BYTES) abort();
  const races::As copy(races::BULK, memories + barrier);
  memcpy(memories + to, &x, sizeof x);
  barriers.at(barrier).bytes -= sizeof x;
  completes(barrier);
}
inline float4 load_shared(u32 at) { return *(const float4 *)(memories + at); }
inline int arrived;  // threads of a cluster, whose CTAs meet once
inline void cluster_arrive_relaxed() {
  races::arrive(&arrived);
  if (++arrived == cta_threads * cta_count) races::complete(&arrived);
  ++moved;
}
inline void cluster_wait() {
  wait_until([] { return arrived == cta_threads * cta_count; });
  races::pass(&arrived);
}
template <bool FP16, int J> void wgmma(float (&d)[J][4], u64 a, u64 b) {
  ask({d[0], a, b, J, false, false, true});
}
inline const bool forgets_arrivals = (forget = [] {
  barriers.clear();
  for (Meeting &m : warpgroups) m = {};
  for (Products &t : products) t = {};
  arrived = 0;
}, true);
