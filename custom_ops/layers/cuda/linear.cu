// out = x' @ weight.T for a handful of tokens: weights stream from memory once, as fast as it gives them.
//
// The dots are transposed: weight rows are the 16 rows of mma.m16n8k16, tokens its 8 columns. A CTA owns ROWS
// weight rows and a share of K; the shares of a tile are the CTAs of a cluster. Inside a CTA the chunks of 64
// k go round the groups of warps, each with a ring of STAGES chunks of its own (cp.async), so that no barrier
// of the whole CTA stands in the loop. The parts meet once, in (distributed) shared memory, in a fixed order.
//
// Weights are constants of a step (docs/stream_order.md): the ring is filled before griddepcontrol.wait, and
// the norm's weight is there for its first round; only x and the residual wait for the kernels before. So a
// chain of these kernels hardly stops reading weights.
//
// RMSNorm: x is scaled by the norm's weight between shared memory and the tensor cores, whose products of x
// with itself give the sums of squares (on the diagonal); 1 / rms is one factor per token, applied to the
// sums. Activation, bias and residual come after it, all in float32.
//
// Compiled at run time by NVRTC, one specialisation per layer shape: linear_config.cuh.

#include "linear_config.cuh"

constexpr int THREADS = ROW_WARPS * K_WARPS * 32, ROWS = ROW_WARPS * MT * 16;
#include "linear_finish.cuh"

// threads of a group: its warps share chunks, each has MT * 16 of the rows
constexpr int MEMBERS = ROW_WARPS * 32;
// weight rows; tokens and the norm's weight
constexpr int STAGE_BYTES = ROWS * LINE, X_STAGE_BYTES = (X_ROWS + NORM) * LINE;
constexpr bool EDGE_K = IN_FEATURES % 64 != 0;
// rows that a group copies at once, 16 bytes a thread
constexpr int STEP = MEMBERS / 8;
constexpr int X_COPIES = (X_ROWS * 8 + MEMBERS - 1) / MEMBERS;
constexpr int CHAINS = MT * NT == 1 ? 2 : 1;              // of products that wait for each other
// Registers: of 16 warps two CTAs and a small one of the kernel ahead share a multiprocessor. With bias or
// scale that would spill.
constexpr int MOST_THREADS = K_WARPS == 16 && !BIAS && !SCALED ? THREADS + 64 : THREADS;

