// Parts of a state that a thread has, and a token's key and query.
#pragma once

#include "state_decode_params.cuh"

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
__device__ __forceinline__ void store_out(const Params &p, i64 at, float x) {
  if constexpr (OUT_FLOAT) ((float *)p.out)[at] = x;
  else ((u16 *)p.out)[at] = (u16)pack<HALF>(x, 0.f);
}

// A row of the batch, for one head.
struct Row {
  int req, head, begin, count, first;  // tokens from `first` on are no padding
  i64 slot;                            // 0: nothing is written
  bool kept;                           // the state is what the slot holds, else zeros
};
__device__ __forceinline__ Row find_row(const Params &p, int item) {
  Row row;
  row.req = item / NUM_HEADS;
  row.head = item % NUM_HEADS;
  row.begin = p.starts[row.req];
  row.count = p.starts[row.req + 1] - row.begin;
  const int length = p.lens[row.req], slot = p.slots[row.req];
  row.first = min(max(row.count - length, 0), row.count);
  row.slot = row.first < row.count ? slot : 0;
  if (row.slot == 0) row.first = row.count;
  row.kept = row.slot > 0 && length > row.count;
  return row;
}

// One warp: a token's key and query as the passes over the state take them, {k, q} or {decay k, decay q, k,
// decay} by row, and their product.
__device__ __forceinline__ void prepare(const Params &p, char *memory, const Row &row, i64 token, int turn,
                                        int lane) {
  constexpr int MINE = KEY_DIM / 32;
  float k[MINE], q[MINE], kk = 0.f, qq = 0.f, kq = 0.f;
  const int key_head = row.head / GROUP;
  const i64 k_at = token * p.k_token + key_head * p.k_head, q_at = token * p.q_token + key_head * p.q_head;
#pragma unroll
  for (int i = 0; i < MINE; i += 2) {  // pairs
    const int n = i * 32 + lane * 2;
    const u32 ks = *(const u32 *)(p.k + (k_at + n) * 2), qs = *(const u32 *)(p.q + (q_at + n) * 2);
    k[i] = to_float<HALF>((u16)ks);
    k[i + 1] = to_float<HALF>((u16)(ks >> 16));
    q[i] = to_float<HALF>((u16)qs);
    q[i + 1] = to_float<HALF>((u16)(qs >> 16));
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    kk += k[i] * k[i];
    qq += q[i] * q[i];
    kq += k[i] * q[i];
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    if constexpr (NORMALIZE) {
      kk += __shfl_xor_sync(ALL, kk, mask);
      qq += __shfl_xor_sync(ALL, qq, mask);
    }
    kq += __shfl_xor_sync(ALL, kq, mask);
  }
  const float of_k = NORMALIZE ? rsqrtf(kk + p.eps) : 1.f;
  const float of_q = NORMALIZE ? rsqrtf(qq + p.eps) * p.scale : p.scale;
  float *factors = (float *)(memory + FACTORS_AT) + turn * KEY_DIM * FACTORS;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int n = i / 2 * 64 + lane * 2 + i % 2;
    const float key = k[i] * of_k, query = q[i] * of_q;
    if constexpr (BY_KEY) {
      const float decay = expf(p.g[token * p.g_token + row.head * p.g_head + n]);
      ((float4 *)factors)[n] = {decay * key, decay * query, key, decay};
    } else {
      ((float2 *)factors)[n] = {key, query};
    }
  }
  if (lane == 0) ((float *)(memory + PRODUCT_AT))[turn] = kq * of_k * of_q;
}
