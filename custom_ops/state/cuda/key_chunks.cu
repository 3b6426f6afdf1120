// What the tokens of chunks of Kimi delta attention are to each other, on Hopper: what `key_chunk_kernel` of
// custom_ops/state/triton/key_products.py gives.
//
// A CTA has a chunk of 64 tokens and a head. A pair of tokens weighs ``sum_d q_id k_jd exp(G_id - G_jd)``,
// with G the sums of decays. Let E_s be those at the end of strip s of 16 tokens. A token i of strip r has
// ``q_i exp(G_i - E_(r-1))``, a key j of strip c ``k_j exp(E_c - G_j)``, and the keys' columns have a factor
// in each square, ``exp(E_(r-1) - E_c)``. Of all these only factors of squares on the diagonal are above 1.
// Where those would be too large, pairs of the strip are computed one by one in 16 columns of the keys.
//
// A thread has two columns of a strip: its sums stay in registers, queries and keys are weighed where they
// came to in shared memory. Squares and their inverse are those of delta_chunks.cu. Compiled by NVRTC for
// sm_90; its constants: key_chunks_config.cuh. Source: "Kimi Linear" (arXiv:2510.26692), section 3.

#include "key_chunks_params.cuh"
#include "chunk_rows.cuh"
#include "chunk_squares.cuh"

constexpr int THREADS = 256, STRIP = CHUNK / STRIPS, HALVES = 2;  // of the columns: a warp has one of a strip
constexpr float WIDEST = 117.f;  // of a strip's decays, to base 2: 16 of at most 5 are within
// Shared memory: weighed queries and keys as rows, and keys as columns; factors of squares; products of keys;
// sums of decays of strips; sums of squares, norms and beta; which columns of a strip decay too much.
constexpr int ROWS_BYTES = CHUNK * ROW_BYTES, KNOWN_AT = ROWS_BYTES, KEYS_AT = 2 * ROWS_BYTES;
constexpr int FACTORS_AT = 3 * ROWS_BYTES, FACTOR_BYTES = KEY_DIM * 4;
constexpr int LOWER_AT = FACTORS_AT + SQUARES * FACTOR_BYTES, TOTALS_AT = LOWER_AT + SQUARES * SQUARE_BYTES;
constexpr int SQUARED_AT = TOTALS_AT + STRIPS * KEY_DIM * 4;
constexpr int NORM_Q_AT = SQUARED_AT + 2 * HALVES * CHUNK * 4, NORM_K_AT = NORM_Q_AT + CHUNK * 4;
constexpr int BETA_AT = NORM_K_AT + CHUNK * 4, WIDE_AT = BETA_AT + CHUNK * 4;
static_assert(WIDE_AT + 128 == SHARED_BYTES, "as key_chunks.py asks for it");
static_assert(THREADS == 32 * STRIPS * HALVES && KEY_DIM == 64 * HALVES);

__device__ __forceinline__ constexpr int factors_at(int row, int column) {
  return FACTORS_AT + (row * (row + 1) / 2 + column) * FACTOR_BYTES;
}
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float2 exp2_of(float2 a) { return {exp2_(a.x), exp2_(a.y)}; }
__device__ __forceinline__ float2 unpack(u32 x) {
  return {to_float<false>((u16)x), to_float<false>((u16)(x >> 16))};
}
__device__ __forceinline__ u32 product(float2 a, float2 b) { return pack<false>(a.x * b.x, a.y * b.y); }

// Sums over a warp's lanes of 2 * WIDTH numbers; of 16 a lane gets that of number lane / 2.
template <int WIDTH = STRIP / 2>
__device__ __forceinline__ float sum_over_lanes(float (&x)[STRIP], int lane) {
  const bool upper = lane & WIDTH * 2;
#pragma unroll
  for (int n = 0; n < WIDTH; ++n) {
    const float other = __shfl_xor_sync(ALL, upper ? x[n] : x[n + WIDTH], WIDTH * 2);
    x[n] = (upper ? x[n + WIDTH] : x[n]) + other;
  }
  if constexpr (WIDTH > 1) return sum_over_lanes<WIDTH / 2>(x, lane);
  else return x[0] + __shfl_xor_sync(ALL, x[0], 1);
}

