// What the tokens of a gated delta net's chunks are to each other, on Hopper: what `chunk_kernel` of
// custom_ops/state/triton/chunk_products.py gives, as delta_records.cuh has it.
//
// A CTA has a chunk of 64 tokens and a head of keys. Products of queries and keys, and of keys, are the same
// for all GROUP heads of values: made once, squares of 16 x 16 on the diagonal and below, 10 of 16. Then each
// warp has a head: decays, and the inverse of 1 + L. That of a square on the diagonal is made from blocks of
// 2, whose size doubles three times (the corner is -b^-1 c a^-1), those below row by row of squares:
// T_rc = -T_rr sum_m L_rm T_mc. All of it stays in the warp's registers, turned by movmatrix.
//
// Operands of the inverse are float16: between normalised keys nothing is too large for it. Compiled by NVRTC
// for sm_90; its constants: delta_chunks_config.cuh. Source: "Gated Delta Networks" (arXiv:2412.06464), 3.3.

#include "delta_chunks_params.cuh"
#include "chunk_rows.cuh"
#include "chunk_squares.cuh"

constexpr int THREADS = 128;
// Shared memory: rows of queries and keys, then squares of both products in their place; behind them norms,
// and sums of decays and beta, a warp's each.
constexpr int KEYS_AT = CHUNK * ROW_BYTES, SCORES_AT = 0, LOWER_AT = SQUARES * SQUARE_BYTES;
constexpr int NORM_Q_AT = 2 * (KEYS_AT > LOWER_AT ? KEYS_AT : LOWER_AT), NORM_K_AT = NORM_Q_AT + CHUNK * 4;
constexpr int WARPS_AT = NORM_K_AT + CHUNK * 4, TOTAL_AT = 0, BETA_AT = CHUNK * 4, WARP_BYTES = CHUNK * 8;
static_assert(WARPS_AT + THREADS / 32 * WARP_BYTES == SHARED_BYTES, "as delta_chunks.py asks for it");

// Rows of a chunk's queries or keys, zeros where there are none; 16 bytes each swizzled among 8.
__device__ __forceinline__ void load_rows(u32 to, const char *from, i64 token_bytes, const Chunk &c) {
  constexpr int PIECES = KEY_DIM / 8;
#pragma unroll
  for (int n = threadIdx.x; n < CHUNK * PIECES; n += THREADS) {
    const int i = n / PIECES, piece = n % PIECES;
    const bool live = c.live(i);
    const char *row = from + (live ? c.begin + (i64)c.at(i) : c.begin) * token_bytes;
    cp_async_or_zero(to + i * ROW_BYTES + (piece ^ (i & 7)) * 16, row + piece * 16, live);
  }
}

// Products of two rows of squares with all before them, HIGH and 3 - HIGH, into shared memory; norms beside.
template <int HIGH, bool QUERIES>
__device__ __forceinline__ void multiply(char *memory, u32 shared, float scale, float eps, int lane) {
  constexpr int LOW = STRIPS - 1 - HIGH;
  const u32 rows = shared + (QUERIES ? 0 : KEYS_AT), keys = shared + KEYS_AT;
  Square high[HIGH + 1] = {}, low[LOW + 1] = {}, own[2] = {};
#pragma unroll 2
  for (int k = 0; k < KEY_DIM / 16; ++k) {
    u32 a[2][4], b[4];
    load_fragment(a[0], rows, HIGH, k, lane);
    load_fragment(a[1], rows, LOW, k, lane);
#pragma unroll
    for (int c = 0; c <= HIGH; ++c) {
      load_fragment(b, keys, c, k, lane);
      high[c].add_rows(a[0], b);
      if (c <= LOW) low[c <= LOW ? c : 0].add_rows(a[1], b);
    }
    if constexpr (QUERIES) {
      own[0].add_rows(a[0], a[0]);
      own[1].add_rows(a[1], a[1]);
    }
  }
  barrier<THREADS>(1);  // rows were read: squares take their place
  char *const to = memory + (QUERIES ? SCORES_AT : LOWER_AT) + lane * 16;
#pragma unroll
  for (int c = 0; c <= HIGH; ++c) high[c].put(to + products_at(HIGH, c));
#pragma unroll
  for (int c = 0; c <= LOW; ++c) low[c].put(to + products_at(LOW, c));
  if (lane % 4 == lane / 8) {  // has two numbers of a diagonal
    float *norms = (float *)(memory + (QUERIES ? NORM_Q_AT : NORM_K_AT)) + lane / 4;
    const bool odd = lane / 4 % 2;
    const auto store = [&](int strip, const Square &square) {
      norms[strip * 16] = rsqrtf((odd ? square.x[0][1] : square.x[0][0]) + eps) * scale;
      norms[strip * 16 + 8] = rsqrtf((odd ? square.x[1][3] : square.x[1][2]) + eps) * scale;
    };
    store(HIGH, QUERIES ? own[0] : high[HIGH]);
    store(LOW, QUERIES ? own[1] : low[LOW]);
  }
}

