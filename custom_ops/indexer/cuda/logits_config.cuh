// What index_logits.cu is compiled for. The values are an example's, DeepSeek-V3.2, keys of e4m3: each
// specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int NUM_HEADS = 64;           // heads of the indexer
inline constexpr int BLOCK_SIZE = 64;          // tokens of a block of the cache
inline constexpr bool HALF = false;            // numbers of 16 bits are float16, else bfloat16
inline constexpr bool FP8 = true;              // keys are e4m3 with a scale each, else of 16 bits
inline constexpr bool CAUSAL = true;           // no key behind a query's own position is seen
inline constexpr int WARPGROUPS = 3;           // warpgroups of a CTA
inline constexpr int STAGES = 3;               // tiles of keys on their way or in use, of each warpgroup
