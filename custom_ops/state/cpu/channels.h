// selective_scan and rg_lru: heads of one value column, whose decays and values are made as their states need
// them; part of state_kernel_impl.h.
#pragma once
#include "columns.h"
#include "gates.h"

namespace {

// n outputs y, times act(gate) if there is a gate, to `out`.
template <typename A, bool SILU>
void gate_and_write(const Operand& gate, const Operand& out, int64_t t, int64_t first, int64_t n, A* y) {
  A z[COLUMNS];
  if (gate.data) {
    read(gate, t * gate.token + first, n, z);
    for (int64_t i = 0; i < n; ++i) y[i] *= SILU ? z[i] * sigmoid(z[i]) : z[i];
  }
  write(out, t * out.token + first, n, y);
}

template <typename A>
void scan(const SelectiveScan& p, const Row* rows, int64_t num_rows, int64_t first, int64_t end) {
  const Recurrence& r = p.recurrence;
  const int64_t keys = r.key_dim;
  std::vector<A> numbers(2 * COLUMNS * keys);
  A *const __restrict rate = numbers.data(), *const __restrict g = rate + COLUMNS * keys;
  A x[COLUMNS], bias[COLUMNS], skip[COLUMNS];
  for (int64_t c = first; c < end; c += COLUMNS) {
    const int64_t n = std::min(COLUMNS, end - c);
    if (p.a_log.token == keys) read(p.a_log, c * keys, n * keys, rate);
    else for (int64_t h = 0; h < n; ++h) read(p.a_log, (c + h) * p.a_log.token, keys, rate + h * keys);
    for (int64_t i = 0; i < n * keys; ++i) {
      A keep, change;
      split_exp(rate[i], &keep, &change);
      rate[i] = -(keep + change);
    }
    read(p.dt_bias, c, n, bias);
    read(p.skip_weight, c, n, skip);
    const auto fill = [&](int64_t t, A* keep, A* change, A* __restrict beta, A* v) {
      read(p.dt, t * p.dt.token + c, n, beta);
      for (int64_t h = 0; h < n; ++h) beta[h] = softplus(beta[h] + bias[h]);
      for (int64_t h = 0; h < n; ++h) {
        int64_t i = h * keys;
        for (; i + LANES<A> <= (h + 1) * keys; i += LANES<A>) wide(g + i) = wide(rate + i) * beta[h];
        for (; i < (h + 1) * keys; ++i) g[i] = rate[i] * beta[h];
      }
      split_exps<A, true>(g, n * keys, keep, change);
      read(r.v, t * r.v.token + c, n, x);
      std::copy_n(x, n, v);
    };
    const auto take = [&](int64_t t, A* y) {
      for (int64_t h = 0; h < n; ++h) y[h] += skip[h] * x[h];
      gate_and_write<A, true>(p.gate, r.out, t, c, n, y);
    };
    for (const Row* row = rows; row < rows + num_rows; ++row)
      recur_columns<A, true>(r, *row, c, n, fill, take);
  }
}

constexpr int64_t PRODUCT_ROWS = 64;    // of a weight that stay in the second cache
constexpr int64_t PRODUCT_TOKENS = 32;  // that take them

// Adds products with `rows` rows of a weight to TILE columns of sums y of up to TOKENS tokens, which lie
// `pitch` apart, as those of x.
template <typename A, int TOKENS = TOGETHER>
void add_products(int64_t tokens, const A* w, int64_t stride, int64_t rows, const A* x, int64_t pitch, A* y) {
  if constexpr (TOKENS > 1)
    if (tokens < TOKENS) return add_products<A, TOKENS - 1>(tokens, w, stride, rows, x, pitch, y);
  W<A> sums[TOKENS][4];
#pragma GCC unroll 8  // else sums go through memory
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[t][i] = wide(y + t * pitch + i * LANES<A>);
  for (int64_t r = 0; r < rows; ++r) {
    const A* const row = w + r * stride;
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[t][i] += x[t * pitch + r] * wide(row + i * LANES<A>);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) wide(y + t * pitch + i * LANES<A>) = sums[t][i];
}

// The same of one token and all `width` columns, in the order in which a weight lies in memory: processors
// fetch ahead by themselves where little is computed, and the other tokens find the rows in a cache. `ahead`:
// they fetch too little of one stream (instruction_set.h), and are asked for what comes two pages later.
template <typename A, typename T>
void add_first_products(const T* w, int64_t stride, int64_t rows, const A* x, int64_t width, bool ahead,
                        A* y) {
  constexpr int64_t DISTANCE = 8192 / sizeof(T);
  fetch_pages(w + rows * stride, rows * stride * sizeof(T));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i + LANES<A> <= width; i += LANES<A>) {
      const T* const at = w + r * stride + i;
      if (ahead) __builtin_prefetch(at + DISTANCE, 0, 2);
      W<A> numbers;
      load_wide<A>(at, numbers);
      wide(y + i) += x[r] * numbers;
    }
}

