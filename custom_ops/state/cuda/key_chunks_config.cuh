// What key_chunks.cu is compiled for. The values are an example's, Kimi Linear's: each specialisation gets
// this text with its own ones (config.py).
#pragma once

inline constexpr int VALUE_DIM = 128;          // numbers of a value
inline constexpr int HEADS = 32;               // heads of values
inline constexpr int GROUP = 1;                // of these, heads per head of keys
inline constexpr int SHORT = 16;               // tokens up to which a row is another kernel's
inline constexpr int BETA = 2;                 // beta: 0 none, 1 bfloat16, 2 float32
inline constexpr int MIN_CTAS = 3;             // CTAs of a multiprocessor that registers must be there for
inline constexpr int SHARED_BYTES = 68480;     // of dynamic shared memory
