// Decode attention over a paged cache: stream-K on a fixed grid, one launch, merged by the last arriver.
//
// A pair is the work tile: a request and one kv head, or two narrow ones side by side (PAIR_HEADS). The keys
// of all requests are cut into tiles of WARPS * WARP_KEYS keys and lined up; every team of TEAM CTAs takes an
// equal run of that line, whatever the lengths are, each CTA for a pair of its own: device memory answers
// faster when the heads of a block are read at about one time. A pair that several runs share is in splits,
// whose partials the last CTA to arrive merges (decode_epilogue.cuh). Inside a CTA each warp owns WARP_KEYS
// keys of a tile: it copies them to shared memory itself (cp.async, STAGES deep, across the borders of
// pairs), so that no barrier stands in the loop; the warps' softmax states meet once per pair.
//
// The dots are transposed: S^T = K Q^T and O^T = V^T P^T, keys and value columns as the 16 rows of
// mma.m16n8k16, query rows (query tokens x heads of the group) as its 8 columns. A group of 4 or 8 heads
// wastes half or nothing instead of 12 or 8 of 16 rows; two heads of a pair share the 8 columns, each of
// which keeps what belongs to its own head.
//
// Compiled at run time by NVRTC, one specialisation per model shape: decode_config.cuh. No headers but ours,
// so that it builds wherever NVRTC is. Sources: Stream-K (arXiv:2301.03598), split-KV merging
// (arXiv:2501.01005, 2.2).

#include "decode_mainloop.cuh"
#include "../../../cuda/clustered.cuh"

#if MAX_REGISTERS > 0  // the two attributes exclude each other
#define BOUNDED __maxnreg__(MAX_REGISTERS)
#else
#define BOUNDED __launch_bounds__(THREADS, CTAS_PER_SM)
#endif
extern "C" __global__ void CLUSTERED BOUNDED paged_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ int is_last;
  __shared__ float all_tops[WARPS][TILE_Q], all_totals[WARPS][TILE_Q];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Shared shared = {stages, all_tops, all_totals, &is_last};
  bool met = false;
#if CLUSTER > 1
  __shared__ u32 arrived_partials;
  shared.arrived_partials = &arrived_partials;
  shared.inbox = (float *)(stages + WARPS * STAGES * STAGE_BYTES);
  shared.inbox_states = shared.inbox + (CLUSTER - 1) * PARTIAL_FLOATS;
  if (threadIdx.x == 0) arrived_partials = 0;
  // No CTA writes to another one before all have come this far. Every thread arrives here and waits once: at
  // the end of its first pair, or, without one, before it leaves (`met` is the same in all warps). Nothing
  // that could wait stands between the start and this line.
  cluster_arrive();
#endif
#if ONE_WARP_SCHEDULES
  // The stages are free until all warps know the run.
  static_assert(Requests::NUMBERS * 4 <= WARPS * STAGES * STAGE_BYTES);
  __shared__ Run run;
  if (warp == 0) {
    const Run found = schedule(p, lane, (int *)stages);
    if (lane == 0) run = found;
  }
  __syncthreads();
#else
  const Run run = schedule(p, lane, nullptr);
#endif
  if (run.unit < run.unit_end) {
    mainloop(p, run, shared, met, warp, lane);
  } else {
    wait_and_launch_next();
  }
#if CLUSTER > 1
  if (!met) cluster_wait();  // a CTA without work stays until the others run: none of them writes to it
#endif
  if (run.busy < p.num_reqs || run.used < p.num_tokens) store_empty(p);
  wait_for_prefill();
}
