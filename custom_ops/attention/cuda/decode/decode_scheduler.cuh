// The run of a CTA: which tiles of the line of work are its own. Compiles for the host, too, where a test
// walks them.
#pragma once
#include "decode_requests.cuh"

// The line of work is cut into runs of equal length, one for each team. A unit of it is a tile of a line of
// TEAM pairs: one tile for each CTA of the team. With NEAR, a border that is so near an end of a pair moves
// there, which leaves fewer pairs to share.
struct Run {
  Partition partition;
  int unit, unit_end;            // this CTA's units; unit == unit_end: none
  int busy, used;                // requests with tiles; token rows of requests, behind which there is padding
  int moves;                     // whether borders move to ends of pairs
  int request, pair, tile;       // where the first unit is, if there is one,
  int start, query_len, seq_len; // and its request

  static __device__ __forceinline__ int team() { return (int)blockIdx.x / TEAM; }

  __device__ __forceinline__ Cursor cursor() const {
    Cursor c = {request, pair, tile, {start, query_len, seq_len}};
    c.r.find_tiles();
    return c;
  }
};

// The last CTAs of a grid begin last, where others of this kernel or of the one ahead end. Where runs hold
// several pairs, the last quarter of the teams get runs that are a tile shorter.
constexpr int LATE_PART = 4, LATE_TILES = NEAR > 0 ? 1 : 0;

// What a warp knows of the requests, 32 shares of them in 32 lanes.
struct RequestTotals {
  const Params &p;
  int lane, per_lane;  // requests of a lane
  int first;           // of a lane: its first request,
  int tiles, upto;     // its requests' tiles, and with those of the lanes before it
  int busy, used;      // as in Run

  __device__ __forceinline__ RequestTotals(const Params &p, int lane)
      : p(p), lane(lane), per_lane((p.num_reqs + 31) / 32), first(lane * per_lane), tiles(0), busy(0) {}

  __device__ __forceinline__ void sum_up() {
    busy = __reduce_add_sync(ALL, busy);
    upto = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(ALL, upto, step);
      if (lane >= step) upto += below;
    }
  }
};

// Up to 64 requests: each lane holds its own, each warp finds the run by itself.
struct HeldRequests : RequestTotals {
  static constexpr int NUMBERS = 0;
  Request one, two;

  __device__ __forceinline__ HeldRequests(const Params &p, int lane, int *) : RequestTotals(p, lane) {
    one.load_first(p, min(first, p.num_reqs - 1));
    two.load_first(p, min(first + 1, p.num_reqs - 1));
    used = load_and_forget_l1(p.starts + p.num_reqs);
    one.find_tiles();
    two.find_tiles();
    for (int r = first; r < min(first + per_lane, p.num_reqs); ++r) {
      const int mine = r == first ? one.num_tiles : two.num_tiles;
      tiles += mine;
      busy += mine > 0;
    }
    sum_up();
  }

  // The request that has `unit`, and the units before it.
  __device__ __forceinline__ int find(int unit, int &request, Request &r) const {
    const int home = __ffs(__ballot_sync(ALL, upto * LINES > unit)) - 1;
    int before = (upto - tiles) * LINES;
    const bool second = per_lane > 1 && before + one.num_tiles * LINES <= unit;
    if (second) before += one.num_tiles * LINES;
    request = __shfl_sync(ALL, first + second, home);
    r = second ? two : one;
    r.take(home);
    return __shfl_sync(ALL, before, home);
  }
};

// Requests whose lengths are read in one trip to memory, and kept in shared memory.
constexpr int KEPT = 32 * ASKED;

// Many requests: one warp finds the run for its CTA. With all warps of all CTAs asking for the same few
// lines, L2 took microseconds to answer.
struct KeptRequests : RequestTotals {
  static constexpr int NUMBERS = 3 * KEPT + 1;  // of shared memory
  int *starts, *lens;  // [KEPT + 1], [KEPT]
  int *ends;           // [KEPT]: tiles of a lane's requests up to this one

  __device__ __forceinline__ KeptRequests(const Params &p, int lane, int *numbers)
      : RequestTotals(p, lane), starts(numbers), lens(numbers + KEPT + 1), ends(numbers + 2 * KEPT + 1) {
    read();
    for (int r = first; r < min(first + per_lane, p.num_reqs); ++r) {
      const int mine = look_at(r).num_tiles;
      tiles += mine;
      busy += mine > 0;
      if (r < KEPT) ends[r] = tiles;
    }
    sum_up();
    __syncwarp();
  }

  // Only lengths and query starts are read.
  __device__ __forceinline__ void read() {
    int start[ASKED], len[ASKED];
#pragma unroll
    for (int i = 0; i < ASKED; ++i) {
      start[i] = load_l2(p.starts + min(i * 32 + lane, p.num_reqs));
      len[i] = load_l2(p.seq_lens + min(i * 32 + lane, p.num_reqs - 1));
    }
    const int end = load_l2(p.starts + min(KEPT, p.num_reqs));
    used = load_and_forget_l1(p.starts + p.num_reqs);
#pragma unroll
    for (int i = 0; i < ASKED; ++i) {
      starts[i * 32 + lane] = start[i];
      lens[i * 32 + lane] = len[i];
    }
    if (lane == 0) starts[KEPT] = end;
    __syncwarp();
  }

