// linear.cu's work on Hopper for more tokens: one thread has the bulk copy engine fetch weights and x,
// warpgroups multiply them.
//
// ROWS weight rows are MT times the 64 rows of a wgmma, tokens its columns. x is most of the traffic besides
// the weights: a CTA reads it once for all of its rows, and the CTAs of a cluster share out k, so that there
// are enough of them. Their parts meet in distributed shared memory. GATED: a tile's rows are a gate row, its
// up row, the next gate row ... As in linear.cu weights are asked for before griddepcontrol.wait, but only
// EARLY_STAGES chunks: more of them hold up what the kernel before still reads, and then x. The next kernel
// may start when this one has asked for all of its own.
//
// Compiled by NVRTC for sm_90a; its constants: linear_config.cuh. Swizzle and descriptors: PTX ISA,
// "asynchronous warpgroup level matrix".

#include "linear_config.cuh"

constexpr int CONSUMERS = MT * 4, THREADS = (CONSUMERS + 1) * 32;  // warps that multiply; one that fetches
constexpr int ROWS = MT * 64;
#include "linear_fragments.cuh"
#include "../../cuda/wgmma.cuh"

struct BulkParams {
  Map weight, x;
  Params p;
};
constexpr int STAGE_BYTES = (ROWS + TOKENS) * LINE;

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM)
    linear_wide(const __grid_constant__ BulkParams all) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + CONSUMERS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
  const int first = rank * CHUNKS / CLUSTER, count = (rank + 1) * CHUNKS / CLUSTER - first;
  const u32 ring = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;
  // what other CTAs of the cluster send: no ring lies there
  [[maybe_unused]] const u32 received = empty + STAGES * 8, parts = ring + STAGES * STAGE_BYTES;

  const u64 policy = read_once();
  if (warp == CONSUMERS) {
    if (lane == 0) {
      for (int s = 0; s < STAGES; ++s) {
        mbarrier_init(full + s * 8, 1);
        mbarrier_init(empty + s * 8, CONSUMERS);
      }
      if constexpr (CLUSTER > 1)
        for (int w = 0; w < CONSUMERS; ++w) mbarrier_init(received + w * 8, 1);
      fence_mbarrier_init();
    }
    __syncwarp();
  }
  auto load_weights = [&](int i, int slot) {
    const u32 to = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);  // x is counted too
    if (GATED) tma_load_2d_pairs(to, &all.weight, (first + i) * 64, tile * OUT_ROWS, barrier, policy);
    else tma_load_2d(to, &all.weight, (first + i) * 64, tile * OUT_ROWS, barrier, policy);
  };
  auto load_x = [&](int i, int slot) {
    tma_load_2d(ring + slot * STAGE_BYTES + ROWS * LINE, &all.x, (first + i) * 64, 0, full + slot * 8);
  };
  if (warp == CONSUMERS && lane == 0) {
    for (int i = 0; i < min(count, EARLY_STAGES); ++i) load_weights(i, i);
    if constexpr (CLUSTER > 1) {
      const int groups = min(OWN, NT - rank / SPLIT * OWN);
      for (int w = rank % SPLIT; w < CONSUMERS; w += SPLIT)
        mbarrier_arrive_expect_tx(received + w * 8, (CLUSTER - 1) * groups * 512);
    }
  }
  __syncthreads();  // barriers are ready
  // Nothing but the barriers, fenced above, need be seen. Every thread arrives here and waits once further
  // down, the fetching warp too.
  if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  if constexpr (PDL) griddepcontrol_wait();
  if (warp == CONSUMERS) {
    if (lane == 0) {
      for (int i = 0; i < min(count, STAGES); ++i) load_x(i, i);
      for (int i = EARLY_STAGES; i < min(count, STAGES); ++i) load_weights(i, i);
      for (int i = STAGES, slot = 0, round = 0; i < count; ++i) {
        // For the multiplying warps, which arrive for every chunk but the last and are behind by STAGES: they
        // wait for `full` of chunks that were asked for already, never for this one.
        mbarrier_wait(empty + slot * 8, round);
        load_weights(i, slot);
        load_x(i, slot);
        if (++slot == STAGES) {
          slot = 0;
          round ^= 1;
        }
      }
      // all is asked for: the next kernel's weights come while these parts are put together
      if constexpr (PDL) griddepcontrol_launch_dependents();
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_wait();  // a CTA that leaves has started the others
    return;
  }
  const OutPlace place(all.p, tile, rank / SPLIT * OWN, warp, lane);
  Addends addends;
  addends.load(place, tile, warp, lane);
  if constexpr (CLUSTER > 1) cluster_wait();  // while x is on its way
  float sums[NT][4] = {};
  int slot = 0, round = 0, last = 0;
  for (int i = 0; i < count; ++i) {
    // for the copy engine; the fetching warp asks for chunk i once chunk i - STAGES is used up
    mbarrier_wait(full + slot * 8, round);
    const u32 at = ring + slot * STAGE_BYTES;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<HALF>(sums, operand(at + warp / 4 * 64 * LINE + step * 32),
                  operand(at + ROWS * LINE + step * 32));
    wgmma_commit();
    wgmma_wait<1>();  // the last chunk's products are done: its slot is free
    if (i > 0 && lane == 0) mbarrier_arrive(empty + last * 8);
    last = slot;
    if (++slot == STAGES) {
      slot = 0;
      round ^= 1;
    }
  }
  wgmma_wait<0>();
  if constexpr (CLUSTER > 1) {
    float own[OWN][4];
    if (exchange(sums, own, parts, received, rank, warp, lane)) store_output(own, place, addends, lane);
  } else {
    store_output((const float(&)[OWN][4])sums, place, addends, lane);  // all of them are its own
  }
}
