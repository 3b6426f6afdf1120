// A row of logits to a token: steps 1 to 4 of custom_ops/step_end/reference.py. Compiled once per instruction
// set by kernel_*.cpp, chosen at run time by step_end_ops.cpp.
#pragma once
#include <cstdint>

namespace torchpaged {

enum class LogitDtype { Float, BFloat16, Half };

struct LogitRow {
  const void* logits;  // vocab_size of them, side by side
  LogitDtype dtype;
  int64_t vocab_size;
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k;
  const int32_t* seen;
  int64_t seed, counter;
};

constexpr int64_t NO_TOKEN = -2;  // as in check.py

// The row's token, or NO_TOKEN.
using Sampler = int64_t (*)(const LogitRow&);

int64_t sample_row_generic(const LogitRow&);
int64_t sample_row_avx2(const LogitRow&);
int64_t sample_row_avx512(const LogitRow&);

}  // namespace torchpaged
