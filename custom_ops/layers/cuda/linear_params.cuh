// What the linear kernels share: arguments, sizes that follow from their configuration, activations.
#pragma once

#include "../../cuda/activation.cuh"
#include "../../cuda/machine.cuh"
#include "linear_config.cuh"
#include "../../cuda/clustered.cuh"

struct Params {
  const char *x, *weight, *bias, *scale, *residual, *norm_weight;
  char *out;
  i64 x_token, residual_token, out_token;  // strides, in numbers
  float eps, offset;
  int tokens, unused;
};
static_assert(sizeof(Params) == 96, "as custom_ops/layers/cuda/linear.py packs it");

constexpr bool GATED = ACTIVATION != 0;
constexpr int TOKENS = NT * 8;
// columns of out per tile; GATED: each has a gate row and an up row
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;
constexpr int OUT_WIDTH = GATED ? OUT_FEATURES / 2 : OUT_FEATURES;
// Whether tiles reach behind the last column; linear_sum.cu has all rows of linear_large.cu's.
constexpr int TILE_ROWS = K_PARTS > 1 ? ROW_WARPS * MT * (GATED ? 32 : 64) : OUT_ROWS;
constexpr bool EDGE_N = OUT_WIDTH % TILE_ROWS != 0;
constexpr int CHUNKS = (IN_FEATURES + 63) / 64;
constexpr int LINE = 128;                                 // bytes of a chunk's 64 numbers