// Byte offset of the m-th step's rows from the first step's.
__device__ __forceinline__ constexpr i64 step_offset(int m) {
  return ((i64)m * STEP + (GATED && m >= MT * 2 ? OUT_FEATURES / 2 - OUT_ROWS : 0)) * W_ROW * 2;
}
// Two numbers of x times theirs of the norm's weight.
__device__ __forceinline__ u32 scale(u32 x, float low, float high) {
  return pack<HALF>(to_float<HALF>((u16)x) * low, to_float<HALF>((u16)(x >> 16)) * high);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(MOST_THREADS, CTAS_PER_SM)
    linear(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  [[maybe_unused]] __shared__ float squares[K_WARPS][TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / ROW_WARPS, row_warp = warp % ROW_WARPS, member = threadIdx.x % MEMBERS;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
  // this group's chunks: every K_WARPS-th
  const int first = rank * CHUNKS / CLUSTER + group, end = (rank + 1) * CHUNKS / CLUSTER;
  const int count = first < end ? (end - first + K_WARPS - 1) / K_WARPS : 0;
  if constexpr (PDL && LAUNCH_FIRST) griddepcontrol_launch_dependents();

  // Thread `member` copies 16 bytes, column `member % 8` of a line, of every STEP-th row, to a place swizzled
  // by the row.
  const int copy_row = member / 8, column = member % 8;
  const char *weight = p.weight + ((i64)(tile * OUT_ROWS + copy_row) * W_ROW + first * 64 + column * 8) * 2;
  const char *x = p.x + (copy_row * p.x_token + first * 64 + column * 8) * 2;
  const u32 ring = shared_address(shared) + group * STAGES * STAGE_BYTES;
  char *const x_ring = shared + K_WARPS * STAGES * STAGE_BYTES + group * STAGES * X_STAGE_BYTES;
  const u32 place = copy_row * LINE + ((column ^ (copy_row & 7)) * 16);
  auto place_of = [&](int m) {  // the swizzle repeats every 8 rows; STEP may be 4
    return STEP % 8 == 0 ? place + m * STEP * LINE
                         : (copy_row + m * STEP) * LINE + ((column ^ ((copy_row + m * STEP) & 7)) * 16);
  };
  auto in_k = [&](int i) { return !EDGE_K || (first + i * K_WARPS) * 64 + column * 8 < IN_FEATURES; };

  [[maybe_unused]] const u64 policy = read_once();
  auto load_weights = [&](int i, int slot) {
    if (i >= count) return;
    const u32 to = ring + slot * STAGE_BYTES;
    const char *from = weight + i * (K_WARPS * LINE);
#pragma unroll
    for (int m = 0; m < MT * 4; ++m) {
      const int row = m % (GATED ? MT * 2 : MT * 4) * STEP + copy_row;
      if (EDGE_N || EDGE_K)
        cp_async_or_zero(to + place_of(m), from + step_offset(m),
                         (!EDGE_N || tile * OUT_ROWS + row < OUT_WIDTH) && in_k(i));
      else cp_async_once(to + place_of(m), from + step_offset(m), policy);
    }
  };
  auto load_x = [&](int i, int slot) {
    if (i >= count) return;
    const char *from = x + i * (K_WARPS * LINE);
    const u32 to = shared_address(x_ring) + slot * X_STAGE_BYTES;
#pragma unroll
    for (int m = 0; m < X_COPIES; ++m) {
      const int token = m * STEP + copy_row;
      if (token < p.tokens) cp_async_or_zero(to + place_of(m), from + (i64)m * STEP * p.x_token * 2, in_k(i));
    }
    if (NORM && member < 8) {
      const char *norm_weight = p.norm_weight + ((first + i * K_WARPS) * 64 + member * 8) * 2;
      cp_async_or_zero(to + X_ROWS * LINE + member * 16, norm_weight, in_k(i));
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    load_weights(s, s);
    cp_async_commit();
    // one by one: a flood of them would hold up the x of the kernel that still runs
    if (PDL && s < STAGES - 1) cp_async_wait<0>();
  }
  if constexpr (NORM) {
    uint4 early[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      early[s] = make_uint4(0, 0, 0, 0);
      if (s < count && member < 8 && in_k(s))
        early[s] = load_l2((const uint4 *)(p.norm_weight + ((first + s * K_WARPS) * 64 + member * 8) * 2));
    }
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
      if (member < 8) *(uint4 *)(x_ring + s * X_STAGE_BYTES + X_ROWS * LINE + member * 16) = early[s];
  }
  if constexpr (PDL) griddepcontrol_wait();
  if constexpr (PDL && !LAUNCH_FIRST) griddepcontrol_launch_dependents();
  Addends addends;
  {  // not by cp.async: its groups complete in order, and these would wait for all weights on their way
    uint4 early[STAGES][X_COPIES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
      for (int m = 0; m < X_COPIES; ++m) {
        early[s][m] = make_uint4(0, 0, 0, 0);
        if (s < count && m * STEP + copy_row < p.tokens && in_k(s))
          early[s][m] = load_l2((const uint4 *)(x + s * (K_WARPS * LINE) + (i64)m * STEP * p.x_token * 2));
      }
    if constexpr (ADDENDS_FIRST) addends.load(p, tile, rank, 0);
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
      for (int m = 0; m < X_COPIES; ++m)
        if (m * STEP + copy_row < X_ROWS)
          *(uint4 *)(x_ring + s * X_STAGE_BYTES + place_of(m)) = early[s][m];
  }

  // The warps of a group: all go through the same `count` chunks and meet twice in each, at a barrier of the
  // group's own. Groups may have different counts and do not wait for each other before the __syncthreads
  // behind the loop.
  static_assert(ROW_WARPS == 1 || K_WARPS < 16, "barrier 0 is __syncthreads, 15 are left for groups");
  auto meet = [&] {
    if (ROW_WARPS == 1) __syncwarp();
    else barrier<MEMBERS>(group + 1);
  };
  float sums[CHAINS][MT][NT][4] = {};
  [[maybe_unused]] float square[NT][4] = {};
  const u32 a_row = (row_warp * MT * 16 + lane % 16) * LINE;
  // A column of products beyond the tokens has the last token's row, or whatever lies there: columns do not
  // mix.
  const int b_token = X_ROWS < 8 ? min(lane % 8, X_ROWS - 1) : NT == 1 ? lane % 8 : lane % 8 + lane / 16 * 8;
  const u32 b_row = b_token * LINE;
  int slot = 0;
  for (int i = 0; i < count; ++i) {
    cp_async_wait<STAGES - 1>();
    meet();
    const u32 at = ring + slot * STAGE_BYTES, x_at = shared_address(x_ring) + slot * X_STAGE_BYTES;
    u32 b[NT][2], both[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (NT == 1) {
        if (step % 2 == 0) ldmatrix_x4(both, x_at + b_row + (((step * 2 + lane / 8) ^ (b_token & 7)) * 16));
        b[0][0] = both[step % 2 * 2];
        b[0][1] = both[step % 2 * 2 + 1];
      } else {
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) {
          ldmatrix_x4(both, x_at + b_row + n * 16 * LINE + (((step * 2 + lane / 8 % 2) ^ (lane & 7)) * 16));
          b[n * 2][0] = both[0];
          b[n * 2][1] = both[1];
          b[n * 2 + 1 < NT ? n * 2 + 1 : 0][0] = both[2];
          b[n * 2 + 1 < NT ? n * 2 + 1 : 0][1] = both[3];
        }
      }
      if constexpr (NORM) {
        const char *line = x_ring + slot * X_STAGE_BYTES + X_ROWS * LINE + (step * 16 + lane % 4 * 2) * 2;
        const u32 w0 = *(const u32 *)line, w1 = *(const u32 *)(line + 16);
        const float f0 = to_float<HALF>((u16)w0) + p.offset, f1 = to_float<HALF>((u16)(w0 >> 16)) + p.offset;
        const float f2 = to_float<HALF>((u16)w1) + p.offset, f3 = to_float<HALF>((u16)(w1 >> 16)) + p.offset;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const u32 a[4] = {b[n][0], 0, b[n][1], 0};
          mma<HALF>(square[n], a, b[n][0], b[n][1]);
          b[n][0] = scale(b[n][0], f0, f1);
          b[n][1] = scale(b[n][1], f2, f3);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        u32 a[4];
        ldmatrix_x4(a, at + a_row + m * 16 * LINE + (((step * 2 + lane / 16) ^ (lane & 7)) * 16));
#pragma unroll
        for (int n = 0; n < NT; ++n) mma<HALF>(sums[step % CHAINS][m][n], a, b[n][0], b[n][1]);
      }
    }
    meet();  // the slot is free again
    load_weights(i + STAGES, slot);
    load_x(i + STAGES, slot);
    cp_async_commit();  // an empty group keeps the count
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // Every group leaves its sums as [token][row] where the rings were.
  cp_async_wait<0>();
  __syncthreads();
  float *part = (float *)shared + group * TOKENS * PITCH + row_warp * MT * 16 + lane / 4;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) part[(n * 8 + lane % 4 * 2 + j % 2) * PITCH + m * 16 + j / 2 * 8] =
            CHAINS == 1 ? sums[0][m][n][j] : sums[0][m][n][j] + sums[CHAINS - 1][m][n][j];
  if constexpr (NORM) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
      if (row_warp == 0 && lane / 8 == lane % 4)
        squares[group][n * 8 + lane / 4] = lane / 4 % 2 ? square[n][1] : square[n][0];
  }
  store_output(p, (const float *)shared, squares, tile, rank, addends);
}