// Into shared memory what products and squares need, and to `Chunks` what leaves by tokens.
__device__ __forceinline__ void weigh_tokens(const Params &p, const Chunk &c, char *memory, i64 number,
                                             int head, int warp, int lane) {
  const int strip = warp / HALVES, half = warp % HALVES, column = half * 64 + lane * 2;
  const int from = strip * STRIP, low = c.first - c.at(from), high = c.count - c.at(from);
  const i64 token = c.begin + (i64)c.at(from);
  const u32 shared = shared_address(memory);
#pragma unroll
  for (int n = 0; n < STRIP / 4; ++n) {  // queries and keys to where they will be weighed
    const int t = n * 4 + lane / 8, piece = half * 8 + lane % 8;
    const bool live = t >= low && t < high;
    const i64 at = live ? token + t : c.begin, key_head = head / GROUP;
    const u32 to = shared + (from + t) * ROW_BYTES + (piece ^ (t & 7)) * 16;
    cp_async_or_zero(to, p.q + (at * p.q_token + key_head * p.q_head) * 2 + piece * 16, live);
    cp_async_or_zero(to + KNOWN_AT, p.k + (at * p.k_token + key_head * p.k_head) * 2 + piece * 16, live);
  }
  cp_async_commit();
  const float *of_g = p.g + token * p.g_token + head * p.g_head + column;
  float2 sum[STRIP];
#pragma unroll
  for (int t = 0; t < STRIP; ++t, of_g += p.g_token) {
    sum[t] = t >= low && t < high ? *(const float2 *)of_g : float2{0.f, 0.f};
  }
  float2 own = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < STRIP; ++t) sum[t] = own = plus(own, {log2_decay(sum[t].x), log2_decay(sum[t].y)});
  *(float2 *)(memory + TOTALS_AT + (strip * KEY_DIM + column) * 4) = own;
  const auto words = [&](int t) {
    return memory + (from + t) * ROW_BYTES + ((column / 8) ^ (t & 7)) * 16 + column % 8 * 2;
  };
  cp_async_wait<0>();
  __syncwarp();
  float *const squared = (float *)(memory + SQUARED_AT) + half * CHUNK + from + lane / 2;
#pragma unroll
  for (int of_keys = 0; of_keys < 2; ++of_keys) {
    float squares[STRIP];
#pragma unroll
    for (int t = 0; t < STRIP; ++t) {
      const float2 x = unpack(*(u32 *)(words(t) + of_keys * KNOWN_AT));
      squares[t] = x.x * x.x + x.y * x.y;
    }
    const float all = sum_over_lanes(squares, lane);
    if (lane % 2 == 0) squared[of_keys * HALVES * CHUNK] = all;
  }
  const u32 wide = __ballot_sync(ALL, -own.x > WIDEST || -own.y > WIDEST);
  if (lane == 0) ((u32 *)(memory + WIDE_AT))[warp] = wide;
  __syncthreads();
  if (threadIdx.x < CHUNK) {
    const int i = threadIdx.x;
    const float *const sums = (const float *)(memory + SQUARED_AT) + i;
    const float norm_q = rsqrtf(sums[0] + sums[CHUNK] + p.eps) * p.scale;
    const float norm_k = rsqrtf(sums[HALVES * CHUNK] + sums[(HALVES + 1) * CHUNK] + p.eps);
    const bool live = c.live(i);
    const i64 at = c.begin + (i64)c.at(i), place = (i64)head * p.num_tokens + at;
    float beta = live ? 1.f : 0.f;
    if (BETA == 1 && live) beta = to_float<false>(((const u16 *)p.beta)[at * p.beta_token + head]);
    if (BETA == 2 && live) beta = ((const float *)p.beta)[at * p.beta_token + head];
    ((float *)(memory + NORM_Q_AT))[i] = norm_q;
    ((float *)(memory + NORM_K_AT))[i] = norm_k;
    ((float *)(memory + BETA_AT))[i] = beta;
    if (live) p.since[place] = norm_q, p.left[place] = norm_k;
  }
  const auto total = [&](int s) {
    return *(const float2 *)(memory + TOTALS_AT + (s * KEY_DIM + column) * 4);
  };
  const auto factors = [&](int s) { return (float2 *)(memory + factors_at(strip, s) + column * 4); };
  float2 before = {0.f, 0.f}, after = {0.f, 0.f}, between = {0.f, 0.f};
  *factors(strip) = exp2_of({-own.x, -own.y});
  for (int s = strip - 1; s >= 0; --s) {
    if (s < strip - 1) *factors(s) = exp2_of(between);
    between = plus(between, total(s));
  }
  for (int s = 0; s < strip; ++s) before = plus(before, total(s));
  for (int s = strip + 1; s < STRIPS; ++s) after = plus(after, total(s));
  if (strip == STRIPS - 1) {
    *(float2 *)(p.decay + (number * HEADS + head) * KEY_DIM + column) = exp2_of(plus(before, own));
  }
  before = exp2_of(before), after = exp2_of(after);
  const i64 place = (((i64)head * p.num_tokens + token) * KEY_DIM + column) * 2;