// y[t] = bias + x[t] W over one block of `width` columns, for `num` tokens that lie side by side.
template <typename A>
void block_product(const Operand& weight, const Operand& bias, int64_t block, int64_t width, const A* x,
                   int64_t num, bool ahead, A* y) {
  const bool own = weight.dtype == (sizeof(A) == 8 ? Number::Double : Number::Float);
  if (num == 1 && !own && width % LANES<A> == 0)  // numbers are converted where they are multiplied
    return by_dtype<A>(weight.dtype, [&](auto* dtype) {
      const auto* const w = static_cast<decltype(dtype)>(weight.data) + block * weight.token;
      read(bias, block * bias.token, width, y);
      for (int64_t r = 0; r < width; r += PRODUCT_ROWS)
        add_first_products(w + r * weight.head, weight.head, std::min(PRODUCT_ROWS, width - r), x + r, width,
                           ahead, y);
    });
  std::vector<A> converted(own ? 0 : PRODUCT_ROWS * width);
  read(bias, block * bias.token, width, y);
  for (int64_t t = 1; t < num; ++t) std::copy_n(y, width, y + t * width);
  for (int64_t r = 0; r < width; r += PRODUCT_ROWS) {
    const int64_t rows = std::min(PRODUCT_ROWS, width - r), at = block * weight.token + r * weight.head,
                  stride = own ? weight.head : width;
    for (int64_t i = 0; !own && i < rows; ++i)
      read(weight, at + i * weight.head, width, converted.data() + i * width);
    const A* const w = own ? static_cast<const A*>(weight.data) + at : converted.data();
    add_first_products(w, stride, rows, x + r, width, ahead, y);
    for (int64_t t = 1; t < num; t += TOGETHER)
      for (int64_t c = 0; c + TILE<A> <= width; c += TILE<A>)
        add_products(num - t, w + c, stride, rows, x + t * width + r, width, y + t * width + c);
    for (int64_t t = 0; t < num; ++t)
      for (int64_t c = width / (t ? TILE<A> : LANES<A>) * (t ? TILE<A> : LANES<A>); c < width; ++c)
        for (int64_t i = 0; i < rows; ++i) y[t * width + c] += x[t * width + r + i] * w[i * stride + c];
  }
}

// Of n channels, by the products a and b of their gates: decays of two parts and v, inputs of the states.
template <typename A>
void decays_and_values(const A* __restrict rate, const A* __restrict a, const A* __restrict b,
                       const A* __restrict x, int64_t n, bool begins, A* __restrict keep,
                       A* __restrict change, A* __restrict v) {
  A g[COLUMNS];
  for (int64_t i = 0; i < n; ++i) g[i] = rate[i] * sigmoid(a[i]);
  split_exps<A, true>(g, n, keep, change);
  for (int64_t i = 0; i < n; ++i) v[i] = x[i] * sigmoid(b[i]);
  for (int64_t i = 0; i < n && !begins; ++i)  // times the root of 1 - decay^2
    v[i] *= std::sqrt((1 - keep[i] - change[i]) * (1 + keep[i] + change[i]));
}

// Blocks [first, end) of channels.
template <typename A>
void rg_lru(const RgLru& p, const Row* rows, int64_t num_rows, int64_t first, int64_t end) {
  const Recurrence& r = p.recurrence;
  const int64_t width = p.width;
  int64_t tokens = 0;
  for (const Row* row = rows; row < rows + num_rows; ++row) tokens += row->end - row->begin;
  std::vector<A> numbers((3 * tokens + 1) * width);
  A *const x = numbers.data(), *const input = x + tokens * width, *const recurrent = input + tokens * width,
          *const rate = recurrent + tokens * width;
  for (int64_t block = first; block < end; ++block) {
    A* to = x;
    for (const Row* row = rows; row < rows + num_rows; ++row)
      for (int64_t t = row->begin; t < row->end; ++t, to += width)
        read(r.v, t * r.v.token + block * width, width, to);
    for (int64_t t = 0; t < tokens; t += PRODUCT_TOKENS) {
      const int64_t num = std::min(PRODUCT_TOKENS, tokens - t), at = t * width;
      block_product(p.input_weight, p.input_bias, block, width, x + at, num, p.ahead, input + at);
      block_product(p.recurrent_weight, p.recurrent_bias, block, width, x + at, num, p.ahead,
                    recurrent + at);
    }
    read(p.recurrent_param, block * width, width, rate);
    for (int64_t i = 0; i < width; ++i) rate[i] = -8 * softplus(rate[i]);
    int64_t done = 0;  // tokens of the rows before
    for (const Row* row = rows; row < rows + num_rows; done += row->end - row->begin, ++row)
      for (int64_t c = 0; c < width; c += COLUMNS) {
        const int64_t n = std::min(COLUMNS, width - c);
        const auto fill = [&](int64_t t, A* keep, A* change, A*, A* v) {
          const int64_t at = (done + t - row->begin) * width + c;
          decays_and_values(rate + c, recurrent + at, input + at, x + at, n, row->begins && t == row->begin,
                            keep, change, v);
        };
        recur_columns<A, false>(r, *row, block * width + c, n, fill, [&](int64_t t, A* y) {
          gate_and_write<A, false>(p.gate, r.out, t, block * width + c, n, y);
        });
      }
  }
}

}  // namespace
