// The sampler behind sampler.h; include once per translation unit after defining VEC_WIDTH.
#pragma once
#include "draw.h"

namespace {

// The largest number of a row and the lowest of its tokens; NO_TOKEN where one is NaN or all are -inf.
template <typename T>
inline int64_t largest(const T* x, int64_t size) {
  vf most = splat(-INF);
  vi token{}, index, invalid{};
  for (int i = 0; i < VEC_WIDTH; ++i) index[i] = i;
  const auto take = [&](vf z) {
    const vi more = (vi)(z > most);
    invalid |= (vi)(z != z);
    most = (vf)(((vi)z & more) | ((vi)most & ~more));
    token = (index & more) | (token & ~more);
    index += VEC_WIDTH;
  };
  int64_t i = 0;
  for (; i + VEC_WIDTH <= size; i += VEC_WIDTH) take(load(x + i));
  if (i < size) {
    vf z = load_tail(x + i, int(size - i));
    for (int j = int(size - i); j < VEC_WIDTH; ++j) z[j] = -INF;
    take(z);
  }
  int best = 0;
  for (int j = 1; j < VEC_WIDTH; ++j)
    if (most[j] > most[best] || (most[j] == most[best] && token[j] < token[best])) best = j;
  return any(invalid) || most[best] == -INF ? NO_TOKEN : token[best];
}

// The row as penalised floats, with -inf behind them.
template <typename T>
inline void penalised(const LogitRow& p, float* z, int64_t padded) {
  const T* x = static_cast<const T*>(p.logits);
  const int64_t size = p.vocab_size;
  int64_t i = 0;
  for (; i + VEC_WIDTH <= size; i += VEC_WIDTH) store(z + i, load(x + i));
  for (; i < padded; ++i) z[i] = i < size ? to_float(x[i]) : -INF;
  if (p.repetition_penalty == 1) return;
  for (int64_t word = 0; 32 * word < size; ++word)
    for (uint32_t bits = uint32_t(p.seen[word]); bits; bits &= bits - 1) {
      const int64_t token = 32 * word + __builtin_ctz(bits);
      if (token >= size) break;
      z[token] = z[token] > 0 ? z[token] / p.repetition_penalty : z[token] * p.repetition_penalty;
    }
}

template <typename T>
inline int64_t sample(const LogitRow& p) {
  const bool greedy = p.temperature == 0;
  if (greedy && p.repetition_penalty == 1) return largest(static_cast<const T*>(p.logits), p.vocab_size);
  static thread_local std::vector<float> numbers;
  const int64_t padded = (p.vocab_size + BLOCK - 1) / BLOCK * BLOCK;
  if (int64_t(numbers.size()) < padded) numbers.resize(padded);
  penalised<T>(p, numbers.data(), padded);
  const int64_t token = largest(static_cast<const float*>(numbers.data()), padded);
  if (greedy || token == NO_TOKEN) return token;
  const Scores row{numbers.data(), p.vocab_size, padded, numbers[token]};
  const bool keeps_all = p.top_k == 0 && p.top_p == 1 && p.min_p == 0;
  return draw(p, row, keeps_all ? Entry{0, -INF, int32_t(padded)} : last_kept(p, row));
}

inline int64_t sample_row(const LogitRow& p) {
  switch (p.dtype) {
    case LogitDtype::BFloat16: return sample<bf16>(p);
    case LogitDtype::Half: return sample<fp16>(p);
    default: return sample<float>(p);
  }
}

}  // namespace
