// Who works on which keys. All tiles of keys of all requests, in order, are cut into ranges of equal length,
// at most one for each group of CTAs; a group has one CTA for each tile of rows (query tokens x heads), so
// that CTAs that need the same keys read them at about the same time. A range goes over the borders of
// requests; a request cut by the border of a range leaves a partial result in each, for latent_merge.cu.
// There are no more ranges than the longest one asks for, and where all requests have equally many tiles a
// few less, so that borders of ranges meet those of requests. Where they have not, a range's next request is
// counted as some tiles more: other queries and another result.
//
// Some kernels' CTAs are clusters of two. Where a request has an even number of ranges of its own, these are
// neighbouring groups, which add their two parts in shared memory; else a group's tiles of rows. So few
// requests, whose tiles differ, get ranges of their own as well, if those are not much longer than ranges of
// all tiles.
//
// Every CTA works all of this out from lengths on the device, before it waits for the kernels ahead. Ahead of
// the wait it reads the table and keys of the context, too (docs/stream_order.md).
#pragma once

#include "latent_params.cuh"

constexpr int SCAN_BYTES = 53 * 4;
constexpr int ROUND_PARTS = 32;  // of a request, that the merge reads in two rounds
constexpr int CUT_TILES = 4;  // what parts cost, in tiles: other queries, partial results, the merge
constexpr int BETWEEN_TILES = ROWS == 64 ? 4 : 0;  // what a range's next request costs, in tiles

__device__ __forceinline__ int tiles_of(int query_len, int seq_len) {
  return query_len > 0 && seq_len > 0 ? (seq_len + TILE_KV - 1) / TILE_KV : 0;
}
struct Lengths {  // of a request
  int start, query_len, seq_len;

  __device__ __forceinline__ int tiles() const { return tiles_of(query_len, seq_len); }
};
__device__ __forceinline__ Lengths lengths_of(const Params &p, int request) {
  const int start = p.starts[request];
  return {start, p.starts[request + 1] - start, p.seq_lens[request]};
}

// Borders of ranges, counted in tiles and what lies between requests.
struct Schedule {
  int tiles, groups, between;  // counted in all; groups of CTAs that have some; counted ahead of each request
  int parts, first_group;      // of this group's request, where its ranges are its own; else no parts
  bool pairs;                  // neighbouring groups are CTAs of a cluster

  // Whether they add their parts.
  __device__ __forceinline__ bool joined() const { return PAIRED && pairs && parts > 1; }

  __device__ __forceinline__ int begin(int group) const { return (int)((i64)tiles * group / groups); }
  __device__ __forceinline__ int counted(const Lengths &of) const {
    const int many = of.tiles();
    return many > 0 ? between + many : 0;
  }
  // the last group that begins at or before what is counted there
  __device__ __forceinline__ int group_of(int tile) const {
    int group = (int)((i64)tile * groups / tiles);
    while (group + 1 < groups && begin(group + 1) <= tile) ++group;
    while (begin(group) > tile) --group;
    return group;
  }
};

struct Place {  // in a request, counted from its begin
  int request, at;
  Lengths of;
};

