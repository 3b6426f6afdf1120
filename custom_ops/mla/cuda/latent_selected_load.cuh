// The producers of latent_selected.cu: four warps copy the queries of a token and gather the keys that it
// selected, each warp 16 of a tile, by 16 bytes; zeros for keys that are not seen, since 0 * NaN is NaN. Rows
// of fp8 have eight warps (latent_convert.cuh).
#pragma once

#include "latent_convert.cuh"
#include "selected_token.cuh"

constexpr int WARP_KEYS = TILE_KV / GATHER_WARPS;  // of a tile
constexpr int LASTS_AT = SEEN_AT + 2 * TILE_KV / 8;  // [warps of the CTA]
constexpr int LOOKUP_KEYS = 16;  // of which a warp knows the rows: 16 bits of which are seen
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

__device__ __forceinline__ int row_tile_of(const Params &p, int token) {
  return blockIdx.x / CLUSTER - token * p.row_tiles;
}

// By all threads, behind the wait for the kernels ahead: counts the tiles up to the last position that is
// seen. The barriers in shared memory can be used afterwards.
__device__ __forceinline__ Selection open_selection(const Params &p, char *memory, int token, Token t) {
  const int thread = threadIdx.x, *indices = p.indices + token * p.indices_row;
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
  const int tiles = __shfl_sync(ALL, (last + TILE_KV - 1) / TILE_KV, 0),
            mine = (tiles + CLUSTER - 1 - blockIdx.x % CLUSTER) / CLUSTER;
  return {t, {t.request, token, 1, tiles * TILE_KV, 0, mine, 0, true}, row_tile_of(p, token), true};
}

// A row of the pool, in bytes; of -1 some.
__device__ __forceinline__ const char *row_from(const Params &p, int row) {
  return p.rows + (row < 0 ? 0 : row / BLOCK_SIZE * p.rows_block + row % BLOCK_SIZE * p.rows_slot);
}

// A warp's keys of a tile: which rows of the pool, each lane with one, which lane + 16 has, too.
struct Gather {
  const Params &p;
  char *memory;
  const u32 shared;
  const int warp, lane;

  __device__ __forceinline__ int line(int slot, int key) const {
    return slot * TILE_BYTES + (warp * WARP_KEYS + key) * 128;
  }
  // COUNT squares of 16-bit numbers, from the row's byte `at` on; eight lanes copy a line.
  template <int COUNT> __device__ __forceinline__ void copy(int rows, int slot, int square, int at) const {
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 4; ++n) {
      const int key = n * 4 + lane / 8, row = __shfl_sync(ALL, rows, key);
      const char *from = row_from(p, row) + at + lane % 8 * 16;
      const u32 to = shared + line(slot, key) + square * SQUARE_BYTES + (lane ^ key) % 8 * 16;
#pragma unroll
      for (int m = 0; m < COUNT; ++m) cp_async_or_zero(to + m * SQUARE_BYTES, from + m * 128, row >= 0);
    }
  }
};

// Of a warp's share of each tile, positions and rows of the pool, both a key of each lane.
struct Lookup {
  const Params &p;
  const int *indices, *table;
  int end, first;  // of what the token sees; of the share

  __device__ __forceinline__ Lookup(const Params &p, int token, Token t, int warp, int lane)
      : p(p), indices(p.indices + token * p.indices_row), table(p.table + t.request * p.table_row),
        end(t.end), first(warp * WARP_KEYS / LOOKUP_KEYS * LOOKUP_KEYS + lane % LOOKUP_KEYS) {}
  __device__ __forceinline__ int position(int tile) const {
    const int i = (tile * CLUSTER + (int)(blockIdx.x % CLUSTER)) * TILE_KV + first;
    return i < p.top_k ? load_l2(indices + i) : -1;
  }
  __device__ __forceinline__ int block(int position) const {  // of a position that is seen
    return (u32)position < (u32)end ? load_l2(table + position / BLOCK_SIZE) : 0;
  }
  __device__ __forceinline__ int row(int block, int position) const {  // -1: not seen
    return (u32)position < (u32)end ? block * BLOCK_SIZE + position % BLOCK_SIZE : -1;
  }
};
// What a lane knows ahead: a row of the next tile, of the one behind it a block and a position, and a
// position of the third one. Each is used a tile after it was asked for.
struct Ahead {
  const Lookup &look;
  int row, block, behind, position;

