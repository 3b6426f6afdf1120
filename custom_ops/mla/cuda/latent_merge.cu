// Puts together the partial results of requests that latent.cu cut. There is a CTA for each range: those
// whose ranges begin in a request take its units (latent_params.cuh) in turns.
//
// Parts are added in one order, so that results are the same bits every time. Launched early, it waits for
// latent.cu; what that wrote is read from L2.

#include "latent_epilogue.cuh"

constexpr int WAYS = 4, MERGE_THREADS = WAYS * 128;  // parts read at a time by neighbours
constexpr int FINE = 2;  // where parts are many, 1 << FINE CTAs share a unit, with so many times as many ways
constexpr int DEPTH = 4;                             // parts asked for at once by a thread
constexpr int STATES = 4;                            // and softmax states
constexpr bool QUERY_ROWS = ROWS == 64;              // these, not value columns, are the fragments' rows
static_assert(WAYS * DEPTH * 2 == ROUND_PARTS, "what latent_scheduler.cuh counts with");
constexpr int STATE_WAYS = MERGE_THREADS / ROWS, STATE_LANES = STATE_WAYS < 32 ? STATE_WAYS : 32;
static_assert(STATE_WAYS * (ROWS + 1) * 8 <= MERGE_THREADS * 16, "states in place of sums");

// The maximum and the total of two parts.
__device__ __forceinline__ float2 joined(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  return {top, a.y * exp2_(a.x - top) + b.y * exp2_(b.x - top)};
}

// A cut request, and this CTA's share of it; from metadata alone, ahead of the wait. The first part may lie
// in its group's second slot.
struct Cut {
  Lengths of;
  const float *first;            // slot of the first part's group
  i64 stride;                    // from part to part
  int offset;                    // of the first part from that slot
  int parts, share, mine, fine;  // `mine` of `share` CTAs; units are cut into 1 << fine
  bool works;

  __device__ __forceinline__ Cut(const Params &p, const Schedule &schedule, const Place &place, int group,
                                 int row_tile, int sub) {
    works = group < schedule.groups && schedule.tiles > 0;
    if (!works) return;
    of = place.of;
    const int begin = schedule.begin(group) - place.tile, last = begin + of.tiles() - 1,
              first_group = schedule.group_of(begin);
    // only the first part may begin behind the begin of its group's range
    const bool behind = schedule.begin(first_group) < begin;
    parts = schedule.group_of(last) - first_group + 1;
    share = (parts - behind) * MERGE_SHARE;
    mine = (group - first_group - behind) * MERGE_SHARE + sub;
    fine = share >= UNITS << FINE ? FINE : 0;
    works = parts > 1 && row_tile * ROWS < of.query_len * NUM_HEADS && mine < UNITS << fine;
    first = slot_of(p, first_group, 0, row_tile);
    stride = (i64)p.row_tiles * 2 * SLOT_FLOATS;
    offset = behind ? p.row_tiles * SLOT_FLOATS : 0;
  }
  __device__ __forceinline__ const float *part(int n) const { return first + n * stride + (n ? 0 : offset); }
};

