// What the kernels of whole steps share: the window of a convolution beside a state, gates and weights.
// Behind `Params` and state_decode_tile.cuh.
#pragma once

constexpr int COLUMNS = SPLIT * VALUE_DIM;         // of a head, whose SPLIT CTAs have VALUE_DIM each
constexpr int HEAD_ROW_BYTES = SPLIT * ROW_BYTES;  // of its state
constexpr int SHARERS = GROUP * SPLIT;             // CTAs that make the same query and key
// A row's factors are its key's and query's numbers as the convolution gives them, and BY_KEY its decay, at
// the places of `update_rows`. Norms come last: sums of rows are linear in key and query, so that nothing
// waits for their squares.
constexpr int KEY_FACTOR = BY_KEY ? 2 : 0, QUERY_FACTOR = 1, DECAY_FACTOR = 3;
constexpr int PRODUCTS_AT = SHARED_BYTES;  // [PARTS], of `Products`

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float rounded(float x) { return to_float<HALF>((u16)pack<HALF>(x, 0.f)); }
template <bool FLOAT> __device__ __forceinline__ float load_weight(const char *from, i64 at) {
  if constexpr (FLOAT) return ((const float *)from)[at];
  else return load_number(from, at);
}
// log(1 + exp(x))
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// Weights of two channels of the convolution, which no kernel ahead writes.
struct Taps {
  float of[WIDTH][2], bias[2];
  __device__ __forceinline__ void load(const Params &p, int channel) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) of[w][j] = load_number(p.weight, (channel + j) * p.weight_channel + w);
      bias[j] = p.bias ? load_number(p.bias, channel + j) : 0.f;
    }
  }
};

// Two channels of the convolution: their last inputs and the token's own, and where they lie.
struct Window {
  u32 seen[WIDTH];
  char *at;  // of the first input, in the pool
  __device__ __forceinline__ static void prefetch(const Params &p, const Row &row, int channel) {
    const char *at = p.conv_state + (row.slot * p.conv_slot + channel) * 2;
#pragma unroll
    for (int w = 0; w < WIDTH - 1; ++w) prefetch_l2(at + w * p.conv_row * 2);
  }
  __device__ __forceinline__ void load_past(const Params &p, const Row &row, int channel) {
    at = p.conv_state + (row.slot * p.conv_slot + channel) * 2;
#pragma unroll
    for (int w = 0; w < WIDTH - 1; ++w)
      seen[w] = row.kept ? load_l2((const u32 *)(at + w * p.conv_row * 2)) : 0;
  }
  __device__ __forceinline__ void load_own(const Params &p, i64 token, int channel) {
    seen[WIDTH - 1] = *(const u32 *)(p.x + (token * p.x_token + channel) * 2);
  }
  // The convolution's two numbers, through silu, `step` places apart.
  __device__ __forceinline__ void mix(const Taps &taps, float *to, int step) const {
    float mixed[2] = {taps.bias[0], taps.bias[1]};
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      float x[2];
      unpack_pair(seen[w], x);
      mixed[0] += x[0] * taps.of[w][0];
      mixed[1] += x[1] * taps.of[w][1];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) to[j * step] = rounded(mixed[j] * sigmoid(mixed[j]));
  }
  __device__ __forceinline__ void move_on(const Params &p) const {
#pragma unroll
    for (int w = 1; w < WIDTH; ++w) *(u32 *)(at + (w - 1) * p.conv_row * 2) = seen[w];
  }
};

// A state in a CTA's registers: there is no barrier between its coming and its sums, nor behind its update.
struct Held {
  char *from;
  uint4 rows[ROWS];

  __device__ __forceinline__ static void prefetch(const char *state, int thread) {
    if constexpr (SPLIT == 1) {
      if (thread == 0) bulk_prefetch(state, STATE_BYTES);
    } else {
      for (int row = thread; row < KEY_DIM; row += THREADS) prefetch_l2(state + row * HEAD_ROW_BYTES);
    }
  }
  __device__ __forceinline__ Held(char *state, int thread)
      : from(state + thread / CHUNKS * HEAD_ROW_BYTES + thread % CHUNKS * 16) {}
  __device__ __forceinline__ void fetch(bool kept) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      rows[i] = kept ? load_l2((const uint4 *)(from + i * GROUPS * HEAD_ROW_BYTES)) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void load(int i, float (&x)[VEC]) const { unpack(rows[i], x); }
  __device__ __forceinline__ void store(int i, const float (&x)[VEC]) { rows[i] = packed(x); }
  __device__ __forceinline__ void put_back() const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) *(uint4 *)(from + i * GROUPS * HEAD_ROW_BYTES) = rows[i];
  }
};

// Of a token's key and query with themselves and each other, which a warp, or group, makes of its rows.
struct Products {
  float keys, queries, both;

  __device__ __forceinline__ void add(float key, float query) {
    if constexpr (NORMALIZE) {
      keys += key * key;
      queries += query * query;
    }
    both += key * query;
  }
  __device__ __forceinline__ void put(char *memory, int group, int chunk, int thread) {
#pragma unroll
    for (int mask = CHUNKS; mask < 32; mask *= 2) {
      if constexpr (NORMALIZE) {
        keys += __shfl_xor_sync(ALL, keys, mask);
        queries += __shfl_xor_sync(ALL, queries, mask);
      }
      both += __shfl_xor_sync(ALL, both, mask);
    }
    if (CHUNKS < 32 ? thread % 32 == 0 : chunk == 0)
      ((Products *)(memory + PRODUCTS_AT))[CHUNKS < 32 ? thread / 32 : group] = *this;
  }
  static __device__ __forceinline__ Products all(const char *memory) {
    Products sum = {0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < PARTS; ++n) {
      const Products part = ((const Products *)(memory + PRODUCTS_AT))[n];
      sum.keys += part.keys, sum.queries += part.queries, sum.both += part.both;
    }
    return sum;
  }
};
