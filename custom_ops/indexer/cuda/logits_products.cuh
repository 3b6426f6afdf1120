// Products of a tile of keys with the heads of a token.
#pragma once

#include "logits_params.cuh"

// Where column d of a head lies among those of the products with e4m3 keys: a thread's 32 bytes of a key are
// its operands of eight products, so that columns go as its operands do.
__device__ __forceinline__ int operand_column(int d) {
  return (d / 16 % 2 * 4 + d % 16 / 4) * 16 + d % 4 / 2 * 8 + d / 32 * 2 + d % 2;
}

// A head for e4m3 keys as float16, multiplied by the power of two that takes its largest number, of exponent
// `top`, to 2^14: exact down to 2^-28 of that, below with an error of 2^-39 of it.
__device__ __forceinline__ void store_scaled(char *line, int head, int chunk, const float (&x)[8], int top) {
  const float factor = __int_as_float((268 - top) << 23);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int column = operand_column(chunk * 8 + e);
    *(u32 *)(line + column / 64 * (HEADS * 128) + (column / 8 % 8 ^ head % 8) * 16 + column % 8 * 2) =
        pack<true>(x[e] * factor, x[e + 1] * factor);
  }
}

// Heads of a token into shared memory, as the products read them; zeros behind the last one.
__device__ __forceinline__ void load_heads(const Params &p, char *memory, int token, int thread) {
  constexpr int LINE = WIDTH / 8, COUNT = HEADS * LINE, EACH = (COUNT + THREADS - 1) / THREADS;
  float4 x[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int head = (i * THREADS + thread) / LINE, chunk = thread % LINE;
    x[i] = {0.f, 0.f, 0.f, 0.f};
    if (head < NUM_HEADS)
      x[i] = load_l2((const float4 *)(p.q + (token * p.q_token + head * p.q_head) * 2) + chunk);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int head = (i * THREADS + thread) / LINE, chunk = thread % LINE;
    char *line = memory + Q_AT + head * 128;
    if constexpr (FP8) {
      const u32 words[4] = {__float_as_uint(x[i].x), __float_as_uint(x[i].y), __float_as_uint(x[i].z),
                            __float_as_uint(x[i].w)};
      float numbers[8], most = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        numbers[e] = to_float<false>((u16)(words[e / 2] >> e % 2 * 16));
        most = fmaxf(most, fabsf(numbers[e]));
      }
#pragma unroll
      for (int step = 1; step < LINE; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
      // of zeros 0; not so small that a weight times its inverse is no number any more
      const int top = min(max((int)(__float_as_uint(most) >> 23), 27), 254);
      if (head < HEADS) {
        store_scaled(line, head, chunk, numbers, top);
        if (chunk == 0) ((float *)(memory + FACTORS_AT))[head] = __int_as_float((top - 14) << 23);
      }
    } else if (head < HEADS) {
      *(float4 *)(line + chunk / 8 * (HEADS * 128) + (chunk % 8 ^ head % 8) * 16) = x[i];
    }
  }
}

// Scores of 64 keys, 16 of them for each warp.
__device__ __forceinline__ void multiply(float (&c)[J][4], const char *memory, u32 shared, int stage_at,
                                         int warp, int lane) {
  const u32 heads = shared + Q_AT;
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[j][e] = 0.f;
  if constexpr (FP8) {
    u32 a[8][4];
    const char *line = memory + stage_at + (warp * 16 + lane / 4) * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (lane % 4 * 2 + half ^ lane / 4) * 16;
      const uint4 low = *(const uint4 *)(line + at), high = *(const uint4 *)(line + 1024 + at);
      const u32 x[4] = {low.x, low.y, low.z, low.w}, y[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unpack_fp8<false>(x[i], a[half * 4 + i][0], a[half * 4 + i][2]);
        unpack_fp8<false>(y[i], a[half * 4 + i][1], a[half * 4 + i][3]);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) product16(c, a[k], operand(heads + k / 4 * (HEADS * 128) + k % 4 * 32));
  } else {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<HALF>(c, operand(shared + stage_at + k / 4 * (TILE * 128) + k % 4 * 32),
                  operand(heads + k / 4 * (HEADS * 128) + k % 4 * 32));
  }
  wgmma_commit();
  wgmma_wait<0>();
}
