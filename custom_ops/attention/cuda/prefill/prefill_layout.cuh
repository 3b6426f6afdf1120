// Where numbers lie in prefill's shared memory: lines, squares, and values on their side. Compiles for the
// host too.
#pragma once

#include "prefill_scheduler.cuh"

constexpr int BYTES = Q_FP8 ? 1 : 2;            // of a number that is multiplied
// bytes of a token's line in a square, which is 8 tokens high
constexpr int K_LINE = DIM * BYTES % 128 == 0 ? 128 : DIM * BYTES % 64 == 0 ? 64 : 32;
constexpr int V_LINE = DIM_V * BYTES % 128 == 0 ? 128 : DIM_V * BYTES % 64 == 0 ? 64 : 32;
constexpr int K_WIDTH = K_LINE / BYTES, V_WIDTH = V_LINE / BYTES;        // columns
constexpr int K_SQUARES = DIM / K_WIDTH, V_SQUARES = DIM_V / V_WIDTH;    // of a token's keys and values
constexpr int K_SQUARE = K_LINE * 8, V_SQUARE = V_LINE * 8;              // bytes
// fp8 queries: of turned values, a column's keys in lines of so many bytes
constexpr int TURNED_LINE = TILE_KV % 128 ? 64 : 128;
static_assert(!Q_FP8 || (TILE_KV % 64 == 0 && DIM_V % 32 == 0), "whole lines, units of 16 keys x 32 columns");

// Where byte `at` of swizzled lines of LINE bytes lies.
template <int LINE> BOTH int swizzled(int at) {
  return at ^ (at >> 3 & (LINE == 128 ? 0x70 : LINE == 64 ? 0x30 : 0x10));
}

// Values are turned 16 keys x 32 columns at a time, by a warp: four matrices of 8 keys x 16 bytes come, four
// of 8 rows (columns, before) x 16 bytes go. Two orders are left as they fall out, since both can be had for
// nothing where they are used:
// - of 16 keys of a row, byte 4 * t + i is key 2 * t + i % 2 + i / 2 * 8. That is the order in which a thread
//   holds its scores of 16 keys, so that weights go from accumulators to operands by conversion alone.
// - of 16 columns, row 8 * h + j is column 2 * j + h. So a quad's accumulators of two blocks are 16 columns
//   side by side, four of each thread (prefill_epilogue.cuh).
constexpr int TURN_WIDE = DIM_V / 32;  // units of the same keys

// Where a lane's line of 16 bytes of what comes lies, of the unit of 16 keys `group` and 32 columns `wide`:
// in matrix lane / 8, key lane % 8.
BOTH int turn_from(int group, int wide, int lane) {
  const int keys = group * 2 + lane / 8 % 2, chunk = wide * 2 + lane / 16;
  return swizzled<V_LINE>((keys * V_SQUARES + chunk / (V_LINE / 16)) * V_SQUARE + lane % 8 * V_LINE +
                          chunk % (V_LINE / 16) * 16);
}
// The same of any `wide` from that of 0: swizzled are bits that another `wide` sets, not those that say how.
BOTH int turn_from_next(int first, int wide) {
  constexpr int IN_LINE = V_LINE / 32;
  return (first ^ wide % IN_LINE * 32) + wide / IN_LINE * V_SQUARE;
}
// And of what goes: in matrix lane / 8, row lane % 8. Another `wide` is 32 lines on.
BOTH int turn_to(int group, int wide, int lane) {
  const int place = group * 16, row = wide * 32 + lane;
  return swizzled<TURNED_LINE>((place / TURNED_LINE * DIM_V + row) * TURNED_LINE + place % TURNED_LINE);
}
// Where key `key` of row `row` of turned values lies.
BOTH int turned_at(int row, int key) {
  const int unit = key % 16, place = key / 16 * 16 + unit % 8 / 2 * 4 + unit / 8 * 2 + unit % 2;
  return swizzled<TURNED_LINE>((place / TURNED_LINE * DIM_V + row) * TURNED_LINE + place % TURNED_LINE);
}
