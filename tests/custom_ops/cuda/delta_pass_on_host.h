// The instructions of the kernel that goes from chunk to chunk of a gated delta net for the host, in place of
// machine.cuh, wgmma.cuh and delta_pass_instructions.cuh: those of latent attention, and products whose left
// operand is in registers.
#pragma once
constexpr bool HALF = false;
#include "latent_on_host.h"

inline Product kept(float *d, const u32 (&a)[4], u64 b, int columns, bool turned, bool add) {
  Product made = {d, 0, b, columns, false, turned, add, true};
  for (int n = 0; n < 4; ++n) {
    const u64 *all = exchange(a[n]);
    for (int k = 0; k < 8; ++k)
      made.of_a[n % 2][n / 2 * 8 + k] =
          number<HALF>((u16)(all[current % 32 / 4 * 4 + k / 2] >> k % 2 * 16));
  }
  return made;
}
inline void bulk_wait_read() { races::wait(races::STORE, 0); }
inline void tma_load_3d(u32 to, const Map *map, int x, int y, int z, u32 barrier) {
  tma_load_4d(to, map, x, y, z, 0, barrier);
}
inline void tma_store_3d(const Map *map, u32 from, int x, int y, int z) {
  const races::As copy(races::STORE);
  for (int c = 0, place = (int)from; c < map->box[2]; ++c)
    for (int b = 0; b < map->box[1]; ++b)
      for (int a = 0; a < map->box[0]; ++a, place += 2) {
        const i64 at = x + a + (i64)(y + b) * map->strides[0] + (i64)(z + c) * map->strides[1];
        if (x + a < map->sizes[0] && y + b < map->sizes[1] && z + c < map->sizes[2])
          memcpy((char *)map->from + at * 2, memories + (place ^ (place >> 7 & 7) << 4), 2);
      }
  races::commit(races::STORE);
}
template <int ADD> void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
  ask(kept(d, a, b, 8, false, ADD == 1));
}
inline void multiply_lines(float (&d)[64], const u32 (&a)[4], u64 b) {
  ask(kept(d, a, b, 16, true, true));
}
