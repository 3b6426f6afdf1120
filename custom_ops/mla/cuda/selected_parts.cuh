// Parts of a token's selected keys, where each has a CTA with room for all of its keys: shared memory, and
// what a part leaves for the merge.
#pragma once

#include "selected_tile.cuh"

constexpr int PART_KEYS = WARPS * 16;                     // 16 of each warp
constexpr int PART_Q_AT = PART_KEYS / 8 * GROUP_BYTES;    // behind the keys
constexpr int WEIGHTS_AT = PART_Q_AT + 2 * GROUP_BYTES;   // of 64 keys each, as P_AT
constexpr int WARP_TOPS_AT = WEIGHTS_AT + PART_KEYS / 64 * 2048;  // [16, WARPS], maxima of the warps' keys
constexpr int TABLE_AT = WARP_TOPS_AT + 16 * WARPS * 4, TABLE_ROOM = 3072;
constexpr int PART_BYTES = TABLE_AT + TABLE_ROOM * 4;
constexpr int COPIES = 3;                                 // of half a warp's keys, by columns
constexpr int KEPT = (SQUARES + 1) / 2;                   // squares of queries in registers
constexpr float LAZY = 8.f;                               // scores may be so far, in base 2, above a level
static_assert(PART_BYTES <= 227 * 1024, "shared memory");

__device__ __forceinline__ int parts_of(const Params &p) { return (p.top_k + PART_KEYS - 1) / PART_KEYS; }
// Of a part: fragments of sums over a power of two, [RANK / 8, 32], float16. Behind those of all parts: for
// each warp's columns and each row what weights are relative to, their total (below 0: no key is seen), and
// that power.
__device__ __forceinline__ uint2 *sums_of(const Params &p, int part) {
  return (uint2 *)p.parts + (i64)part * (RANK / 8) * 32;
}
__device__ __forceinline__ float4 *states_of(const Params &p, int part) {
  return (float4 *)sums_of(p, p.num_items * parts_of(p)) + part * WARPS * 16;
}
