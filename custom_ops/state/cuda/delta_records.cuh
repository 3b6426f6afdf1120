// What the first kernel of a gated delta net's long rows leaves to the second: a record of each chunk and
// head, a row's chunks from starts[row] / CHUNK + row on. With G the sums of a chunk's decays:
//   solved    a chunk's updates by the values that its keys do not know yet, [CHUNK, CHUNK] of bfloat16
//   seen      exp(G) by the key's norm: what a token's key knows of the state at the chunk's begin
//   left      exp(last G - G) by the key's norm: what its key leaves to the state at its end
//   decay     exp(last G)
//   since     exp(G) by the query's norm: what its query reads of the state at the chunk's begin
//   scores    of a chunk's tokens by each of them, like `solved`
// Nothing is above the diagonal: squares of 16 x 16 of a column from the diagonal on, then of the next one.
// A square lies as products without swizzle read it, blocks of 8 x 8 of 128 bytes each.
#pragma once

constexpr int CHUNK = 64, KEY_DIM = 128, STRIPS = CHUNK / 16, SQUARES = STRIPS * (STRIPS + 1) / 2;
constexpr int BLOCK = 128, SQUARE = 4 * BLOCK, ROW_OF_BLOCKS = 2 * BLOCK;  // in bytes; 8 rows of a square
constexpr int SOLVED = 0, SEEN = SQUARES * SQUARE, LEFT = SEEN + CHUNK * 4, DECAY = LEFT + CHUNK * 4;
constexpr int SINCE = DECAY + 128, SCORES = SINCE + CHUNK * 4, RECORD_BYTES = SCORES + SQUARES * SQUARE;

// Bytes ahead of a square on the diagonal or below it.
__device__ __forceinline__ constexpr int square_at(int row, int column) {
  return (column * STRIPS - column * (column - 1) / 2 + row - column) * SQUARE;
}
