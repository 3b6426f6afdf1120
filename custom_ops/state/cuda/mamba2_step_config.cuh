// What mamba2_step.cu is compiled for. The values are an example's, Granite 4.0 H 1B, states of float32: each
// specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int KEY_DIM = 128;            // rows of a state
inline constexpr int VALUE_DIM = 64;           // columns of a state that a CTA has
inline constexpr int NUM_HEADS = 48;           // heads of values
inline constexpr int GROUP = 48;               // of these, heads per head of keys
inline constexpr int SPLIT = 1;                // CTAs that share a head's columns
inline constexpr int WIDTH = 4;                // of the convolution
inline constexpr bool HALF = false;            // numbers are float16, else bfloat16
inline constexpr bool STATE_FLOAT = true;      // states are float32, else of x's dtype
inline constexpr bool A_LOG_FLOAT = false;     // a_log is float32, else of x's dtype
inline constexpr bool DT_BIAS_FLOAT = false;   // dt_bias is float32, else of x's dtype
inline constexpr bool SKIP_FLOAT = false;      // skip_weight is float32, else of x's dtype
inline constexpr bool GATED = true;            // out is gated
inline constexpr bool NEW_STEP = false;        // states come ahead of the wait
inline constexpr bool BESIDE = false;          // it runs beside the attention in front of it
inline constexpr int THREADS = 256;            // of a CTA
inline constexpr int MIN_CTAS = 3;             // CTAs of a multiprocessor that registers must be there for
