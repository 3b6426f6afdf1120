// The producers of rows of fp8 (custom_ops/mla/fp8_rows.py): two warpgroups, which take turns at the tiles. A
// thread loads its numbers of a tile into registers, waits for the stage, and stores them as float16, which
// has all numbers of e4m3; their scales lie beside them. While one warpgroup converts, the other one's tile
// is on its way.
#pragma once

#include "latent_scheduler.cuh"

#if FP8
constexpr int SCALES = RANK / 128, ROW_BYTES = RANK + SCALES * 4 + ROPE * 2;
constexpr int MY_KEYS = TILE_KV / 4;  // of a warp, all of one block
static_assert(RANK == 512 && ROPE == 64, "16 numbers of a latent for each lane; a key in eight");
static_assert(BLOCK_SIZE % MY_KEYS == 0, "one entry of the table for each warp");

// Behind what latent_params.cuh lays out; custom_ops/mla/cuda/shape.py counts the same.
constexpr int WEIGHTS_AT = (SHARED_BYTES + 1023) / 1024 * 1024;     // times the scales: [SCALES, ROWS], lines
constexpr int SCALES_AT = WEIGHTS_AT + SCALES * P_BYTES;            // [STAGES, TILE_KV, SCALES]
constexpr int TOPS_AT = SCALES_AT + STAGES * TILE_KV * SCALES * 4;  // [STAGES, 4 warps, SCALES], largest ones
constexpr int BACK_AT = TOPS_AT + STAGES * 4 * SCALES * 4;          // [ROWS], what queries were divided by
constexpr int ROWS_SHARED_BYTES = BACK_AT + ROWS * 4;
static_assert(ROWS_SHARED_BYTES <= 227 * 1024, "shared memory");

__device__ __forceinline__ u32 of_bfloat16(u32 x) {
  return HALF ? pack<true>(to_float<false>((u16)x), to_float<false>((u16)(x >> 16))) : x;
}

struct RowTile {  // a warp's keys: lane l has 16 numbers of each latent, 8 of every fourth rotated key
  float4 latents[MY_KEYS], rotated[MY_KEYS / 4];
  float scales[2];  // two of key l / 2

  // Zeros behind the last key.
  __device__ __forceinline__ void load(const Params &p, const Segment &s, int tile, int warp, int lane) {
    const int first = tile * TILE_KV + warp * MY_KEYS, seen = s.seq_len - first;
    const int block = seen > 0 ? p.table[s.request * p.table_row + first / BLOCK_SIZE] : 0;
    const char *from = p.rows + block * p.rows_block + first % BLOCK_SIZE * p.rows_slot;
#pragma unroll
    for (int key = 0; key < MY_KEYS; ++key) {
      latents[key] = {0.f, 0.f, 0.f, 0.f};
      if (key < seen) latents[key] = load_l2((const float4 *)(from + key * p.rows_slot + lane * 16));
    }
    scales[0] = scales[1] = 0.f;
    if (lane / 2 < seen) {
      const float *at = (const float *)(from + lane / 2 * p.rows_slot + RANK) + lane % 2 * 2;
      scales[0] = load_l2(at);
      scales[1] = load_l2(at + 1);
    }
#pragma unroll
    for (int n = 0; n < MY_KEYS / 4; ++n) {
      const int key = n * 4 + lane / 8;
      rotated[n] = {0.f, 0.f, 0.f, 0.f};
      if (key < seen)
        rotated[n] = load_l2((const float4 *)(from + key * p.rows_slot + RANK + SCALES * 4) + lane % 8);
    }
  }
  __device__ __forceinline__ void store(char *memory, int slot, int warp, int lane) const {
    char *const stage = memory + slot * STAGE_BYTES;
#pragma unroll
    for (int n = 0; n < MY_KEYS; ++n) {
      const int key = warp * MY_KEYS + n, odd = lane / 4 % 2;  // 8 lanes store into other banks
      char *line = stage + key / 8 * GROUP_BYTES + key % 8 * 128 + lane / 4 * 1024;
      uint4 low, high;
      unpack_fp8<false>(__float_as_uint(latents[n].x), low.x, low.y);
      unpack_fp8<false>(__float_as_uint(latents[n].y), low.z, low.w);
      unpack_fp8<false>(__float_as_uint(latents[n].z), high.x, high.y);
      unpack_fp8<false>(__float_as_uint(latents[n].w), high.z, high.w);
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
    float top[2] = {scales[0], scales[1]};
    *(float2 *)(memory + SCALES_AT + ((slot * TILE_KV + warp * MY_KEYS) * SCALES + lane * 2) * 4) =
        float2{top[0], top[1]};
#pragma unroll
    for (int step = 2; step < 32; step *= 2)
#pragma unroll
      for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], __shfl_xor_sync(ALL, top[e], step));
    if (lane < 2)
      *(float2 *)(memory + TOPS_AT + ((slot * 4 + warp) * SCALES + lane * 2) * 4) = float2{top[0], top[1]};
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
        rows.store(memory, slot, warp, lane);
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
