// Puts together the parts of selected_few.cu: a CTA takes 32 value columns of 16 heads. Parts are added in
// one order, so that results are the same bits every time. Launched early, it waits for selected_few.cu; what
// that wrote is read from L2.

#include "selected_parts.cuh"

constexpr int MERGE_THREADS = 128, DEPTH = 16;  // DEPTH: parts asked for at once

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_few(const __grid_constant__ Params p) {
  __shared__ float weights[MAX_PARTS * 16];
  griddepcontrol_launch_dependents();
  constexpr int SHARES = RANK / 32;
  const int thread = threadIdx.x, lane = thread % 32, share = blockIdx.x % SHARES, item = blockIdx.x / SHARES,
            head_tile = item % p.head_tiles, token = item / p.head_tiles,
            parts = parts_of(p), num_parts = gridDim.x / SHARES * parts;
  const int columns = share * 4 + thread / 32;
  griddepcontrol_wait();
  const float4 *const sums = sums_of(p, item * parts) + columns * 32 + lane;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < parts; first += DEPTH) {
    float4 x[DEPTH];
#pragma unroll
    for (int n = 0; n < DEPTH; ++n)
      if (first + n < parts) x[n] = load_l2(sums + (i64)(first + n) * (RANK / 8) * 32);
    if (first == 0) {  // while they come, what each part counts
      const int r = thread / 8;
      float top = FLOOR, total = 0.f;
      int seen = 0;
      float2 states[MAX_PARTS / 8];
#pragma unroll
      for (int n = 0; n < MAX_PARTS / 8; ++n) {
        const int part = n * 8 + thread % 8;
        states[n] = {FLOOR, -1.f};
        if (n * 8 >= parts) break;
        if (part < parts) {
          const float *at = (const float *)(states_of(p, item * parts + part, num_parts) + r);
          states[n] = {load_l2(at), load_l2(at + 1)};
        }
        top = fmaxf(top, states[n].x);
      }
#pragma unroll
      for (int step = 1; step < 8; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
#pragma unroll
      for (int n = 0; n < MAX_PARTS / 8; ++n) {
        if (n * 8 >= parts) break;
        const bool of = !(states[n].y < 0.f);
        states[n].x = of ? exp2_(states[n].x - top) : 0.f;
        total += of ? states[n].x * states[n].y : 0.f;
        seen |= of;
      }
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {
        total += __shfl_xor_sync(ALL, total, step);
        seen |= __shfl_xor_sync(ALL, seen, step);
      }
      const float by = seen ? 1.f / total : 0.f;
#pragma unroll
      for (int n = 0; n < MAX_PARTS / 8; ++n) {
        if (n * 8 >= parts) break;
        weights[(n * 8 + thread % 8) * 16 + r] = states[n].x * by;
      }
      const int head = head_tile * 16 + r;
      if (LSE && share == 0 && thread % 8 == 0 && head < NUM_HEADS)
        p.lse[token * p.l_token + head * p.l_head] = seen ? (top + log2_(total)) * LN2 : -INF;
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < DEPTH; ++n)
      if (first + n < parts) {
        const float *of = weights + (first + n) * 16 + lane / 4, low = of[0], high = of[8];
        sum.x += x[n].x * low;
        sum.y += x[n].y * low;
        sum.z += x[n].z * high;
        sum.w += x[n].w * high;
      }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * 16 + h * 8 + lane / 4;
    if (head < NUM_HEADS)
      *(u32 *)(p.out + (token * p.o_token + head * p.o_head + columns * 8 + lane % 4 * 2) * 2) =
          h ? pack<HALF>(sum.z, sum.w) : pack<HALF>(sum.x, sum.y);
  }
}
