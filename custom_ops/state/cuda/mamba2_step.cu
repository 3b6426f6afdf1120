// Mamba 2's single tokens on Hopper, from the projection to what the output projection, or a norm before it,
// takes: a CTA per row and head, or for few rows a SPLIT of one's columns, which asks its state into L2 ahead
// of its wait and has it in registers, of a NEW_STEP ahead of the wait already. While it comes, the CTA makes
// its values, and key and query (B and C), by a causal convolution over its channels, and the step.
//
// CTAs of a group share key and query, and make them each for itself. There are too many for a cluster: the
// one that comes last to a semaphore, behind its reads, moves the window of these channels on. Every CTA has
// read it by then. The window of its values is each one's own.
//
// Nothing here waits for ever: no CTA waits at the semaphore. Compiled by NVRTC for sm_90; its constants:
// mamba2_step_config.cuh. Source: "Transformers are SSMs" (arXiv:2405.21060), listing 1.

#include "mamba2_step_params.cuh"
#include "state_decode_tile.cuh"
#include "state_step.cuh"

constexpr int CHANNELS = VALUE_DIM + 2 * KEY_DIM;  // of a CTA: values, key and query, side by side
constexpr int TURNS_OF_PAIRS = (CHANNELS / 2 + THREADS - 1) / THREADS;
constexpr int NUM_GROUPS = NUM_HEADS / GROUP;
// of the CTAs that share key and query
constexpr int IS_LAST_AT = PRODUCTS_AT + PARTS * (int)sizeof(Products);

// BESIDE an attention over other projections of the same product: attention lets this kernel begin when each
// of its CTAs has waited for all that is ahead of both, so that no CTA waits here. Kernels behind wait for
// this launch alone: its first CTA waits for attention at its end.
__device__ __forceinline__ void wait_for_attention() {
  if (BESIDE && blockIdx.x == 0) griddepcontrol_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    mamba2_step(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  const int thread = threadIdx.x, chunk = thread % CHUNKS, group = thread / CHUNKS;
  griddepcontrol_launch_dependents();
  const int item = blockIdx.x / SPLIT, head = item % NUM_HEADS, key_head = head / GROUP;
  const int first = blockIdx.x % SPLIT * VALUE_DIM;  // of the head's columns
  auto channel_of = [&](int part) {  // in x
    if (part < VALUE_DIM) return head * COLUMNS + first + part;
    const int key = part - VALUE_DIM, keys = NUM_HEADS * COLUMNS + key_head * KEY_DIM;
    return keys + (key < KEY_DIM ? key : (NUM_GROUPS - 1) * KEY_DIM + key);
  };
  Taps taps[TURNS_OF_PAIRS];
#pragma unroll
  for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
    const int part = (i * THREADS + thread) * 2;
    if (part < CHANNELS) taps[i].load(p, channel_of(part));
  }
  const Row row = find_row(p, item);
  char *const state = p.state + (row.slot * p.state_slot + head * p.state_head + first) * NUMBER;
  if (row.kept && !NEW_STEP) {
    Held::prefetch(state, thread);
#pragma unroll
    for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
      const int part = (i * THREADS + thread) * 2;
      if (part < CHANNELS) Window::prefetch(p, row, channel_of(part));
    }
  }
  const float dt_bias = load_weight<DT_BIAS_FLOAT>(p.dt_bias, head);
  const float rate = expf(load_weight<A_LOG_FLOAT>(p.a_log, head));
  const float skip = load_weight<SKIP_FLOAT>(p.skip_weight, head);
  Held held(state, thread);
  Window windows[TURNS_OF_PAIRS];
  auto load_past = [&] {
#pragma unroll
    for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
      const int part = (i * THREADS + thread) * 2;
      if (part < CHANNELS) windows[i].load_past(p, row, channel_of(part));
    }
  };
  if constexpr (NEW_STEP) {
    load_past();
    held.fetch(row.kept);
  }
  if constexpr (BESIDE) load_and_forget_l1(p.starts);  // ahead of every plain load of what kernels wrote
  else griddepcontrol_wait();
  // Zeros for tokens without a state, and for those behind the last row, which its CTAs have.
  const int end = row.req == p.num_reqs - 1 ? p.num_tokens - row.begin : row.count;
  const i64 out = head * p.out_head + first + thread;
  if (thread < VALUE_DIM) {
    for (int i = 0; i < end; ++i)
      if (i < row.first || i >= row.count) store_out(p.out, (row.begin + (i64)i) * p.out_token + out, 0.f);
  }
  if (row.slot == 0) return wait_for_attention();  // all CTAs of the row
  const i64 token = row.begin + (i64)row.first;

  if constexpr (!NEW_STEP) load_past();
