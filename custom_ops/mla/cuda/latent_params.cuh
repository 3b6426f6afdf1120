// What latent attention's kernels are given, and what they have in common.
#pragma once

#include "latent_instructions.cuh"

constexpr int TILE_KV = 64;                        // keys of a step
constexpr int WIDTH = RANK + ROPE;
constexpr int SQUARES = WIDTH / 64;                // of a tile: its keys x 64 columns, lines of 128 bytes
constexpr int SQUARE_BYTES = TILE_KV * 128, TILE_BYTES = SQUARES * SQUARE_BYTES;
constexpr int TILE_BLOCKS = TILE_KV / BLOCK_SIZE;  // blocks of the cache in a tile
constexpr int Q_BYTES = ROWS * WIDTH * 2;
static_assert(RANK % 64 == 0 && WIDTH % 64 == 0 && ROWS % 8 == 0, "whole squares, blocks of 8 rows");
static_assert(TILE_KV % BLOCK_SIZE == 0 && BLOCK_SIZE % 8 == 0, "whole blocks");

// A row of fp8, in bytes: numbers, a float32 scale for each 128 of them, the rotated key in bfloat16.
constexpr int GROUPS = RANK / 128;  // of columns that share a scale
constexpr int SCALES_IN = RANK, ROPE_IN = SCALES_IN + GROUPS * 4, ROW_BYTES = ROPE_IN + ROPE * 2;

struct Params {  // packed by custom_ops/mla/cuda/latent.py, in this order
  Map kv;
  const char *q;
  char *out;
  float *lse;
  const int *table, *seq_lens, *starts;
  const int *indices;  // of latent_selected.cu
  float *parts;  // SLOT_FLOATS for each of two slots of each group of CTAs and tile of rows
  const char *rows;  // of fp8, or selected ones, else `kv`
  i64 q_token, q_head, o_token, o_head, l_token, l_head, table_row, indices_row;  // strides in elements
  i64 rows_block, rows_slot;                                         // in bytes
  float scale;
  int num_reqs, num_tokens, num_blocks, block_group, row_tiles, groups, top_k;
};
static_assert(sizeof(Params) == 320, "as custom_ops/mla/cuda/latent.py packs it");

// A partial result: accumulators by units of 8 rows x 64 value columns, or 64 rows x 8 columns, each a
// warpgroup's fragments, four at a time; then the maximum and the sum of each row.
constexpr int BLOCKS_8 = ROWS / 8, UNITS = RANK / 64 * BLOCKS_8, SLOT_FLOATS = UNITS * 512 + ROWS * 2;
constexpr int CUT_FLOATS = 8;  // behind the slots, for each CTA (latent_cut.cuh)
// CTAs of neighbouring groups are a cluster. Not over rows of fp8, whose consumers have too few registers.
constexpr bool PAIRED = ROWS == 64 && !FP8;
