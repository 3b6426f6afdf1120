// From chunk to chunk of a gated delta net's long rows, or BY_KEY of Kimi delta attention's, on Hopper: what
// `pass_kernel` of custom_ops/state/triton/chunk_pass.py does.
//
// A CTA has a row, or a segment of one, a head, and 64 columns of values for each warpgroup, whose state
// stays in registers on its side: values are rows, keys columns. So the state, and what is made of values,
// are left operands of products that the registers hold already, and rows of queries, keys, scores and solved
// are read from shared memory as they come. With S' the state on its side, of a chunk:
//   x = v' - seen S' k',  u = x solved',  out' = since S' q' + u scores',  S' = decay S' + (left u) k
// The chain of a chunk is the first, second and last product; those of `out` run beside it. BY_KEY the first
// has rows of its own for k, columns of S' have decays each, and all rows and squares come as `Chunks` has
// them, of which a record has the squares alone otherwise.
//
// Copies are STAGES deep. Nothing here waits for ever: the producer fills stages in the order in which every
// consumer warp uses them, and waits for their releases alone; a warpgroup waits for its own threads.
// Compiled by NVRTC for sm_90a; its constants: delta_pass_config.cuh. Source: as delta_chunks.cu.

#include "delta_pass_load.cuh"

// What a thread holds of a matrix on its side: rows warp * 16 + lane / 4 and + 8, two of each 8 columns.
__device__ __forceinline__ void as_left(u32 (&a)[4], const float *x) {
#pragma unroll
  for (int n = 0; n < 4; ++n) a[n] = pack<false>(x[n * 2], x[n * 2 + 1]);
}
// d (+)= a @ b.T for scores or solved. ADD: 0 starts from zeros.
template <int ADD>
__device__ __forceinline__ void multiply_square(float (&d)[CHUNK / 2], const u32 (&a)[CHUNK / 16][4], u32 b) {
#pragma unroll
  for (int n = 0; n < CHUNK / 16; ++n) {
    const u64 columns = BY_KEY ? operand(b + n * 32) : blocks(b + n * COLUMN_BYTES);
    if (n == 0) multiply<ADD>(d, a[n], columns);
    else multiply<1>(d, a[n], columns);
  }
}
// Times a factor of each column.
template <int COUNT>
__device__ __forceinline__ void scale(float (&x)[COUNT], const float *factors, int key) {
#pragma unroll
  for (int n = 0; n < COUNT / 4; ++n) {
    const float2 f = *(const float2 *)(factors + n * 8 + key);
    x[n * 4] *= f.x, x[n * 4 + 1] *= f.y, x[n * 4 + 2] *= f.x, x[n * 4 + 3] *= f.y;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_pass(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const u32 shared = shared_address(memory);
  const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % NUM_HEADS;
  const int place = blockIdx.x / (TILES * NUM_HEADS);
  const Part part = find_part(p, place);
  const bool of_values = tile * COLUMNS < VALUE_DIM;
  if (part.count <= SHORT || part.slot == 0 || part.low >= part.count) return;
  if (ENDS && (part.high == part.count || (part.number == 0 && !of_values))) return;
  if (threadIdx.x == 0) {
    for (int n = 0; n < STAGES; ++n) {
      mbarrier_init(shared + n * STAGE_BYTES + FULL_AT, 33);  // a warp, and who says how much comes
      mbarrier_init(shared + n * STAGE_BYTES + EMPTY_AT, GROUPS * 4);
    }
    fence_mbarrier_init();
  }
  for (int n = threadIdx.x * 16; !BY_KEY && n < SQUARES_AT_ONCE * SQUARE_BYTES; n += THREADS * 16)
    for (int stage = 0; stage < STAGES; ++stage)  // above diagonals nothing comes
      *(uint4 *)(memory + stage * STAGE_BYTES + SOLVED_AT + n) = {};
  fence_async();
  __syncthreads();
  const int of_cta = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (of_cta >= GROUPS * 4) {
    if constexpr (GROUPS == 2) give_registers<40>();
    if (of_cta == GROUPS * 4) produce(p, part, memory, head, tile * COLUMNS, lane);
    return;
  }
  if constexpr (GROUPS == 2) take_registers<232>();

  const int group = of_cta / 4, warp = of_cta % 4;
  const int column = tile * COLUMNS + group * 64 + warp * 16 + lane / 4, key = lane % 4 * 2;
  const i64 of_state = part.slot * p.state_slot + head * p.state_head;
  float *const joined = p.joined + (JOINED ? (place * (i64)NUM_HEADS + head) * KEY_DIM * WIDTH : 0);
  float state[KEY_DIM / 2];
#pragma unroll
  for (int n = 0; n < KEY_DIM / 2; ++n) {
    const int row = n / 4 * 8 + key + n % 2, d = column + n / 2 % 2 * 8;
    float x = 0.f;
    if (JOINED && !ENDS) {
      x = joined[row * WIDTH + d];
    } else if (part.kept && of_values) {
      const i64 at = of_state + row * p.state_row + d;
      x = STATE_FLOAT ? ((const float *)p.state)[at] : to_float<false>(((const u16 *)p.state)[at]);
    } else if (ENDS && part.number > 0 && row == d - VALUE_DIM) {
      x = 1.f;
    }
    state[n] = x;
  }

  float y[CHUNK / 2];
  u32 results[CHUNK / 16][4];
  int turn = 0;
  const auto store_results = [&](int base) {
    const int at = OUT_AT + (turn * GROUPS + group) * SQUARE_BYTES;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) {
      const int token = n * 16 + lane / 16 * 8 + lane % 8;
      stmatrix_x4_trans(shared + at + line_at(token, warp * 2 + lane / 8 % 2), results[n][0], results[n][1],
                        results[n][2], results[n][3]);
    }
    const int thread = threadIdx.x % 128, token = part.begin + base, to = tile * COLUMNS + group * 64;
    if (thread == 0) bulk_wait_read();  // of the other square, before it is written again
    fence_async();  // the copy engine reads what this thread wrote
    barrier<128>(1 + group);
    if (part.whole(base)) {
      if (thread == 0) tma_store_3d(&p.of_out, shared + at, to, head, token);
      return;
    }
#pragma unroll 1
    for (int n = thread; n < CHUNK * 8; n += 128) {
      const int i = n / 8, piece = n % 8;
      char *const row = p.out + ((token + (i64)i) * p.out_token + head * p.out_head + to) * 2 + piece * 16;
      if (part.live(base + i)) *(uint4 *)row = *(const uint4 *)(memory + at + line_at(i, piece));
    }
  };
  const auto release = [&](u32 empty) {
    __syncwarp();  // all lanes have read values and factors
    if (lane == 0) mbarrier_arrive(empty);
  };

  Stage stage;
  u32 held[KEY_DIM / 16][4], left[CHUNK / 16][4];
  float x[CHUNK / 2], u[CHUNK / 2];
  const auto hold = [&] {
#pragma unroll
    for (int n = 0; n < KEY_DIM / 16; ++n) as_left(held[n], state + n * 8);
  };
  // Of the chunk's queries, or of what its keys know, which begin at `part` of the stage.
  const auto times_state = [&](float (&to)[CHUNK / 2], int part) {
    const u32 at = shared + stage.rows() + part;
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < KEY_DIM / 16; ++n) {
      const u64 rows = operand(at + n / 4 * SQUARE_BYTES + n % 4 * 32);
      if (n == 0) multiply<0>(to, held[n], rows);
      else multiply<1>(to, held[n], rows);
    }
    wgmma_commit();
  };
  const auto solve = [&] {  // u of what the keys know, x
    const u32 at = shared + stage.rows();
    const char *const factors = memory + stage.rows();
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) {  // of 16 tokens
      u32 values[4] = {};
      const int token = n * 16 + lane / 16 * 8 + lane % 8;
      if (of_values)
        ldmatrix_x4_trans(values, at + V_AT + group * SQUARE_BYTES + line_at(token, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int i = n * 8 + e;
        const float2 seen = *(const float2 *)(factors + SEEN_AT + (i / 4 * 8 + key) * 4);
        x[i] = to_float<false>((u16)values[e / 2]) - seen.x * x[i];
        x[i + 1] = to_float<false>((u16)(values[e / 2] >> 16)) - seen.y * x[i + 1];
      }
      as_left(left[n], x + n * 8);
    }
    wgmma_fence();
    multiply_square<0>(u, left, at + SOLVED_AT);
    wgmma_commit();
    wgmma_wait<0>();
  };
  const auto update = [&] {  // products of the chunk with u
    const u32 at = shared + stage.rows();
    const char *const factors = memory + stage.rows();
    u32 updates[CHUNK / 16][4];
    if constexpr (!ENDS) {
#pragma unroll
      for (int n = 0; n < CHUNK / 16; ++n) as_left(updates[n], u + n * 8);
      scale(y, (const float *)(factors + SINCE_AT), key);
    }
    scale(u, (const float *)(factors + LEFT_AT), key);
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) as_left(left[n], u + n * 8);
    const float *const decay = (const float *)(factors + DECAY_AT);
    if constexpr (BY_KEY) {
      scale(state, decay, key);
    } else {
#pragma unroll
      for (int n = 0; n < KEY_DIM / 2; ++n) state[n] *= *decay;
    }
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n)
      multiply_lines(state, left[n], operand(at + K_AT + n * 2048, 1024, SQUARE_BYTES));
    wgmma_commit();
    if constexpr (!ENDS) {
      multiply_square<1>(y, updates, at + SCORES_AT);
      wgmma_commit();
    }
  };

  int base = part.start();
  if (base < part.high) {  // else all of a segment is padding
    hold();
    // arrive: the producer's lanes, and what they have copied; so below
    mbarrier_wait(shared + stage.full(), stage.phase);
    times_state(x, KNOWN_AT);
    if constexpr (!ENDS) times_state(y, Q_AT);
    wgmma_wait<ENDS ? 0 : 1>();
    solve();
    for (; base + CHUNK < part.high; base += CHUNK) {
      update();
      wgmma_wait<ENDS ? 0 : 1>();  // the state; products of scores run on beside the next chunk's first
      hold();
      const u32 done = shared + stage.empty();
      if constexpr (ENDS) release(done);
      stage.advance();
      mbarrier_wait(shared + stage.full(), stage.phase);
      times_state(x, KNOWN_AT);
      if constexpr (!ENDS) {
        wgmma_wait<1>();  // results
        release(done);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; ++n) as_left(results[n], y + n * 8);
        times_state(y, Q_AT);
        store_results(base);
      }
      wgmma_wait<ENDS ? 0 : 1>();
      solve();
    }
    update();
    wgmma_wait<0>();
    if constexpr (!ENDS) {
#pragma unroll
      for (int n = 0; n < CHUNK / 16; ++n) as_left(results[n], y + n * 8);
      store_results(base);
      if (threadIdx.x % 128 == 0) bulk_wait_read();
    }
  }
  if (!ENDS && part.high < part.count) return;
#pragma unroll
  for (int n = 0; n < KEY_DIM / 2; ++n) {
    const int row = n / 4 * 8 + key + n % 2, d = column + n / 2 % 2 * 8;
    const i64 at = of_state + row * p.state_row + d;
    if (ENDS) joined[row * WIDTH + d] = state[n];
    else if (STATE_FLOAT) ((float *)p.state)[at] = state[n];
    else ((u16 *)p.state)[at] = (u16)pack<false>(state[n], 0.f);
  }
}