// Each of few requests has ranges of its own, one or an even number: the shortest ranges for which groups are
// enough. Requests that are cut come first, so that pairs have parts of one request.
constexpr int MOST_OWN = 160;  // requests, with those without tiles
struct Own {
  int range, groups;                // tiles of the longest one; groups with some
  int request, parts, first_group;  // of one group: no parts where it has no work
};
__device__ __forceinline__ int own_parts(int tiles, int range) {
  return tiles <= range ? tiles > 0 : (tiles + 2 * range - 1) / (2 * range) * 2;
}
// By one warp; `tiles`: of MOST_OWN requests. A range longer than `longest` says that there is none.
__device__ __forceinline__ void find_own(const Params &p, int group, int shortest, int longest,
                                         const int *tiles, Own *own, int lane) {
  constexpr int EACH = MOST_OWN / 32;
  int mine[EACH], low = shortest, high = longest + 1;
#pragma unroll
  for (int i = 0; i < EACH; ++i) mine[i] = tiles[i * 32 + lane];
  while (low < high) {
    const int range = (low + high) / 2;
    int parts = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) parts += own_parts(mine[i], range);
#pragma unroll
    for (int step = 16; step; step /= 2) parts += __shfl_xor_sync(ALL, parts, step);
    if (parts <= p.groups) high = range;
    else low = range + 1;
  }
  int cut = 0, whole = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    mine[i] = own_parts(mine[i], low);
    if (mine[i] > 1) cut += mine[i];
    else whole += mine[i];
  }
  int cut_upto = cut, whole_upto = whole;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(ALL, cut_upto, step),
              whole_before = __shfl_up_sync(ALL, whole_upto, step);
    if (lane >= step) {
      cut_upto += before;
      whole_upto += whole_before;
    }
  }
  const int all_cut = __shfl_sync(ALL, cut_upto, 31), groups = all_cut + __shfl_sync(ALL, whole_upto, 31);
  if (lane == 0) *own = {low, groups, 0, 0, 0};
  __syncwarp();
  int next_cut = cut_upto - cut, next_whole = all_cut + whole_upto - whole;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = mine[i] > 1 ? next_cut : next_whole;
    if (at <= group && group < at + mine[i]) {
      own->request = i * 32 + lane;
      own->parts = mine[i];
      own->first_group = at;
    }
    if (mine[i] > 1) next_cut += mine[i];
    else next_whole += mine[i];
  }
}

// By all COUNT threads of a CTA: the schedule, and where the range of `group` begins, which is `paired` where
// neighbouring groups are CTAs of a cluster. `scan`: SCAN_BYTES of shared memory; where CTAs are clusters of
// two, OWN_BYTES more.
constexpr int OWN_BYTES = MOST_OWN * 4 + sizeof(Own);
template <int COUNT>
__device__ __forceinline__ Schedule open_schedule(const Params &p, int &group, int paired, int *scan,
                                                  Place &place) {
  static_assert(COUNT % 32 == 0 && COUNT / 32 <= 16, "room for the warps' sums");
  [[maybe_unused]] int *const tiles = scan + SCAN_BYTES / 4;
  const int thread = threadIdx.x, lane = thread % 32, each = (p.num_reqs + COUNT - 1) / COUNT,
            first = min(thread * each, p.num_reqs), last = min(first + each, p.num_reqs),
            warps = min(COUNT / 32, (p.num_reqs + 31) / 32);  // that have requests
  int count = 0, most = 0, some = 0;  // tiles, those of one request, requests with some
  Lengths mine = {0, 0, 0};           // of the last one
  for (int r = first; r < last; ++r) {
    const int start = load_l2(p.starts + r);
    mine = {start, load_l2(p.starts + r + 1) - start, load_l2(p.seq_lens + r)};
    const int many = mine.tiles();
    count += many;
    most = max(most, many);
    some += many > 0;
  }
  load_and_forget_l1(p.starts + last);
  if (PAIRED && thread < MOST_OWN) tiles[thread] = count;
  int upto = count, upto_some = some;
  if (__shfl_sync(ALL, thread / 32, 0) < warps) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(ALL, upto, step), before_some = __shfl_up_sync(ALL, upto_some, step);
      if (lane >= step) {
        upto += before;
        upto_some += before_some;
      }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
    if (lane == 31) {
      scan[thread / 32] = upto;
      scan[18 + thread / 32] = most;
      scan[34 + thread / 32] = upto_some;
    }
  }
  __syncthreads();
  Schedule s = {0, 0, 0, 0, 0, false};
  int requests = 0;
