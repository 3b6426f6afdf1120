// The instructions of linear_wide.cu for the host, in place of machine.cuh, bulk.cuh and wgmma.cuh: those of
// latent attention.
#pragma once
#include "latent_on_host.h"

inline void tma_load_2d(u32 to, const Map *map, int k, int row, u32 barrier, u64 = 0) {
  tma_load_4d(to, map, k, row, 0, 0, barrier);
}
inline void tma_load_2d_pairs(u32 to, const Map *map, int k, int row, u32 barrier, u64) {
  tma_load_4d(to, map, k, 0, row, 0, barrier);
}
template <bool FP16, int J> void wgmma(float (&d)[J][4], u64 a, u64 b) {
  ask({d[0], a, b, J, false, false, true});
}
