// The run of a CTA: which units of the line of work are its own. Compiles for the host, too, where a test
// walks them.
#pragma once
#include "requests.cuh"

// The line of work is cut into runs of equal length, one for each team. A unit of it is UNIT keys of a line of
// TEAM pairs: those of one pair for each CTA of the team. With NEAR, a border that is so near an end of a pair
// moves there, which leaves fewer pairs to share.
//
// Every warp works its CTA's run out for itself. All barriers rely on the warps agreeing, and the counts of
// parts on the CTAs agreeing: what they read, lengths and query starts, comes from L2, and nobody writes it
// while this kernel runs. Lane i counts the i-th share of the requests.
struct Run {
  int first;               // of a lane: its first request,
  Request asked[ASKED];    // the first of them, read in one trip to memory,
  int lane, share, units;  // its number, its requests and their units,
  int upto;                // and units with those of the lanes before it
  int busy, used;          // requests with units; token rows of requests, behind which there is padding
  int total;               // units in all
  int team, teams;         // this CTA's, and how many have runs
  int member;              // this CTA's place in its team
  int unit, unit_end;      // its units; unit == unit_end: none
  bool moves;              // whether borders move to ends of pairs

  // Only lengths and query starts are read. `c` is used up.
  __device__ __forceinline__ void plan(const Params &p, int lane, Cursor &c) {
    const int share = (p.num_reqs + 31) / 32;
    first = lane * share;
    const int last = min(first + share, p.num_reqs);
    int busy = 0, units = 0;
    int start = load_l2(p.starts + min(first, p.num_reqs));
#pragma unroll
    for (int i = 0; i < ASKED; ++i) start = asked[i].load_first(p, first + i, start);
    const int used = load_and_forget_l1(p.starts + p.num_reqs);
#pragma unroll
    for (int i = 0; i < ASKED; ++i) {
      asked[i].cut();
      if (first + i < last) units += asked[i].num_units, busy += asked[i].num_units > 0;
    }
    c.r = asked[0];
    for (int r = first + ASKED; r < last; ++r) {
      c.r.load(p, r);
      units += c.r.num_units;
      busy += c.r.num_units > 0;
    }
    busy = __reduce_add_sync(ALL, busy);
    int upto = units;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(ALL, upto, step);
      if (lane >= step) upto += below;
    }
    const int total = __shfl_sync(ALL, upto, 31) * LINES;
    const int lines = max(busy * LINES, 1);
    const int wanted = max(min((int)gridDim.x / TEAM, total / MIN_UNITS), 1);
    int teams = wanted;
    // equal lengths: let runs end where pairs end, unless that idles a quarter of the CTAs
    if (lines <= wanted) {
      // a power of two keeps a pair's CTAs in one cluster
      const int each = wanted / lines, even = 1 << (31 - __clz(each));
      if (CLUSTER > 1 && even <= CLUSTER && even * lines * 10 >= wanted * 7) teams = even * lines;
      else if (each * lines * 4 >= wanted * 3) teams = each * lines;
    }
    const int team = (int)blockIdx.x / TEAM;
    member = (int)blockIdx.x % TEAM;
    const int base = total / teams, extra = total % teams;
    unit = team * base + team * extra / teams;
    unit_end = team < teams ? (team + 1) * base + (team + 1) * extra / teams : unit;
    moves = NEAR > 0 && base >= 4 * NEAR_UNITS;
    this->lane = lane, this->share = share, this->units = units, this->upto = upto;
    this->busy = busy, this->used = used;
    this->total = total, this->team = team, this->teams = teams;
  }

  // The request that has `unit`, and the units before it.
  __device__ __forceinline__ int find(const Params &p, int unit, Cursor &c) {
    const int home = __ffs(__ballot_sync(ALL, upto * LINES > unit)) - 1;
    int before = (upto - units) * LINES, request = first;
    if (share > 1 && lane == home) {
      for (;; ++request) {
        look_at(p, request, c);
        if (before + c.r.num_units * LINES > unit) break;
        before += c.r.num_units * LINES;
      }
    }
    c.request = __shfl_sync(ALL, request, home);
    before = __shfl_sync(ALL, before, home);
    c.r.take(home);
    return before;
  }

  // How far a border at `offset` of a pair moves, to an end that is NEAR: what a run saves by such a tile, the
  // exchange of a shared pair costs. Runs stay longer than 4 * NEAR - 2 * NEAR tiles.
  static __device__ __forceinline__ int shift(int offset, int num_units) {
    const int left = num_units - offset;
    return offset <= left ? (offset <= NEAR_UNITS ? -offset : 0) : left <= NEAR_UNITS ? left : 0;
  }

  // The cursor of the first unit, if there is one; borders come to where they stay.
  __device__ __forceinline__ void begin(const Params &p, Cursor &c) {
    if (NEAR > 0 && moves && unit_end < total) {
      const Request mine = c.r;  // with share == 1 the lane's own
      const int before = find(p, unit_end, c);
      unit_end += shift((unit_end - before) % c.r.num_units, c.r.num_units);
      c.r = mine;
    }
    const int before = find(p, unit, c), line = LINES == 1 ? 0 : (unit - before) / c.r.num_units;
    c.pair = line * TEAM + member;
    c.offset = unit - before - line * c.r.num_units;
    if (NEAR > 0 && moves) {
      const int far = shift(c.offset, c.r.num_units);
      unit += far;
      if (far > 0) c.next_pair(p);
      else c.offset += far;
    }
  }

  __device__ __forceinline__ void look_at(const Params &p, int r, Cursor &c) {
    if (r >= first + ASKED) c.r.load(p, r);
#pragma unroll
    for (int i = 0; i < ASKED; ++i)
      if (r == first + i) c.r = asked[i];
  }
};