#pragma unroll 1
  for (int warp = 0; warp < warps; ++warp) {
    if (warp == thread / 32) {
      upto += s.tiles;
      upto_some += requests;
    }
    s.tiles += scan[warp];
    most = max(most, scan[18 + warp]);
    requests += scan[34 + warp];
  }
  const int most_parts = PAIRED ? ROUND_PARTS * 2 : ROUND_PARTS,  // pairs add theirs
            few = min(CUT_TILES, (most + most_parts - 1) / most_parts),
            fewest = max(MIN_TILES, few), range = max(fewest, (s.tiles + p.groups - 1) / p.groups);
  if (requests * most == s.tiles && s.tiles > 0) {  // all alike: equal parts of requests, or whole ones
    const int whole = (range + most - 1) / most;
    int parts = most / range;
    const int even = parts & ~1;
    if (PAIRED && even > 0 && (most + even - 1) / even <= range + 1) parts = even;
    if (parts > 0 && (most + parts - 1) / parts <= range + CUT_TILES) {
      s.groups = requests * parts;
      if (PAIRED || ROWS < 64) s.parts = parts;  // else it would take registers
      s.pairs = PAIRED && parts % 2 == 0;
    }
    if (parts == 0 && requests % whole == 0 && whole * most <= range + CUT_TILES) s.groups = requests / whole;
  }
  const Own *own = nullptr;
  if (PAIRED && s.groups == 0 && requests * 2 <= p.groups && p.num_reqs <= MOST_OWN) {
    const int packed = (s.tiles + requests * BETWEEN_TILES + p.groups - 1) / p.groups,
              longest = max(fewest, packed) + CUT_TILES;
    Own *const found = (Own *)(tiles + MOST_OWN);
    if (thread < 32) find_own(p, paired, range, longest, tiles, found, lane);
    __syncthreads();
    if (found->range <= longest) {
      own = found;
      s.groups = own->groups;
      s.parts = own->parts;
      s.pairs = true;
    }
  }
  if (s.groups == 0) {
    if (requests > 1) s.between = BETWEEN_TILES;
    const int counted = s.tiles + requests * s.between,
              length = max(fewest, (counted + p.groups - 1) / p.groups);
    s.groups = max(1, (counted + length - 1) / length);
  }
  s.groups = __shfl_sync(ALL, s.groups, 0);  // uniform, which spares registers
  s.between = __shfl_sync(ALL, s.between, 0);
  if constexpr (PAIRED) {
    s.parts = __shfl_sync(ALL, s.parts, 0);
    s.pairs = __shfl_sync(ALL, (int)s.pairs, 0);
    if (s.pairs) group = paired;
  }
  if (s.parts > 0) s.first_group = group - group % s.parts;
  if (PAIRED && own) {
    s.first_group = own->first_group;
    place = {own->request, 0, lengths_of(p, own->request)};
    return s;
  }
  s.tiles += requests * s.between;
  if (group < s.groups && s.tiles > 0) {
    int left = (PAIRED && s.parts > 0 ? group / s.parts * most : s.begin(group)) -
               (upto - count + (upto_some - some) * s.between);
    if (left >= 0 && left < count + some * s.between) {
      int request = first;
      if (each > 1) mine = lengths_of(p, request);  // one is known: a trip through L2 less
      while (left >= s.counted(mine)) {
        left -= s.counted(mine);
        mine = lengths_of(p, ++request);
      }
      scan[16] = request;
      scan[17] = left;
      scan[50] = mine.start;
      scan[51] = mine.query_len;
      scan[52] = mine.seq_len;
    }
  }
  __syncthreads();
  place = {scan[16], scan[17], {scan[50], scan[51], scan[52]}};
  return s;
}

struct Segment {  // tiles [first, last) of a request
  int request, start, query_len, seq_len, first, last, slot;
  bool whole;

  __device__ __forceinline__ int rows() const { return query_len * NUM_HEADS; }
  // Whether a tile's keys were all there when the kernel ahead began: none is a query token's.
  __device__ __forceinline__ bool is_context(int tile) const {
    return (tile + 1) * TILE_KV <= seq_len - query_len;
  }
};

// The segments of a range, one after the other; those without rows for this CTA are left out. The lengths of
// the next request are asked for ahead.
struct Walk {
  const Params &p;
  int request, at, left, row_tile, slot, between;  // `at` and `left` as the schedule counts
  Lengths of;                                      // of `request`

