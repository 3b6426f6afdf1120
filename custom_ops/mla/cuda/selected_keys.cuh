// Which rows of the pool a CTA reads, and their copies into shared memory.
#pragma once

#include "selected_params.cuh"
#include "selected_token.cuh"

// A request's blocks into shared memory, as far as a token sees and there is room. Before the kernels ahead
// have ended, as all metadata: what is asked for behind them is one trip through L2 shorter.
__device__ __forceinline__ void copy_table(const Params &p, int *to, int room, Token t, int thread) {
  const int blocks = min((t.end + BLOCK_SIZE - 1) / BLOCK_SIZE, room);
  constexpr int AT_ONCE = 4;
  for (int first = thread; first < blocks; first += AT_ONCE * THREADS) {
    int x[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = first + n * THREADS;
      x[n] = i < blocks ? load_l2(p.table + t.request * p.table_row + i) : 0;
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
      if (first + n * THREADS < blocks) to[first + n * THREADS] = x[n];
  }
}

// This CTA's part of a token's positions.
struct Positions {
  static constexpr int EACH = MAX_KEYS / THREADS;
  int count, of_thread[EACH];

  __device__ __forceinline__ Positions(const Params &p, int token, int rank, int thread) {
    const int first = rank * p.part_keys;
    count = max(0, min(p.part_keys, p.top_k - first));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = n * THREADS + thread;
      of_thread[n] = i < count ? load_l2(p.indices + token * p.indices_row + first + i) : -1;
    }
  }
};

// Rows of the pool of these positions; how many tiles hold those that are seen. All of `copy_table` is there
// behind a barrier.
__device__ __forceinline__ int find_keys(const Params &p, char *memory, const Positions &positions, Token t,
                                         int thread) {
  int *keys = (int *)(memory + KEYS_AT), *lasts = (int *)(memory + COUNT_AT);
  const int *table = p.table + t.request * p.table_row, lane = thread % 32;
  int last = 0;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Positions::EACH; ++n) {
    const int i = n * THREADS + thread, position = positions.of_thread[n], block = position / BLOCK_SIZE;
    if (i >= (positions.count + TILE - 1) / TILE * TILE) break;
    int row = -1;
    if ((u32)position < (u32)t.end) {
      row = (block < TABLE_ENTRIES ? ((const int *)memory)[block] : load_l2(table + block)) * BLOCK_SIZE +
            position % BLOCK_SIZE;
      last = i + 1;
    }
    keys[i] = row;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) last = max(last, __shfl_xor_sync(ALL, last, step));
  if (lane == 0) lasts[thread / 32] = last;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) last = max(last, lasts[warp]);
  return (last + TILE - 1) / TILE;
}

// Heads of a token, as keys lie; zeros behind the last one.
__device__ __forceinline__ void copy_queries(const Params &p, u32 to, int token, int head_tile,
                                             int thread) {
  for (int i = thread; i < ROWS * SQUARES * 8; i += THREADS) {
    const int r = i / (SQUARES * 8), chunk = i - r * (SQUARES * 8), head = head_tile * ROWS + r;
    const bool real = head < NUM_HEADS;
    const char *from = p.q + (real ? (token * p.q_token + head * p.q_head + chunk * 8) * 2 : 0);
    cp_async_or_zero(to + r / 8 * GROUP_BYTES + chunk / 8 * 1024 + r % 8 * 128 +
                         ((chunk ^ r) & 7) * 16, from, real);
  }
}

// A tile of keys into a stage: each warp a share of them, as groups of 8 lines in each square. Eight lanes
// copy a line; zeros for keys that are not seen, since 0 * NaN is NaN.
__device__ __forceinline__ void copy_keys(const Params &p, char *memory, u32 stage, int tile, int warp,
                                          int lane) {
  constexpr int EACH = TILE / WARPS;
  const int *keys = (const int *)(memory + KEYS_AT) + tile * TILE;
#pragma unroll
  for (int n = 0; n < EACH / 4; ++n) {
    const int key = warp * EACH + n * 4 + lane / 8, chunk = lane % 8, row = keys[key];
    const i64 at = row < 0 ? 0 : row / BLOCK_SIZE * p.kv_block + row % BLOCK_SIZE * p.kv_slot;
    const char *from = p.kv + at * 2 + chunk * 16;
    const u32 to = stage + key / 8 * GROUP_BYTES + key % 8 * 128 + (chunk ^ key % 8) * 16;
#pragma unroll
    for (int square = 0; square < SQUARES; ++square)
      cp_async_or_zero(to + square * 1024, from + square * 128, row >= 0);
  }
}
