// The load side of a warp: block ids, its keys and values of a tile on their way to shared memory or to L2.
#pragma once
#include "decode_scheduler.cuh"

// One warp's keys of a tile to shared memory. `ids`: lane i holds the i-th block id of the current batch of
// tiles.
constexpr int IDS = BLOCK_SIZE >= WARP_KEYS ? 1 : WARP_KEYS / BLOCK_SIZE;  // block ids of a warp's keys
// tiles whose ids one register per lane holds
constexpr int BATCH = 32 / IDS;
static_assert(IDS <= 32, "a lane holds one block id: at most 32 blocks per warp's keys");
constexpr int IN_BLOCK = BLOCK_SIZE >= WARP_KEYS ? WARP_KEYS : BLOCK_SIZE;

__device__ __forceinline__ int load_ids(const Params &p, const Cursor &c, int warp, int lane) {
  const int key = ((c.r.first_tile + c.tile / BATCH * BATCH + lane / IDS) * WARPS + warp) * WARP_KEYS +
                  lane % IDS * IN_BLOCK;
  return key < c.r.end && key + IN_BLOCK > c.r.low ? p.table[c.request * p.table_row + key / BLOCK_SIZE] : 0;
}

// Whether the warp's keys in the cursor's tile, if any, all lie before the query tokens.
__device__ __forceinline__ bool is_context(const Cursor &c, int warp) {
  const int key = ((c.r.first_tile + c.tile) * WARPS + warp) * WARP_KEYS;
  return key >= c.r.end || min(key + WARP_KEYS, c.r.end) <= c.r.seq_len - c.r.query_len;
}

// Rows as wide as a step of the warp, of `block` by its id. WHOLE: all of the warp's keys are there.
template <int PADDED, i64 SLOT_STRIDE, bool WHOLE>
__device__ __forceinline__ void copy_wide_rows(u32 to, const char *at, int block, int skip, int real,
                                               u64 policy, int lane) {
#pragma unroll
  for (int step = 0; step < IN_BLOCK; ++step, at += SLOT_STRIDE * KV_BYTES) {
    const int row = block * IN_BLOCK + step;
    const u32 target = to + row * (PADDED * 16) + (lane ^ swizzle<PADDED>(row)) * 16;
    if (WHOLE) cp_async_once(target, at, policy);
    // a masked value may be NaN, and 0 * NaN is NaN
    else cp_async_or_zero(target, at, row >= skip && row < real);
  }
}

template <int CHUNKS, int PADDED, i64 BLOCK_STRIDE, i64 SLOT_STRIDE>
__device__ __forceinline__ void copy_rows(u32 to, const char *from, int ids, int batch_tile, int first_slot,
                                          int skip, int real, int lane) {
  // Heads of 256 have twice the steps: what each takes is most of what a warp issues ahead of short
  // attention, and of the machine code. Narrower ones gained nothing by this (docs/log/decode_registers.md).
  if constexpr (CHUNKS == 32) {
    const bool whole = skip <= 0 && real >= WARP_KEYS;
    const u64 policy = read_once();
#pragma unroll(IDS <= 8 ? IDS : 4)
    for (int block = 0; block < IDS; ++block) {
      const i64 id = __shfl_sync(ALL, ids, batch_tile * IDS + block), slot = IDS == 1 ? first_slot : 0;
      const char *const at = from + (id * BLOCK_STRIDE + slot * SLOT_STRIDE) * KV_BYTES + lane * 16;
      if (whole) copy_wide_rows<PADDED, SLOT_STRIDE, true>(to, at, block, skip, real, policy, lane);
      else copy_wide_rows<PADDED, SLOT_STRIDE, false>(to, at, block, skip, real, policy, lane);
    }
    return;
  }
  constexpr int STEPS = (WARP_KEYS * CHUNKS + 31) / 32;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int chunk = i * 32 + lane;
    const int row = chunk / CHUNKS, column = chunk % CHUNKS;
    const int id = IDS == 1 ? __shfl_sync(ALL, ids, batch_tile)
                            : __shfl_sync(ALL, ids, batch_tile * IDS + (row / IN_BLOCK) % IDS);
    const int slot = IDS == 1 ? first_slot + row : row % IN_BLOCK;
    const char *at = from + ((i64)id * BLOCK_STRIDE + (i64)slot * SLOT_STRIDE) * KV_BYTES + column * 16;
    const u32 target = to + row * (PADDED * 16) + (column ^ swizzle<PADDED>(row)) * 16;
    if (WARP_KEYS * CHUNKS % 32 && row >= WARP_KEYS) continue;
    if (skip <= 0 && real >= WARP_KEYS) cp_async_once(target, at, read_once());
    // a masked value may be NaN, and 0 * NaN is NaN
    else cp_async_or_zero(target, at, row >= skip && row < real);
  }
}