  __device__ __forceinline__ bool next(Segment &s) {
    while (left > 0) {
      s.request = request;
      s.start = of.start;
      s.query_len = of.query_len;
      s.seq_len = of.seq_len;
      const int tiles = of.tiles(), many = tiles > 0 ? between + tiles - at : 0;
      ++request;
      if (left > many) of = lengths_of(p, request);
      if (tiles == 0) continue;  // some is left, so that a request with tiles is behind
      s.first = max(at - between, 0);
      s.last = max(at + min(many, left) - between, 0);
      s.whole = s.first == 0 && s.last == tiles;
      s.slot = slot;
      left -= min(many, left);
      at = 0;
      slot = 1;
      if (s.first < s.last && row_tile * ROWS < s.rows()) return true;
    }
    return false;
  }
};

// By all COUNT threads of a CTA of the kernels that work on keys.
template <int COUNT>
__device__ __forceinline__ Walk open_walk(const Params &p, int *scan, int &group, Schedule &schedule,
                                         Place &place) {
  const int cta = blockIdx.x, pair = cta / 2, more = p.row_tiles - 1;  // tiles of 64 rows are one or two
  group = PAIRED ? cta >> more : cta / p.row_tiles;
  schedule = open_schedule<COUNT>(p, group, PAIRED ? (pair >> more) * 2 + cta % 2 : 0, scan, place);
  int row_tile = PAIRED ? cta & more : cta - group * p.row_tiles;
  if (PAIRED && schedule.pairs) row_tile = pair & more;
  const bool has_work = group < schedule.groups && schedule.tiles > 0;
  int many = 0;
  if (PAIRED && schedule.parts > 0) {
    if (has_work) {
      const int tiles = place.of.tiles(), part = group - schedule.first_group;
      place.at = tiles * part / schedule.parts;
      many = tiles * (part + 1) / schedule.parts - place.at;
    }
  } else if (has_work) {
    many = schedule.begin(group + 1) - schedule.begin(group);
  }
  if (PAIRED) {  // uniform, which spares registers
    many = __shfl_sync(ALL, many, 0);
    place.request = __shfl_sync(ALL, place.request, 0);
    place.at = __shfl_sync(ALL, place.at, 0);
    place.of.start = __shfl_sync(ALL, place.of.start, 0);
    place.of.query_len = __shfl_sync(ALL, place.of.query_len, 0);
    place.of.seq_len = __shfl_sync(ALL, place.of.seq_len, 0);
  }
  return {p, place.request, place.at, many, row_tile, 0, schedule.between, place.of};
}

// The next kernel may begin behind the wait, so that to attention behind this one query tokens of this step
// are context. A merge between them begins then, and lets that one begin at once.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
}
// By the producer, in front of each tile: it waits, once, for the first that is not all context.
__device__ __forceinline__ bool ask_early(const Segment &s, int tile, bool early) {
  if (!early || s.is_context(tile)) return early;
  wait_for_kernels_ahead();
  return false;
}

// The lane's block of a tile; none past the last key: the copy engine fills those with zeros.
__device__ __forceinline__ int block_of(const Params &p, const Segment &s, int tile, int lane) {
  const int index = tile * TILE_BLOCKS + lane;
  const bool seen = lane < TILE_BLOCKS && index * BLOCK_SIZE < s.seq_len;
  return seen ? p.table[s.request * p.table_row + index] : p.num_blocks;
}

// A row of a tile of rows: its token row in q and out, its head, and one past the last key that it sees.
// Rows behind the request's see nothing, nor do query tokens ahead of the first key.
struct Row {
  int token, head, end;
  bool real;
};
__device__ __forceinline__ Row row_of(int index, int start, int query_len, int seq_len) {
  const int query = index / NUM_HEADS, position = seq_len - query_len + query;
  const bool real = query < query_len, sees = real && (CAUSAL || position >= 0);
  return {start + query, index - query * NUM_HEADS,
          !sees ? 0 : CAUSAL ? min(position + 1, seq_len) : seq_len, real};
}
