// Shared memory of the kernel that goes from chunk to chunk of a gated delta net.
#pragma once

#include "delta_pass_instructions.cuh"
#include "delta_pass_params.cuh"

constexpr int CHUNK = 64, KEY_DIM = 128, THREADS = GROUPS * 128, COLUMNS = GROUPS * 64;
constexpr int WIDTH = VALUE_DIM + KEY_DIM, TILES = (ENDS ? WIDTH : VALUE_DIM) / COLUMNS;
// Shared memory: STAGES of a chunk's rows in squares of 64 x 64, lines of 128 bytes, swizzled; results of a
// warpgroup; factors of tokens, twice.
constexpr int ROW_BYTES = CHUNK * 2, SQUARE_BYTES = CHUNK * ROW_BYTES;
constexpr int K_AT = 0, SOLVED_AT = 2 * SQUARE_BYTES, V_AT = 3 * SQUARE_BYTES;
constexpr int Q_AT = V_AT + GROUPS * SQUARE_BYTES, SCORES_AT = Q_AT + 2 * SQUARE_BYTES;
constexpr int STAGE_BYTES = ENDS ? Q_AT : SCORES_AT + SQUARE_BYTES, STAGES = 3;
constexpr int OUT_AT = STAGES * STAGE_BYTES, FACTORS_AT = OUT_AT + (ENDS ? 0 : GROUPS * SQUARE_BYTES);
constexpr int SEEN = 0, LEFT = CHUNK, SINCE = 2 * CHUNK, FACTORS = (ENDS ? 2 : 3) * CHUNK;
static_assert(FACTORS_AT + 2 * FACTORS * 4 == SHARED_BYTES, "as delta_pass.py asks for it");

// Of 16 bytes of a line.
__device__ __forceinline__ constexpr int line_at(int line, int piece) {
  return piece / 8 * SQUARE_BYTES + line * 128 + ((piece % 8) ^ (line & 7)) * 16;
}
