// What state_decode.cu is compiled for. The values are an example's, a shard of two of Qwen3-Next's, states
// of bfloat16: each specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int KEY_DIM = 128;            // rows of a state
inline constexpr int VALUE_DIM = 128;          // columns of a state that a CTA has
inline constexpr int NUM_HEADS = 16;           // heads of values
inline constexpr int GROUP = 2;                // of these, heads per head of keys
inline constexpr bool HALF = false;            // q, k and v are float16, else bfloat16
inline constexpr bool STATE_FLOAT = false;     // states are float32, else of q's dtype
inline constexpr bool OUT_FLOAT = false;       // out is float32, else of q's dtype
inline constexpr int BETA = 1;                 // beta: 0 none, 1 of q's dtype, 2 float32
inline constexpr bool BY_KEY = false;          // a decay per row of the state
inline constexpr bool DELTA = true;            // the delta rule
inline constexpr bool NORMALIZE = true;        // keys and queries are divided by their norms
inline constexpr bool ONCE = true;             // states are loaded evict-first into L2
inline constexpr int THREADS = 256;            // of a CTA
inline constexpr int MIN_CTAS = 4;             // CTAs of a multiprocessor that registers must be there for
