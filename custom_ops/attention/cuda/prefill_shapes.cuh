// Sizes that follow from prefill's configuration, the kernel's parameters, and the plan of its shared memory.
#pragma once
#include "../../cuda/bulk.cuh"
#include "prefill_lines.cuh"
#include "prefill_products.cuh"
#include "prefill_tiles.cuh"

constexpr int THREADS = (GROUPS + 1) * 128;     // warpgroup 0 loads
constexpr int LOADER_REGISTERS = GROUPS == 3 ? 32 : PAIRED ? 56 : 40;
constexpr int MATH_REGISTERS = GROUPS == 3 ? 160 : PAIRED ? 224 : 232;
constexpr int MATH_WARPS = GROUPS * 4, MATH_THREADS = GROUPS * 128;
constexpr int PAGES = KEYS / BLOCK_SIZE;        // blocks of a step
// bytes of a step's keys, and of its values
constexpr int K_STAGE = KEYS * DIM * BYTES, V_STAGE = KEYS * DIM_V * BYTES;
constexpr int Q_TILE = ROWS * DIM * BYTES;
constexpr int Q_BYTES = TOKENS * GROUP * DIM * BYTES;  // what the copy engine brings of it
constexpr bool FP8 = KV_BYTES == 1;
// fp8: bytes of a step's keys, or of its values, as they come; with fp8 queries keys come as they are read
constexpr int RAW_STAGE = KEYS * (DIM > DIM_V && !Q_FP8 ? DIM : DIM_V);
// fp8: warps that convert them, those beside the loader's
constexpr int CONVERTERS = 3;
// lanes of a warp that arrive at a barrier: one, behind what all have read or written; compute-sanitizer's
// racecheck follows each lane for itself
constexpr int ARRIVING = EVERY_LANE ? 32 : 1;
constexpr bool LOW = WINDOW_LEFT >= 0 || CHUNK > 0;  // some rows do not see the first keys
constexpr bool ADJUST = SOFT_CAP || ALIBI;           // scores are more than scaled products
static_assert(GROUPS == 2 || GROUPS == 3, "registers");
static_assert(DIM % 32 == 0 && DIM_V % 32 == 0 && BLOCK_SIZE % 8 == 0 && KEYS % BLOCK_SIZE == 0 &&
                  GROUP <= ROWS && PAGES <= 16,
              "squares, boxes, one a lane");
static_assert(K_STAGE % 1024 == 0 && V_STAGE % 1024 == 0 && Q_TILE % 1024 == 0, "swizzles repeat");
static_assert(!PAIRED || (PAGES % 2 == 0 && GROUPS == 2 && !LOW && !FP8 && !TREE && SPLIT == CASCADE &&
                          SHORT == 0),
              "each CTA brings half of the blocks; registers; what was thought through");
static_assert(!PAIRED || !EVERY_LANE, "counts");
static_assert(!CASCADE || (SPLIT && !CAUSAL && !LOW && WINDOW_RIGHT < 0 && !TREE && !ALIBI && !SINKS &&
                           SHORT == 0 && !Q_FP8),
              "all rows of a group see the same keys; sinks count once");
static_assert(!CASCADE || GROUP * K_WIDTH * 2 % 128 == 0, "where a token's box may lie in shared memory");
static_assert(K_STAGES >= 2 && V_STAGES >= 2, "one that is read, one that is filled");
static_assert(K_STAGES * K_STAGE + V_STAGES * V_STAGE + Q_BUFFERS * Q_TILE + RAW_STAGES * RAW_STAGE <=
                  226 * 1024,
              "shared memory");
static_assert(KV_BYTES == 2 ? RAW_STAGES == 0 : RAW_STAGES >= 2 && (GROUPS == 2 || Q_FP8),
              "one that is read, one that is filled; registers of the converters");

// what of a cache's map is where: coordinates of head 0 and block 0 plus these for each head and block
struct Where {
  int head_square, head_group, block_group;
};

