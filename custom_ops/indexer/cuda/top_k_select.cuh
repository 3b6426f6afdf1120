// The key of a row's k-th largest number, found by a cluster of CTAs; top_k_indices.cu says how.
#pragma once

#include "../../cuda/machine.cuh"
#include "top_k_config.cuh"
#include "../../cuda/clustered.cuh"

constexpr int THREADS = 1024, WARPS = 32, BINS = 2048, CTA_COLUMNS = THREADS * 4 * VECTORS;
constexpr u32 LOWEST = 0x007fffff;  // of -inf, which is never taken
static_assert(CTA_COLUMNS < 1 << 16, "two counts in a number");

struct Shared {
  u32 counts[BINS], totals[BINS];  // of this CTA; of the cluster
  u32 scan[VECTORS * WARPS];
  u32 of_cta[CLUSTER];
  u32 bin, above, inside;
};

// Unsigned integers in the order of numbers; NaN above all, -0 as 0.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return x != x ? ~0u : bits ^ ((int)bits < 0 ? ~0u : 0x80000000u);
}

__device__ __forceinline__ u32 sum_upto(u32 x, int lane) {  // over the lanes of a warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 before = __shfl_up_sync(ALL, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// The counts of all CTAs of the cluster, in every one. Each CTA adds up a share of the bins: LANES threads
// for each bin read two CTAs' counts each, and send the sum to those two.
__device__ __forceinline__ void add_up(Shared &s, int thread, int rank) {
  meet_cluster<CLUSTER>();
#if CLUSTER > 1
  constexpr int LANES = CLUSTER / 2, SHARE = BINS / CLUSTER;
  static_assert(SHARE * LANES == THREADS, "two CTAs' counts for each thread");
  const int lane = thread % LANES, bin = rank * SHARE + thread / LANES;
  u32 sum = ld_cluster_u32(mapa(&s.counts[bin], lane)) + ld_cluster_u32(mapa(&s.counts[bin], lane + LANES));
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
  st_cluster(mapa(&s.totals[bin], lane), sum);
  st_cluster(mapa(&s.totals[bin], lane + LANES), sum);
  meet_cluster<CLUSTER>();
#endif
}

// The bin with the `wanted`-th key from above into s.bin, with the keys above it and in it; s.inside stays 0
// if there are fewer. Counts are cleared for the next step.
__device__ __forceinline__ void find_bin(Shared &s, int thread, u32 wanted) {
  const int lane = thread % 32, warp = thread / 32, bin = BINS - 1 - 2 * thread;
  const u32 *totals = CLUSTER > 1 ? s.totals : s.counts;
  const u32 high = totals[bin], low = totals[bin - 1], upto = sum_upto(high + low, lane);
  if (lane == 31) s.scan[warp] = upto;
  if (thread == 0) s.inside = 0;
  __syncthreads();
  s.counts[bin] = s.counts[bin - 1] = 0;
  const u32 of_warps = sum_upto(s.scan[lane], lane);
  const u32 before = __shfl_sync(ALL, of_warps, warp) - s.scan[warp];
  const u32 above = before + upto - high - low;
  if (above < wanted && wanted <= above + high + low) {
    const bool is_high = wanted <= above + high;
    s.bin = is_high ? bin : bin - 1;
    s.above = is_high ? above : above + high;
    s.inside = is_high ? high : low;
  }
  __syncthreads();
}

struct Threshold {  // taken: keys above `key`, and the first `equal` of those that are it
  u32 key, equal;
};

__device__ __forceinline__ Threshold find_threshold(Shared &s, const u32 (&keys)[VECTORS][4], int thread,
                                                    int rank, u32 wanted) {
  u32 known = 0;
  constexpr int SHIFTS[3] = {21, 10, 0}, BITS[3] = {11, 11, 10};
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int shift = SHIFTS[step], bits = BITS[step];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 key = keys[v][e];
        if (step == 0 ? key > LOWEST : key >> (shift + bits) % 32 == known)
          atomicAdd(&s.counts[key >> shift & ((1 << bits) - 1)], 1u);
      }
    add_up(s, thread, rank);
    find_bin(s, thread, wanted);
    if (s.inside == 0) return {LOWEST, 0};  // fewer than wanted: in the first step alone
    known = known << bits | s.bin;
    wanted -= s.above;
    if (s.inside == wanted) return {(known << shift) - 1, 0};  // the whole bin
  }
  return {known, wanted};
}
