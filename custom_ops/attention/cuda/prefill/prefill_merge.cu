// Puts together the tiles that prefill.cu cut into splits: one launch behind it, in which each CTA takes 32
// columns of a warpgroup's 64 rows of a tile.
//
// A thread reads what the thread of the same place stored for each split, always in the same order, so that
// results are the same bits every time. Launched early, it waits for the prefill launch, or for the decode
// launch behind that one, which does not end before it (decode.cu). What it reads behind its wait comes from
// L2: this multiprocessor's L1 may hold what an older launch left at the same place.
//
// Compiled by NVRTC with prefill.cu's constants. Sources: merging of attention states (arXiv:2501.01005,
// 2.2).

#include "prefill_epilogue.cuh"
#include "../cascade/cascade_epilogue.cuh"

constexpr int SLICE = 4, SLICES = (DIM_V / 8 + SLICE - 1) / SLICE;  // blocks of 8 columns
constexpr int ITEMS = SLICES * WARPGROUPS;            // of a tile, one for a CTA; prefill.py counts them
// splits asked for at once: a trip to L2 takes longer than all else here
constexpr int AHEAD = WARPGROUPS == 2 ? 8 : 4;

__device__ __forceinline__ QueryTile load_query_tile(const QueryTile *from) {
  const int *p = (const int *)from;
  return {load_l2(p),     load_l2(p + 1), load_l2(p + 2), load_l2(p + 3),
          load_l2(p + 4), load_l2(p + 5), load_l2(p + 6), load_l2(p + 7)};
}

__device__ __forceinline__ CascadeScheduler load_schedule(const CascadeScheduler *from) {
  const int *p = (const int *)from;
  CascadeScheduler x;
  x.tiles = load_l2(p), x.ctas = load_l2(p + 1), x.splits = load_l2(p + 2), x.main_splits = load_l2(p + 3);
  x.rest = load_l2(p + 4), x.region = load_l2(p + 5), x.own = load_l2(p + 6);
  x.spread = load_l2(p + 7), x.steps = load_l2(p + 8);
  return x;
}

extern "C" __global__ void __launch_bounds__(128) paged_prefill_merge(const __grid_constant__ Params p) {
  // Every CTA waits, with work or without, and lets the next kernel go only then: to an attention behind this
  // one the ends of those ahead count.
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if constexpr (CASCADE && LSE) copy_lse_of_others(p);
  const SplitTiles *split_tiles = split_tiles_of(p);
  int item = blockIdx.x;
  // of no tile perhaps; asked for together with what says so
  QueryTile tile = load_query_tile(split_tiles->query_tiles + item / ITEMS);
  const int items = load_l2(&split_tiles->tiles) * ITEMS;
  [[maybe_unused]] CascadeScheduler cascade;
  if constexpr (CASCADE) cascade = load_schedule(&split_tiles->cascade);
  for (; item < items; item += gridDim.x) {
    const int index = item / ITEMS, warpgroup = item / SLICES % WARPGROUPS, block = item % SLICES * SLICE;
    if (item != blockIdx.x) tile = load_query_tile(split_tiles->query_tiles + index);
    // no row of the warpgroup stands for a query: it left nothing (Consumer::is_idle)
    if (tile.index * TILE_TOKENS + warpgroup * 64 / GROUP >= tile.query_len) continue;
    const int thread = warpgroup * 128 + threadIdx.x, lane = thread % 32;
    const int splits = CASCADE ? cascade.num_splits(index) : tile.steps;
    float top[2] = {FLOOR, FLOOR}, total[2] = {}, acc[SLICE * 4] = {};
    for (int begin = 0; begin < splits; begin += AHEAD) {
      float4 state[AHEAD], x[AHEAD][SLICE];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (begin + j >= splits) break;
        const int partial = CASCADE ? cascade.partial(index, begin + j) : tile.partial + begin + j;
        const float4 *at = partial_of(p, partial) + thread;
        state[j] = load_l2(at + DIM_V / 8 * CONSUMER_THREADS);
#pragma unroll
        for (int n = 0; n < SLICE; ++n)  // behind the last block it again, which is not stored
          x[j][n] = load_l2(at + min(block + n, DIM_V / 8 - 1) * CONSUMER_THREADS);
      }
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (begin + j >= splits) break;
        const float tops[2] = {state[j].x, state[j].y}, totals[2] = {state[j].z, state[j].w};
        float keep[2], add[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float raised = fmaxf(top[r], tops[r]);
          keep[r] = exp2_(top[r] - raised);
          add[r] = exp2_(tops[r] - raised);
          total[r] = total[r] * keep[r] + totals[r] * add[r];
          top[r] = raised;
        }
#pragma unroll
        for (int n = 0; n < SLICE; ++n) {
          acc[n * 4] = acc[n * 4] * keep[0] + x[j][n].x * add[0];
          acc[n * 4 + 1] = acc[n * 4 + 1] * keep[0] + x[j][n].y * add[0];
          acc[n * 4 + 2] = acc[n * 4 + 2] * keep[1] + x[j][n].z * add[1];
          acc[n * 4 + 3] = acc[n * 4 + 3] * keep[1] + x[j][n].w * add[1];
        }
      }
    }
    const int row = thread / 32 * 16 + lane / 4;
    if constexpr (CASCADE) store_with_suffixes<SLICE>(p, tile, row, lane, top, total, acc, block);
    else store_rows<SLICE>(p, tile, row, lane, top, total, acc, block);
  }
}
