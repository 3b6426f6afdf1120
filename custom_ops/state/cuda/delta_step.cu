// A gated delta net's single tokens on Hopper, from its projections to what its output projection takes: a
// CTA per row and head, or for few rows a SPLIT of one's columns, which asks its state into L2 ahead of its
// wait and has it in registers, of a NEW_STEP ahead of the wait already. While it comes, the CTA makes query,
// key and values, by a causal convolution over its channels, and decay and beta.
//
// CTAs that share a query and key make them each for itself, as a cluster: the last of them moves the window
// of these channels on when all have read it. The window of its values is each one's own. CTAs of a head send
// each other their squares for its norm.
//
// Nothing here waits for ever: a cluster is there as a whole. Compiled by NVRTC for sm_90; its constants:
// delta_step_config.cuh.

#include "delta_step_params.cuh"
#include "state_decode_tile.cuh"
#include "state_step.cuh"

#define CLUSTERED __cluster_dims__(GROUP * SPLIT, 1, 1)

constexpr int CHANNELS = 2 * KEY_DIM + VALUE_DIM;  // of a CTA: its query, key and values, side by side
constexpr int SQUARES_AT = PRODUCTS_AT + PARTS * (int)sizeof(Products);  // [COLUMNS / 32], the last
static_assert(CHANNELS / 2 <= THREADS && VALUE_DIM % 32 == 0, "two channels of a thread, whole warps");

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, MIN_CTAS)
    delta_step(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  const int thread = threadIdx.x, chunk = thread % CHUNKS, group = thread / CHUNKS;
  griddepcontrol_launch_dependents();
  const int item = blockIdx.x / SPLIT, split = blockIdx.x % SPLIT, head = item % NUM_HEADS;
  const int key_head = head / GROUP, first = split * VALUE_DIM;  // of the head's columns
  const int part = thread * 2, keys = NUM_HEADS / GROUP * KEY_DIM;
  const int channel = part < KEY_DIM       ? key_head * KEY_DIM + part
                      : part < 2 * KEY_DIM ? keys + key_head * KEY_DIM + part - KEY_DIM
                                           : 2 * keys + head * COLUMNS + first + part - 2 * KEY_DIM;
  Taps taps;
  if (part < CHANNELS) taps.load(p, channel);
  const Row row = find_row(p, item);
  char *const state = p.state + (row.slot * p.state_slot + head * p.state_head + first) * NUMBER;
  if (row.kept && !NEW_STEP) {
    Held::prefetch(state, thread);
    if (part < CHANNELS) Window::prefetch(p, row, channel);
  }
  // of a decay per row of the state: a thread has that of a row
  const int decays = BY_KEY ? KEY_DIM : 1, mine = BY_KEY ? thread % KEY_DIM : 0;
  const float dt_bias = load_weight<DT_BIAS_FLOAT>(p.dt_bias, head * decays + mine);
  const float rate = expf(load_weight<A_LOG_FLOAT>(p.a_log, head));
  float weight = 0.f;
  if (thread < VALUE_DIM)
    weight = load_weight<NORM_FLOAT>(p.norm_weight, head * p.norm_head + first + thread);
  Held held(state, thread);
  Window window;
  if (NEW_STEP && part < CHANNELS) window.load_past(p, row, channel);
  if constexpr (NEW_STEP) held.fetch(row.kept);
  griddepcontrol_wait();
  if constexpr (!NEW_STEP) held.fetch(row.kept);
  // Zeros for tokens without a state, and for those behind the last row, which its CTAs have.
  const int end = row.req == p.num_reqs - 1 ? p.num_tokens - row.begin : row.count;
  const i64 out = head * p.out_head + first + thread;
  if (thread < VALUE_DIM) {
    for (int i = 0; i < end; ++i)
      if (i < row.first || i >= row.count) store_out(p.out, (row.begin + (i64)i) * p.out_token + out, 0.f);
  }
  if (row.slot == 0) return;  // the whole cluster
  const i64 token = row.begin + (i64)row.first;

  if (!NEW_STEP && part < CHANNELS) window.load_past(p, row, channel);
  if (part < CHANNELS) window.load_own(p, token, channel);
  const int side = head / TOGETHER, place = head % TOGETHER;  // groups of a, b and gate
  const float a = load_number(p.a, token * p.a_token + side * p.a_group + place * decays + mine);
  const float b = load_number(p.b, token * p.b_token + side * p.b_group + place);
  float gate = 0.f;
  if (thread < VALUE_DIM)
    gate = load_number(p.gate, token * p.gate_token + side * p.gate_group + place * COLUMNS + first + thread);
  float *const factors = (float *)(memory + FACTORS_AT), *const values = (float *)(memory + UPDATE_AT);
  if (part < CHANNELS) {
    float *const row = factors + part % KEY_DIM * FACTORS;
    if (part < 2 * KEY_DIM) window.mix(taps, row + (part < KEY_DIM ? QUERY_FACTOR : KEY_FACTOR), FACTORS);
    else window.mix(taps, values + part - 2 * KEY_DIM, 1);
    if (SHARERS == 1 || part >= 2 * KEY_DIM) window.move_on(p);
  }
  if constexpr (SHARERS > 1) cluster_arrive();  // the window of the shared channels is read
  float log_decay = -rate * softplus(a + dt_bias);
  if constexpr (BOUNDED) log_decay = p.bound * sigmoid(rate * (a + dt_bias));
  if (BY_KEY && thread < KEY_DIM) factors[thread * FACTORS + DECAY_FACTOR] = expf(log_decay);
  const float decay = BY_KEY ? 1.f : expf(log_decay);
  const float beta = p.beta_scale * sigmoid(b);
  __syncthreads();  // query, key and values are there
  float u = thread < VALUE_DIM ? values[thread] : 0.f, y = 0.f;
  Products products = {0.f, 0.f, 0.f};
  sum_rows(held, memory, 0, group, chunk, thread, [&](const float *row) {
    const float key = row[KEY_FACTOR], query = row[QUERY_FACTOR], of_row = BY_KEY ? row[DECAY_FACTOR] : 1.f;
    products.add(key, query);
    return float2{of_row * key, of_row * query};
  });
  products.put(memory, group, chunk, thread);
  const int rank = blockIdx.x % SHARERS;
  if constexpr (SHARERS > 1) {
    cluster_wait();
    if (rank == SHARERS - 1 && part < 2 * KEY_DIM) window.move_on(p);
  }
  __syncthreads();
  if (thread < VALUE_DIM) {
    const float *sums = (const float *)(memory + SUMS_AT) + thread;
    float seen = 0.f;
#pragma unroll
    for (int n = 0; n < PARTS; ++n) {
      seen += sums[n * 2 * VALUE_DIM];
      y += sums[(n * 2 + 1) * VALUE_DIM];
    }
    const Products all = Products::all(memory);
    const float of_key = rsqrtf(all.keys + p.key_eps), of_query = rsqrtf(all.queries + p.key_eps) * p.scale;
    u = beta * (u - decay * of_key * seen);
    values[thread] = of_key * u;
    y = rounded(of_query * (decay * y + of_key * all.both * u));
    float squares = y * y;
#pragma unroll
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(ALL, squares, mask);
    float *const to = (float *)(memory + SQUARES_AT) + (first + thread) / 32;
    if (SPLIT == 1 && thread % 32 == 0) *to = squares;
    if (SPLIT > 1 && thread % 32 < SPLIT) st_cluster(mapa(to, rank - split + thread % 32), squares);
  }
  if constexpr (SPLIT == 1) __syncthreads();
  else meet_cluster<SHARERS>();
  if (thread < VALUE_DIM) {
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMNS / 32; ++n) squares += ((const float *)(memory + SQUARES_AT))[n];
    y *= rsqrtf(squares / COLUMNS + p.eps) * weight * (SIGMOID ? sigmoid(gate) : gate * sigmoid(gate));
    store_out(p.out, token * p.out_token + out, y);
  }
  update_rows(held, memory, decay, 0, group, chunk);
  held.put_back();
}
