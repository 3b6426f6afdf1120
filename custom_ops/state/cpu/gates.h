// delta_gates and gated_rms_norm; part of state_kernel_impl.h.
#pragma once
#include <cmath>
#include <vector>

#include "state_kernel.h"
#include "../../cpu/numbers.h"

namespace {

// log(1 + exp(x)); x itself where it is above 20, as in torch.
template <typename A>
__attribute__((always_inline)) inline A softplus(A x) {
  typedef Exponent<A> E;
  A keep, change;
  split_exp(x, &keep, &change);
  const A y = keep + change, u = 1 + y;
  typename E::bits bits;
  std::memcpy(&bits, &u, sizeof u);
  const typename E::bits power = (bits - E::half_root) >> E::mantissa;
  bits -= power << E::mantissa;
  A m, p = 0;  // u = m 2^power, m next to 1
  std::memcpy(&m, &bits, sizeof m);
  const A s = (m - 1) / (m + 1), z = s * s;
  for (int i = 2 * E::log_terms - 1; i > 0; i -= 2) p = p * z + A(2) / i;
  const A log = A(power) * E::ln2_high + (A(power) * E::ln2_low + p * s);
  return x > 20 ? x : x < E::least || x != x ? y : log + (y - (u - 1)) / u;  // what 1 + y has lost of y
}

constexpr int64_t GATES = 256;  // numbers that are taken together

// b is null: beta is the step.
template <typename A>
void gates_of(const Gates& p, int64_t first, int64_t end) {
  A x[GATES], bias[GATES], step[GATES], g[GATES];
  std::vector<A> rate(p.num_heads);
  read(p.a_log, 0, p.num_heads, rate.data());
  for (A& each : rate) {
    A keep, change;
    split_exp(each, &keep, &change);
    each = keep + change;
  }
  const int64_t per_head = p.columns / p.num_heads;
  const A low = A(p.min_step), high = A(p.max_step), bound = A(p.bound), scale = A(p.beta_scale);
  for (int64_t t = first; t < end; ++t) {
    for (int64_t c = 0; c < p.columns;) {
      const int64_t at = c % p.group_columns, n = std::min({GATES, p.columns - c, p.group_columns - at});
      read(p.a, t * p.a.token + c / p.group_columns * p.a.head + at, n, x);
      read(p.dt_bias, c, n, bias);
      for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
      for (int64_t i = 0; i < n; ++i) g[i] = rate[(c + i) / per_head];
      if (!p.bounded || !p.b.data)
        for (int64_t i = 0; i < n; ++i) {
          const A dt = softplus(x[i]);
          step[i] = dt < low ? low : dt > high ? high : dt;
        }
      if (p.bounded)
        for (int64_t i = 0; i < n; ++i) g[i] = bound * sigmoid(g[i] * x[i]);
      else
        for (int64_t i = 0; i < n; ++i) g[i] = -(g[i] * step[i]);
      write(p.g, t * p.g.token + c, n, g);
      if (!p.b.data) write(p.beta, t * p.beta.token + c, n, step);
      c += n;
    }
    const int64_t heads = p.b.data ? p.num_heads : 0, group_heads = heads / std::max<int64_t>(p.groups, 1);
    for (int64_t h = 0; h < heads;) {
      const int64_t at = h % group_heads, n = std::min({GATES, heads - h, group_heads - at});
      read(p.b, t * p.b.token + h / group_heads * p.b.head + at, n, x);
      for (int64_t i = 0; i < n; ++i) x[i] = scale * sigmoid(x[i]);
      write(p.beta, t * p.beta.token + h, n, x);
      h += n;
    }
  }
}

// Heads [first, end), counted through all tokens.
template <typename A>
void gated_norms(const GatedNorm& p, int64_t first, int64_t end) {
  const int64_t width = p.width;
  std::vector<A> numbers(3 * width);
  A *__restrict y = numbers.data(), *__restrict z = y + width, *__restrict weight = z + width;
  for (int64_t row = first; row < end; ++row) {
    const int64_t t = row / p.num_heads, h = row % p.num_heads, column = h * width;
    read(p.x, t * p.x.token + h * p.x.head, width, y);
    read(p.gate, t * p.gate.token + column / p.gate_columns * p.gate.head + column % p.gate_columns, width,
         z);
    if (p.sigmoid) for (int64_t i = 0; i < width; ++i) z[i] = sigmoid(z[i]);
    else for (int64_t i = 0; i < width; ++i) z[i] *= sigmoid(z[i]);
    for (int64_t i = 0; p.skip.data && i < width;) {
      const int64_t of = (column + i) / p.skip_columns, at = (column + i) % p.skip_columns,
                    n = std::min(width - i, p.skip_columns - at);
      A factor;
      read(p.skip_weight, of, 1, &factor);
      read(p.skip, t * p.skip.token + of * p.skip.head + at, n, weight);
      for (int64_t j = 0; j < n; ++j) y[i + j] += weight[j] * factor;
      i += n;
    }
    if (p.gate_first) for (int64_t i = 0; i < width; ++i) y[i] *= z[i];
    const A factor = 1 / std::sqrt(sum_of_squares<A>(y, width) / A(width) + A(p.eps));
    if (row == first || p.weight.head) read(p.weight, h * p.weight.head, width, weight);
    else if (p.skip.data) read(p.weight, 0, width, weight);
    for (int64_t i = 0; i < width; ++i) y[i] *= factor * weight[i];
    if (!p.gate_first) for (int64_t i = 0; i < width; ++i) y[i] *= z[i];
    write(p.out, t * p.out.token + h * p.out.head, width, y);
  }
}

}  // namespace
