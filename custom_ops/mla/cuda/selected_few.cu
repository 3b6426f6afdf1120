// Sparse latent attention on Hopper, for so few query tokens that all of their positions fit the
// device's shared memory at once: a CTA has 128 of them for 16 heads of a token.
//
// Everything is asked for at once, in two halves of the keys. A warp copies 8 keys of each and multiplies
// them with the queries as columns of them come. While the second half comes, values of the first one are
// added; weights of the second one are relative to the first one's maxima, unless a score is far above these.
// Parts meet in a second launch, selected_few_merge.cu, whose CTAs wait next to these: through the shared
// memory of a cluster, as in selected.cu, it took longer (docs/log/sparse_cuda.md).
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

// Two heads of each warp, as keys lie; zeros behind the last one.
__device__ __forceinline__ void copy_warps_queries(const Params &p, u32 shared, int token, int head_tile,
                                                   int warp, int lane) {
#pragma unroll
  for (int n = 0; n < 16 / WARPS; ++n) {
    const int r = n * WARPS + warp, head = head_tile * 16 + r;
    const bool real = head < NUM_HEADS;
    const char *from = p.q + ((token * p.q_token + (real ? head : 0) * p.q_head) * 2 + lane * 16);
    const u32 to = shared + PART_Q_AT + n * GROUP_BYTES + lane / 8 * 1024 + line_at(warp, lane % 8);
#pragma unroll
    for (int square = 0; square < SQUARES; square += 4)  // of 32 lanes
      if (square + 4 <= SQUARES || lane / 8 < SQUARES % 4)
        cp_async_or_zero(to + square * 1024, from + square * 128, real);
  }
  cp_async_commit();
}

// This warp's 8 keys of each half, whose rows are those of its lanes; COPIES groups of a half, of
// neighbouring columns each.
__device__ __forceinline__ void copy_warps_keys(const Params &p, u32 shared, int row, int warp, int lane) {
  const u64 policy = read_once();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const char *from[2];  // of 4 keys at a time, eight lanes each
    bool real[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int of = __shfl_sync(ALL, row, half * 8 + n * 4 + lane / 8);
      const i64 at = of < 0 ? 0 : of / BLOCK_SIZE * p.kv_block + of % BLOCK_SIZE * p.kv_slot;
      real[n] = of >= 0;
      from[n] = p.kv + at * 2 + lane % 8 * 16;
    }
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const u32 to = shared + (warp * 2 + half) * GROUP_BYTES + line_at(n * 4 + lane / 8, lane % 8);
#pragma unroll
        for (int square = copy * SQUARES / COPIES; square < (copy + 1) * SQUARES / COPIES; ++square)
          cp_async_once_or_zero(to + square * 1024, from[n] + square * 128, real[n], policy);
      }
      cp_async_commit();
    }
  }
}

// What a row's weights are relative to, of rows lane / 4 and 8 behind it; whether any key of the CTA is seen.
struct Levels {
  float of[2];
  bool seen;
};

// Queries as operands of the last KEPT squares: if all warps read all of them for each half, that takes
// longer than the scores.
struct KeptQueries {
  u32 of[KEPT][4][4];

  __device__ __forceinline__ KeptQueries(u32 queries, int lane) {
#pragma unroll
    for (int s = 0; s < KEPT; ++s)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        ldmatrix_x4(of[s][k], queries + (SQUARES - KEPT + s) * 1024 + line_at(lane, k * 2 + lane / 16));
  }
};

