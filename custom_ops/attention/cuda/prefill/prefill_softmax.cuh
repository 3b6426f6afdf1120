// A consumer warpgroup's scores in registers: which keys a row sees, masks, maxima, weights.
#pragma once

#include "prefill_fp8.cuh"

// TREE: of 128 keys, which a row sees, a bit each, and the position at which the first of them counts.
struct Seen {
  u64 bits[2];
  int first;

  __device__ __forceinline__ bool sees(int key) const { return bits[key / 64] >> key % 64 & 1; }
  __device__ __forceinline__ int position(int key) const {
    return first + (key < 64 ? 0 : __popcll(bits[0])) + __popcll(bits[key / 64] & ((1ull << key % 64) - 1));
  }
};

// TREE: what a row sees of its request's query tokens, whose keys begin at `context`. It counts positions
// over these and the context.
struct Branch {
  u64 word;
  int context;

  // of the 64 keys from `key` on
  __device__ __forceinline__ u64 bits(int key) const {
    const int token = key - context;
    if (token >= 0) return token < 64 ? word >> token : 0;
    return token > -64 ? word << -token | ((1ull << -token) - 1) : ~0ull;
  }
  __device__ __forceinline__ Seen from(int key) const {
    const int token = key - context;
    const int before = token <= 0 ? token : __popcll(token > 63 ? word : word & ((1ull << token) - 1));
    return {{bits(key), bits(key + 64)}, context + before};
  }
};

// One thread's share of a warpgroup's 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16; columns 8 * n
// + lane % 4 * 2 + {0, 1}. Element i of a product: n = i / 4, row i / 2 % 2, column i % 2.
struct Softmax {
  float s[TILE_KV / 2];              // scores, then weights
  u32 weights[TILE_KV * BYTES / 8];  // as the second product reads them
  float acc[DIM_V / 2];
  float top[2], total[2];   // in base 2 with the scale applied; this thread's columns only

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = FLOOR;
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < DIM_V / 2; ++i) acc[i] = 0.f;
  }

  // Scores that are more than scaled products, in base 2. `to_key`: this thread's first key minus its rows'
  // positions.
  template <bool MASKED>
  __device__ __forceinline__ void adjust(float scale, float cap, const float (&slope)[2],
                                         const int (&to_key)[2], [[maybe_unused]] const Seen (&seen)[2],
                                         [[maybe_unused]] int first) {
    [[maybe_unused]] const float inverse = inverse_of(cap);
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) {
      float x = s[i] * scale;
      if (SOFT_CAP) x = soft_capped(x, cap, inverse);
      if constexpr (ALIBI && TREE && MASKED) {
        const int r = i / 2 % 2, distance = to_key[r] - first + seen[r].position(i / 4 * 8 + i % 2);
        x = fmaf(slope[r], (float)distance, x);
      } else if (ALIBI) x = fmaf(slope[i / 2 % 2], (float)(to_key[i / 2 % 2] + i / 4 * 8 + i % 2), x);
      s[i] = x * LOG2E;
    }
  }

  __device__ __forceinline__ void mask(const int (&low)[2], const int (&end)[2],
                                       [[maybe_unused]] const Seen (&seen)[2], int first) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) {
      const int r = i / 2 % 2, key = i / 4 * 8 + i % 2;
      if constexpr (TREE) {
        if (!seen[r].sees(key) || (HIDES_FIRST_KEYS && seen[r].position(key) < low[r])) s[i] = -INF;
      } else if (key >= end[r] - first || (HIDES_FIRST_KEYS && key < low[r] - first)) s[i] = -INF;
    }
  }

  // The rows' maxima with these scores; `shrink`: what sums so far have to be multiplied by.
  __device__ __forceinline__ void raise(float scale, float (&shrink)[2]) {
    float most[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      most[0][j] = fmaxf(s[j * 4], s[j * 4 + 1]);
      most[1][j] = fmaxf(s[j * 4 + 2], s[j * 4 + 3]);
    }
#pragma unroll
    for (int i = 16; i < TILE_KV / 2; i += 4) {
      most[0][i / 4 % 4] = fmaxf(most[0][i / 4 % 4], fmaxf(s[i], s[i + 1]));
      most[1][i / 4 % 4] = fmaxf(most[1][i / 4 % 4], fmaxf(s[i + 2], s[i + 3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 2));
      const float raised = fmaxf(top[r], Q_FP8 ? fmaf(x, scale, -WEIGHT_BITS) : x * scale);
      shrink[r] = exp2_(top[r] - raised);
      top[r] = raised;
    }
  }

  __device__ __forceinline__ void exponentiate(float scale, const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) s[i] = exp2_(fmaf(s[i], scale, -top[i / 2 % 2]));
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) sum[i / 2 % 2][i % 2] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = fmaf(total[r], shrink[r], sum[r][0] + sum[r][1]);
  }

  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; i += Q_FP8 ? 8 : 2) {
      if constexpr (Q_FP8) {  // two rows of 16 keys, in the order that turned values have
        weights[i / 4] = pack_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
        weights[i / 4 + 1] = pack_e4m3(s[i + 2], s[i + 3], s[i + 6], s[i + 7]);
      } else {
        weights[i / 2] = pack<HALF>(s[i], s[i + 1]);
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(ALL, shrink[0] < 1.f || shrink[1] < 1.f)) return;
#pragma unroll
    for (int i = 0; i < DIM_V / 2; ++i) acc[i] *= shrink[i / 2 % 2];
  }
};
