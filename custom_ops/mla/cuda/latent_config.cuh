// What latent.cu, latent_pairs.cu, latent_selected.cu, latent_fp8.cu and latent_merge.cu are compiled for.
// The values are an example's, DeepSeek-V3 on eight GPUs: each specialisation gets this text with its own
// ones (config.py).
#pragma once

inline constexpr int RANK = 512;               // columns of a latent, which are its value
inline constexpr int ROPE = 64;                // columns of a rotated key, behind it
inline constexpr int NUM_HEADS = 16;           // query heads
inline constexpr int BLOCK_SIZE = 64;          // tokens of a block of the cache
inline constexpr bool HALF = false;            // numbers are float16, else bfloat16
inline constexpr bool FP8 = false;             // rows of fp8
inline constexpr bool CAUSAL = true;           // no key behind a query's own position is seen
inline constexpr bool LSE = false;             // log-sum-exp is stored
inline constexpr int ROWS = 16;                // query rows (tokens x heads) of a CTA
inline constexpr int MAX_GROUPS = 132;         // parts that the work is cut into at most
#define CLUSTER 1                              // CTAs that share a request; 1: ranges. Chooses an attribute
inline constexpr int STAGES = 2;               // tiles of keys on their way or in use
inline constexpr int MIN_TILES = 2;            // tiles of keys that a part of the work has at least
inline constexpr int MERGE_SHARE = 1;          // CTAs of the merge for each range