// Scores of this warp's 8 keys of a half, -INF for those that are not seen. Its copies of that half have
// ended then.
__device__ __forceinline__ void score_keys(u32 shared, u32 queries, const KeptQueries &kept, int half,
                                           float (&x)[2][2], int row, float scale, int warp, int lane) {
  const u32 keys = shared + (warp * 2 + half) * GROUP_BYTES;
  constexpr int MOST = (SQUARES + COPIES - 1) / COPIES, LEFT = 2 * COPIES - 1;  // behind the first one
  float c[4][4] = {};
#pragma unroll
  for (int copy = 0; copy < COPIES; ++copy) {
    const int first = copy * SQUARES / COPIES, count = (copy + 1) * SQUARES / COPIES - first;
    u32 a[MOST][4][4];
#pragma unroll
    for (int s = 0; s < count; ++s)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (first + s < SQUARES - KEPT)
          ldmatrix_x4(a[s][k], queries + (first + s) * 1024 + line_at(lane, k * 2 + lane / 16));
        else
#pragma unroll
          for (int e = 0; e < 4; ++e) a[s][k][e] = kept.of[first + s - (SQUARES - KEPT)][k][e];
    if (copy == 0) cp_async_wait<LEFT>();
    else if (copy == 1) cp_async_wait<LEFT - 1>();
    else cp_async_wait<LEFT - 2>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < count; ++s)
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        u32 b[4];
        ldmatrix_x4(b, keys + (first + s) * 1024 + line_at(lane, k * 2 + lane / 8));
        mma<HALF>(c[k], a[s][k], b[0], b[1]);
        mma<HALF>(c[k + 1], a[s][k + 1], b[2], b[3]);
      }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool here = __shfl_sync(ALL, row, half * 8 + lane % 4 * 2 + e % 2) >= 0;
    x[e / 2][e % 2] = here ? (c[0][e] + c[1][e] + (c[2][e] + c[3][e])) * scale : -INF;
  }
}

// To the largest score of all warps. `seen`: whether this warp sees one of its keys. A barrier.
__device__ __forceinline__ void raise(char *memory, Levels &level, const float (&x)[2][2], bool seen,
                                      int warp, int lane) {
  float *const tops = (float *)(memory + WARP_TOPS_AT);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = fmaxf(fmaxf(x[h][0], x[h][1]), seen ? FLOOR : -INF);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    if (lane % 4 == 0) tops[(h * 8 + lane / 4) * WARPS + warp] = top;
  }
  __syncthreads();  // maxima are there, and all keys of the half
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = -INF;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
      const float4 of = *(const float4 *)(tops + (h * 8 + lane / 4) * WARPS + w);
      top = fmaxf(top, fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)));
    }
    level.seen |= top >= FLOOR;
    level.of[h] = fmaxf(level.of[h], top);
  }
}

// Weights of this warp's 8 keys of a half.
__device__ __forceinline__ void weigh_keys(char *memory, int half, const float (&x)[2][2],
                                           const Levels &level, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    *(u32 *)(memory + WEIGHTS_AT + half * 2048 + (h * 8 + lane / 4) * 128 + (warp ^ lane / 4) * 16 +
             lane % 4 * 4) = pack<HALF>(exp2_(x[h][0] - level.of[h]), exp2_(x[h][1] - level.of[h]));
}

// Sums of a half's values, RANK / WARPS columns for each warp, and of its weights.
struct Sums {
  float of[PAIRS * 2][4], total[4];  // columns of `total` are alike

