// Shared memory of the kernel that goes from chunk to chunk of a gated delta net.
#pragma once

#include "delta_pass_instructions.cuh"
#include "delta_pass_params.cuh"
#include "delta_records.cuh"

constexpr int COLUMNS = GROUPS * 64, THREADS = GROUPS * 128 + 128;
constexpr int WIDTH = VALUE_DIM + KEY_DIM, TILES = (ENDS ? WIDTH : VALUE_DIM) / COLUMNS;
// Shared memory: STAGES of a chunk's rows in squares of 64 x 64, lines of 128 bytes, swizzled, and of its
// record, whose squares are whole there, 16 columns one behind the other; behind factors a stage's barriers;
// results of each warpgroup, twice.
constexpr int STAGES = 3, SQUARE_BYTES = CHUNK * 128, COLUMN_BYTES = CHUNK * 32;
constexpr int K_AT = 0, V_AT = 2 * SQUARE_BYTES, Q_AT = V_AT + GROUPS * SQUARE_BYTES;
constexpr int SOLVED_AT = Q_AT + (ENDS ? 0 : 2 * SQUARE_BYTES), SCORES_AT = SOLVED_AT + SQUARE_BYTES;
constexpr int SQUARES_AT_ONCE = ENDS ? 1 : 2, BEHIND = SOLVED_AT + SQUARES_AT_ONCE * SQUARE_BYTES;
constexpr int FACTORS_AT = BEHIND - SEEN, FACTOR_BYTES = (ENDS ? SINCE : SCORES) - SEEN;
constexpr int FULL_AT = BEHIND + FACTOR_BYTES, EMPTY_AT = FULL_AT + 8, STAGE_BYTES = BEHIND + 1024;
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
