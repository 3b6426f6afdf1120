// A state in a CTA's shared memory: how it lies there, a token's key and query beside it, and the two passes
// over it. Behind the constants and `Params` of a kernel.
#pragma once

constexpr int WARPS = THREADS / 32;
constexpr int NUMBER = STATE_FLOAT ? 4 : 2;  // bytes
constexpr int VEC = 16 / NUMBER;             // columns of a thread
constexpr int CHUNKS = VALUE_DIM / VEC;      // threads of a row of the state
constexpr int GROUPS = THREADS / CHUNKS;     // rows at a time
constexpr int ROWS = KEY_DIM / GROUPS;       // rows of a thread
constexpr int PARTS = CHUNKS < 32 ? WARPS : GROUPS;
constexpr int ROW_BYTES = VALUE_DIM * NUMBER, STATE_BYTES = KEY_DIM * ROW_BYTES;
constexpr int FACTORS = BY_KEY ? 4 : 2;
static_assert(CHUNKS <= THREADS && THREADS % CHUNKS == 0 && (CHUNKS % 32 == 0 || 32 % CHUNKS == 0), "rows");
static_assert(KEY_DIM % GROUPS == 0 && KEY_DIM % 64 == 0 && VALUE_DIM <= THREADS, "whole rows");

// Where in shared memory things are, in bytes from its begin; custom_ops/state/cuda/decode.py counts alike.
constexpr int FACTORS_AT = IN_REGISTERS ? 0 : STATE_BYTES;           // [TURNS, KEY_DIM, FACTORS]
constexpr int SUMS_AT = FACTORS_AT + TURNS * KEY_DIM * FACTORS * 4;  // [PARTS, 2, VALUE_DIM]
constexpr int UPDATE_AT = SUMS_AT + PARTS * 2 * VALUE_DIM * 4;       // [VALUE_DIM]
constexpr int PRODUCT_AT = UPDATE_AT + VALUE_DIM * 4;                // [2], of key and query, by turn
constexpr int BARRIER_AT = PRODUCT_AT + 8;
constexpr int SHARED_BYTES = BARRIER_AT + 8;

__device__ __forceinline__ void unpack(const uint4 &raw, float (&x)[VEC]) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    if constexpr (STATE_FLOAT) x[i] = __int_as_float((int)words[i]);
    else x[i] = to_float<HALF>((u16)(words[i / 2] >> i % 2 * 16));
  }
}
__device__ __forceinline__ uint4 packed(const float (&x)[VEC]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (STATE_FLOAT) words[i] = (u32)__float_as_int(x[i]);
    else words[i] = pack<HALF>(x[i * 2], x[i * 2 + 1]);
  }
  return {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ float load_number(const char *from, i64 at) {  // of q, k and v
  return to_float<HALF>(((const u16 *)from)[at]);
}
__device__ __forceinline__ void unpack_pair(u32 raw, float *x) {
  x[0] = to_float<HALF>((u16)raw);
  x[1] = to_float<HALF>((u16)(raw >> 16));
}
__device__ __forceinline__ void store_out(char *to, i64 at, float x) {
  if constexpr (OUT_FLOAT) ((float *)to)[at] = x;
  else ((u16 *)to)[at] = (u16)pack<HALF>(x, 0.f);
}

// A row of the batch, for one head.
struct Row {
  int req, head, begin, count, first;  // tokens from `first` on are no padding
  i64 slot;                            // 0: nothing is written
  bool kept;                           // the state is what the slot holds, else zeros
};
// From L2: ahead of griddepcontrol.wait L1 may hold an older step's.
__device__ __forceinline__ Row find_row(const Params &p, int item) {
  Row row;
  row.req = item / NUM_HEADS;
  row.head = item % NUM_HEADS;
  row.begin = load_l2(p.starts + row.req);
  row.count = load_l2(p.starts + row.req + 1) - row.begin;
  const int length = load_l2(p.lens + row.req), slot = load_l2(p.slots + row.req);
  row.first = min(max(row.count - length, 0), row.count);
  row.slot = row.first < row.count ? slot : 0;
  if (row.slot == 0) row.first = row.count;
  row.kept = row.slot > 0 && length > row.count;
  return row;
}

// What a thread has of a state, in shared memory.
struct Part {
  char *at;

  __device__ __forceinline__ void load(int i, float (&x)[VEC]) const {
    unpack(*(const uint4 *)(at + i * GROUPS * ROW_BYTES), x);
  }
  __device__ __forceinline__ void store(int i, const float (&x)[VEC]) const {
    *(uint4 *)(at + i * GROUPS * ROW_BYTES) = packed(x);
  }
};

// Sums over this warp's, or this group's, rows of S times key and query, which `pair` takes from a row's
// factors.
template <class Tile, class Pair>
__device__ __forceinline__ void sum_rows(const Tile &tile, char *memory, int turn, int group, int chunk,
                                         int thread, Pair pair) {
  float seen[VEC] = {}, y[VEC] = {};
  const float *factors = (const float *)(memory + FACTORS_AT) + (turn * KEY_DIM + group) * FACTORS;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float x[VEC];
    tile.load(i, x);
    const float2 of = pair(factors + i * GROUPS * FACTORS);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if constexpr (DELTA) seen[j] += x[j] * of.x;
      y[j] += x[j] * of.y;
    }
  }
#pragma unroll
  for (int mask = CHUNKS; mask < 32; mask *= 2)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if constexpr (DELTA) seen[j] += __shfl_xor_sync(ALL, seen[j], mask);
      y[j] += __shfl_xor_sync(ALL, y[j], mask);
    }
  if (CHUNKS >= 32 || thread % 32 < CHUNKS) {
    const int here = CHUNKS < 32 ? thread / 32 : group;
    float *sums = (float *)(memory + SUMS_AT) + here * 2 * VALUE_DIM + chunk * VEC;
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
      if constexpr (DELTA) *(float4 *)(sums + j) = {seen[j], seen[j + 1], seen[j + 2], seen[j + 3]};
      *(float4 *)(sums + VALUE_DIM + j) = {y[j], y[j + 1], y[j + 2], y[j + 3]};
    }
  }
}

// S' = decay S + k u^T.
template <class Tile>
__device__ __forceinline__ void update_rows(Tile &tile, const char *memory, float decay, int turn,
                                            int group, int chunk) {
  const float *factors = (const float *)(memory + FACTORS_AT) + (turn * KEY_DIM + group) * FACTORS;
  float u[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) u[j] = ((const float *)(memory + UPDATE_AT))[chunk * VEC + j];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float x[VEC], k;
    tile.load(i, x);
    if constexpr (BY_KEY) {
      const float2 of = *(const float2 *)(factors + i * GROUPS * FACTORS + 2);
      k = of.x;
      decay = of.y;
    } else {
      k = factors[i * GROUPS * FACTORS];
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = decay * x[j] + k * u[j];
    tile.store(i, x);
  }
}