#pragma unroll
  for (int t = 0; t < STRIP; ++t) {
    const float2 since = exp2_of(sum[t]), until = exp2_of({own.x - sum[t].x, own.y - sum[t].y});
    char *const at = words(t);
    const float2 x = unpack(*(u32 *)at), y = unpack(*(u32 *)(at + KNOWN_AT));
    const float2 query = {x.x * since.x, x.y * since.y}, known = {y.x * since.x, y.y * since.y};
    const float2 key = {y.x * until.x, y.y * until.y};
    *(u32 *)at = pack<false>(query.x, query.y);
    *(u32 *)(at + KNOWN_AT) = pack<false>(known.x, known.y);
    *(u32 *)(at + KEYS_AT) = pack<false>(key.x, key.y);
    if (t >= low && t < high) {
      const i64 to = place + t * ROW_BYTES;
      *(u32 *)(p.queries + to) = product(query, before);
      *(u32 *)(p.known + to) = product(known, before);
      *(u32 *)(p.keys + to) = product(key, after);
    }
  }
}

// Adds 16 columns of the keys from ``column`` on to products of a strip's tokens with each other.
__device__ __forceinline__ void add_pairs(const Params &p, const Chunk &c, Square &scores, Square &lower,
                                          int head, int strip, int column, int lane) {
  const int i = strip * STRIP + lane % STRIP;
  const bool live = c.live(i);
  const i64 token = live ? c.begin + (i64)c.at(i) : c.begin;
  const u16 *const of_q = (const u16 *)p.q + token * p.q_token + head / GROUP * p.q_head + column;
  const u16 *const of_k = (const u16 *)p.k + token * p.k_token + head / GROUP * p.k_head + column;
  const float *const of_g = p.g + token * p.g_token + head * p.g_head + column;
#pragma unroll 1
  for (int d = 0; d < 16; ++d) {
    float sum = live ? log2_decay(of_g[d]) : 0.f;
    const float q = live ? to_float<false>(of_q[d]) : 0.f, k = live ? to_float<false>(of_k[d]) : 0.f;
#pragma unroll
    for (int step = 1; step < STRIP; step *= 2) {
      const float before = __shfl_up_sync(ALL, sum, step);
      if (lane % STRIP >= step) sum += before;
    }
    float sums[2], queries[2], known[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + h * 8;
      sums[h] = __shfl_sync(ALL, sum, row);
      queries[h] = __shfl_sync(ALL, q, row), known[h] = __shfl_sync(ALL, k, row);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int other = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const float ahead = __shfl_sync(ALL, sum, other), key = __shfl_sync(ALL, k, other);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float weighed = exp2_(sums[h] - ahead) * key;
        scores.x[n / 2][h * 2 + n % 2] += queries[h] * weighed;
        lower.x[n / 2][h * 2 + n % 2] += known[h] * weighed;
      }
    }
  }
}

// Products of rows of strip ``r`` with keys of strip ``c``.
__device__ __forceinline__ void multiply(const Params &p, const Chunk &chunk, const char *memory,
                                         Square &scores, Square &lower, int head, int r, int c, int lane) {
  const u32 shared = shared_address(memory);
  const u32 *const wide = (const u32 *)(memory + WIDE_AT) + r * HALVES;  // a byte for 16 columns
  const auto is_wide = [&](int k) { return r == c && wide[k / 4] >> k % 4 * 8 & 255; };
#pragma unroll 1
  for (int k = 0; k < KEY_DIM / 16; ++k) {
    if (is_wide(k)) add_pairs(p, chunk, scores, lower, head, r, k * 16, lane);
  }
#pragma unroll 2
  for (int k = 0; k < KEY_DIM / 16; ++k) {
    if (is_wide(k)) continue;
    u32 queries[4], known[4], keys[4];
    load_fragment(queries, shared, r, k, lane);
    load_fragment(known, shared + KNOWN_AT, r, k, lane);
    load_fragment(keys, shared + KEYS_AT, c, k, lane);
    if (r != c + 1) {
      const float2 *const factors = (const float2 *)(memory + factors_at(r, c)) + k * 8 + lane % 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) keys[n] = product(unpack(keys[n]), factors[n / 2 * 4]);
    }
    scores.add_rows(queries, keys);
    lower.add_rows(known, keys);
  }
}

