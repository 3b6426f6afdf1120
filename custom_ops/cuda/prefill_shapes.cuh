// Sizes that follow from a prefill specialisation's macros, the kernel's parameters, and the plan of its shared memory.
#pragma once
#include "bulk.cuh"

constexpr int GROUPS = 2;                       // math warpgroups
constexpr int ROWS = GROUPS * 64;               // packed query rows of a tile: token * GROUP + head of the group
constexpr int KEYS = 128;                       // of a step
constexpr int TOKENS = ROWS / GROUP;            // query tokens of a tile; rows behind TOKENS * GROUP are idle
constexpr int THREADS = (GROUPS + 1) * 128;     // warpgroup 0 loads
constexpr int MATH_WARPS = GROUPS * 4;
constexpr int PAGES = KEYS / BLOCK_SIZE;        // blocks of a step
constexpr int SQUARES = DIM / 64;               // of a token's keys; a square is 64 columns
constexpr int STAGE = KEYS * DIM * 2;           // bytes of a step's keys, and of its values
constexpr int PAGE = STAGE / PAGES;             // of one block
constexpr int Q_TILE = ROWS * DIM * 2;
constexpr int Q_BYTES = TOKENS * GROUP * DIM * 2;  // what the copy engine brings of it
constexpr int HEAD_BYTES = 2 * DIM * 2;         // a token's keys and values in one kv head
static_assert(DIM % 64 == 0 && BLOCK_SIZE % 8 == 0 && KEYS % BLOCK_SIZE == 0 && GROUP <= ROWS && PAGES <= 16, "squares, boxes, one box per lane");
static_assert(STAGES >= 3, "a warpgroup's turn holds two stages, its last step and the next tile's first a third");
static_assert(STAGES * STAGE + 2 * Q_TILE <= 226 * 1024, "shared memory");

struct Params {  // packed by custom_ops/cuda/prefill.py, in this order
  Map q, k, v;
  char *out;
  float *lse;
  const int *table, *seq_lens, *starts;
  int *tickets;  // [2], zeros between launches: tickets given out beyond the first of each CTA, CTAs that are through
  i64 *clocks;   // [CTAs, 2] with CLOCKS: cycles, steps
  i64 o_token, o_head, l_token, l_head, table_row;  // strides in elements
  float scale;
  int num_reqs, num_tokens, num_blocks;
};

// Barriers in shared memory, 8 bytes each.
struct Plan {
  u32 ring, queries;                           // STAGES stages, 2 tiles of queries
  u32 full, empty, q_full, q_empty;            // barriers of the stages and of the query tiles

  __device__ __forceinline__ Plan(const char *dynamic, const u64 *barriers) {
    ring = shared_address(dynamic);
    queries = ring + STAGES * STAGE;
    full = shared_address(barriers);
    empty = full + STAGES * 8;
    q_full = empty + STAGES * 8;
    q_empty = q_full + 16;
  }
};
constexpr int BARRIERS = 2 * STAGES + 4;

// A place in the ring of stages. `round` is the parity of full's phase that fills the slot this time: 0 in the first round. The loader waits for
// the phase of `empty` before, parity round ^ 1; of a barrier that never completed a phase, that wait returns at once.
struct Place {
  int slot = 0, round = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      round ^= 1;
    }
  }
};

// What the loader hands to the math warps with a tile of queries.
struct Job {
  int steps;  // key tiles to go through, from the last one down; 0: nothing is visible; -1: no more tiles
  int last;   // the last key tile
  int tile, start, query_len, seq_len, head, unused;
};
