// CASCADE: tiles of queries on their way to shared memory.
#pragma once

#include "../prefill/prefill_params.cuh"

// A tile of queries, which stand anywhere in the batch; rows behind the request are zeros.
__device__ __forceinline__ void gather_queries(const Params &p, const WorkTile &tile, u32 to, u32 filled,
                                               int lane) {
#pragma unroll 1
  for (int begin = 0; begin < TILE_TOKENS; begin += 32) {
    const int token = tile.index * TILE_TOKENS + begin + lane;
    int row = p.num_tokens;
    // token rows are less than 2^31: the low word
    if (token < tile.r.query_len) row = load_l2((const int *)(p.order + tile.r.start + token));
    const u32 at = to + (begin + lane) * GROUP * K_WIDTH * 2;
    if (begin + lane < TILE_TOKENS) {
#pragma unroll 1
      for (int s = 0; s < K_SQUARES; ++s)
        tma_load_3d(at + s * (Q_TILE_BYTES / K_SQUARES), &p.q, s * K_WIDTH, tile.head * GROUP, row, filled);
    }
    __syncwarp();
  }
}
