// Sizes that follow from a specialisation's macros, the kernel's parameters, and how keys lie in shared memory.
#pragma once
#include "machine.cuh"

constexpr int ROWS = GROUP * QUERY_LEN;             // query rows of a pair
constexpr int COLS = (ROWS + 7) / 8;                // n-tiles of 8 rows
constexpr int TILE = WARPS * KEYS;                  // keys of one unit of work
constexpr int SUBS = KEYS / 16;                     // m-tiles of keys per warp
constexpr int K_CHUNKS = DIM * KV_BYTES / 16;       // 16-byte chunks of a key
constexpr int V_CHUNKS = DIM_V * KV_BYTES / 16;
// A key in shared memory: its chunks, padded so that 8 rows fill whole 128-byte lines, and swizzled within a line. The 8 rows of an
// ldmatrix then meet 8 different banks, and a line of device memory stays a line: rows padded by 16 bytes made cp.async ask L2 for
// 1.5 times the bytes.
__host__ __device__ constexpr int padded(int chunks) { return chunks >= 8 ? (chunks + 7) / 8 * 8 : chunks > 4 ? 8 : chunks > 2 ? 4 : 2; }
constexpr int K_PADDED = padded(K_CHUNKS), V_PADDED = padded(V_CHUNKS);
constexpr int K_ROW = K_PADDED * 16, V_ROW = V_PADDED * 16;  // bytes
constexpr int STAGE = KEYS * (K_ROW + V_ROW);                // bytes of one warp's stage
constexpr int OUT_ROW = ROWS * (DIM_V + 4) * 4 <= STAGE ? DIM_V + 4 : DIM_V;  // floats of a query row when states meet, in a stage
constexpr int VECTORS = DIM_V / 4;
constexpr int THREADS = WARPS * 32;
constexpr int LETTER = ROWS * DIM_V;                // floats of a part that a CTA sends to another of its cluster
static_assert(ROWS * OUT_ROW * 4 <= STAGE, "a stage must hold a warp's state");
static_assert(DIM % 16 == 0 && DIM_V % 16 == 0 && KEYS % 16 == 0 && STAGES >= 2, "sizes in multiples of 16, two stages");

struct Params {  // packed by custom_ops/cuda/paged_attention.py, in this order
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
};

template <int PADDED> __device__ __forceinline__ int swizzle(int row) { return PADDED >= 8 ? row % 8 : row / (8 / PADDED) % PADDED; }

// Address of chunk `2 * pair + odd` of a row, given that of chunk `odd`: the swizzle is an exclusive or below 128 bytes.
template <int PADDED> __device__ __forceinline__ u32 chunk_pair(u32 row, u32 odd, int pair) {
  constexpr int LINE = PADDED >= 8 ? 127 : PADDED * 16 - 1;
  return row + (odd ^ (pair * 32 & LINE)) + (pair * 32 & ~LINE);
}
