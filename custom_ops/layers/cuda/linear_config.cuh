// What linear.cu, linear_wide.cu, linear_large.cu and linear_sum.cu are compiled for. The values are an
// example's, the output projection of Llama 3 8B for up to 64 tokens on Hopper: each specialisation gets this
// text with its own ones (config.py).
#pragma once

inline constexpr int OUT_FEATURES = 4096;      // rows of the weight
inline constexpr int IN_FEATURES = 4096;       // columns of the weight
inline constexpr long long W_ROW = 4096;       // linear.cu: stride of the weight's rows, in numbers
inline constexpr bool HALF = false;            // float16, else bfloat16
inline constexpr int ACTIVATION = 0;           // 0: none; of gate, up: 1 silu, 2 gelu (tanh), 3 gelu (erf)
inline constexpr bool NORM = false;            // linear.cu: x is RMS-normalised on its way in
inline constexpr bool BIAS = false;            // a number per column of out is added
inline constexpr bool SCALED = false;          // a float32 number per column multiplies it and its bias
inline constexpr bool RESIDUAL = true;         // a tensor of out's shape is added
inline constexpr bool ALIGNED = true;          // 4 neighbours of out, residual, bias lie at 8-byte multiples
inline constexpr bool PDL = true;              // launched early: programmatic dependent launch
inline constexpr bool LAUNCH_FIRST = false;    // linear.cu: the next kernel may start with this one
inline constexpr int X_ROWS = 64;              // linear.cu: tokens that shared memory has room for
inline constexpr int NT = 8;                   // groups of 8 tokens that are multiplied
// tiles of 16 rows per warp; wide: of 64 per CTA; large: of 64 per warpgroup
inline constexpr int MT = 1;
// warps, or warpgroups of linear_large.cu, with rows of their own
inline constexpr int ROW_WARPS = 1;
inline constexpr int K_WARPS = 1;              // linear.cu: such groups of a CTA; chunks go round them
inline constexpr int STAGES = 10;              // chunks of k on their way or in use, per group
inline constexpr int EARLY_STAGES = 6;         // wide, large: of them, before the kernels ahead have ended
inline constexpr int CTAS_PER_SM = 1;          // that registers must suffice for
// linear_large.cu: CTAs that share out a tile's k, and leave parts
inline constexpr int K_PARTS = 1;
#define CLUSTER 2                              // CTAs that share a tile's k; chooses an attribute
