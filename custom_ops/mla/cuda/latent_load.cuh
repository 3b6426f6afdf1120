// The producer: one warp, which has the copy engine bring blocks of latents. A lane asks for a block each; a
// block comes in one box, as groups of 8 keys, in each group one square of 64 columns after the other, so
// that the distance of groups is the same within a block and across blocks.
#pragma once

#include "latent_scheduler.cuh"

// The lane's block of a tile; none past the last key: the copy engine fills those with zeros.
__device__ __forceinline__ int block_of(const Params &p, const Segment &s, int tile, int lane) {
  const int index = tile * TILE_BLOCKS + lane;
  const bool seen = lane < TILE_BLOCKS && index * BLOCK_SIZE < s.seq_len;
  return seen ? p.table[s.request * p.table_row + index] : p.num_blocks;
}

__device__ __forceinline__ void produce(const Params &p, u32 shared, Walk walk, int lane) {
  int slot = 0, phase = 0;
  Segment s;
  while (walk.next(s)) {
    for (int tile = s.first; tile < s.last; ++tile) {
      const int block = block_of(p, s, tile, lane);
      const u32 full = shared + FULL_AT + slot * 8;
      // arrive: every consumer warp, when its products with what was in the stage have ended
      mbarrier_wait(shared + EMPTY_AT + slot * 8, phase ^ 1);
      if (lane == 0) mbarrier_arrive_expect_tx(full, STAGE_BYTES);
      __syncwarp();
      if (lane < TILE_BLOCKS)
        tma_load_4d(shared + slot * STAGE_BYTES + lane * (STAGE_BYTES / TILE_BLOCKS), &p.kv, 0, 0, 0,
                    block * p.block_group, full);
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}
