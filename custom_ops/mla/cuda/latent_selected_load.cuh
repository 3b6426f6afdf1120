// The producers of latent_selected.cu: four warps copy the queries of a token and gather the keys that it
// selected, each warp 16 of a tile, by 16 bytes; zeros for keys that are not seen, since 0 * NaN is NaN.
#pragma once

#include "latent_pairs_load.cuh"
#include "selected_token.cuh"

constexpr int GATHER_WARPS = 4, GATHER_THREADS = GATHER_WARPS * 32, WARP_KEYS = TILE_KV / GATHER_WARPS;
// Of a half of a tile: the copies of all threads, and of each warp that its bits are there.
constexpr int HALF_ARRIVALS = GATHER_THREADS + GATHER_WARPS;
constexpr int LASTS_AT = SEEN_AT + 2 * TILE_KV / 8;  // [warps of the CTA]
static_assert(THREADS == CONSUMER_THREADS + GATHER_THREADS && WARP_KEYS == 16, "16 bits of each warp");
static_assert(LASTS_AT + THREADS / 32 * 4 <= SHARED_BYTES, "room for the numbers of opening");

// A token's tiles of positions as one segment, in which a row of queries sees all or nothing.
struct Selection {
  Token token;
  Segment segment;
  int row_tile;
  bool left;

  __device__ __forceinline__ bool next(Segment &s) {
    const bool had = left;
    s = segment;
    left = false;
    return had;
  }
};

// By all threads: waits for the kernels ahead and counts the tiles up to the last position that is seen.
__device__ __forceinline__ Selection open_selection(const Params &p, char *memory) {
  const int thread = threadIdx.x, token = blockIdx.x / p.row_tiles;
  const Token t = find_token(p, token, thread % 32);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int *indices = p.indices + token * p.indices_row;
  int last = 0, *lasts = (int *)(memory + LASTS_AT);
#pragma unroll 6
  for (int i = thread; i < p.top_k; i += THREADS)
    if ((u32)load_l2(indices + i) < (u32)t.end) last = i + 1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) last = max(last, __shfl_xor_sync(ALL, last, step));
  if (thread % 32 == 0) lasts[thread / 32] = last;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) last = max(last, lasts[warp]);
  const int tiles = __shfl_sync(ALL, (last + TILE_KV - 1) / TILE_KV, 0);
  return {t, {t.request, token, 1, tiles * TILE_KV, 0, tiles, 0, true},
          (int)blockIdx.x - token * p.row_tiles, true};
}

__device__ __forceinline__ void produce_selected(const Params &p, char *memory, u32 shared,
                                                 const Selection &of, int warp, int lane) {
  const int *indices = p.indices + of.segment.start * p.indices_row,
            *table = p.table + of.token.request * p.table_row;
  const auto position_of = [&](int tile) {
    const int i = tile * TILE_KV + warp * WARP_KEYS + lane % WARP_KEYS;
    return i < p.top_k ? load_l2(indices + i) : -1;
  };
  const auto row_at = [&](int position) {  // of the pool
    if ((u32)position >= (u32)of.token.end) return -1;
    return load_l2(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
  };
  int position = position_of(0), following = position_of(1);
  copy_queries(p, shared, of.segment, of.row_tile, warp, GATHER_WARPS, lane);
  mbarrier_arrive_behind_copies(shared + Q_FULL_AT);
  int mine = row_at(position), phases = 0;  // the lane's row, -1: not seen; a bit for each tile
  for (int tile = 0; tile < of.segment.last; ++tile) {
    const int slot = tile % 2;
    const u32 seen = __ballot_sync(ALL, mine >= 0);
    const char *from[WARP_KEYS / 4];  // eight lanes copy a line
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 4; ++n) {
      const int row = max(__shfl_sync(ALL, mine, n * 4 + lane / 8), 0);
      from[n] = p.rows + row / BLOCK_SIZE * p.rows_block + row % BLOCK_SIZE * p.rows_slot + lane % 8 * 16;
    }
    mine = row_at(following);
    following = position_of(tile + 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // first the half that is needed first; with the other one the rotated keys, whose square held weights
      const int half = i ^ slot, count = HALF_SQUARES + i;
      const u32 full = full_at(shared, slot, half * HALF_SQUARES);
      // arrive: the warps that have this half of the columns, when their products with it have ended
      mbarrier_wait(empty_at(shared, slot, half), (phases >> slot & 1) ^ 1);
      if (i == 0 && lane == 0) ((u16 *)(memory + SEEN_AT))[slot * GATHER_WARPS + warp] = (u16)seen;
#pragma unroll
      for (int n = 0; n < WARP_KEYS / 4; ++n) {
        const int key = warp * WARP_KEYS + n * 4 + lane / 8;
        const bool real = seen >> (key % WARP_KEYS) & 1;
        const u32 to = shared + slot * TILE_BYTES + key * 128 + (lane ^ key) % 8 * 16;
#pragma unroll
        for (int m = 0; m < count; ++m) {
          const int square = m < HALF_SQUARES ? half * HALF_SQUARES + m : SQUARES - 1;
          cp_async_or_zero(to + square * SQUARE_BYTES, from[n] + square * 128, real);
        }
      }
      mbarrier_arrive_behind_copies(full);
      if (lane == 0) mbarrier_arrive(full);
    }
    phases ^= 1 << slot;
  }
}
