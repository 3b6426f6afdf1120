// linear.cu's work on Hopper for more tokens: one thread has the bulk copy engine fetch weights and x, warpgroups multiply them.
//
// ROWS weight rows are MT times the 64 rows of a wgmma, tokens its columns. x is most of the traffic beside the weights: a CTA reads it once for
// all of its rows, and the CTAs of a cluster share out k, so that there are enough of them. Their parts meet in distributed shared memory.
// As in linear.cu weights are asked for before griddepcontrol.wait; the next kernel may start when this one has asked for all of its own.
//
// Compiled by NVRTC for sm_90a; macros: custom_ops/cuda/linear_shape.py. Swizzle and descriptors: PTX ISA, "asynchronous warpgroup level matrix".

constexpr int CONSUMERS = MT * 4, THREADS = (CONSUMERS + 1) * 32 + (MT == 1) * 128;  // warps that multiply; one that fetches; if few, more to finish
constexpr int ROWS = MT * 64;
#define K_WARPS 1
#include "linear_finish.cuh"
#include "bulk.cuh"
#include "wgmma.cuh"

constexpr int STAGE = (ROWS + TOKENS) * LINE;

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM) linear_wide(const __grid_constant__ BulkParams all) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2][STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
  const int first = rank * CHUNKS / CLUSTER, count = (rank + 1) * CHUNKS / CLUSTER - first;
  const u32 ring = shared_address(shared), full = shared_address(barriers[0]), empty = shared_address(barriers[1]);

  const u64 policy = read_once();
  float sums[NT][4] = {};
  if (warp == CONSUMERS) {
    if (lane == 0) {
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + s * 8, 1);
        barrier_init(empty + s * 8, CONSUMERS);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();
  }
  auto load_weights = [&](int i, int slot) {
    const u32 to = ring + slot * STAGE, barrier = full + slot * 8;
    copy_box_once(to, &all.weight, (first + i) * 64, tile * OUT_ROWS, barrier, policy);
    if (GATED) copy_box_once(to + OUT_ROWS * LINE, &all.weight, (first + i) * 64, OUT_WIDTH + tile * OUT_ROWS, barrier, policy);
  };
  auto load_x = [&](int i, int slot) { copy_box(ring + slot * STAGE + ROWS * LINE, &all.x, (first + i) * 64, 0, full + slot * 8); };
  if (warp == CONSUMERS && lane == 0)
    for (int i = 0; i < min(count, STAGES); ++i) {
      barrier_expect(full + i * 8, STAGE);
      load_weights(i, i);
    }
  __syncthreads();  // barriers are ready
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (warp == CONSUMERS) {
    if (lane == 0) {
      for (int i = 0; i < min(count, STAGES); ++i) load_x(i, i);
      for (int i = STAGES, slot = 0, round = 0; i < count; ++i) {
        barrier_wait(empty + slot * 8, round);
        barrier_expect(full + slot * 8, STAGE);
        load_weights(i, slot);
        load_x(i, slot);
        if (++slot == STAGES) {
          slot = 0;
          round ^= 1;
        }
      }
#if PDL  // all is asked for: the next kernel's weights come while these parts are put together
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    }
    __syncwarp();
  } else if (warp < CONSUMERS) {
    int slot = 0, round = 0, last = 0;
    for (int i = 0; i < count; ++i) {
      barrier_wait(full + slot * 8, round);
      const u32 at = ring + slot * STAGE;
      wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma(sums, matrix(at + warp / 4 * 64 * LINE + step * 32), matrix(at + ROWS * LINE + step * 32));
      wgmma_commit();
      wgmma_wait<1>();  // the last chunk's products are done: its slot is free
      if (i > 0 && lane == 0) barrier_arrive(empty + last * 8);
      last = slot;
      if (++slot == STAGES) {
        slot = 0;
        round ^= 1;
      }
    }
    wgmma_wait<0>();
  }
  __syncthreads();
  if (warp < CONSUMERS) {
    float *part = (float *)shared + warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) part[(n * 8 + lane % 4 * 2 + j % 2) * PITCH + j / 2 * 8] = sums[n][j];
  }
  finish(all.p, (const float *)shared, nullptr, tile, rank);
}
