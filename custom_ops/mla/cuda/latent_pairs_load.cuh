// The producers of latent_pairs.cu: one warp has the copy engine bring squares of latents, three copy the
// queries of the next request while the last products of this one run.
#pragma once

#include "latent_scheduler.cuh"

constexpr int CONSUMER_THREADS = 256, QUERY_THREADS = FP8 ? 224 : 96,  // eight warps, or four
              THREADS = CONSUMER_THREADS + 32 + QUERY_THREADS;
// Where lanes, not the copy engine, bring keys: arrivals at a half of a tile, of all threads' copies, and of
// each warp that its stores are there.
constexpr int GATHER_THREADS = THREADS - CONSUMER_THREADS, GATHER_WARPS = GATHER_THREADS / 32,
              HALF_ARRIVALS = GATHER_THREADS + GATHER_WARPS;
constexpr int PRODUCER_REGISTERS = FP8 ? 56 : 40, CONSUMER_REGISTERS = FP8 ? 200 : 232;
// What warps take is the CTA's own: 65,536 over its threads, by eights. Else they would wait for ever.
static_assert(CONSUMER_THREADS * CONSUMER_REGISTERS + (THREADS - CONSUMER_THREADS) * PRODUCER_REGISTERS <=
                  THREADS * (65536 / THREADS / 8 * 8),
              "registers of the CTA");
constexpr int COLUMNS = RANK / 2, HALF_SQUARES = COLUMNS / 64;  // value columns of a warpgroup
static_assert(RANK == 512, "columns of the instructions, whose rows are ROWS, 64");

// Where in shared memory things are, in bytes from its begin; custom_ops/mla/cuda/shape.py counts the same.
// First the two tiles.
constexpr int Q_AT = 2 * TILE_BYTES;
constexpr int LEVEL_AT = Q_AT + Q_BYTES;          // [2 warpgroups, ROWS], what scores are relative to
constexpr int SUM_AT = LEVEL_AT + 2 * ROWS * 4;   // [2 segments, 2 warpgroups, ROWS], of weights
constexpr int FULL_AT = SUM_AT + 4 * ROWS * 4;    // [2 tiles, SQUARES]
constexpr int EMPTY_AT = FULL_AT + 2 * SQUARES * 8;  // [2 tiles, 2 halves]
constexpr int Q_FULL_AT = EMPTY_AT + 4 * 8, Q_EMPTY_AT = Q_FULL_AT + 8;
constexpr int Q_FIRST_AT = Q_EMPTY_AT + 8;
constexpr int SCAN_AT = Q_FIRST_AT + 8;           // numbers of opening the schedule
constexpr int SEEN_AT = SCAN_AT;                  // [2 tiles, TILE_KV] bits, by latent_selected.cu
constexpr int JOINED_AT = Q_FIRST_AT;             // by latent_selected.cu, in place of the other
constexpr int PART_AT = SCAN_AT + SCAN_BYTES + OWN_BYTES;  // halves of the other CTA's part of a request
constexpr int SHARED_BYTES = PART_AT + 16;
static_assert(PART_AT % 8 == 0, "barriers");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

__device__ __forceinline__ u32 full_at(u32 shared, int slot, int square) {
  return shared + FULL_AT + (slot * SQUARES + square) * 8;
}
__device__ __forceinline__ u32 empty_at(u32 shared, int slot, int half) {
  return shared + EMPTY_AT + (slot * 2 + half) * 8;
}

