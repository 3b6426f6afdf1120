// Sparse latent attention on Hopper for many heads: a CTA has 64 heads of a query token and all of its
// positions; of few tokens two CTAs of a cluster take turns at its tiles of positions and add their results.
// The products and their turns are those of latent_pairs.cu (latent_pairs_mainloop.cuh); in place of the copy
// engine warps gather keys by their positions (latent_selected_load.cuh, latent_convert.cuh).
//
// Why nothing here waits for ever: halves of tiles are filled and released in one order, which is that of the
// products; both warpgroups go through the same tiles and meet at the weights of each; the producers wait for
// them alone; all threads of a cluster meet once behind their last tile, and who waits for the other CTA's
// sums does so behind that.
//
// Compiled by NVRTC for sm_90a; its constants: latent_config.cuh. Sources: sparse attention
// (arXiv:2512.02556), and that of the schedule in latent_pairs.cu.

#include "latent_selected_load.cuh"
#include "latent_pairs_mainloop.cuh"
#include "../../cuda/clustered.cuh"

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
latent_selected(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < 2; ++slot)
      for (int half = 0; half < 2; ++half) {
        mbarrier_init(full_at(shared, slot, half * HALF_SQUARES), HALF_ARRIVALS);
        mbarrier_init(empty_at(shared, slot, half), 4);
      }
    mbarrier_init(shared + Q_FULL_AT, GATHER_THREADS);
    mbarrier_init(shared + Q_EMPTY_AT, CONSUMER_THREADS / 32);
    mbarrier_init(shared + JOINED_AT, 1);
    fence_mbarrier_init();
  }
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32,
            token = blockIdx.x / CLUSTER / p.row_tiles, gathering = warp - CONSUMER_THREADS / 32;
  const Token t = find_token(p, token, lane);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (gathering >= 0) {
    const Lookup look(p, token, t, gathering, lane);
    const Ahead ahead = ask_first(p, shared, look, token, gathering, lane);
    const Selection selection = open_selection(p, memory, token, t);
    give_registers<PRODUCER_REGISTERS>();
    mbarrier_arrive_behind_copies(shared + Q_FULL_AT);
    if constexpr (FP8) {
      SelectedTiles tiles(p, memory, selection, ahead, gathering, lane);
      convert_rows(memory, shared, tiles, gathering, lane);
    } else {
      produce_selected(p, memory, shared, selection, ahead, gathering, lane);
    }
    if constexpr (CLUSTER == 2) {  // with the consumers' finish() and join()
      cluster_arrive_relaxed();
      cluster_wait();
    }
  } else {
    const Selection selection = open_selection(p, memory, token, t);
    take_registers<CONSUMER_REGISTERS>();
    if (warp < 4) Warpgroup<0, true>{p, memory, shared, (int)threadIdx.x, warp, lane}.run(selection, 0);
    else Warpgroup<1, true>{p, memory, shared, (int)threadIdx.x - 128, warp - 4, lane}.run(selection, 0);
  }
}
