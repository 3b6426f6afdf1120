// Shared memory of the kernel that goes from chunk to chunk of long rows.
#pragma once

#include "delta_pass_instructions.cuh"
#include "delta_pass_params.cuh"
#include "delta_records.cuh"

constexpr int COLUMNS = GROUPS * 64, THREADS = GROUPS * 128 + 128;
constexpr int WIDTH = VALUE_DIM + KEY_DIM, TILES = (ENDS ? WIDTH : VALUE_DIM) / COLUMNS;
// Shared memory: STAGES of a chunk's rows in squares of 64 x 64, lines of 128 bytes, swizzled, and of its
// record, whose squares are whole there, 16 columns one behind the other, or BY_KEY squares like those of
// rows; behind factors a stage's barriers; results of each warpgroup, twice.
constexpr int STAGES = BY_KEY ? 2 : 3, SQUARE_BYTES = CHUNK * 128, COLUMN_BYTES = CHUNK * 32;
constexpr int K_AT = 0, V_AT = 2 * SQUARE_BYTES, Q_AT = V_AT + GROUPS * SQUARE_BYTES;
constexpr int SOLVED_AT = Q_AT + (ENDS ? 0 : 2 * SQUARE_BYTES), SCORES_AT = SOLVED_AT + SQUARE_BYTES;
constexpr int SQUARES_AT_ONCE = ENDS ? 1 : 2, ROWS_END = SOLVED_AT + SQUARES_AT_ONCE * SQUARE_BYTES;
// What keys know, where it is not the keys themselves.
constexpr int KNOWN_AT = BY_KEY ? ROWS_END : K_AT, BEHIND = ROWS_END + (BY_KEY ? 2 * SQUARE_BYTES : 0);
// Factors of tokens, and of the chunk, BY_KEY of each column of keys.
constexpr int FACTOR_BYTES = BY_KEY ? 2 * CHUNK * 4 + KEY_DIM * 4 : (ENDS ? SINCE : SCORES) - SEEN;
constexpr int SEEN_AT = BEHIND, LEFT_AT = BY_KEY ? SEEN_AT : BEHIND + LEFT - SEEN;
constexpr int SINCE_AT = BEHIND + (BY_KEY ? CHUNK * 4 : SINCE - SEEN);
constexpr int DECAY_AT = BEHIND + (BY_KEY ? 2 * CHUNK * 4 : DECAY - SEEN);
constexpr int FULL_AT = BEHIND + FACTOR_BYTES, EMPTY_AT = FULL_AT + 8;
constexpr int STAGE_BYTES = BEHIND + (BY_KEY ? 2048 : 1024);
constexpr int RECORD_PART = SQUARES_AT_ONCE * SQUARES * SQUARE + FACTOR_BYTES;
constexpr int OUT_AT = STAGES * STAGE_BYTES;
static_assert(EMPTY_AT + 8 <= STAGE_BYTES, "room");
static_assert(OUT_AT + (ENDS ? 0 : 2 * GROUPS * SQUARE_BYTES) == SHARED_BYTES, "as delta_pass.py asks");

// Of 16 bytes of a line.
__device__ __forceinline__ constexpr int line_at(int line, int piece) {
  return piece / 8 * SQUARE_BYTES + line * 128 + ((piece % 8) ^ (line & 7)) * 16;
}

// A chunk's stage, which comes round.
struct Stage {
  int number = 0, phase = 0;
  __device__ __forceinline__ int full() const { return rows() + FULL_AT; }
  __device__ __forceinline__ int empty() const { return rows() + EMPTY_AT; }
  __device__ __forceinline__ int rows() const { return number * STAGE_BYTES; }
  __device__ __forceinline__ void advance() {
    if (++number == STAGES) number = 0, phase ^= 1;
  }
};
