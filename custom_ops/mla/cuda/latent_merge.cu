// Puts together the partial results of requests that latent.cu cut. A request in n parts has n - 1 borders
// of ranges in it: the CTAs of these borders take its units (latent_params.cuh) in turns.
//
// Parts are added in one order, so that results are the same bits every time. Launched early, it waits for
// latent.cu; what that wrote is read from L2.

#include "latent_epilogue.cuh"

constexpr int WAYS = 4, MERGE_THREADS = WAYS * 128;  // parts read at a time by neighbours
constexpr int DEPTH = 8;                             // parts asked for at once by a thread
constexpr int STATES = 4;                            // and softmax states
constexpr bool QUERY_ROWS = ROWS == 64;              // these, not value columns, are the fragments' rows
static_assert(WAYS * DEPTH == ROUND_PARTS, "what latent_scheduler.cuh counts with");
constexpr int STATE_LANES = MERGE_THREADS / ROWS < 32 ? MERGE_THREADS / ROWS : 32;  // threads of a row

// The first part of a request may lie in its group's second slot.
__device__ __forceinline__ const float *part_of(const Params &p, int first_group, int part, int first_slot,
                                                int row_tile) {
  return slot_of(p, first_group + part, part ? 0 : first_slot, row_tile);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 2)
latent_merge(const __grid_constant__ Params p) {
  __shared__ float weight[MAX_GROUPS * ROWS];
  __shared__ float4 sums[WAYS - 1][128];
  __shared__ int scan[SCAN_BYTES / 4];
  __shared__ int seen[ROWS];
  const int sub = blockIdx.x % MERGE_SHARE, item = blockIdx.x / MERGE_SHARE,
            row_tile = item % p.row_tiles, border = item / p.row_tiles + 1;
  Place place;
  const Schedule schedule = open_schedule<MERGE_THREADS>(p, border, scan, place);
  // Every CTA waits, with work or without, and lets the next kernel go only then
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (border >= schedule.groups || place.tile == 0) return;
  const int start = p.starts[place.request], query_len = p.starts[place.request + 1] - start,
            seq_len = p.seq_lens[place.request];
  if (row_tile * ROWS >= query_len * NUM_HEADS) return;
  const int begin = schedule.begin(border) - place.tile, last = begin + tiles_of(query_len, seq_len) - 1,
            first_group = schedule.group_of(begin), parts = schedule.group_of(last) - first_group + 1,
            share = (parts - 1) * MERGE_SHARE, mine = (border - first_group - 1) * MERGE_SHARE + sub;
  if (mine >= UNITS) return;
  const int thread = threadIdx.x, lane = thread % 32;
  // only the first part may begin behind the begin of its group's range
  const int first_slot = schedule.begin(first_group) < begin ? 1 : 0;
  if (thread < ROWS * STATE_LANES) {  // whole warps
    const int row = thread / STATE_LANES;
    float maximum = FLOOR, total = 0.f;
    for (int from = thread % STATE_LANES; from < parts; from += STATE_LANES * STATES) {
      float m[STATES], t[STATES];
#pragma unroll
      for (int d = 0; d < STATES; ++d) {
        const int part = from + d * STATE_LANES;
        m[d] = FLOOR;
        t[d] = 0.f;
        if (part < parts) {
          const float *at = part_of(p, first_group, part, first_slot, row_tile) + UNITS * 512 + row * 2;
          m[d] = load_l2(at);
          t[d] = load_l2(at + 1);
        }
      }
#pragma unroll
      for (int d = 0; d < STATES; ++d) {
        const float top = fmaxf(maximum, m[d]);
        total = total * exp2_(maximum - top) + t[d] * exp2_(m[d] - top);
        maximum = top;
        if (from + d * STATE_LANES < parts) weight[(from + d * STATE_LANES) * ROWS + row] = m[d];
      }
    }
#pragma unroll
    for (int step = 1; step < STATE_LANES; step *= 2) {
      const float m = __shfl_xor_sync(ALL, maximum, step), t = __shfl_xor_sync(ALL, total, step),
                  top = fmaxf(maximum, m);
      total = total * exp2_(maximum - top) + t * exp2_(m - top);
      maximum = top;
    }
    const Row r = row_of(row_tile * ROWS + row, start, query_len, seq_len);
    for (int part = thread % STATE_LANES; part < parts; part += STATE_LANES) {
      float &w = weight[part * ROWS + row];
      w = exp2_(w - maximum) / total;
    }
    if (thread % STATE_LANES == 0) {
      seen[row] = r.end > 0;
      if (mine == 0) store_lse(p, r, maximum, total);
    }
  }
  __syncthreads();
  const int way = thread / 128, place_in = thread % 128;
  // neighbours take units of their own, or of many parts a share each
  const int ways = parts <= WAYS ? 1 : WAYS, first_unit = ways > 1 ? mine : mine + way * share;
  for (int unit = first_unit; unit < UNITS; unit += ways > 1 ? share : share * WAYS) {
    const int j = unit % BLOCKS_8, row = QUERY_ROWS ? place_in / 32 * 16 + lane / 4 : j * 8 + lane % 4 * 2,
              next = row + (QUERY_ROWS ? 8 : 1), at = (unit * 128 + place_in) * 4;
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    for (int from = ways > 1 ? way : 0; from < parts; from += ways * DEPTH) {
      float4 x[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int part = from + d * ways;
        if (part < parts)
          x[d] = load_l2((const float4 *)(part_of(p, first_group, part, first_slot, row_tile) + at));
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int part = from + d * ways;
        if (part < parts) {
          const float low = weight[part * ROWS + row], high = weight[part * ROWS + next];
          acc.x += x[d].x * low;
          acc.y += x[d].y * (QUERY_ROWS ? low : high);
          acc.z += x[d].z * (QUERY_ROWS ? high : low);
          acc.w += x[d].w * high;
        }
      }
    }
    if (ways > 1) {
      if (way) sums[way - 1][place_in] = acc;
      __syncthreads();
#pragma unroll
      for (int other = 0; other < WAYS - 1 && way == 0; ++other) {
        const float4 y = sums[other][place_in];
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
