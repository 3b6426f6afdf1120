// What norm.cu is compiled for. The values are an example's, a norm of Llama 3 8B: each specialisation gets
// this text with its own ones (config.py).
#pragma once

inline constexpr int IN_FEATURES = 4096;       // width of a token's row
inline constexpr int WEIGHT_BYTES = 2;         // of a number of the weight: 2 as x, 4: float32
inline constexpr int THREADS = 256;            // of a CTA, which has one row
inline constexpr bool HALF = false;            // x and out are float16, else bfloat16
inline constexpr bool PDL = true;              // launched early: programmatic dependent launch
