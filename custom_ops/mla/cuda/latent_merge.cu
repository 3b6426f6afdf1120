// Puts together the partial results of requests that latent.cu cut. A request in n parts has n - 1 borders
// of ranges in it: the CTAs of these borders take its units (8 rows x 64 value columns) in turns.
//
// Parts are added in one order, so that results are the same bits every time. Launched early, it waits for
// latent.cu; what that wrote is read from L2.

#include "latent_epilogue.cuh"

constexpr int WAYS = 4, MERGE_THREADS = WAYS * 128;  // parts read at a time by neighbours
constexpr int DEPTH = 8;                             // parts asked for at once by a thread
constexpr int STATE_LANES = MERGE_THREADS / ROWS < 32 ? MERGE_THREADS / ROWS : 32;  // threads of a row

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) latent_merge(const __grid_constant__ Params p) {
  __shared__ float weight[MAX_GROUPS * ROWS];
  __shared__ float4 sums[WAYS - 1][128];
  __shared__ int scan[18];
  __shared__ int seen[ROWS];
  // Every CTA waits, with work or without, and lets the next kernel go only then
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int sub = blockIdx.x % MERGE_SHARE, item = blockIdx.x / MERGE_SHARE,
            row_tile = item % p.row_tiles, border = item / p.row_tiles + 1;
  Place place;
  const Schedule schedule = open_schedule<MERGE_THREADS>(p, border, scan, place);
  if (border >= schedule.groups || schedule.tiles == 0 || place.tile == 0) return;
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
    for (int part = thread % STATE_LANES; part < parts; part += STATE_LANES) {
      const float *at =
          slot_of(p, first_group + part, part ? 0 : first_slot, row_tile) + UNITS * 512 + row * 2;
      const float m = load_l2(at), t = load_l2(at + 1), top = fmaxf(maximum, m);
      total = total * exp2_(maximum - top) + t * exp2_(m - top);
      maximum = top;
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
      const float *at =
          slot_of(p, first_group + part, part ? 0 : first_slot, row_tile) + UNITS * 512 + row * 2;
      weight[part * ROWS + row] = exp2_(load_l2(at) - maximum) / total;
    }
    if (thread % STATE_LANES == 0) {
      seen[row] = r.end > 0;
      if (mine == 0) store_lse(p, r, maximum, total);
    }
  }
  __syncthreads();
  const int way = thread / 128, place_in = thread % 128;
  for (int unit = mine; unit < UNITS; unit += share) {
    const int j = unit % BLOCKS_8, row = j * 8 + lane % 4 * 2;
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    for (int from = way; from < parts; from += WAYS * DEPTH) {
      float4 x[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int part = from + d * WAYS;
        if (part < parts)
          x[d] = load_l2((const float4 *)slot_of(p, first_group + part, part ? 0 : first_slot, row_tile) +
                         unit * 128 + place_in);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int part = from + d * WAYS;
        if (part < parts) {
          const float2 w = *(const float2 *)(weight + part * ROWS + row);
          acc.x += x[d].x * w.x;
          acc.y += x[d].y * w.y;
          acc.z += x[d].z * w.x;
          acc.w += x[d].w * w.y;
        }
      }
    }
    if (way) sums[way - 1][place_in] = acc;
    __syncthreads();
    if (way == 0) {
#pragma unroll
      for (int other = 0; other < WAYS - 1; ++other) {
        const float4 y = sums[other][place_in];
        acc.x += y.x;
        acc.y += y.y;
        acc.z += y.z;
        acc.w += y.w;
      }
      const bool low = seen[row], high = seen[row + 1];
      const float y[4] = {low ? acc.x : 0.f, high ? acc.y : 0.f, low ? acc.z : 0.f, high ? acc.w : 0.f};
      store_turned(p, row_of(row_tile * ROWS + j * 8 + lane / 4, start, query_len, seq_len),
                   unit / BLOCKS_8 * 64 + place_in / 32 * 16, lane, y);
    }
    __syncthreads();
  }
}
