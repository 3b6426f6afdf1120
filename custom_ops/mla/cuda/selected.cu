// Sparse latent attention on Hopper: query tokens that attend to selected positions of their requests.
//
// A cluster of CTAs takes up to 32 heads of one query token, each CTA a part of its positions. It looks up
// their rows of the pool and asks for as many as its shared memory holds. With up to 16 heads two CTAs fit a
// multiprocessor: so clusters of 16 find room, and one CTA copies while the other one multiplies. Heads are
// the 16 rows of mma.m16n8k16; each row of the pool, gathered by 16 bytes, is key and value. The parts meet
// in the cluster's shared memory: one launch, no memory of its own, the same bits every time.
//
// Nothing here waits for ever: all waits are barriers of a CTA or of its cluster, which all threads reach.
// Compiled by NVRTC for sm_90; its constants: selected_config.cuh. Sources: absorbed latents
// (arXiv:2405.04434, appendix C), sparse attention (arXiv:2512.02556), split-KV (arXiv:2501.01005, 2.2).

#include "selected_merge.cuh"

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM)
    attend_selected(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = blockIdx.x % CLUSTER,
            item = blockIdx.x / CLUSTER, head_tile = item % p.head_tiles, token = item / p.head_tiles;
  griddepcontrol_launch_dependents();
  const Token t = find_token(p, token, lane);
  copy_table(p, (int *)memory, TABLE_ENTRIES, t, thread);  // the stages are free
  griddepcontrol_wait();
  const Positions positions(p, token, rank, thread);
  copy_queries(p, shared + Q_AT, token, head_tile, thread);
  const int tiles = find_keys(p, memory, positions, t, thread);
  for (int tile = 0; tile < STAGES; ++tile) {
    if (tile < tiles) copy_keys(p, memory, shared + tile * STAGE_BYTES, tile, warp, lane);
    cp_async_commit();  // of the first stage with the queries
  }
  Queries queries;
  queries.at = shared + Q_AT;
  Softmax softmax;
#pragma unroll
  for (int i = 0; i < Softmax::TURNS; ++i) {
    softmax.maximum[i] = FLOOR;
    softmax.total[i] = 0.f;
  }
  float acc[M_TILES][PAIRS * 2][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const u32 stage = shared + tile % STAGES * STAGE_BYTES;
    cp_async_wait<STAGES - 1>();
    __syncthreads();  // the tile is there, of all threads' copies
    if (tile == 0) queries.keep(warp / KEY_PARTS, lane);
    score(memory, stage, queries, warp, lane);
    __syncthreads();
    weigh(memory, softmax, tile, p.scale, warp, lane);
    __syncthreads();
    add_values(memory, shared, stage, acc, warp, lane);
    if (tile + STAGES < tiles) {
      __syncthreads();  // the stage is free
      copy_keys(p, memory, stage, tile + STAGES, warp, lane);
    }
    cp_async_commit();
  }
  cp_async_wait<0>();
  __syncthreads();  // the stages are free for the sums
  leave_part(memory, softmax, acc, tiles, warp, lane);
  store_merged(p, memory, token, head_tile, rank, thread);
}