  __device__ __forceinline__ u32 step(int tile) {  // to the row behind that tile; which of its own are seen
    const u32 seen = __ballot_sync(ALL, row >= 0);
    row = look.row(block, behind);
    behind = position;
    block = look.block(behind);
    position = look.position(tile + 3);
    return seen;
  }
};
// By a producer, before tiles are counted: queries and the first rows.
__device__ __forceinline__ Ahead ask_first(const Params &p, u32 shared, const Lookup &look, int token,
                                           int warp, int lane) {
  const int first = look.position(0), second = look.position(1), third = look.position(2);
  copy_queries(p, shared, Segment{0, token, 1}, row_tile_of(p, token), warp * 32 + lane, GATHER_THREADS);
  const int block = look.block(first), next = look.block(second);
  return {look, look.row(block, first), next, second, third};
}

// Rows of fp8 in this order, for convert_rows().
struct SelectedTiles {
  const Params &p;
  char *memory;
  Ahead ahead;
  const int last, warp, lane;
  int tile;
  u32 seen;
  const char *at;

  __device__ __forceinline__ SelectedTiles(const Params &p, char *memory, const Selection &of, Ahead ahead,
                                           int warp, int lane)
      : p(p), memory(memory), ahead(ahead), last(of.segment.last), warp(warp), lane(lane), tile(0) {
    find();
  }
  __device__ __forceinline__ void find() {  // a warp knows rows of 16 keys
    const int row = __shfl_sync(ALL, ahead.row, warp % 2 * 8 + lane / 4);
    at = (row < 0 ? (const char *)NO_ROW : row_from(p, row)) + lane % 4 * 16;
  }
  __device__ __forceinline__ bool left() const { return tile < last; }
  __device__ __forceinline__ int slot() const { return tile % 2; }
  __device__ __forceinline__ const char *row() const { return at; }
  __device__ __forceinline__ void step() {
    seen = ahead.step(tile++);
    find();
  }
  __device__ __forceinline__ void rotated(int slot) const {  // bits of keys that are seen, of 16
    if (lane == 0 && warp % 2 == 0) ((u16 *)(memory + SEEN_AT))[slot * 4 + warp / 2] = (u16)seen;
  }
  __device__ __forceinline__ void end() const {}
};

__device__ __forceinline__ void produce_selected(const Params &p, char *memory, u32 shared,
                                                 const Selection &of, Ahead ahead, int warp, int lane) {
  const Gather gather{p, memory, shared, warp, lane};
  int phases = 0;  // a bit for each tile
  for (int tile = 0; tile < of.segment.last; ++tile) {
    const int slot = tile % 2, row = ahead.row;
    const u32 seen = ahead.step(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // first the half that is needed first; with the other one the rotated keys, whose square held weights
      const int half = i ^ slot;
      const u32 full = full_at(shared, slot, half * HALF_SQUARES);
      // arrive: the warps that have this half of the columns, when their products with it have ended
      mbarrier_wait(empty_at(shared, slot, half), (phases >> slot & 1) ^ 1);
      if (i == 0 && lane == 0) ((u16 *)(memory + SEEN_AT))[slot * GATHER_WARPS + warp] = (u16)seen;
      gather.copy<HALF_SQUARES>(row, slot, half * HALF_SQUARES, half * COLUMNS * 2);
      if (i == 1) gather.copy<1>(row, slot, SQUARES - 1, RANK * 2);
      mbarrier_arrive_behind_copies(full);
      if (lane == 0) mbarrier_arrive(full);
    }
    phases ^= 1 << slot;
  }
}
