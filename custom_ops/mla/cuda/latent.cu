// Latent attention over a paged cache on Hopper, for up to 32 query rows of a request: one warp has the copy
// engine fetch latents, each token's row once, and a warpgroup uses it as key and, turned, as value.
// Rows of fp8 are fetched and converted by two warpgroups (latent_fp8.cuh); where requests are many, or query
// rows at most 8, by latent_fp8.cu.
//
// CTAs stay; who works on which keys says latent_scheduler.cuh, from lengths on the device. Why nothing here
// waits for ever: stages are filled and used in one order by all consumer warps, which go through the same
// segments as the producer and release each stage when their products with it have ended; the producer waits
// for that alone.
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Sources: absorbed latents
// (arXiv:2405.04434, appendix C), split-KV (arXiv:2501.01005, 2.2), contiguous ranges of work
// (arXiv:2301.03598).

#include "latent_fp8.cuh"
#include "latent_load.cuh"
#include "latent_mainloop.cuh"

#if CLUSTER > 1
#include "latent_cluster.cuh"
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
latent_decode(const __grid_constant__ Params p) {
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
  int group = 0;
#if CLUSTER > 1
  const Walk walk = open_share(p);
  __syncthreads();
#else
  const Walk walk = open_walk<THREADS>(p, (int *)(memory + SCAN_AT), group);
#endif
  griddepcontrol_wait();
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
  if (warp >= CONSUMER_WARPS) {
    if constexpr (FP8)
      give_registers<PRODUCER_REGISTERS>();
#if FP8
    const int producer = warp - CONSUMER_WARPS;
    produce_rows(p, memory, shared, walk, producer / 4, producer % 4, threadIdx.x % 32);
#else
    if (warp == CONSUMER_WARPS) produce(p, shared, walk, threadIdx.x % 32);
#endif
  } else {
    if constexpr (FP8)
      take_registers<CONSUMER_REGISTERS>();
    store_rows_without_keys(p, threadIdx.x, CONSUMER_THREADS);
    consume(p, memory, walk, group, threadIdx.x);
  }
#if CLUSTER > 1
  put_together(p, memory);
#endif
}
