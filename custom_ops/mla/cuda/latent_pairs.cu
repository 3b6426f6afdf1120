// Latent attention over a paged cache on Hopper, for tiles of 64 query rows: as latent.cu, whose schedule of
// the work it has, but with query rows as the rows of the products, two warpgroups that take turns at them,
// and keys in pairs of tiles (latent_pairs_mainloop.cuh).
//
// Why nothing here waits for ever: squares of keys are filled and released in one order, which is that of the
// products; both warpgroups go through the same tiles and meet at the weights of each; the producers wait for
// them alone; all threads of a pair of CTAs that adds its parts meet once behind their last tile, both have
// some, and who waits for the other CTA's sums does so behind that.
//
// Rows of fp8 are converted on their way (latent_pairs_fp8.cuh).
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Source of the schedule: the description of
// FlashMLA's kernel of April 2025 (docs/20250422-new-kernel-deep-dive.md there).

#include "latent_cut.cuh"
#include "latent_pairs_fp8.cuh"
#include "latent_pairs_mainloop.cuh"

extern "C" __global__ void __cluster_dims__(PAIRED ? 2 : 1, 1, 1) __launch_bounds__(THREADS, 1)
latent_pairs(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < 2; ++slot) {
      for (int square = 0; square < SQUARES; ++square)
        mbarrier_init(full_at(shared, slot, square), FP8 ? HALF_ARRIVALS : 1);
      for (int half = 0; half < 2; ++half) mbarrier_init(empty_at(shared, slot, half), 4);
    }
    mbarrier_init(shared + Q_FULL_AT, FP8 ? GATHER_THREADS : QUERY_THREADS);
    mbarrier_init(shared + Q_EMPTY_AT, CONSUMER_THREADS / 32);
    mbarrier_init(shared + Q_FIRST_AT, FIRST_THREADS);
    if (PAIRED)
      for (int half = 0; half < 2; ++half) mbarrier_init(shared + PART_AT + half * 8, 1);
    fence_mbarrier_init();
    if (!FP8) prefetch_tensormap(&p.kv);
  }
  int group;
  Schedule schedule;
  Place place;
  const Walk walk = open_walk<THREADS>(p, (int *)(memory + SCAN_AT), group, schedule, place);
  wait_for_kernels_ahead();
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (FP8 ? warp < CONSUMER_THREADS / 32 : warp != CONSUMER_THREADS / 32) copy_first_queries(p, shared, walk);
  if (warp >= CONSUMER_THREADS / 32) {
    give_registers<PRODUCER_REGISTERS>();
    if (!FP8 && warp == CONSUMER_THREADS / 32) {
      produce_keys(p, shared, walk, lane);
    } else {
      const int thread = threadIdx.x - CONSUMER_THREADS - (FP8 ? 0 : 32);
      if constexpr (FP8) {
        RangeTiles tiles(p, shared, walk, thread);
        convert_rows(memory, shared, tiles, thread / 32, lane);
      } else {
        produce_queries(p, shared, walk, thread);
      }
      if (p.groups > 1 && thread == 0)
        note_of(p)[group * p.row_tiles + walk.row_tile] = find_cut(p, schedule, place, group, walk.row_tile);
      store_rows_without_keys(p, thread, FP8 ? GATHER_THREADS : QUERY_THREADS);
    }
    if constexpr (PAIRED) {
      Segment s;
      if (schedule.joined() && Walk(walk).next(s)) {  // with the consumers' finish() and join_parts()
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
      }
    }
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  const int thread = threadIdx.x, joined = schedule.joined() ? schedule.parts : 0;
  if (warp < 4) Warpgroup<0>{p, memory, shared, thread, warp, lane}.run(walk, group, joined);
  else Warpgroup<1>{p, memory, shared, thread - 128, warp - 4, lane}.run(walk, group, joined);
}
