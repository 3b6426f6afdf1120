// Single tokens of linear attention on Hopper: a CTA per row and head, whose state comes and goes as one bulk
// copy each, so that as many states are under way as shared memory holds.
//
// With S before a token and S' behind it: S^T k and S^T q are one pass over S, and out = S'^T q = decay S^T q
// + (k . q) u; a second pass makes S', in place. Rows of S lie across the threads of a CTA, 16 bytes each;
// sums over rows meet in shared memory. Rows of several tokens go one by one, which rounds states of two-byte
// numbers behind each: the launcher leaves those rows to others.
//
// Nothing here waits for ever: the barrier is told by a copy that this CTA asked for. Compiled by NVRTC for
// sm_90; its constants: state_decode_config.cuh. Source: "Gated Delta Networks" (arXiv:2412.06464), eq. 10.

#include "state_decode_params.cuh"
#include "state_decode_tile.cuh"

// One warp: a token's key and query as the passes over the state take them, {k, q} or {decay k, decay q, k,
// decay} by row, and their product.
__device__ __forceinline__ void prepare_token(const Params &p, char *memory, const Row &row, i64 token,
                                              int turn, int lane) {
  const int key_head = row.head / GROUP;
  const char *k_at = p.k + (token * p.k_token + key_head * p.k_head) * 2;
  const char *q_at = p.q + (token * p.q_token + key_head * p.q_head) * 2;
  const float *g_at = p.g + token * p.g_token + row.head * p.g_head;
  constexpr int MINE = KEY_DIM / 32;
  float k[MINE], q[MINE], kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int i = 0; i < MINE; i += 2) {
    const int n = i * 32 + lane * 2;
    unpack_pair(*(const u32 *)(k_at + n * 2), k + i);
    unpack_pair(*(const u32 *)(q_at + n * 2), q + i);
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    kk += k[i] * k[i];
    qq += q[i] * q[i];
    kq += k[i] * q[i];
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    if constexpr (NORMALIZE) {
      kk += __shfl_xor_sync(ALL, kk, mask);
      qq += __shfl_xor_sync(ALL, qq, mask);
    }
    kq += __shfl_xor_sync(ALL, kq, mask);
  }
  const float of_k = NORMALIZE ? rsqrtf(kk + p.eps) : 1.f;
  const float of_q = NORMALIZE ? rsqrtf(qq + p.eps) * p.scale : p.scale;
  float *factors = (float *)(memory + FACTORS_AT) + turn * KEY_DIM * FACTORS;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int n = i / 2 * 64 + lane * 2 + i % 2;
    const float key = k[i] * of_k, query = q[i] * of_q;
    if constexpr (BY_KEY) {
      const float decay = expf(g_at[n]);
      ((float4 *)factors)[n] = {decay * key, decay * query, key, decay};
    } else {
      ((float2 *)factors)[n] = {key, query};
    }
  }
  if (lane == 0) ((float *)(memory + PRODUCT_AT))[turn] = kq * of_k * of_q;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    update_states(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = shared_address(memory);
  const int thread = threadIdx.x, chunk = thread % CHUNKS, group = thread / CHUNKS;
  // Thread 0 makes the barrier, then asks for the copy that completes it; the fence orders the two. The other
  // threads meet the barrier behind __syncthreads. racecheck does not know the fence: it warns of this pair.
  if (thread == 0) {
    mbarrier_init(shared + BARRIER_AT, 1);
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const Row row = find_row(p, blockIdx.x);
  const u64 policy = ONCE ? read_once() : read_again();
  char *const state = p.state + (row.slot * p.state_slot + row.head * p.state_head) * NUMBER;
  if (thread == 0 && row.kept) {
    mbarrier_arrive_expect_tx(shared + BARRIER_AT, STATE_BYTES);
    bulk_load(shared, state, STATE_BYTES, shared + BARRIER_AT, policy);
  }
  // Zeros for tokens without a state, and for those behind the last row, which its CTAs have.
  const int end = row.req == p.num_reqs - 1 ? p.num_tokens - row.begin : row.count;
  const i64 out = row.head * p.out_head + thread;
  if (thread < VALUE_DIM) {
    for (int i = 0; i < end; ++i)
      if (i < row.first || i >= row.count) store_out(p.out, (row.begin + (i64)i) * p.out_token + out, 0.f);
  }
  if (row.slot == 0) return;
  Part part;
  part.at = memory + group * ROW_BYTES + chunk * 16;
  if (!row.kept) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) *(uint4 *)(part.at + i * GROUPS * ROW_BYTES) = {0, 0, 0, 0};
  }
  for (int i = row.first, turn = 0; i < row.count; ++i, turn ^= 1) {
    const i64 token = row.begin + (i64)i;
    if (thread < 32) prepare_token(p, memory, row, token, turn, thread);
    float u = 0.f, decay = 1.f, beta = 1.f;
    if (thread < VALUE_DIM) u = load_number(p.v, token * p.v_token + row.head * p.v_head + thread);
    if constexpr (!BY_KEY) decay = expf(p.g[token * p.g_token + row.head * p.g_head]);
    if constexpr (BETA == 1) beta = load_number(p.beta, token * p.beta_token + row.head);
    if constexpr (BETA == 2) beta = ((const float *)p.beta)[token * p.beta_token + row.head];
    __syncthreads();  // key and query are there; at the first token, the barrier too
    // ends with the copy of this CTA's own state
    if (i == row.first && row.kept) mbarrier_wait(shared + BARRIER_AT, 0);
    sum_rows(part, memory, turn, group, chunk, thread,
             [](const float *row) { return *(const float2 *)row; });
    __syncthreads();
    if (thread < VALUE_DIM) {
      const float *sums = (const float *)(memory + SUMS_AT) + thread;
      float seen = 0.f, y = 0.f;
#pragma unroll
      for (int n = 0; n < PARTS; ++n) {
        if constexpr (DELTA) seen += sums[n * 2 * VALUE_DIM];
        y += sums[(n * 2 + 1) * VALUE_DIM];
      }
      if constexpr (DELTA) u -= decay * seen;
      u *= beta;
      ((float *)(memory + UPDATE_AT))[thread] = u;
      y = decay * y + ((const float *)(memory + PRODUCT_AT))[turn] * u;
      store_out(p.out, token * p.out_token + out, y);
    }
    __syncthreads();
    update_rows(part, memory, decay, turn, group, chunk);
  }
  fence_async();  // of each thread that stored
  __syncthreads();
  if (thread == 0) {
    bulk_store(state, shared, STATE_BYTES, policy);
    bulk_wait_read();  // shared memory is this CTA's until then
  }
}