  __device__ __forceinline__ Request look_at(int r) const {
    Request request;
    if (r < KEPT) {
      request.start = starts[r];
      request.query_len = starts[r + 1] - starts[r];
      request.seq_len = lens[r];
      request.find_tiles();
    } else {
      request.load(p, r);
    }
    return request;
  }

  // The request that has `unit`, and the units before it.
  __device__ __forceinline__ int find(int unit, int &request, Request &r) const {
    const int home = __ffs(__ballot_sync(ALL, upto * LINES > unit)) - 1;
    const int begin = home * per_lane;
    int before = __shfl_sync(ALL, upto - tiles, home) * LINES;
    if (p.num_reqs <= KEPT) {  // a lane has at most as many requests as there are lanes
      const bool mine = lane < per_lane && begin + lane < p.num_reqs;
      const bool behind = mine && before + ends[begin + lane] * LINES > unit;
      const int place = __ffs(__ballot_sync(ALL, behind)) - 1;
      request = begin + place;
      if (place > 0) before += ends[request - 1] * LINES;
    } else {
      for (request = begin;; ++request) {
        const int mine = look_at(request).num_tiles * LINES;
        if (before + mine > unit) break;
        before += mine;
      }
    }
    r = look_at(request);
    return before;
  }
};

#if ONE_WARP_SCHEDULES
using Requests = KeptRequests;
#else
using Requests = HeldRequests;
#endif

// How far a border at `tile` of a pair moves, to an end that is NEAR: what a run saves by such a tile, the
// exchange of a shared pair costs. Runs stay longer than 4 * NEAR - 2 * NEAR.
__device__ __forceinline__ int shift(int tile, int num_tiles) {
  const int left = num_tiles - tile;
  return tile <= left ? (tile <= NEAR ? -tile : 0) : left <= NEAR ? left : 0;
}

// The run of this CTA. All barriers rely on the warps agreeing, and the counts of splits on the CTAs
// agreeing: what they read, lengths and query starts, comes from L2, and is not written while this kernel
// runs. `numbers`: Requests::NUMBERS of shared memory.
__device__ __forceinline__ Run schedule(const Params &p, int lane, int *numbers) {
  const Requests requests(p, lane, numbers);
  Run run;
  run.busy = requests.busy;
  run.used = requests.used;
  const int total = __shfl_sync(ALL, requests.upto, 31) * LINES;
  const int lines = max(run.busy * LINES, 1);
  const int wanted = max(min((int)gridDim.x / TEAM, total / MIN_TILES), 1);
  int teams = wanted;
  // equal lengths: let runs end where pairs end, unless that idles a quarter of the CTAs
  if (lines <= wanted) {
    // a power of two keeps a pair's CTAs in one cluster
    const int each = wanted / lines, even = 1 << (31 - __clz(each));
    if (CLUSTER > 1 && even <= CLUSTER && even * lines * 10 >= wanted * 7) teams = even * lines;
    else if (each * lines * 4 >= wanted * 3) teams = each * lines;
  }
  run.partition = {total, teams, total, teams};
  int shortest = total / teams;
  if (LATE_TILES > 0 && lines > wanted) {
    const int late = teams / LATE_PART, shorter = (total - LATE_TILES * (teams - late)) / teams;
    if (late > 0 && shorter >= 2 * LATE_TILES) {
      shortest = shorter;
      run.partition = {total, teams, total - late * shorter, teams - late};
    }
  }
  const int team = Run::team();
  run.unit = run.partition.begin(min(team, teams));
  run.unit_end = run.partition.begin(min(team + 1, teams));
  run.moves = NEAR > 0 && shortest >= 4 * NEAR;
  if (run.unit >= run.unit_end) return run;

  // The place of the first unit; borders come to where they stay.
  Cursor c;
  if (NEAR > 0 && run.moves && run.unit_end < total) {
    const int before = requests.find(run.unit_end, c.request, c.r);
    run.unit_end += shift((run.unit_end - before) % c.r.num_tiles, c.r.num_tiles);
  }
  const int before = requests.find(run.unit, c.request, c.r);
  const int line = LINES == 1 ? 0 : (run.unit - before) / c.r.num_tiles;
  c.pair = line * TEAM + (int)blockIdx.x % TEAM;
  c.tile = run.unit - before - line * c.r.num_tiles;
  if (NEAR > 0 && run.moves) {
    const int far = shift(c.tile, c.r.num_tiles);
    run.unit += far;
    if (far > 0) c.next_pair(p);
    else c.tile += far;
  }
  run.request = c.request, run.pair = c.pair, run.tile = c.tile;
  run.start = c.r.start, run.query_len = c.r.query_len, run.seq_len = c.r.seq_len;
  return run;
}
