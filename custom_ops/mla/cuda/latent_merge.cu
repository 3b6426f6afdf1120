// Puts together the partial results of requests that latent.cu cut. There is a CTA for each range: those
// whose ranges begin in a request take its units (latent_params.cuh) in turns (latent_cut.cuh).
//
// Parts are added in one order, so that results are the same bits every time. Launched early, it waits for
// latent.cu; what that wrote is read from L2.

#include "latent_cut.cuh"

constexpr int WAYS = 4, MERGE_THREADS = WAYS * 128;  // neighbours: 128 threads have a unit
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

// Two more warps than there are: so few registers that a CTA fits beside one of latent.cu, which ends sooner
// for it, and the attention behind it begins sooner.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS + 64, 2)
latent_merge(const __grid_constant__ Params p) {
  __shared__ float weight[MAX_GROUPS * ROWS];
  __shared__ float4 sums[MERGE_THREADS];
  [[maybe_unused]] __shared__ int scan[SCAN_BYTES / 4];
  __shared__ int seen[ROWS];
  __shared__ float2 levels[ROWS];  // maximum, 1 / total
  griddepcontrol_launch_dependents();
  const int sub = blockIdx.x % MERGE_SHARE, item = blockIdx.x / MERGE_SHARE,
            row_tile = item % p.row_tiles;
  int group = item / p.row_tiles;
  Cut cut;
  if constexpr (QUERY_ROWS) {
    griddepcontrol_wait();  // by every CTA, with work or without
    const float4 *note = (const float4 *)(note_of(p) + item);
    ((float4 *)&cut)[0] = load_l2(note);
    ((float4 *)&cut)[1] = load_l2(note + 1);
  } else {
    Place place;
    const Schedule schedule = open_schedule<MERGE_THREADS>(p, group, group, scan, place);
    cut = find_cut(p, schedule, place, group, row_tile);
    griddepcontrol_wait();
  }
  const auto [start, query_len, seq_len] = cut.of;
  // where pairs have joined their parts one CTA for each group is enough, unless these are few
  const int parts = cut.parts, apart = PAIRED ? cut.apart : 1,
            each = apart == 1 || parts <= 2 || (parts > DEPTH * 2 && parts * 2 < UNITS) ? MERGE_SHARE : 1,
            share = (parts * apart - cut.behind) * each, mine = cut.mine * each + sub,
            fine = share >= UNITS << FINE ? FINE : 0, units = UNITS << fine;
  if (parts == 0 || sub >= each || mine >= units) return;
  const float *const first = slot_of(p, cut.first_group, 0, row_tile);
  const int stride = p.row_tiles * 2 * SLOT_FLOATS * apart;       // from part to part
  const int offset = cut.behind ? p.row_tiles * SLOT_FLOATS : 0,  // of the first part
            thread = threadIdx.x, lane = thread % 32;
  const int places = 128 >> fine, neighbour = thread >> (7 - fine), neighbours = WAYS << fine;
  // neighbours take units of their own, or of many parts a share each
  const int ways = parts <= DEPTH ? 1 : parts <= DEPTH * 2 ? 2 : neighbours, way = neighbour & ways - 1,
            step = share * (neighbours / ways), first_unit = mine + neighbour / ways * share;
  float4 x[DEPTH];
  const auto part_at = [&](int part) { return first + (i64)part * stride + (part ? 0 : offset); };
  const auto ask = [&](int from, int i) {  // for parts of a unit's place
    const int unit = i >> fine, place_in = (i - (unit << fine)) * places + (thread & places - 1);
    const float *here = part_at(from) + (unit * 128 + place_in) * 4;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int part = from + d * ways;
      x[d] = {0.f, 0.f, 0.f, 0.f};
      if (part < parts) x[d] = load_l2((const float4 *)here);
      here += ways * stride - (part ? 0 : offset);
    }
  };
  if (first_unit < units) ask(way, first_unit);
  // neighbours read states of the same part, which lie next to each other
  const int state_row = thread % ROWS, state_way = thread / ROWS;
  float2 found = {FLOOR, 0.f};
  for (int from = state_way; from < parts; from += STATE_WAYS * STATES) {
    float2 of[STATES];
#pragma unroll
    for (int d = 0; d < STATES; ++d) {
      const int part = from + d * STATE_WAYS;
      of[d] = {FLOOR, 0.f};
      if (part < parts) of[d] = load_l2((const float2 *)(part_at(part) + UNITS * 512) + state_row);
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
  for (int begin = mine; begin < units; begin += step) {
    const int i = begin - mine + first_unit;
    const int unit = i >> fine, place_in = (i - (unit << fine)) * places + (thread & places - 1);
    const int j = unit % BLOCKS_8, row = QUERY_ROWS ? place_in / 32 * 16 + lane / 4 : j * 8 + lane % 4 * 2,
              next = row + (QUERY_ROWS ? 8 : 1);
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    for (int from = way; from < parts; from += ways * DEPTH) {
      if (i < units && (i != first_unit || from != way)) ask(from, i);
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
    }
    if (way || i >= units) continue;
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