  __device__ __forceinline__ void add(u32 shared, int half, int warp, int lane) {
    const u32 weights = shared + WEIGHTS_AT + half * 2048 + lane / 8 % 2 * 1024;
    constexpr u32 ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
    for (int k = 0; k < PART_KEYS / 32; ++k) {  // keys of two warps
      u32 a[4];
      ldmatrix_x4(a, weights + line_at(lane, k * 2 + lane / 16));
      mma<HALF>(total, a, ONES, ONES);
#pragma unroll
      for (int n = 0; n < PAIRS; ++n) {
        const int column = warp * (RANK / WARPS) + n * 16;
        u32 b[4];
        ldmatrix_x4_trans(b, shared + (k * 4 + lane / 8 % 2 * 2 + half) * GROUP_BYTES + column / 64 * 1024 +
                                 line_at(lane, column % 64 / 8 + lane / 16));
        mma<HALF>(of[n * 2], a, b[0], b[1]);
        mma<HALF>(of[n * 2 + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ void shrink(const float (&factor)[2]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total[e] *= factor[e / 2];
#pragma unroll
      for (int n = 0; n < PAIRS * 2; ++n) of[n][e] *= factor[e / 2];
    }
  }
  // As float16 over a power of two for each row, which the largest finite number of the warp's columns gives.
  __device__ __forceinline__ void leave(const Params &p, int part, const Levels &level, int warp,
                                        int lane) const {
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.f;
#pragma unroll
      for (int n = 0; n < PAIRS * 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = fabsf(of[n][h * 2 + e]);
          most = fmaxf(most, x < INF ? x : 0.f);
        }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
      const int exponent = max(__float_as_int(most) >> 23, 20);  // so that both powers are normal
      by[h] = __int_as_float(268 - exponent << 23);              // most * by < 2^15
      if (lane % 4 == 0)
        states_of(p, part)[warp * 16 + h * 8 + lane / 4] = {
            level.of[h], level.seen ? total[h * 2] : -1.f, __int_as_float(exponent - 14 << 23), 0.f};
    }
    uint2 *const to = sums_of(p, part) + warp * PAIRS * 2 * 32 + lane;
#pragma unroll
    for (int n = 0; n < PAIRS * 2; ++n)
      to[n * 32] = {pack<true>(of[n][0] * by[0], of[n][1] * by[0]),
                    pack<true>(of[n][2] * by[1], of[n][3] * by[1])};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_few(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, parts = parts_of(p),
            part = blockIdx.x % parts, item = blockIdx.x / parts, head_tile = item % p.head_tiles,
            token = item / p.head_tiles, mine = part * PART_KEYS + warp * 16 + lane % 16;
  griddepcontrol_launch_dependents();
  const int *const index = p.indices + token * p.indices_row + mine;
  if (lane == 0 && mine < p.top_k) prefetch_l2((const char *)index);
  const Token t = find_token(p, token, lane);
  int *const table = (int *)(memory + TABLE_AT);
  copy_table(p, table, TABLE_ROOM, t, thread);
  __syncthreads();  // the table is there
  griddepcontrol_wait();
  const int position = mine < p.top_k ? load_l2(index) : -1;
  copy_warps_queries(p, shared, token, head_tile, warp, lane);
  const int row = find_row(p, table, t, position);
  copy_warps_keys(p, shared, row, warp, lane);
  const u32 seen = __ballot_sync(ALL, row >= 0);
  cp_async_wait<2 * COPIES>();
  __syncthreads();  // queries are there
  const u32 queries = shared + PART_Q_AT + lane / 8 % 2 * GROUP_BYTES;
  const KeptQueries kept(queries, lane);
  float x[2][2];
  Levels level = {{FLOOR, FLOOR}, false};
  Sums sums = {};
#pragma unroll 1  // else the compiler puts off products of the first half until the second one is there
  for (int half = 0; half < 2; ++half) {
    score_keys(shared, queries, kept, half, x, row, p.scale, warp, lane);
    const bool sees = seen >> half * 8 & 0xff;
    bool above = sees && !level.seen;
#pragma unroll
    for (int h = 0; h < 2; ++h) above |= fmaxf(x[h][0], x[h][1]) > level.of[h] + LAZY;
    if (half) weigh_keys(memory, half, x, level, warp, lane);
    // keys and weights are there, but these may be too large
    if (half == 0 || barrier_or<THREADS>(1, above)) {
      const Levels before = level;
      raise(memory, level, x, sees, warp, lane);
      sums.shrink({exp2_(before.of[0] - level.of[0]), exp2_(before.of[1] - level.of[1])});
      weigh_keys(memory, half, x, level, warp, lane);
      __syncthreads();  // weights are there
    }
    sums.add(shared, half, warp, lane);
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) cp_async_commit();  // of nothing: waits count alike
  }
  sums.leave(p, blockIdx.x, level, warp, lane);
}
