// CASCADE: the end of a tile of prefixes. Each row is put together with what the decode launch has left of
// its request's suffix in `out`, by both sides' LSE, and stored over it.
#pragma once

#include "../prefill/prefill_epilogue.cuh"

// The LSE of token rows in no group, which are behind all groups' rows.
__device__ __forceinline__ void copy_lse_of_others(const Params &p) {
  constexpr int HEADS = NUM_KV_HEADS * GROUP;
  const int begin = load_l2(p.starts + p.num_reqs), count = (p.num_tokens - begin) * HEADS;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const i64 line = load_l2((const int *)(p.order + begin + i / HEADS));
    p.lse[line * p.l_token + i % HEADS * p.l_head] = load_l2(p.own_lse + line * HEADS + i % HEADS);
  }
}

// As store_rows; a row of the groups is token row `order` says. A NaN or +inf lives on in its own weight; a
// side that saw nothing, or nothing but -inf, is left out (merge_attn_states).
template <int N>
__device__ __forceinline__ void
store_with_suffixes(const Params &p, const QueryTile &tile, int first, int lane, const float (&tops)[2],
                    const float (&totals)[2], const float (&acc)[N * 4], int block) {
  constexpr int HEADS = NUM_KV_HEADS * GROUP;
  float weight[2], own_weight[2];
  bool stored[2], sees[2], own_sees[2];
  char *at[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = totals[r];
    total += __shfl_xor_sync(ALL, total, 1);
    total += __shfl_xor_sync(ALL, total, 2);
    const int row = first + r * 8;
    const int token = row < TILE_TOKENS * GROUP ? tile.index * TILE_TOKENS + row / GROUP : tile.query_len;
    stored[r] = token < tile.query_len;
    // token rows are less than 2^31: the low word
    const i64 line = stored[r] ? load_l2((const int *)(p.order + tile.start + token)) : 0;
    const i64 head = tile.head * GROUP + row % GROUP;
    const float own = load_l2(p.own_lse + line * HEADS + head) * LOG2E;
    const float lse = tile.seq_len - tile.query_len + token >= 0 ? tops[r] + log2_(total) : -INF;
    sees[r] = lse != -INF, own_sees[r] = own != -INF;
    const float top = fmaxf(lse, own), safe = top == -INF ? 0.f : top;
    const float share = exp2_(lse - safe), own_share = exp2_(own - safe);
    const float both = sees[r] || own_sees[r] ? share + own_share : 1.f;
    weight[r] = share / both / total, own_weight[r] = own_share / both;
    if constexpr (SCALES) weight[r] *= load_l2(p.v_scale + tile.head * p.vs_head);
    at[r] = p.out + (line * p.o_token + head * p.o_head + lane % 4 * 8) * 2;
    if (LSE && block == 0 && stored[r] && lane % 4 == 0)
      p.lse[line * p.l_token + head * p.l_head] =
          sees[r] || own_sees[r] ? (safe + log2_(both)) * LN2 : -INF;
  }
#pragma unroll
  for (int n = 0; n < N; n += 4)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint4 *const to = (uint4 *)(at[r] + (block + n) * 16);
      float4 own = make_float4(0.f, 0.f, 0.f, 0.f);
      const bool here = stored[r] && has_columns(block + n, lane);
      if (here) own = load_l2((const float4 *)to);
      u32 w[4] = {__float_as_uint(own.x), __float_as_uint(own.y), __float_as_uint(own.z),
                  __float_as_uint(own.w)};
      transpose_quad(w, lane);  // its own inverse
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *pair = acc + (n + i) * 4 + r * 2;
        const float low = to_float<HALF>((u16)w[i]), high = to_float<HALF>((u16)(w[i] >> 16));
        float x = 0.f, y = 0.f;
        if (sees[r]) x = pair[0] * weight[r], y = pair[1] * weight[r];
        if (own_sees[r]) x = fmaf(low, own_weight[r], x), y = fmaf(high, own_weight[r], y);
        w[i] = pack<HALF>(x, y);
      }
      transpose_quad(w, lane);
      if (here) *to = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
