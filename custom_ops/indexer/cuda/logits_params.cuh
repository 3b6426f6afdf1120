// What the indexer's scoring kernel is given, and how its shared memory is laid out.
#pragma once

#include "logits_instructions.cuh"

constexpr int TILE = 64, THREADS = WARPGROUPS * 128, WIDTH = 128, MAX_TOKENS = 512;
constexpr int HEADS = NUM_HEADS <= 16 ? 16 : NUM_HEADS <= 32 ? 32 : 64, J = HEADS / 8;
constexpr int KEY_BYTES = WIDTH * (FP8 ? 1 : 2), TILE_BYTES = TILE * KEY_BYTES;
constexpr int CHUNKS = KEY_BYTES / 16;              // 16 bytes each, of a key
constexpr int COPIES = TILE * CHUNKS / 128;         // of a thread for each tile: a key every PITCH keys
constexpr int PITCH = 128 / CHUNKS;
constexpr int TILE_BLOCKS = BLOCK_SIZE < TILE ? TILE / BLOCK_SIZE : 1;
static_assert(NUM_HEADS <= 64, "columns of a product");
static_assert(BLOCK_SIZE < TILE ? TILE % BLOCK_SIZE == 0 && BLOCK_SIZE % PITCH == 0 : BLOCK_SIZE % TILE == 0,
              "whole blocks in a tile, or whole tiles in a block");

struct Params {  // packed by custom_ops/indexer/cuda/index_logits.py, in this order
  const char *q, *keys;
  const float *weights, *scales;
  float *logits;
  const int *table, *seq_lens, *starts;
  i64 q_token, q_head, w_token, key_block, key_slot, scale_block, table_row, logits_row;  // in elements
  int num_reqs, num_tokens, columns;
};
static_assert(sizeof(Params) == 144, "as custom_ops/indexer/cuda/index_logits.py packs it");

// Where in shared memory things are, in bytes; custom_ops/indexer/cuda/index_logits.py counts the same.
constexpr int Q_AT = WARPGROUPS * STAGES * TILE_BYTES;         // behind each warpgroup's stages
constexpr int SCALES_AT = Q_AT + HEADS * WIDTH * 2;            // of the stages' keys
constexpr int ENDS_AT = SCALES_AT + WARPGROUPS * STAGES * TILE * 4;  // [MAX_TOKENS], keys that each sees
constexpr int REQUESTS_AT = ENDS_AT + MAX_TOKENS * 4;          // [MAX_TOKENS]
constexpr int BEGINS_AT = REQUESTS_AT + MAX_TOKENS * 4;        // [MAX_TOKENS + 1], tiles of those before
constexpr int FACTORS_AT = BEGINS_AT + (MAX_TOKENS + 1) * 4;      // [HEADS], of the products
constexpr int WEIGHTS_AT = FACTORS_AT + HEADS * 4;             // [HEADS]
constexpr int SHARED_BYTES = WEIGHTS_AT + HEADS * 4;
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");