// Of a head: sums of decays, as logarithms to base 2, and beta into this warp's shared memory; what a lane's
// two tokens have.
struct Gates {
  float total[2], last;
};
__device__ __forceinline__ Gates load_gates(const Params &p, const Chunk &c, char *mine, int head, int lane) {
  Gates gates;
  __syncwarp();  // the head before is done with
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = lane + h * 32;
    const i64 token = c.begin + (i64)c.at(i);
    const bool live = c.live(i);
    float beta = live ? 1.f : 0.f, x = live ? p.g[token * p.g_token + head] : 0.f;
    if (BETA == 1 && live) beta = to_float<false>(((const u16 *)p.beta)[token * p.beta_token + head]);
    if (BETA == 2 && live) beta = ((const float *)p.beta)[token * p.beta_token + head];
    x = log2_decay(x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(ALL, x, step);
      if (lane >= step) x += before;
    }
    gates.total[h] = x;
    ((float *)(mine + BETA_AT))[i] = beta;
  }
  gates.total[1] += __shfl_sync(ALL, gates.total[0], 31);
  gates.last = __shfl_sync(ALL, gates.total[1], 31);
#pragma unroll
  for (int h = 0; h < 2; ++h) ((float *)(mine + TOTAL_AT))[lane + h * 32] = gates.total[h];
  __syncwarp();
  return gates;
}

// `solved`, of what `weigh` gives of a square of products of keys.
template <class Weigh>
__device__ __forceinline__ void solve(const Weigh &weigh, const float *beta, char *record, int lane) {
  Square diagonal[STRIPS];
#pragma unroll
  for (int r = 0; r < STRIPS; ++r) diagonal[r] = weigh(r, r);
  invert<STRIPS>(diagonal, lane);
  u32 own[STRIPS][4];
#pragma unroll
  for (int r = 0; r < STRIPS; ++r) diagonal[r].fragment(own[r]);
  Turned solved[STRIPS - 1][STRIPS - 1];  // squares of T, to be multiplied from the left
#pragma unroll
  for (int r = 0; r < STRIPS; ++r) {
    if (r < STRIPS - 1) solved[r][r] = Turned::of(own[r]);
    diagonal[r].scale_columns(beta, r, lane);
    diagonal[r].store<BLOCK, 16, ROW_OF_BLOCKS>(record + SOLVED + square_at(r, r), lane);
    u32 left[STRIPS - 1][4];
#pragma unroll
    for (int m = 0; m < r; ++m) weigh(r, m).fragment(left[m]);
#pragma unroll
    for (int n = 0; n < r; ++n) {
      Square t = {}, sum = {};
#pragma unroll
      for (int m = n; m < r; ++m) sum.add(left[m], solved[m][n]);
      u32 x[4];
      sum.fragment(x);
      t.add(own[r], Turned::of(x));
      t.negate();
      t.fragment(x);
      if (r < STRIPS - 1) solved[r][n] = Turned::of(x);
      t.scale_columns(beta, n, lane);
      t.store<BLOCK, 16, ROW_OF_BLOCKS>(record + SOLVED + square_at(r, n), lane);
    }
  }
}

