// linear_wide.cu's sums on their way from registers to out.
//
// A warp has 16 rows of a tile, as fragments of 8 tokens: sums[n] of a lane are rows lane / 4 and lane / 4 +
// 8 of tokens lane % 4 * 2 and the next. GATED: gate and up rows take turns, so that a gate and its up are in
// lanes four apart.
//
// The CTAs of a cluster share out the tokens. A warp sends what others finish into their shared memory, and
// its own share waits for the same warp of the others; no barrier of a CTA or of the cluster stands here.
// Parts are added in the order of ranks.
#pragma once

#include "../../cuda/bulk.cuh"
#include "linear_params.cuh"

// groups of 8 tokens that a warp finishes; those of a cluster's last CTA may be fewer
constexpr int OWN = (NT + CLUSTER - 1) / CLUSTER;
// more CTAs than groups: so many have the same one, each finishes every SPLIT-th warp's rows
constexpr int SPLIT = CLUSTER > NT ? CLUSTER / NT : 1;
// bytes that a warp sends to, or gets from, another CTA
constexpr int PART_BYTES = OWN * 512;
constexpr int WARP_PARTS_BYTES = (CLUSTER - 1) * PART_BYTES;
static_assert((CLUSTER - 1) / SPLIT * OWN < NT, "every CTA finishes something");
constexpr int WARP_ROWS = GATED ? 8 : 16;               // columns of out of a warp

// Where a lane's numbers of out are, once a fragment is transposed: token lane / 4 of a group, two
// neighbouring columns, and if not GATED two more 8 further on.
struct OutPlace {
  const Params &p;
  int token, column;  // of the first group; column of out

  __device__ __forceinline__ OutPlace(const Params &p, int tile, int group, int warp, int lane)
      : p(p), token(group * 8 + lane / 4) {
    const int pair = lane % 4;
    column = tile * OUT_ROWS + warp * WARP_ROWS + (!GATED ? pair * 2 : pair % 2 ? pair + 3 : pair);
  }
  __device__ __forceinline__ bool real(int g, int half, int c = 0) const {
    return token + g * 8 < p.tokens && (!EDGE_N || column + half * 8 + c < OUT_WIDTH);
  }
  __device__ __forceinline__ i64 offset(int g, int half, i64 stride) const {
    return ((token + g * 8) * stride + column + half * 8) * 2;
  }
};

// 8 x 8 numbers of a fragment, transposed. GATED: rows are columns 0, 4, 1, 5, ... of out; lanes exchange
// numbers until each has two neighbours.
__device__ __forceinline__ u32 neighbours(u32 x, int lane) {
  if (!GATED) return x;
  const u32 other = __shfl_xor_sync(ALL, x, 1);
  return lane % 2 ? other >> 16 | (x & 0xffff0000u) : (x & 0xffffu) | other << 16;
}
__device__ __forceinline__ u32 to_out(u32 fragment, int lane) {
  return neighbours(movmatrix_trans(fragment), lane);
}
__device__ __forceinline__ u32 from_out(u32 x, int lane) { return movmatrix_trans(neighbours(x, lane)); }

// Two numbers from global memory; what is not real is 0.
__device__ __forceinline__ u32 load_two(const char *p, bool first, bool second) {
  u32 x = 0;
  if constexpr (ALIGNED) {
    if (first) x = load_l2((const u32 *)p);
  } else {
    u16 low = 0, high = 0;
    if (first) low = load_l2((const u16 *)p);
    if (second) high = load_l2((const u16 *)p + 1);
    x = low | (u32)high << 16;
  }
  return x;
}

// Residual, bias and scale of what a warp finishes, asked for before the products.
struct Addends {
  u32 residual[OWN][GATED ? 1 : 2];
  float bias[2], scale[2];  // of a lane's two rows; GATED: of its gate and its up

  __device__ __forceinline__ void load([[maybe_unused]] const OutPlace &place, [[maybe_unused]] int tile,
                                       [[maybe_unused]] int warp, [[maybe_unused]] int lane) {
    if constexpr (RESIDUAL) {
#pragma unroll
      for (int g = 0; g < OWN; ++g)
#pragma unroll
        for (int half = 0; half < (GATED ? 1 : 2); ++half) {
          const char *from = place.p.residual + place.offset(g, half, place.p.residual_token);
          residual[g][half] = load_two(from, place.real(g, half), place.real(g, half, 1));
        }
    }
    if constexpr (BIAS || SCALED) {
      const int row = lane / 4,
                column = tile * OUT_ROWS + warp * WARP_ROWS + (GATED ? row / 2 + row % 2 * 4 : row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int here = column + (GATED ? 0 : half * 8), at = here + (GATED ? half * OUT_WIDTH : 0);
        if constexpr (BIAS) {
          u16 x = 0;
          if (here < OUT_WIDTH) x = load_l2((const u16 *)place.p.bias + at);
          bias[half] = to_float<HALF>(x);
        }
        if constexpr (SCALED) scale[half] = here < OUT_WIDTH ? ((const float *)place.p.scale)[at] : 0.f;
      }
    }
  }
};

