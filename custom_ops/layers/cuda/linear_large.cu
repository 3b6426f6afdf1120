// linear_wide.cu's work for 65 to 256 tokens, where products take as long as reads.
//
// A CTA has ROWS weight rows, MT times 64 for each of its warpgroups, and all tokens as their columns; one
// thread has the copy engine fetch both. K_PARTS CTAs share out k. Their sums go to `parts`, in the order in
// which lanes hold them, and linear_sum.cu adds them: a CTA may not wait for others of its grid.
//
// Compiled by NVRTC for sm_90a; its constants: linear_config.cuh.

#include "linear_config.cuh"

constexpr int CONSUMERS = ROW_WARPS * 4;  // warps that multiply
constexpr bool TAKES = MT > 1;            // they take registers of those that do not
// One warp fetches; registers are exchanged by warpgroups.
constexpr int THREADS = (CONSUMERS + (TAKES ? 4 : 1)) * 32;
constexpr int ROWS = CONSUMERS / 4 * MT * 64;
#include "linear_fragments.cuh"
#include "../../cuda/wgmma.cuh"

struct LargeParams {
  Map weight, x;
  Params p;
  float *parts;
};
constexpr int STAGE_BYTES = (ROWS + TOKENS) * LINE;
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_large(const __grid_constant__ LargeParams all) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = blockIdx.x % K_PARTS, tile = blockIdx.x / K_PARTS;
  const int first = part * CHUNKS / K_PARTS, count = (part + 1) * CHUNKS / K_PARTS - first;
  const u32 ring = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;
  const u64 policy = read_once();
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
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full + s * 8, 1);
      mbarrier_init(empty + s * 8, CONSUMERS);
    }
    fence_mbarrier_init();
    for (int i = 0; i < min(count, EARLY_STAGES); ++i) load_weights(i, i);
  }
  __syncthreads();  // barriers are ready
  if constexpr (PDL) griddepcontrol_wait();
  if (warp >= CONSUMERS) {
    if constexpr (TAKES) give_registers<24>();
    if (warp == CONSUMERS && lane == 0) {
      for (int i = 0; i < min(count, STAGES); ++i) {
        load_x(i, i);
        if (i >= EARLY_STAGES) load_weights(i, i);
      }
      for (int i = STAGES, slot = 0, round = 0; i < count; ++i) {
        // for the multiplying warps, which wait for `full` of chunks that were asked for already
        mbarrier_wait(empty + slot * 8, round);
        load_weights(i, slot);
        load_x(i, slot);
        if (++slot == STAGES) {
          slot = 0;
          round ^= 1;
        }
      }
      if constexpr (PDL) griddepcontrol_launch_dependents();
    }
    return;
  }
  if constexpr (TAKES) take_registers<240>();
  float sums[MT][NT][4] = {};
  const int first64 = warp / 4 * MT;  // of the tile's groups of 64 rows
  int slot = 0, round = 0, last = 0;
  for (int i = 0; i < count; ++i) {
    mbarrier_wait(full + slot * 8, round);  // for the copy engine
    const u32 at = ring + slot * STAGE_BYTES;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int m = 0; m < MT; ++m)
        wgmma<HALF>(sums[m], operand(at + (first64 + m) * 64 * LINE + step * 32),
                    operand(at + ROWS * LINE + step * 32));
    wgmma_commit();
    wgmma_wait<1>();  // the last chunk's products are done: its slot is free
    // of slots that are filled again
    if (i > 0 && i - 1 + STAGES < count && lane == 0) mbarrier_arrive(empty + last * 8);
    last = slot;
    if (++slot == STAGES) {
      slot = 0;
      round ^= 1;
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int rows16 = (first64 + m) * 4 + warp % 4;  // of the tile's groups of 16 rows
    if constexpr (K_PARTS > 1) {
      const i64 group = ((i64)part * gridDim.x / K_PARTS + tile) * (ROWS / 16) + rows16;
      float4 *to = (float4 *)all.parts + group * NT * 32 + lane;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        to[n * 32] = make_float4(sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]);
    } else {
      const OutPlace place(all.p, tile, 0, rows16, lane);
      Addends addends;
      addends.load(place, tile, rows16, lane);
      store_output((const float(&)[OWN][4])sums[m], place, addends, lane);
    }
  }
}
