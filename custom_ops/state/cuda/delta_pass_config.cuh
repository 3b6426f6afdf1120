// What delta_pass.cu is compiled for. The values are an example's, a shard of two of Qwen3-Next's: each
// specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int VALUE_DIM = 128;          // columns of a state
inline constexpr int NUM_HEADS = 16;           // heads of values
inline constexpr int GROUP = 2;                // of these, heads per head of keys
inline constexpr int GROUPS = 2;               // warpgroups of a CTA, each with 64 columns
inline constexpr int SHORT = 16;               // tokens up to which a row is another kernel's
inline constexpr bool STATE_FLOAT = true;      // states are float32, else bfloat16
inline constexpr bool JOINED = false;          // rows are cut into segments
// what segments make of zeros and of the identity, without results
inline constexpr bool ENDS = false;
inline constexpr bool BY_KEY = false;          // columns of keys decay one by one
inline constexpr int SHARED_BYTES = 232448;    // of dynamic shared memory
