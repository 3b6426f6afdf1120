// What latent attention's kernels are given, and how their shared memory is laid out.
#pragma once

#include "latent_instructions.cuh"

constexpr int TILE_KV = 64;                                   // keys of a step: the rows of a product
constexpr int WIDTH = RANK + ROPE;
constexpr int SQUARES = WIDTH / 64;                           // 64 columns each, lines of 128 bytes
constexpr int GROUP_BYTES = SQUARES * 1024;                   // 8 keys
constexpr int STAGE_BYTES = TILE_KV / 8 * GROUP_BYTES;
constexpr int TILE_BLOCKS = TILE_KV / BLOCK_SIZE;             // blocks of the cache in a step
constexpr int CONSUMER_THREADS = WARPGROUPS * 128, CONSUMER_WARPS = WARPGROUPS * 4;
// and the producer, one warp; with two warpgroups in a third, whose registers they get; of fp8 two warpgroups
constexpr int THREADS = CONSUMER_THREADS + (FP8 ? 256 : WARPGROUPS == 1 ? 32 : 128);
constexpr int FULL_ARRIVALS = FP8 ? 4 : 1;                    // warps that fill a stage
static_assert(!FP8 || WARPGROUPS == 1, "registers for the producers");
constexpr bool SHARES_OUT_REGISTERS = FP8 || WARPGROUPS > 1;
constexpr int PRODUCER_REGISTERS = !FP8 ? 24 : ROWS == 32 ? 128 : 136;
constexpr int CONSUMER_REGISTERS = !FP8 ? 240 : ROWS == 32 ? 248 : 232;
constexpr int MY_ROWS = ROWS / WARPGROUPS;                    // whose scores a warpgroup works out
constexpr int VALUE_TILES = RANK / 64, MY_TILES = VALUE_TILES / WARPGROUPS;  // 64 value columns each
constexpr int BLOCKS_8 = ROWS / 8;                            // blocks of 8 rows
constexpr int Q_BYTES = ROWS * WIDTH * 2, P_BYTES = ROWS * 128;
static_assert(RANK % (64 * WARPGROUPS) == 0 && WIDTH % 64 == 0, "whole squares");
static_assert(ROWS % (8 * WARPGROUPS) == 0 && ROWS <= 64, "blocks of 8 rows");
static_assert(TILE_KV % BLOCK_SIZE == 0 && BLOCK_SIZE % 8 == 0 && STAGES >= 2, "whole blocks");

struct Params {  // packed by custom_ops/mla/cuda/latent.py, in this order
  Map kv;
  const char *q;
  char *out;
  float *lse;
  const int *table, *seq_lens, *starts;
  float *parts;  // SLOT_FLOATS for each of two slots of each group of CTAs and tile of rows
  const char *rows;  // of fp8, else `kv`
  i64 q_token, q_head, o_token, o_head, l_token, l_head, table_row;  // strides in elements
  i64 rows_block, rows_slot;                                         // in bytes
  float scale;
  int num_reqs, num_tokens, num_blocks, block_group, row_tiles, groups;
};
static_assert(sizeof(Params) == 320, "as custom_ops/mla/cuda/latent.py packs it");

// A partial result: accumulators, four at a time, by value tile, block of rows and thread of a warpgroup;
// then the maximum and the sum of each row.
constexpr int UNITS = VALUE_TILES * BLOCKS_8, SLOT_FLOATS = UNITS * 128 * 4 + ROWS * 2;

// Where in shared memory things are, in bytes from its begin; custom_ops/mla/cuda/shape.py counts the same.
constexpr int Q_AT = STAGES * STAGE_BYTES, P_AT = Q_AT + Q_BYTES;
constexpr int MAXIMA_AT = P_AT + P_BYTES;                      // [4 warps, ROWS], of a step
constexpr int SHRINK_AT = MAXIMA_AT + 4 * ROWS * 4;            // [ROWS]
constexpr int STATE_AT = SHRINK_AT + ROWS * 4;                 // [ROWS, 2], maximum and sum
constexpr int FULL_AT = STATE_AT + ROWS * 8, EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SCAN_AT = EMPTY_AT + STAGES * 8;                 // numbers of opening the schedule
constexpr int SHARED_BYTES = SCAN_AT + 72;
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");