__device__ __forceinline__ void produce_keys(const Params &p, u32 shared, Walk walk, int lane) {
  int phases = 0;  // a bit for each tile
  Segment s;
  while (walk.next(s)) {
    for (int tile = s.first; tile < s.last; ++tile) {
      const int slot = (tile - s.first) % 2, block = block_of(p, s, tile, lane);
      const u32 to = shared + slot * TILE_BYTES + lane * (SQUARE_BYTES / TILE_BLOCKS);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // first the half that is needed first; with the other one the rotated keys, whose square held weights
        const int half = i ^ slot, count = HALF_SQUARES + i;
        // arrive: the warps that have this half of the columns, when their products with it have ended
        mbarrier_wait(empty_at(shared, slot, half), (phases >> slot & 1) ^ 1);
#pragma unroll
        for (int n = 0; n < count; ++n) {
          const int square = n < HALF_SQUARES ? half * HALF_SQUARES + n : SQUARES - 1;
          const u32 full = full_at(shared, slot, square);
          if (lane == 0) mbarrier_arrive_expect_tx(full, SQUARE_BYTES);
          __syncwarp();
          if (lane < TILE_BLOCKS)
            tma_load_4d(to + square * SQUARE_BYTES, &p.kv, 0, 0, square, block * p.block_group, full);
        }
      }
      phases ^= 1 << slot;
    }
  }
}

// Queries of a tile of rows, as squares, by so many threads; zeros behind the last row.
__device__ __forceinline__ void copy_queries(const Params &p, u32 shared, const Segment &s, int row_tile,
                                             int thread, int threads) {
  constexpr int CHUNKS = WIDTH / 8;
#pragma unroll 1  // code that runs once takes longer to arrive than to run
  for (int i = thread; i < ROWS * CHUNKS; i += threads) {
    const int r = i / CHUNKS, chunk = i - r * CHUNKS;
    const Row row = row_of(row_tile * ROWS + r, s.start, s.query_len, s.seq_len);
    const char *from = p.q + (row.real ? (row.token * p.q_token + row.head * p.q_head + chunk * 8) * 2 : 0);
    cp_async_or_zero(shared + Q_AT + chunk / 8 * (ROWS * 128) + r * 128 + ((chunk ^ r) & 7) * 16, from,
                     row.real);
  }
}
// A warp of so many takes a row, a lane 16 bytes of every fourth square. Not over rows of fp8, where it would
// spill registers.
__device__ __forceinline__ void copy_queries_by_warps(const Params &p, u32 shared, const Segment &s,
                                                      int row_tile, int warp, int warps) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = warp; r < ROWS; r += warps) {
    const Row row = row_of(row_tile * ROWS + r, s.start, s.query_len, s.seq_len);
    const char *from = p.q + (row.real ? (row.token * p.q_token + row.head * p.q_head + lane * 8) * 2 : 0);
    const u32 to = shared + Q_AT + lane / 8 * (ROWS * 128) + r * 128 + ((lane ^ r) & 7) * 16;
#pragma unroll
    for (int square = 0; square < SQUARES; square += 4)
      if (square + lane / 8 < SQUARES)
        cp_async_or_zero(to + square * (ROWS * 128), from + (row.real ? square * 128 : 0), row.real);
  }
}
// Those of the first segment, by all threads but those that bring keys: they have nothing else to do yet.
constexpr int FIRST_THREADS = CONSUMER_THREADS + (FP8 ? 0 : QUERY_THREADS);
__device__ __forceinline__ void copy_first_queries(const Params &p, u32 shared, Walk walk) {
  const int thread = threadIdx.x < CONSUMER_THREADS ? threadIdx.x : threadIdx.x - 32;
  Segment s;
  if (!walk.next(s)) return;
  if constexpr (FP8) copy_queries(p, shared, s, walk.row_tile, thread, FIRST_THREADS);
  else copy_queries_by_warps(p, shared, s, walk.row_tile, thread / 32, FIRST_THREADS / 32);
  mbarrier_arrive_behind_copies(shared + Q_FIRST_AT);
}
__device__ __forceinline__ void produce_queries(const Params &p, u32 shared, Walk walk, int thread) {
  int phase = 0;
  Segment s;
  if (!walk.next(s)) return;
  while (walk.next(s)) {
    // arrive: all warps that multiply, when their last scores of the segment before are there
    mbarrier_wait(shared + Q_EMPTY_AT, phase);
    phase ^= 1;
    copy_queries_by_warps(p, shared, s, walk.row_tile, thread / 32, QUERY_THREADS / 32);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async();
    mbarrier_arrive(shared + Q_FULL_AT);
  }
}