// Send what others finish; true if this warp finishes something, then `own` is all parts' sum. `parts`:
// WARP_PARTS_BYTES bytes for each of CONSUMERS / SPLIT warps; `barriers`: one for each of CONSUMERS.
__device__ __forceinline__ bool exchange(const float (&sums)[NT][4], float (&own)[OWN][4], u32 parts,
                                         u32 barriers, int rank, int warp, int lane) {
  const u32 place = parts + warp / SPLIT * WARP_PARTS_BYTES + lane * 16, barrier = barriers + warp * 8;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int owner = n / OWN * SPLIT + warp % SPLIT;
    if (owner == rank) {
#pragma unroll
      for (int j = 0; j < 4; ++j) own[n % OWN][j] = sums[n][j];
    } else {
      st_async(mapa(place + (rank - (rank > owner)) * PART_BYTES + n % OWN * 512, owner), sums[n],
               mapa(barrier, owner));
    }
  }
  if (warp % SPLIT != rank % SPLIT) return false;
  // For the same warp of the other CTAs of the cluster. All run, since each has passed the cluster's barrier,
  // and send before they wait. The bytes are expected since before that barrier. A CTA's memory outlives what
  // comes in: the CTA that is written to waits for it here.
  mbarrier_wait(barrier, 0);
  float total[OWN][4] = {};
#pragma unroll
  for (int from = 0; from < CLUSTER; ++from)
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      float4 part = make_float4(own[g][0], own[g][1], own[g][2], own[g][3]);
      if (from != rank) part = load_shared(place + (from - (from > rank)) * PART_BYTES + g * 512);
      total[g][0] += part.x; total[g][1] += part.y; total[g][2] += part.z; total[g][3] += part.w;
    }
#pragma unroll
  for (int g = 0; g < OWN; ++g)
#pragma unroll
    for (int j = 0; j < 4; ++j) own[g][j] = total[g][j];
  return true;
}

// Apply bias, scale, activation and residual, and store.
__device__ __forceinline__ void store_output(const float (&own)[OWN][4], const OutPlace &place,
                                             [[maybe_unused]] const Addends &addends, int lane) {
  const Params &p = place.p;
#pragma unroll
  for (int g = 0; g < OWN; ++g)
#pragma unroll
    for (int half = 0; half < (GATED ? 1 : 2); ++half) {
      float y[2];
      if constexpr (GATED) {
        // Even rows have gates, odd rows ups. Each lane keeps one of its two, the even row the first, and
        // gets that one's counterpart.
        const bool up_row = lane / 4 % 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float got = __shfl_xor_sync(ALL, up_row ? own[g][c] : own[g][2 + c], 4);
          const float kept = up_row ? own[g][2 + c] : own[g][c];
          float gate = up_row ? got : kept, up = up_row ? kept : got;
          if constexpr (BIAS) {
            gate += addends.bias[0];
            up += addends.bias[1];
          }
          if constexpr (SCALED) {
            gate *= addends.scale[0];
            up *= addends.scale[1];
          }
          y[c] = activate<ACTIVATION>(gate) * up;
        }
      } else {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          y[c] = own[g][half * 2 + c];
          if constexpr (BIAS) y[c] += addends.bias[half];
          if constexpr (SCALED) y[c] *= addends.scale[half];
        }
      }
      if constexpr (RESIDUAL) {
        const u32 residual = from_out(addends.residual[g][half], lane);
        y[0] += to_float<HALF>((u16)residual);
        y[1] += to_float<HALF>((u16)(residual >> 16));
      }
      const u32 packed = to_out(pack<HALF>(y[0], y[1]), lane);
      char *out = p.out + place.offset(g, half, p.out_token);
      if constexpr (ALIGNED) {
        if (place.real(g, half)) *(u32 *)out = packed;
      } else {
        if (place.real(g, half)) *(u16 *)out = (u16)packed;
        if (place.real(g, half, 1)) *(u16 *)(out + 2) = (u16)(packed >> 16);
      }
    }
}
