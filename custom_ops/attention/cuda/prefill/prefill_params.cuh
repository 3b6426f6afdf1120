// Sizes that follow from prefill's configuration, the kernel's parameters, and the layout of its shared
// memory.
#pragma once
#include "../../../cuda/bulk.cuh"
#include "prefill_layout.cuh"
#include "prefill_products.cuh"
#include "prefill_scheduler.cuh"

constexpr int THREADS = (WARPGROUPS + 1) * 128;     // warpgroup 0 loads
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr int CONSUMER_WARPS = WARPGROUPS * 4, CONSUMER_THREADS = WARPGROUPS * 128;
constexpr int TILE_BLOCKS = TILE_KV / BLOCK_SIZE;        // blocks of a step
// bytes of a step's keys, and of its values
constexpr int K_STAGE_BYTES = TILE_KV * DIM * BYTES, V_STAGE_BYTES = TILE_KV * DIM_V * BYTES;
constexpr int Q_TILE_BYTES = TILE_Q * DIM * BYTES;
constexpr int Q_LOAD_BYTES = TILE_TOKENS * GROUP * DIM * BYTES;  // what the copy engine brings of it
constexpr bool FP8 = KV_BYTES == 1;
constexpr int OUT_BYTES = FP8_RESULTS ? 1 : 2;  // of a number of the results
// fp8: bytes of a step's keys, or of its values, as they come; with fp8 queries keys come as they are read
constexpr int RAW_STAGE_BYTES = TILE_KV * (DIM > DIM_V && !Q_FP8 ? DIM : DIM_V);
// fp8: warps that convert them, the others of the producer's warpgroup
constexpr int CONVERTERS = 3;
// lanes of a warp that arrive at a barrier: one, behind what all have read or written; compute-sanitizer's
// racecheck follows each lane for itself
constexpr int ARRIVING = EVERY_LANE ? 32 : 1;
constexpr bool ADJUST = SOFT_CAP || ALIBI;                        // scores are more than scaled products
static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "registers");
static_assert(DIM % 16 == 0 && DIM_V % 16 == 0 && BLOCK_SIZE % 8 == 0 && TILE_KV % BLOCK_SIZE == 0 &&
                  GROUP <= TILE_Q && TILE_BLOCKS <= 16,
              "squares, boxes, one a lane");
static_assert(K_STAGE_BYTES % 1024 == 0 && V_STAGE_BYTES % 1024 == 0 && Q_TILE_BYTES % 1024 == 0,
              "swizzles repeat");
static_assert(!CASCADE || (SPLIT && !CAUSAL && !HIDES_FIRST_KEYS && WINDOW_RIGHT < 0 && !TREE && !ALIBI &&
                           !SINKS && DECODE_LEN == 0 && !Q_FP8 && !FP8_RESULTS),
              "all rows of a group see the same keys; sinks count once; results are what is merged");
static_assert(!CASCADE || GROUP * K_WIDTH * 2 % 128 == 0, "where a token's box may lie in shared memory");
static_assert(K_STAGES >= 2 && V_STAGES >= 2, "one that is read, one that is filled");
static_assert(K_STAGES * K_STAGE_BYTES + V_STAGES * V_STAGE_BYTES + Q_STAGES * Q_TILE_BYTES +
                      RAW_STAGES * RAW_STAGE_BYTES <=
                  226 * 1024,
              "shared memory");
static_assert(KV_BYTES == 2 ? RAW_STAGES == 0 : RAW_STAGES >= 2 && (WARPGROUPS == 2 || Q_FP8),
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
  float *partials;  // with SPLIT, PARTIAL_FLOATS for each split, CTA_PARTS of a CTA, then struct SplitTiles
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
  const float *output_scale;  // with FP8_RESULTS, one number
};
static_assert(sizeof(Params) == 3 * sizeof(Map) + 256,
              "as custom_ops/attention/cuda/prefill.py packs it behind the maps");

// Shared memory: the stages of keys, those of values, tiles of queries, with fp8 the stages that keys and
// values come through; barriers, 8 bytes each, that say of these whether they are full or empty.
struct SharedLayout {
  u32 k, v, q, raw, k_full, k_empty, v_full, v_empty, q_full, q_empty, raw_full, raw_empty;

  __device__ __forceinline__ SharedLayout(const char *dynamic, const u64 *barriers) {
    k = shared_address(dynamic);
    v = k + K_STAGES * K_STAGE_BYTES;
    q = v + V_STAGES * V_STAGE_BYTES;
    raw = q + Q_STAGES * Q_TILE_BYTES;
    k_full = shared_address(barriers);
    k_empty = k_full + K_STAGES * 8;
    v_full = k_empty + K_STAGES * 8;
    v_empty = v_full + V_STAGES * 8;
    q_full = v_empty + V_STAGES * 8;
    q_empty = q_full + Q_STAGES * 8;
    raw_full = q_empty + Q_STAGES * 8;
    raw_empty = raw_full + RAW_STAGES * 8;
  }
};
constexpr int BARRIERS = 2 * (K_STAGES + V_STAGES + Q_STAGES + RAW_STAGES);

// A place in a ring of stages. `phase` is the parity of full's phase that fills the slot this time: 0 in the
// first round. The producer waits for the phase of `empty` before, parity phase ^ 1; of a barrier that never
// completed a phase, that wait returns at once.
template <int STAGES> struct PipelineState {
  int slot = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// What the producer hands to the consumer warps with a tile of queries.
struct QueryTile {
  int steps;  // key tiles to go through, from the last one down; 0: nothing is visible; -1: no more tiles
  int last;   // the last key tile; the first: last + 1 - steps
  int index, start, query_len, seq_len, head;
  int partial;  // where the result of a split goes; -1: the tile is whole
};

// The partial result of a split: each consumer thread's accumulators, four at a time, then its maxima and
// sums of two rows.
constexpr int PARTIAL_VECTORS = DIM_V / 8 + 1, PARTIAL_FLOATS = PARTIAL_VECTORS * CONSUMER_THREADS * 4;
__device__ __forceinline__ float4 *partial_of(const Params &p, int partial) {
  return (float4 *)p.partials + (i64)partial * PARTIAL_VECTORS * CONSUMER_THREADS;
}

struct SplitTiles {  // the tiles in splits
  int tiles, unused[3];
  CascadeScheduler cascade;  // with CASCADE, which says what the splits are
  int unused_too[3];
  // of each its first split's, with the number of splits as `steps`; with CASCADE of each tile its last one's
  QueryTile query_tiles[1];
};
static_assert(sizeof(SplitTiles) == 64 + sizeof(QueryTile), "as prefill.py makes room for it");
__device__ __forceinline__ SplitTiles *split_tiles_of(const Params &p) {
  return (SplitTiles *)(p.partials + (i64)p.ctas * (CASCADE ? MAX_CTA_SPLITS : CTA_PARTS) * PARTIAL_FLOATS);
}
