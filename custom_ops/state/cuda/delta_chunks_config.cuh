// What delta_chunks.cu is compiled for. The values are an example's, a shard of two of Qwen3-Next's: each
// specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int VALUE_DIM = 128;          // numbers of a value
inline constexpr int KEY_HEADS = 8;            // heads of keys
inline constexpr int GROUP = 2;                // heads of values per head of keys
inline constexpr int SHORT = 16;               // tokens up to which a row is another kernel's
inline constexpr int BETA = 1;                 // beta: 0 none, 1 bfloat16, 2 float32
inline constexpr int MIN_CTAS = 4;             // CTAs of a multiprocessor that registers must be there for
inline constexpr int SHARED_BYTES = 35328;     // of dynamic shared memory