// Squares of `solved` below that on the diagonal of column N, as `solve` makes them. ``own``: those on it.
template <int N, class Store>
__device__ __forceinline__ void solve_column(const char *memory, const u32 (&own)[STRIPS][4],
                                             const Store &store, const float *beta, int lane) {
  Turned solved[STRIPS];
  solved[N] = Turned::of(own[N]);
#pragma unroll
  for (int r = N + 1; r < STRIPS; ++r) {
    Square sum = {}, t = {};
    u32 x[4];
#pragma unroll
    for (int m = N; m < r; ++m) {
      Square left;
      left.get(memory + LOWER_AT + products_at(r, m) + lane * 16);
      left.fragment(x);
      sum.add(x, solved[m]);
    }
    sum.fragment(x);
    t.add(own[r], Turned::of(x));
    t.negate();
    t.fragment(x);
    solved[r] = Turned::of(x);
    t.scale_columns(beta, N, lane);
    store(r, N, t);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    key_chunks(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int head = blockIdx.x % HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 number = blockIdx.x / HEADS;
  const Chunk c = find_chunk(p, (int)number);
  if (c.at(0) < c.end && (!c.live(0) || !c.live(CHUNK - 1))) store_zeros<1, THREADS>(p, c, head);
  if (c.count <= SHORT || max(c.at(0), c.first) >= c.count || c.at(CHUNK - 1) < c.first) return;
  weigh_tokens(p, c, memory, number, head, warp, lane);
  __syncthreads();
  const float *const norm_q = (const float *)(memory + NORM_Q_AT), *const norm_k = norm_q + CHUNK;
  const float *const beta = (const float *)(memory + BETA_AT);
  const i64 place = ((i64)head * p.num_tokens + c.begin + c.at(0)) * CHUNK * 2;
  const int low = c.first - c.at(0), high = c.count - c.at(0);  // tokens that are live
  const auto store = [&](char *squares, int row, int column, const Square &square) {
    const int i = row * 16 + lane / 4;
    square.store<16, CHUNK * 2, 8 * CHUNK * 2>(squares + place + row * 16 * CHUNK * 2 + column * 32, lane,
                                               i >= low && i < high, i + 8 >= low && i + 8 < high);
  };
  // A warp has a square whose factors are not 1: (0, 0) to (3, 3), (2, 0), (3, 1), (3, 0). The last has those
  // next to the diagonal.
  for (int n = warp; n < (warp == 7 ? SQUARES : warp + 1); ++n) {
    const int row = n < 4 ? n : n < 7 ? min(n - 2, 3) : n - 6, column = n < 4 ? n : n < 7 ? n == 5 : n - 7;
    Square scores = {}, lower = {}, of_columns;
    multiply(p, c, memory, scores, lower, head, row, column, lane);
    float of_q[2], of_k[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = row * 16 + lane / 4 + h * 8;
      of_q[h] = norm_q[i], of_k[h] = norm_k[i] * beta[i];
    }
    of_columns.fill(norm_k, column, lane);
    scores.weigh(of_columns, of_q, row == column, true, lane);
    store(p.scores, row, column, scores);
    lower.weigh(of_columns, of_k, row == column, false, lane);
    lower.put(memory + LOWER_AT + products_at(row, column) + lane * 16);
  }
  __syncthreads();
  if (warp < STRIPS - 1) {  // a column of squares each; the last one has those on the diagonal, too
    const auto put = [&](int r, int m, const Square &square) { store(p.solved, r, m, square); };
    Square diagonal[STRIPS];
#pragma unroll
    for (int r = 0; r < STRIPS; ++r) diagonal[r].get(memory + LOWER_AT + products_at(r, r) + lane * 16);
    invert<STRIPS>(diagonal, lane);
    u32 own[STRIPS][4];
#pragma unroll
    for (int r = 0; r < STRIPS; ++r) diagonal[r].fragment(own[r]);
    if (warp == STRIPS - 2) {
#pragma unroll
      for (int r = 0; r < STRIPS; ++r) {
        diagonal[r].scale_columns(beta, r, lane);
        put(r, r, diagonal[r]);
      }
    }
    if (warp == 0) solve_column<0>(memory, own, put, beta, lane);
    if (warp == 1) solve_column<1>(memory, own, put, beta, lane);
    if (warp == 2) solve_column<2>(memory, own, put, beta, lane);
    return;
  }
  constexpr int OTHERS = 32 * (STRIPS - 1);
  for (int n = threadIdx.x - OTHERS; n < CHUNK * 8; n += THREADS - OTHERS) {  // above the diagonal
    const int i = n / 8, piece = n % 8;
    if (piece / 2 <= i / STRIP || i < low || i >= high) continue;
    *(uint4 *)(p.scores + place + i * CHUNK * 2 + piece * 16) = uint4{0, 0, 0, 0};
    *(uint4 *)(p.solved + place + i * CHUNK * 2 + piece * 16) = uint4{0, 0, 0, 0};
  }
}
