// Few requests: a cluster of CTAs shares the keys of each, in equal ranges of tiles. They put parts together
// by reading each other's shared memory, so that no merge is launched behind it.
#pragma once

#include "latent_epilogue.cuh"
#include "../../cuda/clustered.cuh"

struct Share {  // tiles of keys of a CTA of a cluster, and how many CTAs have some
  int each, parts;
};
__device__ __forceinline__ Share share_of(int tiles) {
  const int each = (tiles + CLUSTER - 1) / CLUSTER;
  return {each, each ? (tiles + each - 1) / each : 0};
}

// By every thread, ahead of the wait: lengths come from L2.
__device__ __forceinline__ Walk open_share(const Params &p) {
  const int item = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, request = item / p.row_tiles,
            start = load_l2(p.starts + request);
  const Lengths of = {start, load_l2(p.starts + request + 1) - start, load_l2(p.seq_lens + request)};
  const int tiles = of.tiles();
  load_and_forget_l1(p.starts + request);
  const int each = share_of(tiles).each, first = min(rank * each, tiles);
  return {p, request, first, min(each, tiles - first), item % p.row_tiles, 0, 0, of};
}

// The work of a CTA, by all of its COUNT threads; `scan`: SCAN_BYTES of shared memory.
template <int COUNT> __device__ __forceinline__ Walk open_work(const Params &p, int *scan, int &group) {
  if constexpr (CLUSTER == 1) {
    Schedule schedule;
    Place place;
    return open_walk<COUNT>(p, scan, group, schedule, place);
  }
  group = 0;
  __syncthreads();
  return open_share(p);
}

// Parts: accumulators and softmax states, at the begin of each CTA's memory as in a slot (latent_params.cuh).
// All are added in the order of the CTAs. A CTA takes every CLUSTER-th unit, by COUNT threads; they are of
// the same rows, so that a thread weighs the parts once.
template <int COUNT>
__device__ __forceinline__ void put_together(const Params &p, char *memory, const Walk &walk, int thread) {
  constexpr int STEP = COUNT / 128 * CLUSTER, AT_ONCE = UNITS > STEP ? 2 : 1;  // units asked for at once
  static_assert(CLUSTER == 1 || CLUSTER % BLOCKS_8 == 0, "rows of a thread");
  static_assert(CLUSTER == 1 || UNITS <= STEP || UNITS % (STEP * 2) == 0, "whole rounds");
  const int rank = blockIdx.x % CLUSTER, first_row = walk.row_tile * ROWS, place = thread % 128,
            lane = thread % 32, first = rank + thread / 128 * CLUSTER, j = first % BLOCKS_8,
            row = j * 8 + lane % 4 * 2, parts = share_of(walk.of.tiles()).parts;
  const auto [start, query_len, seq_len] = walk.of;
  __syncwarp();
  meet_cluster<CLUSTER>();  // every part is there
  if (parts > 1 && first_row < query_len * NUM_HEADS && first < UNITS) {
    const u32 at = shared_address(memory);
    float4 state[CLUSTER], x[AT_ONCE][CLUSTER];
    const auto ask = [&](float4 (&x)[CLUSTER], u32 from) {  // no branches, and nothing where there is no part
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part)
        x[part] = ld_cluster_float4_or_zero(mapa(from, part), part < parts);
    };
    ask(state, at + UNITS * 2048 + row * 8);
    float top[2] = {FLOOR, FLOOR}, total[2] = {0.f, 0.f}, by[2];
    bool sees[2];
#pragma unroll
    for (int unit = first; unit < UNITS; unit += STEP * AT_ONCE) {
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) ask(x[n], at + ((unit + n * STEP) * 128 + place) * 16);
      if (unit == first) {
#pragma unroll
        for (int part = 0; part < CLUSTER; ++part) {
          top[0] = fmaxf(top[0], part < parts ? state[part].x : FLOOR);
          top[1] = fmaxf(top[1], part < parts ? state[part].z : FLOOR);
        }
#pragma unroll
        for (int part = 0; part < CLUSTER; ++part) {
          state[part].x = part < parts ? exp2_(state[part].x - top[0]) : 0.f;
          state[part].z = part < parts ? exp2_(state[part].z - top[1]) : 0.f;
          total[0] += part < parts ? state[part].y * state[part].x : 0.f;
          total[1] += part < parts ? state[part].w * state[part].z : 0.f;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Row r = row_of(first_row + row + e, start, query_len, seq_len);
          sees[e] = r.end > 0;
          by[e] = 1.f / total[e];
          if (unit < BLOCKS_8 && place < 4) store_lse(p, r, top[e], total[e]);
        }
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        float4 acc = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int part = 0; part < CLUSTER; ++part)
          if (part < parts) {
            acc.x += x[n][part].x * state[part].x;
            acc.y += x[n][part].y * state[part].z;
            acc.z += x[n][part].z * state[part].x;
            acc.w += x[n][part].w * state[part].z;
          }
        const float y[4] = {sees[0] ? acc.x * by[0] : 0.f, sees[1] ? acc.y * by[1] : 0.f,
                            sees[0] ? acc.z * by[0] : 0.f, sees[1] ? acc.w * by[1] : 0.f};
        store_turned(p, row_of(first_row + j * 8 + lane / 4, start, query_len, seq_len),
                     (unit + n * STEP) / BLOCKS_8 * 64 + place / 32 * 16, lane, y);
      }
    }
  }
  __syncwarp();
  end_with_cluster();
}
// By the warps that take no part in it.
__device__ __forceinline__ void stand_by() {
  __syncwarp();
  meet_cluster<CLUSTER>();
  end_with_cluster();
}
