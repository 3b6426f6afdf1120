// Which rows of the pool a CTA reads, and their copies into shared memory.
#pragma once

#include "selected_params.cuh"

struct Token {
  int request, end;  // positions below are seen; 0: none
};

// By all lanes of a warp. The metadata is read before the kernels ahead have ended, from L2.
__device__ __forceinline__ Token find_token(const Params &p, int token, int lane) {
  int request = 0;  // the last one that begins at or before the token
  for (int first = 1; first < p.num_reqs; first += 32) {
    const int r = first + lane;
    request += __popc(__ballot_sync(ALL, r < p.num_reqs && load_l2(p.starts + r) <= token));
  }
  const int seq_len = load_l2(p.seq_lens + request),
            position = seq_len - load_l2(p.starts + request + 1) + token;
  const bool sees = position >= 0 && token < load_l2(p.starts + p.num_reqs);
  return {request, !sees ? 0 : CAUSAL ? min(seq_len, position + 1) : max(seq_len, 0)};
}

// Rows of the pool of this CTA's part of the positions; how many tiles hold those that are seen.
__device__ __forceinline__ int find_keys(const Params &p, char *memory, int token, int rank, Token t,
                                         int thread) {
  int *keys = (int *)(memory + KEYS_AT), *lasts = (int *)(memory + COUNT_AT);
  const int first = rank * p.part_keys, count = max(0, min(p.part_keys, p.top_k - first)),
            lane = thread % 32;
  const int *indices = p.indices + token * p.indices_row + first;
  const int *table = p.table + t.request * p.table_row;
  int last = 0;
  for (int i = thread; i < (count + TILE - 1) / TILE * TILE; i += THREADS) {
    int row = -1;
    if (i < count) {
      const int position = load_l2(indices + i);
      if ((u32)position < (u32)t.end) {
        row = load_l2(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
        last = i + 1;
      }
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
__device__ __forceinline__ void copy_queries(const Params &p, u32 shared, int token, int head_tile,
                                             int thread) {
  for (int i = thread; i < ROWS * SQUARES * 8; i += THREADS) {
    const int r = i / (SQUARES * 8), chunk = i - r * (SQUARES * 8), head = head_tile * ROWS + r;
    const bool real = head < NUM_HEADS;
    const char *from = p.q + (real ? (token * p.q_token + head * p.q_head + chunk * 8) * 2 : 0);
    cp_async_or_zero(shared + Q_AT + r / 8 * GROUP_BYTES + chunk / 8 * 1024 + r % 8 * 128 +
                         ((chunk ^ r) & 7) * 16, from, real);
  }
}

// A tile of keys into a stage: 8 keys for each warp, as groups of 8 lines in each square. Eight lanes copy a
// line; zeros for keys that are not seen, since 0 * NaN is NaN.
__device__ __forceinline__ void copy_keys(const Params &p, char *memory, u32 stage, int tile, int warp,
                                          int lane) {
  const int *keys = (const int *)(memory + KEYS_AT) + tile * TILE + warp * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = half * 4 + lane / 8, chunk = lane % 8, row = keys[key];
    const i64 at = row < 0 ? 0 : row / BLOCK_SIZE * p.kv_block + row % BLOCK_SIZE * p.kv_slot;
    const char *from = p.kv + at * 2 + chunk * 16;
    const u32 to = stage + warp * GROUP_BYTES + key * 128 + (chunk ^ key) * 16;
#pragma unroll
    for (int square = 0; square < SQUARES; ++square)
      cp_async_or_zero(to + square * 1024, from + square * 128, row >= 0);
  }
}
