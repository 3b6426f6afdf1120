// From accumulators to the result: whole ones to out and lse, partial ones to scratch memory.
#pragma once

#include "latent_scheduler.cuh"

// 16 value columns from `column` on, of the 8 rows from `first` on (this lane's is the one at lane / 4): a
// fragment with value columns as rows, turned.
__device__ __forceinline__ void store_turned(const Params &p, const Row &row, int column, int lane,
                                             const float (&x)[4]) {
  const u32 low = movmatrix_trans(pack<HALF>(x[0], x[1])), high = movmatrix_trans(pack<HALF>(x[2], x[3]));
  if (!row.real) return;
  char *at = p.out + (row.token * p.o_token + row.head * p.o_head + column + lane % 4 * 2) * 2;
  *(u32 *)at = low;
  *(u32 *)(at + 16) = high;
}

// The lanes of four have each a column of 4 x 4; afterwards each a row.
__device__ __forceinline__ void turn_quad(u32 (&y)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int low = step == 1 ? n * 2 : n, high = low + step;
      const bool odd = lane & step;
      const u32 other = __shfl_xor_sync(ALL, odd ? y[low] : y[high], step);
      (odd ? y[low] : y[high]) = other;
    }
}

__device__ __forceinline__ void store_lse(const Params &p, const Row &row, float maximum, float total) {
  if (LSE && row.real)
    p.lse[row.token * p.l_token + row.head * p.l_head] =
        row.end > 0 ? (maximum + log2_(total)) * LN2 : -INF;
}

__device__ __forceinline__ float *slot_of(const Params &p, int group, int slot, int row_tile) {
  return p.parts + (i64)((group * 2 + slot) * p.row_tiles + row_tile) * SLOT_FLOATS;
}

// Token rows that no CTA works on: those behind the last request, and those of requests without keys.
__device__ __forceinline__ void store_zeros(const Params &p, int first, int last, int thread, int threads) {
  constexpr int LINE = RANK / 8;
#pragma unroll 1
  for (i64 i = (i64)first * NUM_HEADS * LINE + thread; i < (i64)last * NUM_HEADS * LINE; i += threads) {
    const int row = (int)(i / LINE), token = row / NUM_HEADS, head = row - token * NUM_HEADS;
    *(uint4 *)(p.out + (token * p.o_token + head * p.o_head + i % LINE * 8) * 2) = uint4{0, 0, 0, 0};
    if (LSE && i % LINE == 0) p.lse[token * p.l_token + head * p.l_head] = -INF;
  }
}
__device__ __forceinline__ void store_rows_without_keys(const Params &p, int thread, int threads) {
  const int used = p.starts[p.num_reqs];
  for (int token = used + blockIdx.x; token < p.num_tokens; token += gridDim.x)
    store_zeros(p, token, token + 1, thread, threads);
  for (int r = blockIdx.x; r < p.num_reqs; r += gridDim.x)
    if (p.seq_lens[r] <= 0) store_zeros(p, p.starts[r], p.starts[r + 1], thread, threads);
}
