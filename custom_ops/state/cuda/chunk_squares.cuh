// Squares of 16 x 16 numbers in a warp's registers: what the first kernels of long rows of delta nets make of
// a chunk's tokens. A lane has rows lane / 4 and + 8, columns lane % 4 * 2 and + 1 of both halves: what
// products give.
#pragma once

#include "../../cuda/machine.cuh"
#include "delta_records.cuh"

constexpr int ROW_BYTES = KEY_DIM * 2;  // of queries or keys in shared memory
constexpr int SQUARE_BYTES = 1024;      // of a square of float32 there

// Of a square of products.
__device__ __forceinline__ constexpr int products_at(int row, int column) {
  return (row * (row + 1) / 2 + column) * SQUARE_BYTES;
}

// 16 rows and numbers of 16 columns, both for the left and, as numbers of 16 rows to the right are, turned.
__device__ __forceinline__ void load_fragment(u32 (&x)[4], u32 rows, int strip, int step, int lane) {
  const int i = strip * 16 + lane % 16;
  ldmatrix_x4(x, rows + i * ROW_BYTES + ((step * 2 + lane / 16) ^ (i & 7)) * 16);
}

// A square of float16 as the right operand of products.
struct Turned {
  u32 x[2][2];  // half of the columns, half of the rows
  static __device__ __forceinline__ Turned of(const u32 (&a)[4]) {
    return {{{movmatrix_trans(a[0]), movmatrix_trans(a[1])}, {movmatrix_trans(a[2]), movmatrix_trans(a[3])}}};
  }
};

struct Square {
  float x[2][4];  // half of the columns; two of a row, then of the row 8 further

  // Products of 16 rows with 16 rows, of bfloat16.
  __device__ __forceinline__ void add_rows(const u32 (&a)[4], const u32 (&b)[4]) {
    mma<false>(x[0], a, b[0], b[2]);
    mma<false>(x[1], a, b[1], b[3]);
  }
  __device__ __forceinline__ void add(const u32 (&a)[4], const Turned &b) {
    mma<true>(x[0], a, b.x[0][0], b.x[0][1]);
    mma<true>(x[1], a, b.x[1][0], b.x[1][1]);
  }
  // As the left operand of products.
  __device__ __forceinline__ void fragment(u32 (&a)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) a[n] = pack<true>(x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
  }
  __device__ __forceinline__ void put(char *to) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) *(float4 *)(to + n * 512) = {x[n][0], x[n][1], x[n][2], x[n][3]};
  }
  __device__ __forceinline__ void get(const char *from) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 y = *(const float4 *)(from + n * 512);
      x[n][0] = y.x, x[n][1] = y.y, x[n][2] = y.z, x[n][3] = y.w;
    }
  }
  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n / 4][n % 4] = -x[n / 4][n % 4];
  }
  // Decays from column to row, times a factor of each column.
  __device__ __forceinline__ void decay(const float (&of_rows)[2], const float *total, const float *column,
                                        int c, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = c * 16 + n / 4 * 8 + lane % 4 * 2 + n % 2;
      x[n / 4][n % 4] = exp2_(of_rows[n % 4 / 2] - total[j]) * column[j];
    }
  }
  // A factor of each column.
  __device__ __forceinline__ void fill(const float *column, int c, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n / 4][n % 4] = column[c * 16 + n / 4 * 8 + lane % 4 * 2 + n % 2];
  }
  // Times these and a factor of each row; where `on_diagonal`, 0 above it, and on it but for ``with_own``.
  __device__ __forceinline__ void weigh(const Square &decays, const float (&rows)[2], bool on_diagonal,
                                        bool with_own, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = lane / 4 + n % 4 / 2 * 8, j = n / 4 * 8 + lane % 4 * 2 + n % 2;
      const float y = decays.x[n / 4][n % 4] * rows[n % 4 / 2] * x[n / 4][n % 4];
      x[n / 4][n % 4] = !on_diagonal || i > j || (with_own && i == j) ? y : 0.f;
    }
  }
  __device__ __forceinline__ void scale_columns(const float *column, int c, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n / 4][n % 4] *= column[c * 16 + n / 4 * 8 + lane % 4 * 2 + n % 2];
  }
  // As bfloat16. Neighbours exchange numbers: a lane then has 8 bytes of a row of 8 columns. Rows are ROW
  // bytes apart, their halves HALF, and halves of the rows EIGHT; ``live``: which of a lane's two rows are.
  template <int HALF, int ROW, int EIGHT>
  __device__ __forceinline__ void store(char *to, int lane, bool live = true, bool live_too = true) const {
    const bool odd = lane % 2;
    char *const at = to + lane % 2 * HALF + lane / 4 * ROW + lane % 4 / 2 * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 low = pack<false>(x[0][h * 2], x[0][h * 2 + 1]);
      const u32 high = pack<false>(x[1][h * 2], x[1][h * 2 + 1]);
      const u32 got = __shfl_xor_sync(ALL, odd ? low : high, 1);
      if (h ? live_too : live) *(uint2 *)(at + h * EIGHT) = odd ? uint2{got, high} : uint2{low, got};
    }
  }
};

// Squares below the diagonal to inverses of 1 + square. Two blocks of 8 x 8 on the diagonal of each go
// through one product.
template <int COUNT> __device__ __forceinline__ void invert(Square (&squares)[COUNT], int lane) {
  const int i = lane / 4, j = lane % 4 * 2;
  float block[COUNT][4];  // two of each block of 8
#pragma unroll
  for (int s = 0; s < COUNT; ++s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = j + n % 2;
      const float below = squares[s].x[n / 2][n];
      block[s][n] = i == column ? 1.f : i / 2 == column / 2 ? -below : 0.f;
    }
  }
#pragma unroll
  for (int half = 1; half < 3; ++half) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
      float corner[4], y[4] = {}, z[4] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        corner[n] = (i ^ (j + n % 2)) >> half == 1 ? squares[s].x[n / 2][n] : 0.f;
      }
      const u32 a[4] = {pack<true>(block[s][0], block[s][1]), 0, 0, pack<true>(block[s][2], block[s][3])};
      mma<true>(y, a, movmatrix_trans(pack<true>(corner[0], corner[1])),
                movmatrix_trans(pack<true>(corner[2], corner[3])));
      const u32 b[4] = {pack<true>(y[0], y[1]), 0, 0, pack<true>(y[2], y[3])};
      mma<true>(z, b, movmatrix_trans(a[0]), movmatrix_trans(a[3]));
#pragma unroll
      for (int n = 0; n < 4; ++n) block[s][n] -= z[n];
    }
  }
#pragma unroll
  for (int s = 0; s < COUNT; ++s) {  // blocks of 16
    float y[4] = {}, z[4] = {};
    const u32 a[4] = {pack<true>(block[s][2], block[s][3]), 0, 0, 0};
    mma<true>(y, a, movmatrix_trans(pack<true>(squares[s].x[0][2], squares[s].x[0][3])), 0);
    const u32 b[4] = {pack<true>(y[0], y[1]), 0, 0, 0};
    mma<true>(z, b, movmatrix_trans(pack<true>(block[s][0], block[s][1])), 0);
    Square &done = squares[s];
    done = {{{block[s][0], block[s][1], -z[0], -z[1]}, {0.f, 0.f, block[s][2], block[s][3]}}};
  }
}
