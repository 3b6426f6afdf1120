// Few requests: a cluster of CTAs shares the keys of each, in equal ranges of tiles. They put parts together
// by reading each other's shared memory, so that no merge is launched behind it.
#pragma once

#include "latent_epilogue.cuh"

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

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
  return {p, request, first, min(each, tiles - first), item % p.row_tiles, 0, of};
}

// The work of a CTA, by all of its COUNT threads; `scan`: SCAN_BYTES of shared memory.
template <int COUNT> __device__ __forceinline__ Walk open_work(const Params &p, int *scan, int &group) {
  if constexpr (CLUSTER == 1) return open_walk<COUNT>(p, scan, group);
  group = 0;
  __syncthreads();
  return open_share(p);
}

// Parts: accumulators and softmax states, at the begin of each CTA's memory as in a slot (latent_params.cuh).
// All are added in the order of the CTAs. A CTA takes every CLUSTER-th unit, by COUNT threads.
template <int COUNT> __device__ __forceinline__ void put_together(const Params &p, char *memory, int thread) {
  const int item = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, request = item / p.row_tiles,
            first_row = item % p.row_tiles * ROWS, place = thread % 128, lane = thread % 32,
            start = p.starts[request], query_len = p.starts[request + 1] - start,
            seq_len = p.seq_lens[request], parts = share_of(tiles_of(query_len, seq_len)).parts;
  __syncwarp();
  meet_cluster<CLUSTER>();  // every part is there
  if (parts > 1 && first_row < query_len * NUM_HEADS) {
    for (int unit = rank + thread / 128 * CLUSTER; unit < UNITS; unit += COUNT / 128 * CLUSTER) {
      const int j = unit % BLOCKS_8, row = j * 8 + lane % 4 * 2;
      const u32 at = shared_address(memory) + (unit * 128 + place) * 16,
                state_at = shared_address(memory) + UNITS * 2048 + row * 8;
      float4 x[CLUSTER], state[CLUSTER];
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part)
        if (part < parts) {
          state[part] = ld_cluster_float4(mapa(state_at, part));
          x[part] = ld_cluster_float4(mapa(at, part));
        }
      float top[2] = {FLOOR, FLOOR}, total[2] = {0.f, 0.f};
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part)
        if (part < parts) {
          top[0] = fmaxf(top[0], state[part].x);
          top[1] = fmaxf(top[1], state[part].z);
        }
      float4 acc = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part)
        if (part < parts) {
          const float low = exp2_(state[part].x - top[0]), high = exp2_(state[part].z - top[1]);
          total[0] += state[part].y * low;
          total[1] += state[part].w * high;
          acc.x += x[part].x * low;
          acc.y += x[part].y * high;
          acc.z += x[part].z * low;
          acc.w += x[part].w * high;
        }
      bool sees[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Row r = row_of(first_row + row + e, start, query_len, seq_len);
        sees[e] = r.end > 0;
        if (unit < BLOCKS_8 && place < 4) store_lse(p, r, top[e], total[e]);
      }
      const float y[4] = {sees[0] ? acc.x / total[0] : 0.f, sees[1] ? acc.y / total[1] : 0.f,
                          sees[0] ? acc.z / total[0] : 0.f, sees[1] ? acc.w / total[1] : 0.f};
      store_turned(p, row_of(first_row + j * 8 + lane / 4, start, query_len, seq_len),
                   unit / BLOCKS_8 * 64 + place / 32 * 16, lane, y);
    }
  }
  meet_cluster<CLUSTER>();  // none ends while its part is read
}
// By the warps that take no part in it.
__device__ __forceinline__ void stand_by() {
  __syncwarp();
  meet_cluster<CLUSTER>();
  meet_cluster<CLUSTER>();
}
