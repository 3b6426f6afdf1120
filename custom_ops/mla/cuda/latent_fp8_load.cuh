// The producer of rows of fp8: one warp, which has the copy engine bring them as they are. Rows of 656 bytes
// begin in other banks, eight of them in all: no swizzle.
#pragma once

#include "latent_scheduler.cuh"

constexpr int STAGE_BYTES = TILE_KV * ROW_BYTES;
// A warpgroup leaves registers to the consumers, which otherwise would wait for them for ever; one warp of it
// works.
constexpr int CONSUMER_THREADS = 256, CONSUMER_WARPS = 8, THREADS = CONSUMER_THREADS + 128;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 104, OF_CTA = 65536 / 2 / THREADS / 8 * 8;
static_assert(CONSUMER_REGISTERS * CONSUMER_THREADS + PRODUCER_REGISTERS * 128 <= OF_CTA * THREADS, "");
// Queries are sums of so many terms of e4m3, with which those of 16 bits are exact.
constexpr int TERMS = HALF ? 3 : 2;
// Of a row of queries the scores of a tile by two warpgroups, then its weights, times each of the scales.
constexpr int ROW_LINE = GROUPS * TILE_KV * 2 + 16;  // in other banks
constexpr int COPIED_KEYS = 16;                      // at a time, all of one block
static_assert(RANK == 512 && ROPE == 64, "a warpgroup has the columns of two scales");
static_assert(TERMS * ROWS <= 32 && STAGES >= 2 && BLOCK_SIZE % COPIED_KEYS == 0, "room, and whole copies");

// Where things are, in bytes from the begin; custom_ops/mla/cuda/shape.py counts the same.
constexpr int Q_AT = STAGES * STAGE_BYTES;  // [GROUPS, TERMS, ROWS] lines of 128 bytes, swizzled
constexpr int Q_GROUP_BYTES = TERMS * ROWS * 128, Q_ROTATED_AT = Q_AT + GROUPS * Q_GROUP_BYTES;  // [ROWS]
constexpr int WEIGHTS_AT = Q_ROTATED_AT + ROWS * 128;                   // [ROWS] lines, scores before
constexpr int UNITS_AT = WEIGHTS_AT + ROWS * ROW_LINE;                  // [ROWS, GROUPS], one over a unit
constexpr int FACTORS_AT = UNITS_AT + ROWS * GROUPS * 4;                // [ROWS, GROUPS], for accumulators
constexpr int FULL_AT = FACTORS_AT + ROWS * GROUPS * 4, EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SCAN_AT = EMPTY_AT + STAGES * 8;  // numbers of opening the schedule
constexpr int SHARED_BYTES = SCAN_AT + SCAN_BYTES;
static_assert(SHARED_BYTES <= 113 * 1024, "shared memory of two CTAs");

__device__ __forceinline__ void produce_rows(const Params &p, u32 shared, Walk walk, int lane) {
  const u64 policy = read_once();
  int slot = 0, phase = 0;
  bool early = true;
  Segment s;
  while (walk.next(s)) {
    for (int tile = s.first; tile < s.last; ++tile) {
      const int first = tile * TILE_KV + lane * COPIED_KEYS,
                rows = lane < TILE_KV / COPIED_KEYS ? min(s.seq_len - first, COPIED_KEYS) : 0,
                block = rows > 0 ? p.table[s.request * p.table_row + first / BLOCK_SIZE] : 0;
      const char *const from = p.rows + block * p.rows_block + first % BLOCK_SIZE * p.rows_slot;
      const u32 full = shared + FULL_AT + slot * 8,
                to = shared + slot * STAGE_BYTES + lane * (COPIED_KEYS * ROW_BYTES);
      early = ask_early(s, tile, early);
      // arrive: every consumer warp, when it has read what was in the stage
      mbarrier_wait(shared + EMPTY_AT + slot * 8, phase ^ 1);
      if (lane == 0) mbarrier_arrive_expect_tx(full, min(s.seq_len - tile * TILE_KV, TILE_KV) * ROW_BYTES);
      __syncwarp();
      if (rows > 0) {
        if (p.rows_slot == ROW_BYTES) bulk_load(to, from, rows * ROW_BYTES, full, policy);
        else
          for (int key = 0; key < rows; ++key)
            bulk_load(to + key * ROW_BYTES, from + key * p.rows_slot, ROW_BYTES, full, policy);
      }
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}
