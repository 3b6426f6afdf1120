// The producer: one warp, which has the copy engine bring blocks of latents. A lane asks for a block each; a
// block comes in one box, as groups of 8 keys, in each group one square of 64 columns after the other, so
// that the distance of groups is the same within a block and across blocks.
#pragma once

#include "latent_scheduler.cuh"

constexpr int GROUP_BYTES = SQUARES * 1024;  // 8 keys: their lines of each square, one behind the other
constexpr int CONSUMER_THREADS = 128, CONSUMER_WARPS = 4;
constexpr int THREADS = CONSUMER_THREADS + 32;  // and the producer, one warp
constexpr int P_BYTES = ROWS * 128;
static_assert(ROWS <= 32 && STAGES >= 2, "tiles in use and on their way");

// Where things are, in bytes from the begin; custom_ops/mla/cuda/shape.py counts the same.
constexpr int Q_AT = STAGES * TILE_BYTES, P_AT = Q_AT + Q_BYTES;
constexpr int MAXIMA_AT = P_AT + P_BYTES;          // [4 warps, ROWS], of a step
constexpr int STATE_AT = MAXIMA_AT + 4 * ROWS * 4;  // [ROWS, 2], maximum and sum
constexpr int FULL_AT = STATE_AT + ROWS * 8, EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SCAN_AT = EMPTY_AT + STAGES * 8;     // numbers of opening the schedule
constexpr int SHARED_BYTES = SCAN_AT + SCAN_BYTES;
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

__device__ __forceinline__ void produce(const Params &p, u32 shared, Walk walk, int lane) {
  const u64 policy = read_once();
  int slot = 0, phase = 0;
  bool early = true;
  Segment s;
  while (walk.next(s)) {
    for (int tile = s.first; tile < s.last; ++tile) {
      const int block = block_of(p, s, tile, lane);
      const u32 full = shared + FULL_AT + slot * 8;
      early = ask_early(s, tile, early);
      // arrive: every consumer warp, when its products with what was in the stage have ended
      mbarrier_wait(shared + EMPTY_AT + slot * 8, phase ^ 1);
      if (lane == 0) mbarrier_arrive_expect_tx(full, TILE_BYTES);
      __syncwarp();
      if (lane < TILE_BLOCKS)
        tma_load_4d(shared + slot * TILE_BYTES + lane * (TILE_BYTES / TILE_BLOCKS), &p.kv, 0, 0, 0,
                    block * p.block_group, full, policy);
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}