struct Params {  // packed by custom_ops/attention/cuda/prefill.py, in this order
  Map q, k, v;
  char *out;
  float *lse;
  const int *table, *seq_lens, *starts;
  const float *slopes;
  const u16 *sinks;
  const float *k_scale, *v_scale;  // with SCALES, one or one per kv head
  // one zero between launches, ticket_row numbers from here per request before the first with tiles: tickets
  // given out
  int *tickets;
  float *parts;  // with SPLIT, PART_FLOATS for each CTA, then struct Cut
  // [CTAs, 5] with CLOCKS: cycles in all, waiting for tiles, waiting for their first keys, storing; steps
  i64 *clocks;
  i64 o_token, o_head, l_token, l_head, table_row;  // strides in elements
  float scale, soft_cap;
  int num_reqs, num_tokens, num_blocks, ticket_row;
  Where k_at, v_at;
  int ks_head, vs_head;  // strides of scales: 0 where there is one for all
  // of both launches, and of those the ones of the second launch, behind decode: prefill.py
  int ctas, late;
  int is_late;           // whether this is the second one
  const i64 *tree;       // with TREE, a word for each token row
  // with CASCADE, by rows of the groups: the token row that each is; and by token rows the LSE over suffixes
  const i64 *order;
  const float *own_lse;
};
static_assert(sizeof(Params) == 3 * sizeof(Map) + 256,
              "as custom_ops/attention/cuda/prefill.py packs it behind the maps");

// Shared memory: the stages of keys, those of values, tiles of queries, with fp8 the stages that keys and
// values come through; barriers, 8 bytes each, that say of these whether they are full or empty.
struct Plan {
  u32 k, v, q, raw, k_full, k_empty, v_full, v_empty, q_full, q_empty, raw_full, raw_empty;

  __device__ __forceinline__ Plan(const char *dynamic, const u64 *barriers) {
    k = shared_address(dynamic);
    v = k + K_STAGES * K_STAGE;
    q = v + V_STAGES * V_STAGE;
    raw = q + Q_BUFFERS * Q_TILE;
    k_full = shared_address(barriers);
    k_empty = k_full + K_STAGES * 8;
    v_full = k_empty + K_STAGES * 8;
    v_empty = v_full + V_STAGES * 8;
    q_full = v_empty + V_STAGES * 8;
    q_empty = q_full + Q_BUFFERS * 8;
    raw_full = q_empty + Q_BUFFERS * 8;
    raw_empty = raw_full + RAW_STAGES * 8;
  }
};
constexpr int BARRIERS = 2 * (K_STAGES + V_STAGES + Q_BUFFERS + RAW_STAGES);

// A place in a ring of stages. `round` is the parity of full's phase that fills the slot this time: 0 in the
// first round. The loader waits for the phase of `empty` before, parity round ^ 1; of a barrier that never
// completed a phase, that wait returns at once.
template <int STAGES> struct Place {
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
  int last;   // the last key tile; the first: last + 1 - steps
  int tile, start, query_len, seq_len, head;
  int unit;  // the ticket, of a tile in parts; -1: the tile is whole
};

// What is left of a part of a tile: each math thread's accumulators, four at a time, then its maxima and sums
// of two rows.
constexpr int PART_VECTORS = DIM_V / 8 + 1, PART_FLOATS = PART_VECTORS * MATH_THREADS * 4;
__device__ __forceinline__ float4 *part_of(const Params &p, int unit) {
  return (float4 *)p.parts + (i64)unit * PART_VECTORS * MATH_THREADS;
}

// PAIRED, addresses in the memory of a cluster's second CTA, but for `empty`, which the first one's is: two
// places for tickets, and two barriers each that say of them whether they are full or empty.
struct Mail {
  u32 full, empty, place;
};

struct Cut {  // the tiles in parts, of which tickets tile * parts ... are the parts
  int tiles, parts, unused[2];
  Shares shares;  // with CASCADE, which say what the parts are
  int unused_too[3];
  Job jobs[1];  // as many as there are CTAs at most; with CASCADE, as there are tiles
};
static_assert(sizeof(Cut) == 64 + sizeof(Job), "as prefill.py makes room for it");
__device__ __forceinline__ Cut *cut_of(const Params &p) {
  return (Cut *)(p.parts + (i64)p.ctas * (CASCADE ? TURNS : 1) * PART_FLOATS);
}
