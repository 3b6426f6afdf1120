// What few_experts.cu is compiled for. The values are an example's, DeepSeek-V2-Lite: each specialisation
// gets this text with its own ones (config.py).
#pragma once

inline constexpr int HIDDEN = 2048;            // width of a token's row
inline constexpr int INNER = 1408;             // inner numbers of an expert
inline constexpr int SHARED = 2816;            // of the shared one, 0: there is none
inline constexpr int TOP_K = 6;                // experts of a token
inline constexpr int ACTIVATION = 1;           // of gate: 1 silu, 2 gelu (tanh), 3 gelu (erf)
inline constexpr bool HALF = false;            // numbers are float16, else bfloat16
inline constexpr bool PDL = true;              // launched early: programmatic dependent launch
