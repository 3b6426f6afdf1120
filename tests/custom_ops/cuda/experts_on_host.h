// The instructions of the kernels of mixtures of experts for the host, in place of machine.cuh.
#pragma once
#include "hopper_on_host.h"

inline u64 read_once() { return 0; }
inline void cp_async_once(u32 to, const char *from, u64) {
  if (to % 16 || (u64)from % 16) abort();
  cp_async_or_zero(to, from, true);
}
inline u32 atomicOr(u32 *at, u32 x) {
  races::touch(at, 4, true, true);
  const races::Quiet quiet;
  return std::exchange(*at, *at | x);
}
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
