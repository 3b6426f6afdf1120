// The run of a CTA, tile by tile: prologue, loop, and what comes at the end of each pair.
#pragma once
#include "decode_epilogue.cuh"
#include "decode_launch_order.cuh"
#include "decode_load.cuh"
#include "decode_softmax.cuh"

// Fill all stages but one, and read the queries: as many keys as may be read before the kernels ahead have
// ended, the wait, everything else.
__device__ __forceinline__ void prologue(const Params &p, const Cursor &c, Producer &producer,
                                         Queries &queries, int warp, int lane) {
  int filled = 0;
  if constexpr (PDL && PREFETCH > 0 && DECODE_LEN == 0) {
#pragma unroll 1
    for (; filled < PREFETCH && is_context(producer.at, warp); ++filled) producer.load(p, filled, warp, lane);
    if (filled == PREFETCH) prefetch_tiles(p, producer.at, producer.ids, producer.to_load, warp, lane);
  }
  wait_and_launch_next();
  queries.load(p, c, lane);
#pragma unroll 1
  for (; filled < STAGES - 1; ++filled) producer.load(p, filled, warp, lane);
}

// All tiles of a run that is not empty: the loop, and what comes at the end of each pair. `met`: whether this
// CTA has waited for those of its cluster to have started.
__device__ __forceinline__ void mainloop(const Params &p, const Run &run, const Shared &shared,
                                           [[maybe_unused]] bool &met, int warp, int lane) {
  Cursor c = run.cursor();
  int unit = run.unit;
  const int unit_end = run.unit_end, team = Run::team();
  const int near = NEAR > 0 && run.moves ? NEAR : 0;
  const u32 stages = shared_address(shared.stages) + warp * STAGES * STAGE_BYTES;
  LoadCursor ahead(p, c);
  Producer producer = {ahead, unit_end - unit, 0, stages};
  producer.ids = load_ids(p, producer.at, warp, lane);
  int stage = 0;
  Queries queries;
  prologue(p, c, producer, queries, warp, lane);
  State state;
  state.clear();
  int pair_begin = c.tile;  // first tile of this run in the pair
  Splits splits;
  splits.find(c, unit, unit_end, run.partition, near);

  while (true) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();
    const int key = ((c.r.first_tile + c.tile) * WARPS + warp) * WARP_KEYS;
    producer.load(p, stage == 0 ? STAGES - 1 : stage - 1, warp, lane);  // into what the last round used up
    if (key < c.r.end && key + WARP_KEYS > c.r.low)
      attend(state, queries, p, c, stages + stage * STAGE_BYTES, key, lane);
    const int used_stage = stage;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    ++c.tile;
    ++unit;
    if (c.tile < c.r.num_tiles && unit < unit_end) {
      __syncwarp();
      continue;
    }

    // The end of a pair, or of the run: the warps' states meet in the stage they have just used.
    [[maybe_unused]] Cursor next;
    if constexpr (ASK_EARLY) {
      next = c;
      if (unit < unit_end) {  // the next queries come while the states meet
        next.next_pair(p);
        queries.load(p, next, lane);
      }
    }
    __syncwarp();
    leave_state(state, (float *)(shared.stages + (warp * STAGES + used_stage) * STAGE_BYTES),
                shared.all_tops[warp], shared.all_totals[warp], lane);
    __syncthreads();
    const i64 slot = (i64)blockIdx.x * 2 + (pair_begin == 0);
    // -1: the pair begins here, the others' partials come to this CTA
    [[maybe_unused]] const int sender = team - splits.first - 1;
#if CLUSTER > 1
    if (!met) cluster_wait();
    met = true;
    if (splits.near && sender < 0) {
      // Waits for the next CTAs of this cluster, all of which run. Each has sent its partial before it waits
      // itself: it sends at the end of its run's first pair, receives at the end of the last, and does one of
      // the two where these are the same. So a CTA is sent partials of one pair only, and `arrived_partials`
      // counts that pair's.
      if (threadIdx.x == 0) wait_for_count(shared.arrived_partials, splits.count - 1);
      __syncthreads();
    }
#endif
    hand_over(p, c, splits, shared, used_stage, slot, sender);
#if CLUSTER > 1
    if (splits.near && sender >= 0) {
      __syncthreads();  // all threads' partials are sent before one thread says so
      // The receiver can't have ended: it leaves its last pair, this one, only when all partials have
      // arrived.
      if (threadIdx.x == 0) red_release_cluster(mapa(shared.arrived_partials, splits.first % CLUSTER));
    }
#endif
    if (!splits.whole && !splits.near) merge_if_last(p, c, splits, team, shared.is_last);
    if (unit == unit_end) break;
    __syncthreads();  // the stage is free again
    if constexpr (ASK_EARLY) {
      c = next;
    } else {
      c.next_pair(p);
    }
    pair_begin = 0;
    if constexpr (!ASK_EARLY) queries.load(p, c, lane);
    splits.find(c, unit, unit_end, run.partition, near);
    state.clear();
  }
}
