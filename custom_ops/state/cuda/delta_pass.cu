// From chunk to chunk of a gated delta net's long rows, on Hopper: what `pass_kernel` of
// custom_ops/state/triton/chunk_pass.py does.
//
// A CTA has a row, or a segment of one, a head, and 64 columns of values for each warpgroup, whose state
// stays in registers on its side: values are rows, keys columns. So the state, and what is made of values,
// are left operands of products that the registers hold already, and rows of queries, keys, scores and solved
// are read from shared memory as they come. With S' the state on its side, of a chunk:
//   x = v' - seen S' k',  u = x solved',  out' = since S' q' + u scores',  S' = decay S' + (left u) k
// The chain of a chunk is the first, second and last product; those of `out` run beside it.
//
// Copies are STAGES deep. Nothing here waits for ever: threads wait for their own copies and for each other.
// Compiled by NVRTC for sm_90a; its constants: delta_pass_config.cuh. Source: as delta_chunks.cu.

#include "delta_pass_shared.cuh"

// A row's tokens, padding among them, the part of it that this CTA has.
struct Part {
  int begin, count, first, number, low, high;
  i64 slot;
  bool kept;  // the row's first part goes on from its slot's state
  __device__ __forceinline__ bool live(int at) const { return at >= first && at < count; }
};

__device__ __forceinline__ Part find_part(const Params &p, int place) {
  int row = place, segment = p.num_tokens;
  if constexpr (JOINED) {  // as custom_ops/triton/find_row.py says
    segment = p.segment;
    int low = 0, high = p.num_reqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (load_l2(p.starts + middle) / segment + middle <= place) low = middle;
      else high = middle;
    }
    row = low;
  }
  Part part;
  part.begin = load_l2(p.starts + row);
  part.count = load_l2(p.starts + row + 1) - part.begin;
  part.number = JOINED ? place - part.begin / segment - row : 0;
  const int length = load_l2(p.lens + row);
  part.first = min(max(part.count - length, 0), part.count);
  part.slot = part.first < part.count ? load_l2(p.slots + row) : 0;
  part.low = part.number * segment;
  part.high = min(part.low + segment, part.count);
  part.kept = part.number == 0 && length > part.count;
  return part;
}

// Rows of a chunk into a stage, PIECES of 16 bytes each; zeros where there are none. A thread has the same
// piece of every so many rows, so that its lines are swizzled alike. `from`: of the chunk's begin.
template <int PIECES>
__device__ __forceinline__ void load_rows(u32 to, const char *from, i64 row_bytes, const Part &part,
                                          int base) {
  constexpr int ROWS = THREADS / PIECES;
  static_assert(ROWS % 8 == 0 && CHUNK % ROWS == 0, "lines of one swizzle");
  const int line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  const char *row = from + line * row_bytes + piece * 16;
  to += line_at(line, piece);
#pragma unroll
  for (int n = 0; n < CHUNK / ROWS; ++n, row += ROWS * row_bytes)
    cp_async_or_zero(to + n * ROWS * 128, row, part.live(base + line + n * ROWS));
}

