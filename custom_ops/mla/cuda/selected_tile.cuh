// What is done with a tile of keys: scores, their softmax, values.
#pragma once

#include "selected_keys.cuh"

// Where a lane's line of ldmatrix lies: line `lane % 8` of a group, 16 bytes `chunk` of a square.
__device__ __forceinline__ u32 line_at(int lane, int chunk) {
  return lane % 8 * 128 + (chunk ^ lane % 8) * 16;
}

// Queries of a warp's part of the columns as operands; kept in registers where a tile has 16 heads.
struct Queries {
  static constexpr bool KEPT = M_TILES == 1;
  u32 kept[KEPT ? SQUARES : 1][STEPS][4];
  u32 at;

  __device__ __forceinline__ void load(u32 (&a)[4], int m, int square, int k, int part, int lane) const {
    ldmatrix_x4(a, at + (m * 2 + lane / 8 % 2) * GROUP_BYTES + square * 1024 +
                       line_at(lane, (part * STEPS + k) * 2 + lane / 16));
  }
  __device__ __forceinline__ void keep(int part, int lane) {
    if constexpr (KEPT)
#pragma unroll
      for (int square = 0; square < SQUARES; ++square)
#pragma unroll
        for (int k = 0; k < STEPS; ++k) load(kept[square][k], 0, square, k, part, lane);
  }
};

// Scores of 16 keys in a part of the columns, STEPS times 16 of each square, for each warp.
__device__ __forceinline__ void score(char *memory, u32 stage, const Queries &q, int warp, int lane) {
  constexpr int CHAINS = 1;
  const int part = warp / KEY_PARTS, keys = warp % KEY_PARTS;
  float c[CHAINS][M_TILES][2][4] = {};
#pragma unroll
  for (int square = 0; square < SQUARES; ++square) {
    // of 8 keys 32 columns each, or of 16 keys 16
    u32 b[STEPS][4];
    const u32 at = stage + keys * 2 * GROUP_BYTES + square * 1024;
#pragma unroll
    for (int n = 0; n < STEPS; ++n)
      ldmatrix_x4(b[n], at + (STEPS == 2 ? n : lane / 16) * GROUP_BYTES +
                            line_at(lane, STEPS == 2 ? part * 4 + lane / 8 : part * 2 + lane / 8 % 2));
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        u32 a[4];
        if constexpr (Queries::KEPT) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = q.kept[square][k][e];
        } else {
          q.load(a, m, square, k, part, lane);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const u32(&of)[4] = b[STEPS == 2 ? n : 0];
          const int e = STEPS == 2 ? k * 2 : n * 2;
          mma<HALF>(c[(square + k) % CHAINS][m][n], a, of[e], of[e + 1]);
        }
      }
  }
  float *to = (float *)(memory + S_AT) + part * ROWS * S_LINE + keys * 16 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        float2 x = {c[0][m][n][e], c[0][m][n][e + 1]};
        if constexpr (CHAINS == 2) {
          x.x += c[1][m][n][e];
          x.y += c[1][m][n][e + 1];
        }
        *(float2 *)(to + (m * 16 + e / 2 * 8 + lane / 4) * S_LINE + n * 8) = x;
      }
}

// Of a warp's rows, AT_ONCE next to each other, each with as many lanes as it has pairs of keys; the total of
// a lane's keys.
struct Softmax {
  static constexpr int LANES = TILE / 2, AT_ONCE = 32 / LANES, TURNS = MY_ROWS / AT_ONCE;
  float maximum[TURNS], total[TURNS];

  static __device__ __forceinline__ int row(int turn, int warp, int lane) {
    return warp * MY_ROWS + turn * AT_ONCE + lane / LANES;
  }
};

// Weights of a tile into shared memory, as an operand; by which the sums so far shrink, into FACTOR_AT.
__device__ __forceinline__ void weigh(char *memory, Softmax &s, int tile, float scale, int warp, int lane) {
  const int pair = lane % Softmax::LANES;
  const int *keys = (const int *)(memory + KEYS_AT) + tile * TILE + pair * 2;
  const bool first_seen = keys[0] >= 0, second_seen = keys[1] >= 0;
#pragma unroll
  for (int i = 0; i < Softmax::TURNS; ++i) {
    const int r = Softmax::row(i, warp, lane);
    const float *from = (const float *)(memory + S_AT) + r * S_LINE + pair * 2;
    float2 sum = *(const float2 *)from;
#pragma unroll
    for (int part = 1; part < COLUMN_PARTS; ++part) {
      const float2 more = *(const float2 *)(from + part * ROWS * S_LINE);
      sum.x += more.x;
      sum.y += more.y;
    }
    const float x = first_seen ? sum.x * scale : -INF, y = second_seen ? sum.y * scale : -INF;
    float top = fmaxf(x, y);
#pragma unroll
    for (int step = 1; step < Softmax::LANES; step *= 2)
      top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    top = fmaxf(s.maximum[i], top);
    const float shrink = exp2_(s.maximum[i] - top), px = exp2_(x - top), py = exp2_(y - top);
    s.maximum[i] = top;
    s.total[i] = s.total[i] * shrink + (px + py);
    *(u32 *)(memory + P_AT + r * 128 + (pair / 4 ^ r % 8) * 16 + pair % 4 * 4) = pack<HALF>(px, py);
    if (pair == 0) ((float *)(memory + FACTOR_AT))[r] = shrink;
  }
}

// Sums of values: all heads, RANK / WARPS columns for each warp.
__device__ __forceinline__ void add_values(char *memory, u32 shared, u32 stage,
                                           float (&acc)[M_TILES][PAIRS * 2][4], int warp, int lane) {
  constexpr int COLUMNS = RANK / WARPS;
  const float *shrinks = (const float *)(memory + FACTOR_AT) + lane / 4;
  const u32 values = stage + warp * COLUMNS / 64 * 1024;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    const float low = shrinks[m * 16], high = shrinks[m * 16 + 8];
#pragma unroll
    for (int n = 0; n < PAIRS * 2; ++n) {
      acc[m][n][0] *= low;
      acc[m][n][1] *= low;
      acc[m][n][2] *= high;
      acc[m][n][3] *= high;
    }
  }
#pragma unroll
  for (int k = 0; k < TILE / 16; ++k) {
    u32 a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
      ldmatrix_x4(a[m], shared + P_AT + (m * 2 + lane / 8 % 2) * 1024 + line_at(lane, k * 2 + lane / 16));
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      u32 b[4];
      ldmatrix_x4_trans(b, values + (k * 2 + lane / 8 % 2) * GROUP_BYTES +
                               line_at(lane, warp * COLUMNS % 64 / 8 + n * 2 + lane / 16));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        mma<HALF>(acc[m][n * 2], a[m], b[0], b[1]);
        mma<HALF>(acc[m][n * 2 + 1], a[m], b[2], b[3]);
      }
    }
  }
}
