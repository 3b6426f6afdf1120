// Latent attention over a paged cache on Hopper, for up to 32 query rows of a request: one warp has the copy
// engine fetch latents, each token's row once, and a warpgroup uses it as key and, turned, as value.
// Rows of fp8: latent_fp8.cu.
//
// CTAs stay; who works on which keys says latent_scheduler.cuh, from lengths on the device. Why nothing here
// waits for ever: stages are filled and used in one order by all consumer warps, which go through the same
// segments as the producer and release each stage when their products with it have ended; the producer waits
// for that alone.
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Sources: absorbed latents
// (arXiv:2405.04434, appendix C), split-KV (arXiv:2501.01005, 2.2), contiguous ranges of work
// (arXiv:2301.03598).

#include "latent_cluster.cuh"
#include "latent_mainloop.cuh"

// Up to 16 rows: so few registers that a CTA of the merge fits beside.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CLUSTER == 1 && ROWS <= 16 ? 3 : 1)
latent_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared + FULL_AT + i * 8, 1);
      mbarrier_init(shared + EMPTY_AT + i * 8, CONSUMER_WARPS);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.kv);
  }
  int group;
  const Walk walk = open_work<THREADS>(p, (int *)(memory + SCAN_AT), group);
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
  if (warp < CONSUMER_WARPS) {
    consume(p, memory, walk, group, threadIdx.x);
    if constexpr (CLUSTER > 1) put_together<CONSUMER_THREADS>(p, memory, walk, threadIdx.x);
  } else {
    produce(p, shared, walk, threadIdx.x % 32);
    wait_for_kernels_ahead();
    store_rows_without_keys(p, threadIdx.x % 32, 32);
    if constexpr (CLUSTER > 1) stand_by();
  }
}
