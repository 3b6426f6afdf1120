// What selected.cu, selected_few.cu and selected_few_merge.cu are compiled for. The values are an example's,
// DeepSeek-V3.2 on eight GPUs, 8 query tokens: each specialisation gets this text with its own ones
// (config.py).
#pragma once

inline constexpr int RANK = 512;               // columns of a latent, which are its value
inline constexpr int ROPE = 64;                // columns of a rotated key, behind it
inline constexpr int NUM_HEADS = 16;           // query heads
inline constexpr int BLOCK_SIZE = 64;          // tokens of a block of the cache
inline constexpr bool HALF = false;            // numbers are float16, else bfloat16
inline constexpr bool CAUSAL = true;           // no key behind a query's own position is seen
inline constexpr bool LSE = false;             // log-sum-exp is stored
inline constexpr int M_TILES = 1;              // tiles of 16 heads of a CTA
#define CLUSTER 16                             // CTAs that share a token's positions; chooses an attribute
inline constexpr int MAX_PARTS = 16;           // most parts of a token that are merged, a multiple of 8
