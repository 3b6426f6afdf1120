// linear.cu's work on Hopper for more tokens: one thread has the bulk copy engine fetch weights and x, a warpgroup multiplies them.
//
// ROWS weight rows are MT times the 64 rows of a wgmma, tokens its columns. x is most of the traffic beside the weights: a CTA reads it once for
// all of its rows, and the CTAs of a cluster share out k, so that there are enough of them. Their parts meet in distributed shared memory.
// As in linear.cu weights are asked for before griddepcontrol.wait.
//
// Compiled by NVRTC for sm_90a; macros: custom_ops/cuda/linear_shape.py. Swizzle and descriptors: PTX ISA, "asynchronous warpgroup level matrix".

constexpr int THREADS = 128 + 32, ROWS = MT * 64;  // the consumers, the producer's warp
#define K_WARPS 1
#include "linear_finish.cuh"
#include "wgmma.cuh"

struct alignas(64) Map {
  char opaque[128];
};
struct WideParams {
  Map weight, x;
  Params p;
};

constexpr int STAGE = (ROWS + TOKENS) * LINE;

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM) linear_wide(const __grid_constant__ WideParams all) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2][STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
  const int first = rank * CHUNKS / CLUSTER, count = (rank + 1) * CHUNKS / CLUSTER - first;
  const u32 ring = shared_address(shared), full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
#if PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  float sums[MT][NT][4] = {};
  if (warp == 4) {
    if (lane == 0) {
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + s * 8, 1);
        barrier_init(empty + s * 8, 4);  // warps
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();
  }
  auto load_weights = [&](int i, int slot) {
    const u32 to = ring + slot * STAGE, barrier = full + slot * 8;
    barrier_expect(barrier, STAGE);
    copy_box(to, &all.weight, (first + i) * 64, tile * OUT_ROWS, barrier);
    if (GATED) copy_box(to + OUT_ROWS * LINE, &all.weight, (first + i) * 64, OUT_WIDTH + tile * OUT_ROWS, barrier);
  };
  auto load_x = [&](int i, int slot) { copy_box(ring + slot * STAGE + ROWS * LINE, &all.x, (first + i) * 64, 0, full + slot * 8); };
  if (warp == 4 && lane == 0)
    for (int i = 0; i < min(count, STAGES); ++i) load_weights(i, i);
  __syncthreads();  // barriers are ready
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (warp == 4) {
    if (lane == 0) {
      for (int i = 0; i < min(count, STAGES); ++i) load_x(i, i);
      for (int i = STAGES, slot = 0, round = 0; i < count; ++i) {
        barrier_wait(empty + slot * 8, round);
        load_weights(i, slot);
        load_x(i, slot);
        if (++slot == STAGES) {
          slot = 0;
          round ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    int slot = 0, round = 0, last = 0;
    for (int i = 0; i < count; ++i) {
      barrier_wait(full + slot * 8, round);
      const u32 at = ring + slot * STAGE;
      wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int m = 0; m < MT; ++m) wgmma(sums[m], matrix(at + m * 64 * LINE + step * 32), matrix(at + ROWS * LINE + step * 32));
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
  if (warp < 4) {
    float *part = (float *)shared + warp * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) part[(n * 8 + lane % 4 * 2 + j % 2) * PITCH + m * 64 + j / 2 * 8] = sums[m][n][j];
  }
  finish(all.p, (const float *)shared, nullptr, tile, rank);
}
