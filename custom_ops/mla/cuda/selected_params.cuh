// What sparse latent attention's kernel is given, and how its shared memory is laid out.
#pragma once

#include "../../cuda/machine.cuh"
#include "selected_config.cuh"
#include "../../cuda/clustered.cuh"

// With 16 heads a CTA's memory and registers are such that two of them fit a multiprocessor.
constexpr int THREADS = 256, WARPS = 8, TILE = M_TILES == 1 ? 32 : 64, STAGES = 2, MAX_KEYS = 2048;
constexpr int CTAS_PER_SM = M_TILES == 1 ? 2 : 1;
constexpr int ROWS = M_TILES * 16, MY_ROWS = ROWS / WARPS;  // heads; those whose softmax a warp works out
constexpr int WIDTH = RANK + ROPE, SQUARES = WIDTH / 64;    // 64 columns each, lines of 128 bytes
constexpr int GROUP_BYTES = SQUARES * 1024;                 // 8 keys, or 8 heads
constexpr int STAGE_BYTES = TILE / 8 * GROUP_BYTES;
constexpr int KEY_PARTS = TILE / 16, COLUMN_PARTS = WARPS / KEY_PARTS;  // of a tile's scores, by warps
constexpr int STEPS = 4 / COLUMN_PARTS;                     // of 16 columns, of a warp in each square
constexpr int PAIRS = RANK / WARPS / 16;                    // 16 value columns each, of a warp
constexpr int TABLE_ENTRIES = STAGES * STAGE_BYTES / 4;     // which the stages have room for
constexpr int S_LINE = TILE + 8, O_LINE = RANK + 8;         // numbers; rows lie in other banks
static_assert(RANK % 128 == 0 && WIDTH % 64 == 0 && RANK <= 512, "whole squares; sums fit in registers");
static_assert(RANK % (CLUSTER * 4) == 0 && CLUSTER <= 16, "columns for each CTA of a cluster");

struct Params {  // packed by custom_ops/mla/cuda/selected.py, in this order
  const char *q, *kv;
  char *out;
  float *lse, *parts;
  const int *table, *seq_lens, *starts, *indices;
  i64 q_token, q_head, kv_block, kv_slot, o_token, o_head, l_token, l_head;  // strides in elements
  i64 table_row, indices_row;
  float scale;
  int num_reqs, top_k, part_keys, head_tiles, num_items;
};
static_assert(sizeof(Params) == 176, "as custom_ops/mla/cuda/selected.py packs it");

// Where in shared memory things are, in bytes from its begin; custom_ops/mla/cuda/selected.py counts alike.
constexpr int Q_AT = STAGES * STAGE_BYTES;             // behind the stages, in which the sums lie at the end
constexpr int P_AT = Q_AT + ROWS / 8 * GROUP_BYTES;    // weights, lines of 128 bytes
constexpr int S_AT = P_AT + ROWS * 128;                // scores of each part of the columns
// [MAX_KEYS], rows of the pool, -1: not seen
constexpr int KEYS_AT = S_AT + COLUMN_PARTS * ROWS * S_LINE * 4;
constexpr int STATE_AT = KEYS_AT + MAX_KEYS * 4;       // [ROWS], maximum; sum, below 0: no key is seen
constexpr int FACTOR_AT = STATE_AT + ROWS * 8;         // [ROWS], by which sums shrink
constexpr int COUNT_AT = FACTOR_AT + ROWS * 4;
constexpr int SHARED_BYTES = COUNT_AT + WARPS * 4;
static_assert(ROWS * O_LINE * 4 <= Q_AT, "sums in place of the stages");
static_assert((SHARED_BYTES + 1024) * CTAS_PER_SM <= 228 * 1024, "shared memory");
