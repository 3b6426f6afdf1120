// Who scores which keys. The tiles of keys that each query token sees, one token after the other, are cut
// into as many ranges of equal length as there are CTAs; every CTA works this out from lengths on the device.
#pragma once

#include "logits_params.cuh"

// Ends and requests of all tokens, and the tiles before each, into shared memory. The metadata is read before
// the kernels ahead have ended, from L2.
__device__ __forceinline__ void line_up(const Params &p, char *memory, int thread) {
  int *ends = (int *)(memory + ENDS_AT), *requests = (int *)(memory + REQUESTS_AT),
      *begins = (int *)(memory + BEGINS_AT);
  for (int token = thread; token < p.num_tokens; token += THREADS) ends[token] = requests[token] = 0;
  __syncthreads();
  for (int r = thread; r < p.num_reqs; r += THREADS) {
    const int start = load_l2(p.starts + r), next = load_l2(p.starts + r + 1),
              seq_len = load_l2(p.seq_lens + r);
    for (int token = start; token < min(next, p.num_tokens); ++token) {
      const int position = seq_len - next + token;
      ends[token] = position < 0 ? 0 : CAUSAL ? min(seq_len, position + 1) : seq_len;
      requests[token] = r;
    }
  }
  __syncthreads();
  if (thread < 32) {
    const int each = (p.num_tokens + 31) / 32, first = min(thread * each, p.num_tokens),
              last = min(first + each, p.num_tokens);
    int count = 0;
    for (int token = first; token < last; ++token) count += (ends[token] + TILE - 1) / TILE;
    int upto = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(ALL, upto, step);
      if (thread >= step) upto += before;
    }
    int begin = upto - count;
    for (int token = first; token < last; ++token) {
      begins[token] = begin;
      begin += (ends[token] + TILE - 1) / TILE;
    }
    if (thread == 31) begins[p.num_tokens] = upto;
  }
  __syncthreads();
}

// The last token whose tiles begin at or before `tile`.
__device__ __forceinline__ int token_of(const char *memory, int num_tokens, int tile) {
  const int *begins = (const int *)(memory + BEGINS_AT);
  int low = 0, high = num_tokens;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begins[middle] <= tile) low = middle;
    else high = middle;
  }
  return low;
}
