// The producers of rows of fp8 (custom_ops/mla/fp8_rows.py): two warpgroups, which take turns at the tiles. A
// thread loads its numbers of a tile into registers, waits for the stage, converts and stores them as the
// copy engine would have brought them. While one warpgroup converts, the other one's tile is on its way.
#pragma once

#include "latent_load.cuh"

#if FP8
constexpr int ROW_SCALES = RANK / 128, ROW_BYTES = RANK + ROW_SCALES * 4 + ROPE * 2;
constexpr int MY_KEYS = TILE_KV / 4;  // of a warp, all of one block
static_assert(RANK == 512 && ROPE == 64, "16 numbers of a latent for each lane; a key in eight");
static_assert(BLOCK_SIZE % MY_KEYS == 0, "one entry of the table for each warp");

// Four e4m3 numbers times a scale, as two pairs of 16 bits; rounded once, as the reference does.
__device__ __forceinline__ void scaled(u32 x, float scale, u32 &first, u32 &second) {
  u32 low, high;
  unpack_fp8<false>(x, low, high);
  first = pack<HALF>(to_float<true>((u16)low) * scale, to_float<true>((u16)(low >> 16)) * scale);
  second = pack<HALF>(to_float<true>((u16)high) * scale, to_float<true>((u16)(high >> 16)) * scale);
}
__device__ __forceinline__ u32 of_bfloat16(u32 x) {
  return HALF ? pack<true>(to_float<false>((u16)x), to_float<false>((u16)(x >> 16))) : x;
}

struct RowTile {  // a warp's keys: lane l has 16 numbers of each latent, 8 of every fourth rotated key
  float4 latents[MY_KEYS], rotated[MY_KEYS / 4];
  float scales[MY_KEYS];

  // Zeros behind the last key.
  __device__ __forceinline__ void load(const Params &p, const Segment &s, int tile, int warp, int lane) {
    const int first = tile * TILE_KV + warp * MY_KEYS, seen = s.seq_len - first;
    const int block = seen > 0 ? p.table[s.request * p.table_row + first / BLOCK_SIZE] : 0;
    const char *from = p.rows + block * p.rows_block + first % BLOCK_SIZE * p.rows_slot;
#pragma unroll
    for (int key = 0; key < MY_KEYS; ++key) {
      const char *row = from + key * p.rows_slot;
      latents[key] = {0.f, 0.f, 0.f, 0.f};
      scales[key] = 0.f;
      if (key < seen) {
        latents[key] = load_l2((const float4 *)(row + lane * 16));
        scales[key] = load_l2((const float *)(row + RANK) + lane / 8);
      }
    }
#pragma unroll
    for (int n = 0; n < MY_KEYS / 4; ++n) {
      const int key = n * 4 + lane / 8;
      rotated[n] = {0.f, 0.f, 0.f, 0.f};
      if (key < seen)
        rotated[n] = load_l2((const float4 *)(from + key * p.rows_slot + RANK + ROW_SCALES * 4) + lane % 8);
    }
  }
  __device__ __forceinline__ void store(char *stage, int warp, int lane) const {
#pragma unroll
    for (int n = 0; n < MY_KEYS; ++n) {
      const int key = warp * MY_KEYS + n, odd = lane / 4 % 2;  // 8 lanes store into other banks
      char *line = stage + key / 8 * GROUP_BYTES + key % 8 * 128 + lane / 4 * 1024;
      const u32 x[4] = {__float_as_uint(latents[n].x), __float_as_uint(latents[n].y),
                        __float_as_uint(latents[n].z), __float_as_uint(latents[n].w)};
      uint4 low, high;
      scaled(x[0], scales[n], low.x, low.y);
      scaled(x[1], scales[n], low.z, low.w);
      scaled(x[2], scales[n], high.x, high.y);
      scaled(x[3], scales[n], high.z, high.w);
      const int chunk = lane % 4 * 2;
      *(uint4 *)(line + ((chunk + odd) ^ key % 8) * 16) = odd ? high : low;
      *(uint4 *)(line + ((chunk + 1 - odd) ^ key % 8) * 16) = odd ? low : high;
    }
#pragma unroll
    for (int n = 0; n < MY_KEYS / 4; ++n) {
      const int key = warp * MY_KEYS + n * 4 + lane / 8;
      const float4 x = rotated[n];
      *(uint4 *)(stage + key / 8 * GROUP_BYTES + RANK / 64 * 1024 + key % 8 * 128 +
                 (lane % 8 ^ key % 8) * 16) =
          uint4{of_bfloat16(__float_as_uint(x.x)), of_bfloat16(__float_as_uint(x.y)),
                of_bfloat16(__float_as_uint(x.z)), of_bfloat16(__float_as_uint(x.w))};
    }
  }
};

// `mine`: which of the two warpgroups.
__device__ __forceinline__ void produce_rows(const Params &p, char *memory, u32 shared, Walk walk, int mine,
                                             int warp, int lane) {
  int turn = 0, slot = 0, phase = 0;
  Segment s;
  while (walk.next(s)) {
    for (int tile = s.first; tile < s.last; ++tile) {
      if (turn == mine) {
        RowTile rows;
        rows.load(p, s, tile, warp, lane);
        // arrive: every consumer warp, when its products with what was in the stage have ended
        mbarrier_wait(shared + EMPTY_AT + slot * 8, phase ^ 1);
        rows.store(memory + slot * TILE_BYTES, warp, lane);
        fence_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared + FULL_AT + slot * 8);
      }
      turn ^= 1;
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}
#endif
