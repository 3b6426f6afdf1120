// The positions of each row's largest logits, exactly: a radix selection by one cluster of CTAs for each row,
// in one launch and without memory of its own.
//
// A row is read once: each thread keeps its numbers in registers, as unsigned integers of the same order. The
// key of the k-th largest one is found in three steps of 11, 11 and 10 bits: each CTA counts, in its shared
// memory, the keys that begin with what is known; the counts of the cluster are added up, each CTA a share of
// the bins, which it sends to all; each CTA then finds the same bin. What is taken is counted in the order
// of columns, so that positions are written in ascending order, of equal logits the first, and the same ones
// every time.
//
// Nothing here waits for ever: all waits are barriers of a CTA or of its cluster, which all threads reach;
// what decides on the way is the same in all of them.
// Source: radix selection as of A. Alabi et al., "Fast k-selection algorithms for GPUs" (2012).

#include "top_k_select.cuh"

struct Params {  // packed by custom_ops/indexer/cuda/top_k_indices.py, in this order
  const float *logits;
  int *indices;
  i64 logits_row, indices_row;  // strides in numbers
  int columns, top_k;
};
static_assert(sizeof(Params) == 40, "as custom_ops/indexer/cuda/top_k_indices.py packs it");

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    top_k_indices(const __grid_constant__ Params p) {
  __shared__ Shared s;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = blockIdx.x % CLUSTER,
            begin = rank * CTA_COLUMNS;
  const i64 row = blockIdx.x / CLUSTER;
  griddepcontrol_launch_dependents();
  for (int bin = thread; bin < BINS; bin += THREADS) s.counts[bin] = 0;
  griddepcontrol_wait();
  u32 keys[VECTORS][4];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = begin + (v * THREADS + thread) * 4;
    const float *at = p.logits + row * p.logits_row + column;
    float4 x = {-INF, -INF, -INF, -INF};
    if (column + 4 <= p.columns) {
      x = load_l2((const float4 *)at);
    } else {
      if (column < p.columns) x.x = load_l2(at);
      if (column + 1 < p.columns) x.y = load_l2(at + 1);
      if (column + 2 < p.columns) x.z = load_l2(at + 2);
    }
    keys[v][0] = key_of(x.x);
    keys[v][1] = key_of(x.y);
    keys[v][2] = key_of(x.z);
    keys[v][3] = key_of(x.w);
  }
  __syncthreads();
  const Threshold t = find_threshold(s, keys, thread, rank, p.top_k);

  // keys above the threshold, and equal ones in the upper half, before each thread's
  u32 before[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u32 count = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) count += (keys[v][e] > t.key) + ((u32)(keys[v][e] == t.key) << 16);
    before[v] = sum_upto(count, lane);
    if (lane == 31) s.scan[v * WARPS + warp] = before[v];
    before[v] -= count;
  }
  __syncthreads();
  if (warp == 0) {
    u32 of_warps[VECTORS], sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) sum += of_warps[i] = s.scan[lane * VECTORS + i];
    const u32 upto = sum_upto(sum, lane);
    u32 at = upto - sum;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      s.scan[lane * VECTORS + i] = at;
      at += of_warps[i];
    }
    const u32 all = __shfl_sync(ALL, upto, 31);
#if CLUSTER > 1
    if (lane < CLUSTER) st_cluster(mapa(&s.of_cta[rank], lane), all);
#else
    if (lane == 0) s.of_cta[0] = all;
#endif
  }
  meet_cluster<CLUSTER>();
  u32 above = 0, equal = 0, all_above = 0, all_equal = 0;
#pragma unroll
  for (int cta = 0; cta < CLUSTER; ++cta) {
    const u32 count = s.of_cta[cta];
    if (cta < rank) {
      above += count & 0xffff;
      equal += count >> 16;
    }
    all_above += count & 0xffff;
    all_equal += count >> 16;
  }
  int *to = p.indices + row * p.indices_row;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const u32 at = s.scan[v * WARPS + warp] + before[v];
    u32 larger = above + (at & 0xffff), same = equal + (at >> 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_larger = keys[v][e] > t.key, is_same = keys[v][e] == t.key;
      if (is_larger || (is_same && same < t.equal))
        to[larger + min(same, t.equal)] = begin + (v * THREADS + thread) * 4 + e;
      larger += is_larger;
      same += is_same;
    }
  }
  const int taken = all_above + min(all_equal, t.equal);
  for (int i = taken + rank * THREADS + thread; i < p.top_k; i += CLUSTER * THREADS) to[i] = -1;
}
