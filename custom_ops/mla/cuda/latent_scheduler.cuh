// Who works on which keys. All tiles of keys of all requests, in order, are cut into as many ranges of equal
// length as there are groups of CTAs; a group has one CTA for each tile of rows (query tokens x heads), so
// that CTAs that need the same keys read them at about the same time. A range goes over the borders of
// requests; a request cut by the border of a range leaves a partial result in each, for latent_merge.cu.
//
// Every CTA works all of this out from lengths on the device.
#pragma once

#include "latent_params.cuh"

__device__ __forceinline__ int tiles_of(int query_len, int seq_len) {
  return query_len > 0 && seq_len > 0 ? (seq_len + TILE_KV - 1) / TILE_KV : 0;
}
__device__ __forceinline__ int tiles_of(const Params &p, int request) {
  return tiles_of(p.starts[request + 1] - p.starts[request], p.seq_lens[request]);
}

struct Schedule {
  int tiles, groups;  // in all; groups of CTAs that have some

  __device__ __forceinline__ int begin(int group) const { return (int)((i64)tiles * group / groups); }
  // the last group that begins at or before a tile
  __device__ __forceinline__ int group_of(int tile) const {
    int group = (int)((i64)tile * groups / tiles);
    while (group + 1 < groups && begin(group + 1) <= tile) ++group;
    while (begin(group) > tile) --group;
    return group;
  }
};

struct Place {  // a tile of a request
  int request, tile;
};

// By all COUNT threads of a CTA: the schedule, and where the range of `group` begins. `scan`: 18 numbers of
// shared memory.
template <int COUNT>
__device__ __forceinline__ Schedule open_schedule(const Params &p, int group, int *scan, Place &place) {
  static_assert(COUNT % 32 == 0 && COUNT / 32 <= 16, "room for the warps' sums");
  const int thread = threadIdx.x, lane = thread % 32, each = (p.num_reqs + COUNT - 1) / COUNT,
            first = min(thread * each, p.num_reqs), last = min(first + each, p.num_reqs);
  int count = 0;
  for (int r = first; r < last; ++r) count += tiles_of(p, r);
  int upto = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == 31) scan[thread / 32] = upto;
  __syncthreads();
  Schedule s = {0, 0};
#pragma unroll
  for (int warp = 0; warp < COUNT / 32; ++warp) {
    if (warp == thread / 32) upto += s.tiles;
    s.tiles += scan[warp];
  }
  s.groups = max(1, min(p.groups, s.tiles / MIN_TILES));
  if (group < s.groups && s.tiles > 0) {
    int left = s.begin(group) - (upto - count);
    if (left >= 0 && left < count) {
      int request = first, many = tiles_of(p, request);
      while (left >= many) {
        left -= many;
        many = tiles_of(p, ++request);
      }
      scan[16] = request;
      scan[17] = left;
    }
  }
  __syncthreads();
  place = {scan[16], scan[17]};
  return s;
}

struct Segment {  // tiles [first, last) of a request
  int request, start, query_len, seq_len, first, last, slot;
  bool whole;

  __device__ __forceinline__ int rows() const { return query_len * NUM_HEADS; }
};

// The segments of a range, one after the other; those without rows for this CTA are left out.
struct Walk {
  const Params &p;
  int request, tile, left, row_tile, slot;

  __device__ __forceinline__ bool next(Segment &s) {
    while (left > 0) {
      s.request = request;
      s.start = p.starts[request];
      s.query_len = p.starts[request + 1] - s.start;
      s.seq_len = p.seq_lens[request];
      const int tiles = tiles_of(s.query_len, s.seq_len);
      ++request;
      if (tiles == 0) continue;  // tiles are left, so that a request with some is behind
      s.first = tile;
      s.last = min(tiles, tile + left);
      s.whole = s.first == 0 && s.last == tiles;
      s.slot = slot;
      left -= s.last - s.first;
      tile = 0;
      slot = 1;
      if (row_tile * ROWS < s.rows()) return true;
    }
    return false;
  }
};

// A row of a tile of rows: its token row in q and out, its head, and one past the last key that it sees.
// Rows behind the request's see nothing.
struct Row {
  int token, head, end;
  bool real;
};
__device__ __forceinline__ Row row_of(int index, int start, int query_len, int seq_len) {
  const int query = index / NUM_HEADS;
  const bool real = query < query_len;
  return {start + query, index - query * NUM_HEADS,
          !real ? 0 : CAUSAL ? min(seq_len - query_len + query + 1, seq_len) : seq_len, real};
}