// Two more warps than there are: so few registers that a CTA fits beside one of latent.cu, which ends sooner
// for it, and the attention behind it begins sooner.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS + 64, 2)
latent_merge(const __grid_constant__ Params p) {
  __shared__ float weight[MAX_GROUPS * ROWS];
  __shared__ float4 sums[MERGE_THREADS];
  __shared__ int scan[SCAN_BYTES / 4];
  __shared__ int seen[ROWS];
  __shared__ float2 levels[ROWS];  // maximum, 1 / total
  griddepcontrol_launch_dependents();
  const int sub = blockIdx.x % MERGE_SHARE, item = blockIdx.x / MERGE_SHARE,
            row_tile = item % p.row_tiles, group = item / p.row_tiles;
  Place place;
  const Schedule schedule = open_schedule<MERGE_THREADS>(p, group, scan, place);
  const Cut cut(p, schedule, place, group, row_tile, sub);
  griddepcontrol_wait();  // by every CTA, with work or without
  if (!cut.works) return;
  const auto [start, query_len, seq_len] = cut.of;
  const int parts = cut.parts, share = cut.share, mine = cut.mine, fine = cut.fine, units = UNITS << fine,
            thread = threadIdx.x, lane = thread % 32;
  const int places = 128 >> fine, way = thread >> (7 - fine);
  // neighbours take units of their own, or of many parts a share each
  const int ways = parts <= WAYS ? 1 : WAYS << fine, first_unit = ways > 1 ? mine : mine + way * share;
  float4 x[DEPTH];
  const auto ask = [&](int from, int i) {  // for parts of a unit's place
    const int unit = i >> fine, place_in = (i - (unit << fine)) * places + (thread & places - 1);
    const float *here = cut.part(from) + (unit * 128 + place_in) * 4;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int part = from + d * ways;
      x[d] = {0.f, 0.f, 0.f, 0.f};
      if (part < parts) x[d] = load_l2((const float4 *)here);
      here += ways * cut.stride - (part ? 0 : cut.offset);
    }
  };
  const int first_part = ways > 1 ? way : 0;
  if (first_unit < units) ask(first_part, first_unit);
  // neighbours read states of the same part, which lie next to each other
  const int state_row = thread % ROWS, state_way = thread / ROWS;
  float2 found = {FLOOR, 0.f};
  for (int from = state_way; from < parts; from += STATE_WAYS * STATES) {
    float2 of[STATES];
#pragma unroll
    for (int d = 0; d < STATES; ++d) {
      const int part = from + d * STATE_WAYS;
      of[d] = {FLOOR, 0.f};
      if (part < parts) of[d] = load_l2((const float2 *)(cut.part(part) + UNITS * 512) + state_row);
    }
#pragma unroll
    for (int d = 0; d < STATES; ++d) {
      found = joined(found, of[d]);
      if (from + d * STATE_WAYS < parts) weight[(from + d * STATE_WAYS) * ROWS + state_row] = of[d].x;
    }
  }
  float2 *const states = (float2 *)sums;  // [STATE_WAYS, ROWS + 1]
  states[state_way * (ROWS + 1) + state_row] = found;
  __syncthreads();
  const int of_row = thread / STATE_LANES;
  if (of_row < ROWS) {  // whole warps
    found = {FLOOR, 0.f};
#pragma unroll
    for (int n = 0; n < STATE_WAYS / STATE_LANES; ++n)
      found = joined(found, states[(n * STATE_LANES + thread % STATE_LANES) * (ROWS + 1) + of_row]);
#pragma unroll
    for (int step = 1; step < STATE_LANES; step *= 2)
      found = joined(found, {__shfl_xor_sync(ALL, found.x, step), __shfl_xor_sync(ALL, found.y, step)});
    if (thread % STATE_LANES == 0) {
      const Row r = row_of(row_tile * ROWS + of_row, start, query_len, seq_len);
      seen[of_row] = r.end > 0;
      levels[of_row] = {found.x, 1.f / found.y};
      if (mine == 0) store_lse(p, r, found.x, found.y);
    }
  }
  __syncthreads();
  for (int part = state_way; part < parts; part += STATE_WAYS) {
    float &w = weight[part * ROWS + state_row];
    w = exp2_(w - levels[state_row].x) * levels[state_row].y;
  }
  __syncthreads();
  for (int i = first_unit; i < units; i += ways > 1 ? share : share * WAYS) {
    const int unit = i >> fine, place_in = (i - (unit << fine)) * places + (thread & places - 1);
    const int j = unit % BLOCKS_8, row = QUERY_ROWS ? place_in / 32 * 16 + lane / 4 : j * 8 + lane % 4 * 2,
              next = row + (QUERY_ROWS ? 8 : 1);
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    for (int from = first_part; from < parts; from += ways * DEPTH) {
      if (i != first_unit || from != first_part) ask(from, i);
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int part = min(from + d * ways, parts - 1);  // no branches
        const float low = weight[part * ROWS + row], high = weight[part * ROWS + next];
        acc.x += x[d].x * low;
        acc.y += x[d].y * (QUERY_ROWS ? low : high);
        acc.z += x[d].z * (QUERY_ROWS ? high : low);
        acc.w += x[d].w * high;
      }
    }
    if (ways > 1) {
      sums[thread] = acc;
      __syncthreads();
#pragma unroll 4
      for (int other = 1; other < ways && way == 0; ++other) {
        const float4 y = sums[other * places + thread];
        acc.x += y.x;
        acc.y += y.y;
        acc.z += y.z;
        acc.w += y.w;
      }
      __syncthreads();
      if (way) continue;
    }
    const bool low = seen[row], high = seen[next];
    if constexpr (QUERY_ROWS) {
      const u32 y[2] = {low ? pack<HALF>(acc.x, acc.y) : 0, high ? pack<HALF>(acc.z, acc.w) : 0};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Row r = row_of(row_tile * ROWS + row + e * 8, start, query_len, seq_len);
        if (r.real)
          *(u32 *)(p.out + (r.token * p.o_token + r.head * p.o_head + unit * 8 + lane % 4 * 2) * 2) = y[e];
      }
    } else {
      const float y[4] = {low ? acc.x : 0.f, high ? acc.y : 0.f, low ? acc.z : 0.f, high ? acc.w : 0.f};
      store_turned(p, row_of(row_tile * ROWS + j * 8 + lane / 4, start, query_len, seq_len),
                   unit / BLOCKS_8 * 64 + place_in / 32 * 16, lane, y);
    }
  }
}
