// Latent attention on Hopper over rows of fp8 (custom_ops/mla/fp8_rows.py), for up to 32 query rows of a
// request, 16 of them for a CTA: one warp has the copy engine fetch rows as they are, eight warps multiply.
// Two CTAs share a multiprocessor, so that products of one run beside the softmax of the other.
//
// Who works on which keys says latent_scheduler.cuh. Why nothing here waits for ever: stages are filled and
// used in one order by all consumer warps, which go through the same segments as the producer and release
// each stage when they have read it; the producer waits for that alone.
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Sources: as latent.cu.

#include "latent_cluster.cuh"
#include "latent_fp8_mainloop.cuh"

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 2)
latent_fp8(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared + FULL_AT + i * 8, 1);
      mbarrier_init(shared + EMPTY_AT + i * 8, CONSUMER_WARPS);
    }
    fence_mbarrier_init();
  }
  int group;
  const Walk walk = open_work<THREADS>(p, (int *)(memory + SCAN_AT), group);
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp < CONSUMER_WARPS) {
    take_registers<CONSUMER_REGISTERS>();
    RowConsumer{p, memory, shared, warp, lane}.run(walk, group);
    if constexpr (CLUSTER > 1) put_together<CONSUMER_THREADS>(p, memory, walk, threadIdx.x);
  } else {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == CONSUMER_WARPS) {
      produce_rows(p, shared, walk, lane);
    } else if (warp == CONSUMER_WARPS + 1) {
      wait_for_kernels_ahead();
      store_rows_without_keys(p, lane, 32);
    }
    if constexpr (CLUSTER > 1) stand_by();
  }
}
