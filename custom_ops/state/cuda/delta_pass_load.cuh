// What a CTA of the kernel that goes from chunk to chunk has of a row, and its producer: one warp, which has
// the copy engine bring chunks. Rows of those that padding or a row's end cuts it copies itself, zeros in
// place of tokens that are not there.
#pragma once

#include "delta_pass_shared.cuh"

// A row's tokens, padding among them, the part of it that this CTA has.
struct Part {
  int begin, count, first, number, low, high;
  int chunk;  // the row's first one among all
  i64 slot;
  bool kept;  // the row's first part goes on from its slot's state
  __device__ __forceinline__ bool live(int at) const { return at >= first && at < count; }
  __device__ __forceinline__ bool whole(int base) const { return base >= first && base + CHUNK <= count; }
  __device__ __forceinline__ int start() const { return max(low, first / CHUNK * CHUNK); }
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
  part.chunk = part.begin / CHUNK + row;
  part.number = JOINED ? place - part.begin / segment - row : 0;
  const int length = load_l2(p.lens + row);
  part.first = min(max(part.count - length, 0), part.count);
  part.slot = part.first < part.count ? load_l2(p.slots + row) : 0;
  part.low = part.number * segment;
  part.high = min(part.low + segment, part.count);
  part.kept = part.number == 0 && length > part.count;
  return part;
}

// Rows of a chunk, PIECES of 16 bytes each; `from`: of the chunk's begin. A lane has the same piece of every
// so many rows.
template <int PIECES>
__device__ __forceinline__ void copy_rows(u32 to, const char *from, i64 row_bytes, const Part &part, int base,
                                          int lane) {
  constexpr int LINES = 32 / PIECES;
  const int line = lane / PIECES, piece = lane % PIECES;
  from += line * row_bytes + piece * 16;
#pragma unroll 1
  for (int eight = 0; eight < CHUNK; eight += 8, to += 8 * 128) {  // lines of one swizzle
#pragma unroll
    for (int n = 0; n < 8; n += LINES, from += LINES * row_bytes)
      cp_async_or_zero(to + line_at(line + n, piece), from, part.live(base + eight + line + n));
  }
}

// BY_KEY: norms of queries and keys, and what else rows have in `Chunks`; copies a lane has waited for, or
// those that report to `full`.
__device__ __forceinline__ void bring_by_key(const Params &p, const Part &part, char *memory, int stage,
                                             int head, int base, int lane) {
  const u32 to = shared_address(memory) + stage, full = to + FULL_AT;
  const int token = part.begin + base;
  const i64 place = (i64)head * p.num_tokens + token;
  if (part.whole(base)) {
    if (lane == 0) tma_load_3d(to + SOLVED_AT, &p.of_solved, 0, head, token, full);
    if (!ENDS && lane == 0) tma_load_3d(to + SCORES_AT, &p.of_scores, 0, head, token, full);
#pragma unroll
    for (int n = 0; lane == 0 && n < 2; ++n)
      tma_load_3d(to + KNOWN_AT + n * SQUARE_BYTES, &p.of_known, n * 64, head, token, full);
  } else {
    constexpr int SQUARE_ROW = CHUNK * 2, ROW = KEY_DIM * 2;
    copy_rows<8>(to + SOLVED_AT, p.solved + place * SQUARE_ROW, SQUARE_ROW, part, base, lane);
    if constexpr (!ENDS)
      copy_rows<8>(to + SCORES_AT, p.scores + place * SQUARE_ROW, SQUARE_ROW, part, base, lane);
    copy_rows<16>(to + KNOWN_AT, p.known + place * ROW, ROW, part, base, lane);
  }
#pragma unroll
  for (int i = lane; i < CHUNK; i += 32) {
    const bool live = part.live(base + i);
    ((float *)(memory + stage + LEFT_AT))[i] = live ? p.left[place + i] : 0.f;
    if constexpr (!ENDS) ((float *)(memory + stage + SINCE_AT))[i] = live ? p.since[place + i] : 0.f;
  }
}

// `column`: of values, the CTA's first one.
__device__ __forceinline__ void produce(const Params &p, const Part &part, char *memory, int head, int column,
                                        int lane) {
  const u32 shared = shared_address(memory);
  const bool of_values = column < VALUE_DIM;
  const int key_head = head / GROUP;
  const char *const k = p.k + (part.begin * p.k_token + key_head * p.k_head) * 2;
  const char *const q = p.q + (part.begin * p.q_token + key_head * p.q_head) * 2;
  const char *const v = p.v + (part.begin * p.v_token + head * p.v_head + column) * 2;
  const u64 policy = read_again();
  Stage stage;
  for (int base = part.start(); base < part.high; base += CHUNK, stage.advance()) {
    const u32 to = shared + stage.rows(), full = shared + stage.full();
    // arrive: all consumer warps, when their products have read the stage
    mbarrier_wait(shared + stage.empty(), stage.phase ^ 1);
    const bool whole = part.whole(base);
    const int rows = whole ? (BY_KEY ? BEHIND : SOLVED_AT) - (of_values ? 0 : GROUPS * SQUARE_BYTES) : 0;
    if (lane == 0) mbarrier_arrive_expect_tx(full, (BY_KEY ? KEY_DIM * 4 : RECORD_PART) + rows);
    const i64 number = (part.chunk + base / CHUNK) * (i64)NUM_HEADS + head;
    const char *record = p.records + number * RECORD_BYTES;
    if (BY_KEY) {
      if (lane == 0) bulk_load(to + DECAY_AT, p.decay + number * KEY_DIM, KEY_DIM * 4, full, policy);
    } else if (lane < SQUARES_AT_ONCE * STRIPS) {
      const int n = lane % STRIPS, of_square = square_at(n, n);
      const u32 at = to + SOLVED_AT + lane / STRIPS * SQUARE_BYTES + n * (COLUMN_BYTES + SQUARE);
      bulk_load(at, record + lane / STRIPS * SCORES + of_square, (STRIPS - n) * SQUARE, full, policy);
    } else if (lane == SQUARES_AT_ONCE * STRIPS) {
      bulk_load(to + BEHIND, record + SEEN, FACTOR_BYTES, full, policy);
    }
    if (whole) {
      const int token = part.begin + base;
#pragma unroll
      for (int n = 0; lane == 0 && n < 2; ++n)
        tma_load_3d(to + K_AT + n * SQUARE_BYTES, &p.of_k, n * 64, key_head, token, full);
#pragma unroll
      for (int n = 0; lane == 0 && of_values && n < GROUPS; ++n)
        tma_load_3d(to + V_AT + n * SQUARE_BYTES, &p.of_v, column + n * 64, head, token, full);
#pragma unroll
      for (int n = 0; lane == 0 && !ENDS && n < 2; ++n)
        tma_load_3d(to + Q_AT + n * SQUARE_BYTES, &p.of_q, n * 64, key_head, token, full);
    } else {
      copy_rows<16>(to + K_AT, k + base * p.k_token * 2, p.k_token * 2, part, base, lane);
      if (of_values)
        copy_rows<GROUPS * 8>(to + V_AT, v + base * p.v_token * 2, p.v_token * 2, part, base, lane);
      if constexpr (!ENDS)
        copy_rows<16>(to + Q_AT, q + base * p.q_token * 2, p.q_token * 2, part, base, lane);
    }
    if constexpr (BY_KEY) bring_by_key(p, part, memory, stage.rows(), head, base, lane);
    if (!whole) {
      cp_async_commit();
      cp_async_wait<0>();
      fence_async();  // products read what copies of this thread wrote
    }
    mbarrier_arrive(full);
  }
}
