// Sizes that follow from a specialisation's constants, the kernel's parameters, and how keys lie in shared
// memory.
#pragma once
#include "../../../cuda/machine.cuh"
#include "decode_config.cuh"

constexpr int PAIRS = NUM_KV_HEADS / PAIR_HEADS;            // of a request
constexpr int LINES = PAIRS / TEAM;                         // of a request, each of TEAM pairs side by side
constexpr int HEAD_ROWS = GROUP * QUERY_LEN;                // query rows of a kv head
constexpr int TILE_Q = PAIR_HEADS * HEAD_ROWS;              // query rows of a pair
constexpr int COLS = (TILE_Q + 7) / 8;                      // n-tiles of 8 rows
constexpr bool SHARED = PAIR_HEADS > 1 && HEAD_ROWS % 8;    // an n-tile holds rows of both heads
constexpr int TILE_KV = WARPS * WARP_KEYS;                  // keys of one unit of work
constexpr int SUBS = WARP_KEYS / 16;                        // m-tiles of keys per warp
constexpr int K_CHUNKS = PAIR_HEADS * DIM * KV_BYTES / 16;  // 16-byte chunks of a key, of all heads of a pair
constexpr int V_CHUNKS = PAIR_HEADS * DIM_V * KV_BYTES / 16;
// A key in shared memory: its chunks, padded so that 8 rows fill whole 128-byte lines, and swizzled within a
// line. The 8 rows of an ldmatrix then meet 8 different banks, and a line of device memory stays a line: rows
// padded by 16 bytes made cp.async ask L2 for 1.5 times the bytes.
__host__ __device__ constexpr int padded(int chunks) {
  return chunks >= 8 ? (chunks + 7) / 8 * 8 : chunks > 4 ? 8 : chunks > 2 ? 4 : 2;
}
constexpr int K_PADDED = padded(K_CHUNKS), V_PADDED = padded(V_CHUNKS);
constexpr int K_ROW_BYTES = K_PADDED * 16, V_ROW_BYTES = V_PADDED * 16;  // bytes
constexpr int STAGE_BYTES = WARP_KEYS * (K_ROW_BYTES + V_ROW_BYTES);     // bytes of one warp's stage
// floats of a query row when states meet, in a stage
constexpr int STATE_ROW = TILE_Q * (DIM_V + 4) * 4 <= STAGE_BYTES ? DIM_V + 4 : DIM_V;
constexpr int V_SLICES = PAIR_HEADS * DIM_V / 16;   // m-tiles of value columns
constexpr int V_VECTORS = DIM_V / 4;
constexpr int OUT_BYTES = FP8_RESULTS ? 1 : 2;  // of a number of the results
constexpr int THREADS = WARPS * 32;
// of the partial result of a split, without its maxima and sums
constexpr int PARTIAL_FLOATS = TILE_Q * DIM_V;
static_assert(TILE_Q * STATE_ROW * 4 <= STAGE_BYTES, "a stage must hold a warp's state");
static_assert(PAIRS % TEAM == 0 && (TEAM == 1 || CLUSTER == 1),
              "whole teams; CTAs of a cluster share a pair");
static_assert(NUM_KV_HEADS % PAIR_HEADS == 0 && (PAIR_HEADS == 1 || KV_BYTES == 2) &&
                  (!SHARED || TILE_Q <= 8),
              "two heads in one n-tile, or in tiles of their own");
static_assert(!TREE || (CAUSAL && QUERY_LEN > 1 && QUERY_LEN < 32 && WARP_KEYS <= 64),
              "a word's bits, one of them never set; those of a warp's keys");
static_assert(DIM % 16 == 0 && DIM_V % 16 == 0 && WARP_KEYS % 16 == 0 && STAGES >= 2,
              "sizes in multiples of 16, two stages");

struct Params {  // packed by custom_ops/attention/cuda/decode.py, in this order
  const char *q, *k, *v;
  const int *table, *seq_lens, *starts;
  char *out;
  float *lse;
  const float *slopes;
  const u16 *sinks;
  const float *k_scale, *v_scale;
  float *part_acc, *part_state;
  int *semaphore;
  i64 q_token, q_head, o_token, o_head, l_token, l_head, table_row;  // strides in elements
  float scale, soft_cap;
  int num_reqs, num_tokens, ks_head, vs_head;
  const i64 *tree;  // with TREE, a word for each token row
  const float *output_scale;  // with FP8_RESULTS, one number
};
static_assert(sizeof(Params) == 216, "as custom_ops/attention/cuda/decode.py packs it");

// Query rows of a pair: heads of the group within query tokens within kv heads.
__device__ __forceinline__ int query_of(int row) { return row / GROUP % QUERY_LEN; }
__device__ __forceinline__ int kv_head_of(int pair, int row) { return pair * PAIR_HEADS + row / HEAD_ROWS; }
// Whether any row of n-tile `n` belongs to the `head`-th kv head of a pair.
__host__ __device__ constexpr bool holds(int n, int head) { return SHARED || n * 8 / HEAD_ROWS == head; }

template <int PADDED> __device__ __forceinline__ int swizzle(int row) {
  return PADDED >= 8 ? row % 8 : row / (8 / PADDED) % PADDED;
}

// Address of chunk `2 * pair + odd` of a row, given that of chunk `odd`: the swizzle is an exclusive or below
// 128 bytes.
template <int PADDED> __device__ __forceinline__ u32 chunk_pair(u32 row, u32 odd, int pair) {
  constexpr int LINE = PADDED >= 8 ? 127 : PADDED * 16 - 1;
  return row + (odd ^ (pair * 32 & LINE)) + (pair * 32 & ~LINE);
}
