// What the parts of the kernels that compile for the host too need of either side; there a "warp" has one
// lane.
#pragma once

#include "prefill_config.cuh"

#ifdef __CUDACC__
#include "../../../cuda/machine.cuh"
#define BOTH __device__ __forceinline__
constexpr int LANES = 32;
BOTH int warp_lane() { return threadIdx.x % 32; }
BOTH int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
BOTH int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
BOTH int warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
BOTH int warp_sum_upto(int x) {  // of this lane and those before it
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, x, step);
    if (warp_lane() >= step) x += below;
  }
  return x;
}
BOTH int warp_first(bool x) { return __ffs(__ballot_sync(0xffffffffu, x)) - 1; }  // lane, or -1
BOTH int warp_take(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
BOTH void warp_meet() { __syncwarp(); }
BOTH void add_shared(int *at, int x) { atomicAdd(at, x); }
// 0 behind `last`
BOTH unsigned count_up(unsigned *counter, unsigned last) { return atomicInc(counter, last); }
#else
#define BOTH inline
constexpr int LANES = 1;
BOTH int load_l2(const int *p) { return *p; }
BOTH int load_and_forget_l1(const int *p) { return *p; }
BOTH int warp_lane() { return 0; }
BOTH int warp_sum(int x) { return x; }
BOTH int warp_max(int x) { return x; }
BOTH int warp_min(int x) { return x; }
BOTH int warp_sum_upto(int x) { return x; }
BOTH int warp_first(bool x) { return x ? 0 : -1; }
BOTH int warp_take(int x, int) { return x; }
BOTH void warp_meet() {}
BOTH void add_shared(int *at, int x) { *at += x; }
BOTH unsigned count_up(unsigned *counter, unsigned last) {
  const unsigned x = *counter;
  *counter = x >= last ? 0 : x + 1;
  return x;
}
BOTH int min(int a, int b) { return a < b ? a : b; }
BOTH int max(int a, int b) { return a > b ? a : b; }
#endif