// The same rows on their way to L2.
template <int CHUNKS, i64 BLOCK_STRIDE, i64 SLOT_STRIDE>
__device__ __forceinline__ void prefetch_rows(const char *from, int ids, int batch_tile, int first_slot,
                                              int lane) {
  constexpr int ROW_LINES = (CHUNKS + 7) / 8;
#pragma unroll
  for (int i = 0; i < (WARP_KEYS * ROW_LINES + 31) / 32; ++i) {
    const int row = (i * 32 + lane) / ROW_LINES, line = (i * 32 + lane) % ROW_LINES;
    const int id = IDS == 1 ? __shfl_sync(ALL, ids, batch_tile)
                            : __shfl_sync(ALL, ids, batch_tile * IDS + (row / IN_BLOCK) % IDS);
    const int slot = IDS == 1 ? first_slot + row : row % IN_BLOCK;
    if (row < WARP_KEYS)
      prefetch_l2(from + ((i64)id * BLOCK_STRIDE + (i64)slot * SLOT_STRIDE) * KV_BYTES + line * 128);
  }
}

// The warp's keys and values of the next PREFETCH_L2 tiles, as far as their block ids are here. Nothing is
// read: they may still be written.
__device__ __forceinline__ void prefetch_tiles(const Params &p, const Cursor &c, int ids, int to_load,
                                               int warp, int lane) {
  const int end = min(min(c.tile + min(PREFETCH_L2, to_load), c.r.num_tiles), (c.tile / BATCH + 1) * BATCH);
#pragma unroll 1
  for (int tile = c.tile; tile < end; ++tile) {
    const int key = ((c.r.first_tile + tile) * WARPS + warp) * WARP_KEYS,
              first_slot = BLOCK_SIZE >= WARP_KEYS ? key % BLOCK_SIZE : 0;
    if (key >= c.r.end || key + WARP_KEYS <= c.r.low) continue;
    prefetch_rows<K_CHUNKS, K_BLOCK, K_SLOT>(keys_of(p, c), ids, tile % BATCH, first_slot, lane);
    prefetch_rows<V_CHUNKS, V_BLOCK, V_SLOT>(values_of(p, c), ids, tile % BATCH, first_slot, lane);
  }
}

// The producer's side of a warp's pipeline: it runs ahead of the warp over the same tiles.
struct Producer {
  LoadCursor &at;
  int to_load, ids;
  u32 stages;  // the warp's

  // The next tile's keys and values on their way to a stage; an empty group of copies if there is none, which
  // keeps the count.
  __device__ __forceinline__ void load(const Params &p, int stage, int warp, int lane) {
    if (to_load > 0) {
      const int key = ((at.r.first_tile + at.tile) * WARPS + warp) * WARP_KEYS;
      const int skip = at.r.low - key, real = at.r.end - key;
      const int batch_tile = at.tile % BATCH, first_slot = BLOCK_SIZE >= WARP_KEYS ? key % BLOCK_SIZE : 0;
      const u32 to = stages + stage * STAGE_BYTES;
      if (real > 0 && skip < WARP_KEYS) {
        const char *k = keys_of(p, at), *v = values_of(p, at);
        copy_rows<K_CHUNKS, K_PADDED, K_BLOCK, K_SLOT>(to, k, ids, batch_tile, first_slot, skip, real, lane);
        copy_rows<V_CHUNKS, V_PADDED, V_BLOCK, V_SLOT>(to + WARP_KEYS * K_ROW_BYTES, v, ids, batch_tile,
                                                       first_slot, skip, real, lane);
      }
      if (--to_load > 0) {
        const int old = at.request;
        if (++at.tile == at.r.num_tiles) at.next_pair(p);
        if (at.tile % BATCH == 0 && (at.r.num_tiles > BATCH || at.request != old))
          ids = load_ids(p, at, warp, lane);
      }
    }
    cp_async_commit();
  }
};