#pragma unroll
  for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
    const int part = (i * THREADS + thread) * 2;
    if (part < CHANNELS) windows[i].load_own(p, token, channel_of(part));
  }
  if constexpr (!NEW_STEP) held.fetch(row.kept);  // behind the windows, which would come last otherwise
  const float dt = load_number(p.dt, token * p.dt_token + head) + dt_bias;
  float gate = 0.f;
  if (GATED && thread < VALUE_DIM)
    gate = load_number(p.gate, token * p.gate_token + head * p.gate_head + first + thread);
  float *const factors = (float *)(memory + FACTORS_AT), *const values = (float *)(memory + UPDATE_AT);
#pragma unroll
  for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
    const int part = (i * THREADS + thread) * 2;
    if (part >= CHANNELS) continue;
    const int key = part - VALUE_DIM;  // and behind all of them the query's
    if (part < VALUE_DIM) windows[i].mix(taps[i], values + part, 1);
    else windows[i].mix(taps[i], factors + key % KEY_DIM * FACTORS + key / KEY_DIM * QUERY_FACTOR, FACTORS);
    if (SHARERS == 1 || part < VALUE_DIM) windows[i].move_on(p);
  }
  float step = softplus(dt);  // comparisons: NaN stays NaN
  step = step < p.min_step ? p.min_step : step;
  step = step > p.max_step ? p.max_step : step;
  const float decay = expf(-rate * step);
  __syncthreads();  // values, key and query are there, and their windows are read
  int *const semaphore = p.semaphore + row.req * NUM_GROUPS + key_head;
  int arrived = 0;
  if (SHARERS > 1 && thread == THREADS - 1) arrived = count_arrival(semaphore);
  const float value = thread < VALUE_DIM ? values[thread] : 0.f, u = step * value;
  Products products = {0.f, 0.f, 0.f};
  sum_rows(held, memory, 0, group, chunk, thread, [&](const float *row) {
    const float2 of = *(const float2 *)row;
    products.add(of.x, of.y);
    return of;
  });
  products.put(memory, group, chunk, thread);
  if (thread < VALUE_DIM) values[thread] = u;
  if (SHARERS > 1 && thread == THREADS - 1) {  // its number came while the sums were made
    const bool is_last = arrived == SHARERS - 1;
    if (is_last) *semaphore = 0;
    *(int *)(memory + IS_LAST_AT) = is_last;
  }
  __syncthreads();
  if (SHARERS > 1 && *(const int *)(memory + IS_LAST_AT)) {
#pragma unroll
    for (int i = 0; i < TURNS_OF_PAIRS; ++i) {
      const int part = (i * THREADS + thread) * 2;
      if (part >= VALUE_DIM && part < CHANNELS) windows[i].move_on(p);
    }
  }
  if (thread < VALUE_DIM) {
    const float *sums = (const float *)(memory + SUMS_AT) + thread;
    float y = 0.f;
#pragma unroll
    for (int n = 0; n < PARTS; ++n) y += sums[(n * 2 + 1) * VALUE_DIM];
    y = decay * y + Products::all(memory).both * u + skip * value;
    store_out(p.out, token * p.out_token + out, GATED ? y * (gate * sigmoid(gate)) : y);
  }
  update_rows(held, memory, decay, 0, group, chunk);
  held.put_back();
  wait_for_attention();
}
