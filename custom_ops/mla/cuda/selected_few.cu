// Sparse latent attention on Hopper, for so few query tokens that all of their positions fit the
// device's shared memory at once: a CTA has 128 of them for 16 heads of a token.
//
// Everything is asked for at once. A warp copies 16 keys and multiplies them with the queries as columns of
// them come; the softmax of the part is known before its values are added. Parts meet in a second launch,
// selected_few_merge.cu, whose CTAs wait next to these: through the shared memory of a cluster, as in
// selected.cu, it took longer (docs/log/sparse_cuda.md).
//
// Nothing here waits for ever: all waits are barriers of a CTA, which all threads reach. Compiled by NVRTC
// for sm_90; its constants: selected_config.cuh. Sources: as selected.cu.

#include "selected_parts.cuh"

// Row of the pool of a position, -1: not seen.
__device__ __forceinline__ int find_row(const Params &p, const int *table, Token t, int position) {
  if ((u32)position >= (u32)t.end) return -1;
  const int block = position / BLOCK_SIZE,
            at = block < TABLE_ROOM ? table[block] : load_l2(p.table + t.request * p.table_row + block);
  return at * BLOCK_SIZE + position % BLOCK_SIZE;
}

// This warp's 16 keys, whose rows are those of its lanes; in COPIES groups, of neighbouring columns each.
__device__ __forceinline__ void copy_warps_keys(const Params &p, u32 shared, int row, int warp, int lane) {
  const char *from[4];  // of 4 keys at a time, eight lanes each
  bool real[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int of = __shfl_sync(ALL, row, n * 4 + lane / 8);
    const i64 at = of < 0 ? 0 : of / BLOCK_SIZE * p.kv_block + of % BLOCK_SIZE * p.kv_slot;
    real[n] = of >= 0;
    from[n] = p.kv + at * 2 + lane % 8 * 16;
  }
#pragma unroll
  for (int copy = 0; copy < COPIES; ++copy) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int key = n * 4 + lane / 8;
      const u32 to = shared + (warp * 2 + key / 8) * GROUP_BYTES + line_at(key, lane % 8);
#pragma unroll
      for (int square = copy * SQUARES / COPIES; square < (copy + 1) * SQUARES / COPIES; ++square)
        cp_async_or_zero(to + square * 1024, from[n] + square * 128, real[n]);
    }
    cp_async_commit();
  }
}

// Scores of this warp's 16 keys; all of a warp's copies have ended then.
__device__ __forceinline__ void score_keys(u32 shared, float (&c)[2][2][4], int warp, int lane) {
  const u32 keys = shared + (warp * 2 + lane / 16) * GROUP_BYTES,
            queries = shared + PART_Q_AT + lane / 8 % 2 * GROUP_BYTES;
#pragma unroll
  for (int copy = 0; copy < COPIES; ++copy) {
    constexpr int MOST = (SQUARES + COPIES - 1) / COPIES;
    const int first = copy * SQUARES / COPIES, count = (copy + 1) * SQUARES / COPIES - first;
    u32 a[MOST][4][4];
#pragma unroll
    for (int s = 0; s < count; ++s)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        ldmatrix_x4(a[s][k], queries + (first + s) * 1024 + line_at(lane, k * 2 + lane / 16));
    if (copy == 0) cp_async_wait<COPIES - 1>();
    else if (copy == 1) cp_async_wait<COPIES - 2>();
    else cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < count; ++s)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        u32 b[4];
        ldmatrix_x4(b, keys + (first + s) * 1024 + line_at(lane, k * 2 + lane / 8 % 2));
        mma<HALF>(c[k % 2][0], a[s][k], b[0], b[1]);
        mma<HALF>(c[k % 2][1], a[s][k], b[2], b[3]);
      }
  }
}