// What a thread holds of a matrix on its side: rows warp * 16 + lane / 4 and + 8, two of each 8 columns.
__device__ __forceinline__ void as_left(u32 (&a)[4], const float *x) {
#pragma unroll
  for (int n = 0; n < 4; ++n) a[n] = pack<false>(x[n * 2], x[n * 2 + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_pass(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const u32 shared = shared_address(memory);
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % NUM_HEADS;
  const int place = blockIdx.x / (TILES * NUM_HEADS);
  const Part part = find_part(p, place);
  const bool of_values = tile * COLUMNS < VALUE_DIM;
  if (part.count <= SHORT || part.slot == 0 || part.low >= part.count) return;
  if (ENDS && (part.high == part.count || (part.number == 0 && !of_values))) return;

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

  const i64 here = head * (i64)p.num_tokens + part.begin;
  const char *const k = p.k + (part.begin * p.k_token + head / GROUP * p.k_head) * 2;
  const char *const q = p.q + (part.begin * p.q_token + head / GROUP * p.q_head) * 2;
  const char *const v = p.v + (part.begin * p.v_token + head * p.v_head + tile * COLUMNS) * 2;
  const auto load_stage = [&](int stage, int base) {
    if (base < part.high) {
      const u32 to = shared + stage * STAGE_BYTES;
      const i64 at = (here + base) * ROW_BYTES;
      load_rows<16>(to + K_AT, k + base * p.k_token * 2, p.k_token * 2, part, base);
      if (of_values) load_rows<GROUPS * 8>(to + V_AT, v + base * p.v_token * 2, p.v_token * 2, part, base);
      load_rows<8>(to + SOLVED_AT, p.solved + at, ROW_BYTES, part, base);
      if constexpr (!ENDS) {
        load_rows<16>(to + Q_AT, q + base * p.q_token * 2, p.q_token * 2, part, base);
        load_rows<8>(to + SCORES_AT, p.scores + at, ROW_BYTES, part, base);
      }
    }
    cp_async_commit();
  };
  const auto load_factor = [&](int base) {  // one of a thread
    const int i = threadIdx.x % CHUNK, which = threadIdx.x / CHUNK;
    const float *from = which == 0 ? p.seen : which == 1 ? p.left : p.since;
    return which < FACTORS / CHUNK && base < part.high && part.live(base + i) ? from[here + base + i] : 0.f;
  };
  const auto load_second = [&](int base) {  // of a single warpgroup the third ones
    return GROUPS == 1 && !ENDS && threadIdx.x < CHUNK && base < part.high && part.live(base + threadIdx.x)
               ? p.since[here + base + threadIdx.x]
               : 0.f;
  };
  const auto load_decay = [&](int base) {
    return base < part.high ? p.decay[here + max(base, part.first)] : 0.f;
  };

  float y[CHUNK / 2];
  const auto store_results = [&](int base) {
    const u32 to = shared + OUT_AT + group * SQUARE_BYTES;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n += 2) {
      u32 a[4];
      as_left(a, y + n * 4);
      const int token = n * 8 + lane / 16 * 8 + lane % 8;
      stmatrix_x4_trans(to + line_at(token, warp * 2 + lane / 8 % 2), a[0], a[1], a[2], a[3]);
    }
    barrier<128>(1 + group);  // the warpgroup's are there; the barrier of all threads is behind their reads
    const int line = threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
    i64 out = (part.begin + (i64)base + line) * p.out_token + head * p.out_head + tile * COLUMNS + group * 64;
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n, out += 16 * p.out_token) {
      const int i = line + n * 16;
      const uint4 row = *(const uint4 *)(memory + OUT_AT + group * SQUARE_BYTES + line_at(i, piece));
      if (part.live(base + i)) *(uint4 *)(p.out + out * 2 + piece * 16) = row;
    }
  };

  const int begin = max(part.low, part.first / CHUNK * CHUNK);
  int base = begin, stage = 0, turn = 0;
  load_stage(0, base);
  load_stage(1, base + CHUNK);
  float factor = load_factor(base), second = load_second(base), decay = load_decay(base);
  for (; base < part.high; base += CHUNK, stage = stage == STAGES - 1 ? 0 : stage + 1, turn ^= 1) {
    float *const factors = (float *)(memory + FACTORS_AT) + turn * FACTORS;
    if (threadIdx.x < FACTORS) factors[threadIdx.x] = factor;
    if (GROUPS == 1 && !ENDS && threadIdx.x < CHUNK) factors[SINCE + threadIdx.x] = second;
    const float whole = decay;
    cp_async_wait<STAGES - 2>();
    fence_async();  // products read what copies of this thread wrote
    __syncthreads();  // all threads' copies are there, and products of the chunk before have read theirs
    const u32 at = shared + stage * STAGE_BYTES;
    u32 held[KEY_DIM / 16][4];
#pragma unroll
    for (int n = 0; n < KEY_DIM / 16; ++n) as_left(held[n], state + n * 8);
    // of the chunk's keys or queries, which begin at `part` of the stage
    const auto times_state = [&](float (&to)[CHUNK / 2], int part) {
#pragma unroll
      for (int n = 0; n < KEY_DIM / 16; ++n) {
        const u64 rows = operand(at + part + n / 4 * SQUARE_BYTES + n % 4 * 32);
        if (n == 0) multiply<0>(to, held[n], rows);
        else multiply<1>(to, held[n], rows);
      }
    };
    float x[CHUNK / 2];
    wgmma_fence();
    times_state(x, K_AT);
    wgmma_commit();
    // while this runs
    load_stage(stage == 0 ? STAGES - 1 : stage - 1, base + (STAGES - 1) * CHUNK);
    factor = load_factor(base + CHUNK), second = load_second(base + CHUNK), decay = load_decay(base + CHUNK);
    if constexpr (!ENDS) {
      if (base > begin) store_results(base - CHUNK);
      wgmma_fence();
      times_state(y, Q_AT);
      wgmma_commit();
    }
#pragma unroll
    for (int n = 0; n < KEY_DIM / 2; ++n) state[n] *= whole;
    wgmma_wait<ENDS ? 0 : 1>();
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n += 2) {  // of 16 tokens
      u32 values[4] = {};
      const int token = n * 8 + lane / 16 * 8 + lane % 8;
      if (of_values)
        ldmatrix_x4_trans(values, at + V_AT + group * SQUARE_BYTES + line_at(token, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float value = to_float<false>((u16)(values[e / 2] >> e % 2 * 16));
        const int i = n * 4 + e;
        x[i] = value - factors[SEEN + i / 4 * 8 + key + i % 2] * x[i];
      }
    }
    u32 left[CHUNK / 16][4];
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) as_left(left[n], x + n * 8);
    float u[CHUNK / 2];
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) {
      if (n == 0) multiply<0>(u, left[n], operand(at + SOLVED_AT));
      else multiply<1>(u, left[n], operand(at + SOLVED_AT + n * 32));
    }
    wgmma_commit();
    wgmma_wait<0>();
    u32 update[CHUNK / 16][4];
    if constexpr (!ENDS) {
#pragma unroll
      for (int n = 0; n < CHUNK / 16; ++n) as_left(update[n], u + n * 8);
#pragma unroll
      for (int i = 0; i < CHUNK / 2; ++i) y[i] *= factors[SINCE + i / 4 * 8 + key + i % 2];
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) u[i] *= factors[LEFT + i / 4 * 8 + key + i % 2];
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) as_left(left[n], u + n * 8);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n)
      multiply_lines(state, left[n], operand(at + K_AT + n * 2048, 1024, SQUARE_BYTES));
    wgmma_commit();
    if constexpr (!ENDS) {
#pragma unroll
      for (int n = 0; n < CHUNK / 16; ++n) multiply<1>(y, update[n], operand(at + SCORES_AT + n * 32));
      wgmma_commit();
    }
    wgmma_wait<0>();
  }
  if constexpr (!ENDS) {
    __syncthreads();  // results of the chunk before are read
    store_results(base - CHUNK);
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
