// Rows of a batch in chunks, as the first kernels of long rows have them. Included behind a kernel's
// parameters, which have the constants SHORT and VALUE_DIM.
#pragma once

#include "delta_records.cuh"

constexpr float LEAST_DECAY = -100.f;  // of a token, as custom_ops/state/triton/chunk_products.py says

// A token's decay as a logarithm to base 2.
__device__ __forceinline__ float log2_decay(float x) {
  return (x < LEAST_DECAY ? LEAST_DECAY : x) * LOG2E;  // NaN stays
}

// A chunk: its row's first token and tokens, how many of these are padding, its number in the row.
struct Chunk {
  int begin, count, first, part, end;  // end: of the tokens that get zeros where no state sees them
  __device__ __forceinline__ int at(int i) const { return part * CHUNK + i; }
  __device__ __forceinline__ bool live(int i) const {
    return at(i) >= first && at(i) < count && count > SHORT;
  }
  __device__ __forceinline__ bool is_void(int i) const {
    return at(i) < end && !live(i) && (at(i) >= count || count > SHORT);
  }
};

// Row r has the chunks from starts[r] / CHUNK + r on, as custom_ops/triton/find_row.py says. A warp looks at
// 32 rows at a time, since each look is a wait.
__device__ __forceinline__ Chunk find_chunk(const Params &p, int number) {
  const int lane = threadIdx.x % 32;
  int low = 0;
  for (int count = p.num_reqs; count > 1;) {
    const int step = (count + 31) / 32, row = low + lane * step;
    const bool begun = lane * step < count && load_l2(p.starts + row) / CHUNK + row <= number;
    const int found = (__popc(__ballot_sync(ALL, begun)) - 1) * step;
    low += found;
    count = min(step, count - found);
  }
  Chunk c;
  c.begin = load_l2(p.starts + low);
  c.count = load_l2(p.starts + low + 1) - c.begin;
  c.part = number - c.begin / CHUNK - low;
  c.first = min(max(c.count - load_l2(p.lens + low), 0), c.count);
  if (load_l2(p.slots + low) == 0) c.first = c.count;
  c.end = low == p.num_reqs - 1 ? p.num_tokens - c.begin : c.count;
  return c;
}

// ``out`` of tokens that have no state, of HEADS heads from ``head`` on.
template <int HEADS, int THREADS>
__device__ __forceinline__ void store_zeros(const Params &p, const Chunk &c, int head) {
  for (int i = 0; i < CHUNK; ++i) {
    if (!c.is_void(i)) continue;
    for (int n = threadIdx.x; n < HEADS * VALUE_DIM; n += THREADS) {
      const i64 at = (c.begin + (i64)c.at(i)) * p.out_token + (head + n / VALUE_DIM) * p.out_head;
      ((u16 *)p.out)[at + n % VALUE_DIM] = 0;
    }
  }
}