// Weights of all keys into shared memory, and for each row the warps' maxima and totals.
__device__ __forceinline__ void weigh_keys(char *memory, const float (&c)[2][2][4], int row, float scale,
                                           int warp, int lane) {
  const bool seen = __ballot_sync(ALL, row >= 0) != 0;
  float *const tops = (float *)(memory + WARP_TOPS_AT), *const totals = (float *)(memory + WARP_SUMS_AT);
  const int r = lane / 4;  // and r + 8
  float x[2][4], top[2] = {FLOOR, FLOOR}, total[2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool here = __shfl_sync(ALL, row, n * 8 + lane % 4 * 2 + e % 2) >= 0;
      x[e / 2][n * 2 + e % 2] = here ? (c[0][n][e] + c[1][n][e]) * scale : -INF;
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < 4; ++e) top[h] = fmaxf(top[h], x[h][e]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], step));
    if (lane % 4 == 0) tops[(h * 8 + r) * WARPS + warp] = top[h];
  }
  __syncthreads();  // maxima are there, and all keys
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
      const float4 of = *(const float4 *)(tops + (h * 8 + r) * WARPS + w);
      top[h] = fmaxf(fmaxf(top[h], fmaxf(of.x, of.y)), fmaxf(of.z, of.w));
    }
    char *to = memory + WEIGHTS_AT + warp / 4 * 2048 + (h * 8 + r) * 128 + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float px = exp2_(x[h][n * 2] - top[h]), py = exp2_(x[h][n * 2 + 1] - top[h]);
      total[h] += px + py;
      *(u32 *)(to + (warp % 4 * 2 + n ^ r) * 16) = pack<HALF>(px, py);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) total[h] += __shfl_xor_sync(ALL, total[h], step);
    if (lane % 4 == 0) totals[(h * 8 + r) * WARPS + warp] = seen ? total[h] : -1.f;
  }
  __syncthreads();  // so are weights and totals
}

// Sums of values: all keys, RANK / WARPS columns for each warp.
__device__ __forceinline__ void sum_values(u32 shared, float (&acc)[PAIRS * 2][4], int warp, int lane) {
  const u32 weights = shared + WEIGHTS_AT + lane / 8 % 2 * 1024;
#pragma unroll
  for (int k = 0; k < PART_KEYS / 16; ++k) {
    u32 a[4];
    ldmatrix_x4(a, weights + k / 4 * 2048 + line_at(lane, k % 4 * 2 + lane / 16));
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int column = warp * (RANK / WARPS) + n * 16;
      u32 b[4];
      ldmatrix_x4_trans(b, shared + (k * 2 + lane / 8 % 2) * GROUP_BYTES + column / 64 * 1024 +
                               line_at(lane, column % 64 / 8 + lane / 16));
      mma<HALF>(acc[n * 2], a, b[0], b[1]);
      mma<HALF>(acc[n * 2 + 1], a, b[2], b[3]);
    }
  }
}

// The part of a row: its maximum, and its total or -1, if no key is seen.
__device__ __forceinline__ float2 state_of(const char *memory, int r) {
  const float *tops = (const float *)(memory + WARP_TOPS_AT) + r * WARPS,
              *totals = (const float *)(memory + WARP_SUMS_AT) + r * WARPS;
  float2 state = {FLOOR, 0.f};
  bool seen = false;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    seen = seen || !(totals[w] < 0.f);
    state.y += totals[w] < 0.f ? 0.f : totals[w];
    state.x = fmaxf(state.x, tops[w]);
  }
  if (!seen) state.y = -1.f;
  return state;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_few(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, parts = parts_of(p),
            part = blockIdx.x % parts, item = blockIdx.x / parts, head_tile = item % p.head_tiles,
            token = item / p.head_tiles, mine = part * PART_KEYS + warp * 16 + lane % 16;
  const int *const index = p.indices + token * p.indices_row + mine;
  griddepcontrol_launch_dependents();
  if (lane == 0 && mine < p.top_k) prefetch_l2((const char *)index);
  const Token t = find_token(p, token, lane);
  int *const table = (int *)(memory + TABLE_AT);
  copy_table(p, table, TABLE_ROOM, t, thread);
  __syncthreads();  // the table is there
  griddepcontrol_wait();
  const int position = mine < p.top_k ? load_l2(index) : -1;
  copy_queries(p, shared + PART_Q_AT, token, head_tile, thread);
  cp_async_commit();
  const int row = find_row(p, table, t, position);
  copy_warps_keys(p, shared, row, warp, lane);
  cp_async_wait<COPIES>();
  __syncthreads();  // queries are there
  float c[2][2][4] = {};
  score_keys(shared, c, warp, lane);
  weigh_keys(memory, c, row, p.scale, warp, lane);
  float acc[PAIRS * 2][4] = {};
  sum_values(shared, acc, warp, lane);
  float4 *const sums = sums_of(p, blockIdx.x) + warp * PAIRS * 2 * 32 + lane;
#pragma unroll
  for (int n = 0; n < PAIRS * 2; ++n) sums[n * 32] = {acc[n][0], acc[n][1], acc[n][2], acc[n][3]};
  if (thread < 16) states_of(p, blockIdx.x, gridDim.x)[thread] = state_of(memory, thread);
}
