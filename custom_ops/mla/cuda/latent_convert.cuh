// The producers of latent_pairs.cu and latent_selected.cu over rows of fp8: eight warps make 16-bit numbers
// of keys, each warp 8 of a tile. Four lanes have a key, of each 64 columns 16: a lane has one row of a tile,
// its scales are its own, and eight lanes store to all banks. Which rows come in which order says `Tiles`.
//
// What is loaded waits in registers while a lane converts what it loaded before. No fence of proxies here:
// the one behind the consumers' waits lets their products see these stores, too.
#pragma once

#include "latent_pairs_load.cuh"

static_assert(!FP8 || !HALF, "the rotated keys are bfloat16");
static_assert(ROW_BYTES % 16 == 0 && RANK == 512 && ROPE == 64, "shares of a lane");

constexpr int CONVERTED_KEYS = 8;                    // of a tile, by a warp
__device__ const uint4 NO_ROW[ROW_BYTES / 16] = {};  // of a key that is not seen, since 0 * NaN is NaN

struct Converter {
  char *memory;
  const u32 shared;
  const int warp, lane;

  static __device__ __forceinline__ uint4 numbers(const char *row, int half, int square) {
    return load_l2((const uint4 *)(row + half * COLUMNS + square * 64));
  }
  __device__ __forceinline__ float2 scales(const char *row, int half) const {
    return load_l2((const float2 *)(row - lane % 4 * 16 + SCALES_IN + half * 8));
  }
  static __device__ __forceinline__ u32 scaled(u32 x, float scale) {  // of two float16
    return pack<HALF>(to_float<true>((u16)x) * scale, to_float<true>((u16)(x >> 16)) * scale);
  }
  static __device__ __forceinline__ uint4 converted(u32 x, u32 y, float scale) {
    u32 a, b, c, d;
    unpack_fp8<false>(x, a, b);
    unpack_fp8<false>(y, c, d);
    return {scaled(a, scale), scaled(b, scale), scaled(c, scale), scaled(d, scale)};
  }
  // Where a lane's first 16 bytes of a tile's first square go; its second ones: 16 bytes across.
  __device__ __forceinline__ u32 place(int slot) const {
    return slot * TILE_BYTES + (warp * CONVERTED_KEYS + lane / 4) * 128 + ((lane % 4 * 2) ^ (lane / 4)) * 16;
  }
  __device__ __forceinline__ void store(uint4 x, float scale, u32 at, int square) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint4 y = converted(e ? x.z : x.x, e ? x.w : x.y, scale);
      *(uint4 *)(memory + (at ^ e * 16) + square * SQUARE_BYTES) = y;
    }
  }
  // A row of the next tile, or of the first one: lines of 128 bytes, one or two of each of four lanes.
  __device__ __forceinline__ void ask_l2(const char *row) const {
    row += lane % 4 * (128 - 16);
    prefetch_l2(row);
    if (lane % 4 < 2) prefetch_l2(row + 512);
  }
  __device__ __forceinline__ void copy_rotated(const char *row, u32 at) const {
    const char *from = row + ROPE_IN + lane % 4 * 16;
    at += shared + (SQUARES - 1) * SQUARE_BYTES;
    cp_async_or_zero(at, from, true);
    cp_async_or_zero(at ^ 16, from + 16, true);
  }
};

// Tiles: `left()`, whether there is a tile; its `slot()`; `row()`, where this lane's first 16 bytes of its
// key are, NO_ROW if it is not seen; `step()`, to the next tile. Behind that, of the tile before,
// `rotated(slot)` when its rotated keys may be written, and `end()` when all of it was.
template <class Tiles>
__device__ __forceinline__ void convert_rows(char *memory, u32 shared, Tiles &tiles, int warp, int lane) {
  const Converter converter{memory, shared, warp, lane};
  const char *row = tiles.row();
  converter.ask_l2(row);  // the second half of its numbers is loaded half a tile later
  uint4 x[HALF_SQUARES];
#pragma unroll
  for (int n = 0; n < HALF_SQUARES; ++n) x[n] = Converter::numbers(row, 0, n);
  float2 scale = converter.scales(row, 0);
  int phases = 0;  // a bit for each tile
  while (tiles.left()) {
    const int slot = tiles.slot();
    const u32 at = converter.place(slot);
    tiles.step();
    if (tiles.row() != (const char *)NO_ROW + lane % 4 * 16) converter.ask_l2(tiles.row());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // first the half that is needed first; with the other one the rotated keys, whose square held weights
      const int half = i ^ slot, then = i ? tiles.slot() : half ^ 1;
      const u32 to = at + half * HALF_SQUARES * SQUARE_BYTES;
      const u32 full = full_at(shared, slot, half * HALF_SQUARES);
      const char *next = i ? tiles.row() : row;
      const float2 next_scale = converter.scales(next, then);
      // arrive: the warps that have this half of the columns, when their products with it have ended
      mbarrier_wait(empty_at(shared, slot, half), (phases >> slot & 1) ^ 1);
      if (i == 1) {
        tiles.rotated(slot);
        converter.copy_rotated(row, at);
      }
#pragma unroll
      for (int n = 0; n < HALF_SQUARES; ++n) {
        converter.store(x[n], n < HALF_SQUARES / 2 ? scale.x : scale.y, to, n);
        x[n] = Converter::numbers(next, then, n);
        __syncwarp();  // else ptxas asks for all of them behind the last store
      }
      scale = next_scale;
      row = next;
      mbarrier_arrive_behind_copies(full);
      if (lane == 0) mbarrier_arrive(full);
    }
    phases ^= 1 << slot;
    tiles.end();
  }
}
