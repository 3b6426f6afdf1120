// Puts together the parts of selected_few.cu: a CTA takes half of a warp's value columns of 16 heads. Parts
// are added in one order, so that results are the same bits every time. Launched early, it waits for
// selected_few.cu; what that wrote is read from L2.

#include "selected_parts.cuh"

constexpr int SHARES = WARPS * 2, MERGE_THREADS = RANK / 4, DEPTH = 16;  // DEPTH: parts asked for at once
constexpr int AT_ONCE = MERGE_THREADS / 8, ROUNDS = (16 + AT_ONCE - 1) / AT_ONCE;  // rows that are weighed
// Parts that have weights: those behind the last one are multiplied, too.
constexpr int ROOM = MAX_PARTS <= DEPTH ? MAX_PARTS : (MAX_PARTS + DEPTH - 1) / DEPTH * DEPTH;
constexpr int LINE = ROOM + 4;  // weights of a row, four at a time

// By eight neighbours: of a row, what the numbers of each part count in the share's columns. No branches, so
// that all states are asked for at once.
__device__ __forceinline__ void weigh_parts(const Params &p, float *weights, const float4 *states, int parts,
                                            int item, int r, int lane, bool first_share) {
  float4 of[ROOM / 8];
  float top = FLOOR, total = 0.f;
  int seen = 0;
#pragma unroll
  for (int n = 0; n < ROOM / 8; ++n) {
    of[n] = {FLOOR, -1.f, 0.f, 0.f};
    if (n * 8 + lane < parts) of[n] = load_l2(states + (n * 8 + lane) * WARPS * 16 + r);
  }
#pragma unroll
  for (int n = 0; n < ROOM / 8; ++n) top = fmaxf(top, of[n].x);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
#pragma unroll
  for (int n = 0; n < ROOM / 8; ++n) {
    const bool sees = !(of[n].y < 0.f);
    of[n].x = sees ? exp2_(of[n].x - top) : 0.f;
    total += sees ? of[n].x * of[n].y : 0.f;
    seen |= sees;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    total += __shfl_xor_sync(ALL, total, step);
    seen |= __shfl_xor_sync(ALL, seen, step);
  }
  const float by = seen ? 1.f / total : 0.f;
#pragma unroll
  for (int n = 0; n < ROOM / 8; ++n) weights[r * LINE + n * 8 + lane] = of[n].x * of[n].z * by;
  const int token = item / p.head_tiles, head = item % p.head_tiles * 16 + r;
  if (LSE && first_share && lane == 0 && head < NUM_HEADS)
    p.lse[token * p.l_token + head * p.l_head] = seen ? (top + log2_(total)) * LN2 : -INF;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_few(const __grid_constant__ Params p) {
  __align__(16) __shared__ float weights[16 * LINE];
  griddepcontrol_launch_dependents();
  const int thread = threadIdx.x, lane = thread % 32, share = blockIdx.x % SHARES, item = blockIdx.x / SHARES,
            token = item / p.head_tiles, parts = parts_of(p), columns = share * (RANK / 128) + thread / 32;
  const uint2 *sums = sums_of(p, item * parts) + columns * 32 + lane;
  const float4 *states = states_of(p, item * parts) + share / 2 * 16;
  asm volatile("" : "+l"(sums));  // worked out ahead of the wait
  asm volatile("" : "+l"(states));
  griddepcontrol_wait();
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int first = 0; first < (MAX_PARTS <= DEPTH ? 1 : parts); first += DEPTH) {
    uint2 x[DEPTH];
#pragma unroll
    for (int n = 0; n < DEPTH; ++n) {
      x[n] = {0, 0};
      if (first + n < parts) x[n] = load_l2(sums + (first + n) * (RANK / 8) * 32);
    }
    if (first == 0) {  // while they come
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int r = i * AT_ONCE + thread / 8;
        if (ROUNDS == 1 || r < 16) weigh_parts(p, weights, states, parts, item, r, thread % 8, share == 0);
      }
      __syncthreads();
    }
    const float *const low = weights + lane / 4 * LINE + first, *const high = low + 8 * LINE;
#pragma unroll
    for (int n = 0; n < min(DEPTH, ROOM); ++n) {
      sum.x += to_float<true>((u16)x[n].x) * low[n];
      sum.y += to_float<true>((u16)(x[n].x >> 16)) * low[n];
      sum.z += to_float<true>((u16)x[n].y) * high[n];
      sum.w += to_float<true>((u16)(x[n].y >> 16)) * high[n];
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = item % p.head_tiles * 16 + h * 8 + lane / 4;
    if (head < NUM_HEADS)
      *(u32 *)(p.out + (token * p.o_token + head * p.o_head + columns * 8 + lane % 4 * 2) * 2) =
          h ? pack<HALF>(sum.z, sum.w) : pack<HALF>(sum.x, sum.y);
  }
}
