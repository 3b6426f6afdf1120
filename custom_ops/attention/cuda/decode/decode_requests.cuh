// The line of work: requests as runs of key tiles, a CTA's place in it, the CTAs that share a pair.
#pragma once
#include "decode_params.cuh"

// Every mask of the op is an interval [low, end) of keys (docs/ops.md); both bounds grow with the position.
__device__ __forceinline__ void visible(int position, int seq_len, int &low, int &end) {
  low = 0;
  end = seq_len;
  if constexpr (CAUSAL) end = min(end, position + 1);
  if constexpr (WINDOW_LEFT >= 0) low = max(low, position - WINDOW_LEFT);
  if constexpr (WINDOW_RIGHT >= 0) end = min(end, position + WINDOW_RIGHT + 1);
  if constexpr (CHUNK > 0) {
    const int chunk = position / max(CHUNK, 1) * CHUNK;
    low = max(low, chunk);
    end = min(end, chunk + CHUNK);
  }
  if (position < 0) end = 0;
  end = max(end, low);
}

// A request as a run of key tiles: what any of its queries sees. DECODE_LEN > 0: requests with more query
// tokens have none, they are the prefill launch's.
struct Request {
  int start, query_len, seq_len, first_tile, num_tiles, low, end;

  // Before this thread's load_and_forget_l1.
  __device__ __forceinline__ void load_first(const Params &p, int r) {
    start = load_l2(p.starts + r);
    query_len = load_l2(p.starts + r + 1) - start;
    seq_len = load_l2(p.seq_lens + r);
  }

  // The same request as lane `home` has.
  __device__ __forceinline__ void take(int home) {
    start = __shfl_sync(ALL, start, home);
    query_len = __shfl_sync(ALL, query_len, home);
    seq_len = __shfl_sync(ALL, seq_len, home);
    find_tiles();
  }

  // Behind its CTA's load_and_forget_l1.
  __device__ __forceinline__ void load(const Params &p, int r) {
    start = p.starts[r];
    query_len = p.starts[r + 1] - start;
    seq_len = p.seq_lens[r];
    find_tiles();
  }

  __device__ __forceinline__ bool is_others() const { return DECODE_LEN > 0 && query_len > DECODE_LEN; }

  __device__ __forceinline__ void find_tiles() {
    int unused;
    visible(max(seq_len - query_len, 0), seq_len, low, unused);
    visible(seq_len - 1, seq_len, unused, end);
    end = min(end, seq_len);
    if (query_len <= 0 || seq_len <= 0 || end <= low || is_others()) low = end = 0;
    first_tile = low / TILE_KV;
    num_tiles = (end + TILE_KV - 1) / TILE_KV - first_tile;
  }
};

// Where a CTA stands in its run: request, pair of the request, tile of the pair.
struct Cursor {
  int request, pair, tile;
  Request r;

  __device__ __forceinline__ void next_pair(const Params &p) {
    tile = 0;
    if (LINES == 1 || (pair += TEAM) >= PAIRS) {
      if (LINES > 1) pair -= PAIRS;
      do r.load(p, ++request);  // a run ends before the requests do
      while (r.num_tiles == 0);
    }
  }
};

// The cursor that copies run after. The next request's lengths are asked for one request ahead: a trip to L2
// would let the copies run dry.
struct LoadCursor : Cursor {
  int next_start, next_end, next_len;

  __device__ __forceinline__ LoadCursor(const Params &p, const Cursor &c) : Cursor(c) { ask(p); }

  __device__ __forceinline__ void ask(const Params &p) {
    const int next = min(request + 1, p.num_reqs - 1);
    next_start = p.starts[next];
    next_end = p.starts[next + 1];
    next_len = p.seq_lens[next];
  }

  __device__ __forceinline__ void next_pair(const Params &p) {
    tile = 0;
    if (LINES == 1 || (pair += TEAM) >= PAIRS) {
      if (LINES > 1) pair -= PAIRS;
      ++request;
      r.start = next_start;
      r.query_len = next_end - next_start;
      r.seq_len = next_len;
      r.find_tiles();
      while (r.num_tiles == 0) r.load(p, ++request);
      ask(p);
    }
  }
};

// Where a pair's first head begins in the caches.
__device__ __forceinline__ const char *keys_of(const Params &p, const Cursor &c) {
  return p.k + (i64)c.pair * PAIR_HEADS * K_HEAD * KV_BYTES;
}
__device__ __forceinline__ const char *values_of(const Params &p, const Cursor &c) {
  return p.v + (i64)c.pair * PAIR_HEADS * V_HEAD * KV_BYTES;
}

// A pair of many splits is merged in two steps, so that no CTA reads them all: those of a group, then what
// the groups made. Its semaphore counts both: `bits` bits for each group's splits, the highest four for
// groups.
struct SplitGroups {
  static constexpr int FROM = 17, DONE = 28;  // splits from which there are groups; bit
  int count, number, bits;                    // splits, groups, bits of a group's counter

  __device__ __forceinline__ explicit SplitGroups(int splits) : count(splits), number(1), bits(4) {
    while (((1 << bits) - 1) * (DONE / bits) < splits) ++bits;
    number = DONE / bits;
  }
  // its first split
  __device__ __forceinline__ int begin(int group) const { return (group * count + number - 1) / number; }
  __device__ __forceinline__ int size(int group) const { return begin(group + 1) - begin(group); }
  __device__ __forceinline__ int of(int split) const { return split * number / count; }
  // The split whose CTA has room for what a group made: neither the pair's first nor its last, so that it
  // begins no pair.
  __device__ __forceinline__ int keeper(int group) const { return max(begin(group), 1); }
};

// How the line of work is cut: equally for the first `early` teams, and what is behind `border` for the rest.
struct Partition {
  int total, teams;  // units, and teams that have runs
  int border, early;

  // The unit at which a team's run begins.
  __device__ __forceinline__ int begin(int team) const {
    if (NEAR == 0 || team <= early) return begin_of(team, border, early);
    return border + begin_of(team - early, total - border, teams - early);
  }
  // The team whose run holds `unit`.
  __device__ __forceinline__ int owner(int unit) const {
    if (NEAR == 0 || unit < border) return holder(unit, border, early);
    return early + holder(unit - border, total - border, teams - early);
  }

  static __device__ __forceinline__ int begin_of(int team, int units, int teams) {
    return team * (units / teams) + team * (units % teams) / teams;
  }
  static __device__ __forceinline__ int holder(int unit, int units, int teams) {
    if (__umulhi(units, teams) == 0) return ((u32)(unit + 1) * teams - 1) / (u32)units;
    return (int)(((u64)(unit + 1) * teams - 1) / units);
  }
};

// The teams that share the pair a cursor has reached; found while its first keys are on their way.
struct Splits {
  int first, count;
  bool whole;  // this run holds the whole pair
  bool near;   // all of them are in one cluster

  // `near`: how far borders move to ends of pairs. One that comes to `begin` was at begin + near or before
  // it; one that comes to the end was not before last + 1 - near; a shared pair has one that stays between.
  __device__ __forceinline__ void find(const Cursor &c, int unit, int unit_end, const Partition &partition,
                                       int near) {
    const int begin = unit - c.tile, last = begin + c.r.num_tiles - 1;
    whole = c.tile == 0 && last < unit_end;
    this->near = false;
    if (!whole) {
      first = partition.owner(begin + near);
      count = partition.owner(last - near) - first + 1;
      this->near = CLUSTER > 1 && first / CLUSTER == (first + count - 1) / CLUSTER;
    }
  }
};