// A head's record, or what of it is made of products of queries, or of keys.
template <bool OF_QUERIES, bool OF_KEYS>
__device__ __forceinline__ void relate(const char *memory, const char *mine, const Gates &gates, char *record,
                                       int lane) {
  const float *norm_q = (const float *)(memory + NORM_Q_AT), *norm_k = (const float *)(memory + NORM_K_AT);
  const float *beta = (const float *)(mine + BETA_AT), *total = (const float *)(mine + TOTAL_AT);
#pragma unroll
  for (int h = 0; OF_QUERIES && h < 2; ++h) {
    const int i = lane + h * 32;
    const float since = exp2_(gates.total[h]);
    ((float *)(record + SINCE))[i] = since * norm_q[i];
    ((float *)(record + SEEN))[i] = since * norm_k[i];
    ((float *)(record + LEFT))[i] = exp2_(gates.last - gates.total[h]) * norm_k[i];
  }
  if (OF_QUERIES && lane == 0) *(float *)(record + DECAY) = exp2_(gates.last);
  const char *const queries = memory + SCORES_AT + lane * 16, *const keys = memory + LOWER_AT + lane * 16;
  // Weighs both products of a square: stores that of queries, gives that of keys.
  const auto weigh = [&](int r, int c) {
    float sums[2], of_q[2], of_k[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = r * 16 + lane / 4 + h * 8;
      sums[h] = total[i], of_q[h] = norm_q[i], of_k[h] = norm_k[i] * beta[i];
    }
    Square decays, scores, lower = {};
    decays.decay(sums, total, norm_k, c, lane);
    if constexpr (OF_QUERIES) {
      scores.get(queries + products_at(r, c));
      scores.weigh(decays, of_q, r == c, true, lane);
      scores.store<BLOCK, 16, ROW_OF_BLOCKS>(record + SCORES + square_at(r, c), lane);
    }
    if constexpr (OF_KEYS) {
      lower.get(keys + products_at(r, c));
      lower.weigh(decays, of_k, r == c, false, lane);
    }
    return lower;
  };
  if constexpr (OF_KEYS) {
    solve(weigh, beta, record, lane);
  } else {
#pragma unroll
    for (int n = 0; n < STRIPS * STRIPS; ++n)
      if (n % STRIPS <= n / STRIPS) weigh(n / STRIPS, n % STRIPS);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    delta_chunks(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const u32 shared = shared_address(memory);
  const int key_head = blockIdx.x % KEY_HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Chunk c = find_chunk(p, blockIdx.x / KEY_HEADS);
  if (c.at(0) < c.end && (!c.live(0) || !c.live(CHUNK - 1)))
    store_zeros<GROUP, THREADS>(p, c, key_head * GROUP);
  if (c.count <= SHORT || c.at(0) >= c.count || c.at(CHUNK - 1) < c.first) return;  // no token is live
  load_rows(shared, p.q + key_head * p.q_head * 2, p.q_token * 2, c);
  load_rows(shared + KEYS_AT, p.k + key_head * p.k_head * 2, p.k_token * 2, c);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (warp == 0) multiply<3, true>(memory, shared, p.scale, p.eps, lane);
  if (warp == 1) multiply<2, true>(memory, shared, p.scale, p.eps, lane);
  if (warp == 2) multiply<3, false>(memory, shared, 1.f, p.eps, lane);
  if (warp == 3) multiply<2, false>(memory, shared, 1.f, p.eps, lane);
  __syncthreads();
  char *const mine = memory + WARPS_AT + warp * WARP_BYTES;
  const i64 number = blockIdx.x / KEY_HEADS;
  constexpr int WARPS = THREADS / 32, WARPS_A_HEAD = 2 * GROUP <= WARPS ? 2 : 1;
#pragma unroll 1
  for (int n = warp; n < GROUP * WARPS_A_HEAD; n += WARPS) {
    const int head = key_head * GROUP + n % GROUP;
    const Gates gates = load_gates(p, c, mine, head, lane);
    char *const record = p.records + (number * KEY_HEADS * GROUP + head) * RECORD_BYTES;
    if (WARPS_A_HEAD == 1) relate<true, true>(memory, mine, gates, record, lane);
    else if (n < GROUP) relate<false, true>(memory, mine, gates, record, lane);
    else relate<true, false>(memory, mine, gates, record, lane);
  }
}
