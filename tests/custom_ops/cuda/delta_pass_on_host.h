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
template <int ADD> void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
  products[current].open.push_back(kept(d, a, b, 8, false, ADD == 1));
}
inline void multiply_lines(float (&d)[64], const u32 (&a)[4], u64 b) {
  products[current].open.push_back(kept(d, a, b, 16, true, true));
}
