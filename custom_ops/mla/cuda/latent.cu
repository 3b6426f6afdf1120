// Latent attention over a paged cache on Hopper, for short queries: one warp has the copy engine fetch
// blocks of latents, each token's row once, and one or two warpgroups use it as key and, turned, as value.
// Rows of fp8 are fetched and converted by two warpgroups (latent_fp8.cuh).
//
// CTAs stay; who works on which keys says latent_scheduler.cuh, from lengths on the device. Why nothing here
// waits for ever: stages are filled and used in one order by all consumer warps, which go through the same
// segments as the producer and release each stage when their products with it have ended; the producer waits
// for that alone.
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Sources: absorbed latents
// (arXiv:2405.04434, appendix C), split-KV (arXiv:2501.01005, 2.2), contiguous ranges of work
// (arXiv:2301.03598).

#include "latent_fp8_mainloop.cuh"
#include "latent_load.cuh"
#include "latent_mainloop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared + FULL_AT + i * 8, FULL_ARRIVALS);
      mbarrier_init(shared + EMPTY_AT + i * 8, CONSUMER_WARPS);
    }
    fence_mbarrier_init();
    if constexpr (!FP8) prefetch_tensormap(&p.kv);
  }
  griddepcontrol_wait();
  const int group = blockIdx.x / p.row_tiles, row_tile = blockIdx.x - group * p.row_tiles;
  Place place;
  const Schedule schedule = open_schedule<THREADS>(p, group, (int *)(memory + SCAN_AT), place);
  const bool has_work = group < schedule.groups && schedule.tiles > 0;
  const int many = has_work ? schedule.begin(group + 1) - schedule.begin(group) : 0;
  const Walk walk = {p, place.request, place.tile, many, row_tile, 0};
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
  if (warp >= CONSUMER_WARPS) {
    if constexpr (SHARES_OUT_REGISTERS)
      give_registers<PRODUCER_REGISTERS>();
#if FP8
    const int producer = warp - CONSUMER_WARPS;
    produce_rows(p, memory, shared, walk, producer / 4, producer % 4, threadIdx.x % 32);
#else
    if (warp == CONSUMER_WARPS) produce(p, shared, walk, threadIdx.x % 32);
#endif
  } else {
    if constexpr (SHARES_OUT_REGISTERS)
      take_registers<CONSUMER_REGISTERS>();
    store_rows_without_keys(p, threadIdx.x, CONSUMER_THREADS);
#if FP8
    consume_rows(p, memory, walk, group, threadIdx.x);
#else
    consume(p, memory, walk, group, threadIdx.x);
#endif
  }
}
