// The producers of latent_pairs.cu over rows of fp8: eight warps convert keys (latent_convert.cuh), and copy
// the queries of the next request while the last products of this one run.
#pragma once

#include "latent_convert.cuh"

// Tiles of a range for convert_rows(), one after the other.
struct RangeTiles {
  const Params &p;
  const u32 shared;
  Walk walk;
  const int thread;
  Segment s;
  int tile, queries = 0;  // a parity
  bool more, opens = false;  // whether there is a tile, and it is the first one of a segment
  const char *at;

  __device__ __forceinline__ RangeTiles(const Params &p, u32 shared, const Walk &walk, int thread)
      : p(p), shared(shared), walk(walk), thread(thread) {
    more = this->walk.next(s);
    tile = s.first;
    find();
  }
  __device__ __forceinline__ void find() {
    const int position = tile * TILE_KV + thread / 32 * CONVERTED_KEYS + thread % 32 / 4;
    at = (const char *)NO_ROW;
    if (more && position < s.seq_len)
      at = p.rows + p.table[s.request * p.table_row + position / BLOCK_SIZE] * p.rows_block +
           position % BLOCK_SIZE * p.rows_slot;
    at += thread % 4 * 16;
  }
  __device__ __forceinline__ bool left() const { return more; }
  __device__ __forceinline__ int slot() const { return (tile - s.first) % 2; }
  __device__ __forceinline__ const char *row() const { return at; }
  __device__ __forceinline__ void step() {
    opens = ++tile == s.last;
    if (opens) {
      more = walk.next(s);
      tile = s.first;
    }
    find();
  }
  __device__ __forceinline__ void rotated(int) const {}
  __device__ __forceinline__ void end() {  // of a segment: the next one's queries
    if (!opens || !more) return;
    // arrive: all warps that multiply, when their last scores of the segment before are there
    mbarrier_wait(shared + Q_EMPTY_AT, queries);
    queries ^= 1;
    copy_queries(p, shared, s, walk.row_tile, thread, GATHER_THREADS);
    mbarrier_arrive_behind_copies(shared + Q_FULL_AT);
  }
};
