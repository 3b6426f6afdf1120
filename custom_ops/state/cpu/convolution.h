// causal_conv, CHANNELS at a time; part of state_kernel_impl.h.
#pragma once
#include "numbers.h"

namespace {

constexpr int64_t CHANNELS = 256;

template <typename A>
void silu(A* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    A keep, change;
    split_exp(-y[i], &keep, &change);
    y[i] /= 1 + (keep + change);
  }
}

template <typename A>
void convolve(const Convolution& p, const Row* rows, int64_t num_rows, int64_t first, int64_t end) {
  A weight[MAX_WIDTH][CHANNELS], seen[MAX_WIDTH][CHANNELS], bias[CHANNELS], y[CHANNELS], gate[CHANNELS];
  const int64_t kept = p.width - 1;
  for (int64_t c = first; c < end; c += CHANNELS) {
    const int64_t n = std::min(CHANNELS, end - c);
    for (int64_t i = 0; i < p.width; ++i)
      read(p.weight, c * p.weight.token + i, n, weight[i], p.weight.token);
    if (p.bias.data) read(p.bias, c, n, bias);
    else std::fill(bias, bias + n, A(0));
    for (const Row* row = rows; row < rows + num_rows; ++row) {
      A* line[MAX_WIDTH];
      const int64_t place = row->slot * p.state.token + c;
      for (int64_t i = 0; i < p.width; ++i) line[i] = seen[i];
      for (int64_t i = 0; i < kept; ++i)
        if (row->begins) std::fill(line[i], line[i] + n, A(0));
        else read(p.state, place + i * p.state.head, n, line[i]);
      for (int64_t t = row->begin; t < row->end; ++t) {
        A* x = line[kept];
        read(p.x, t * p.x.token + c, n, x);
        if (p.in_gate.data) {
          read(p.in_gate, t * p.in_gate.token + c, n, gate);
          for (int64_t i = 0; i < n; ++i) x[i] *= gate[i];
          round_to(p.x, n, x);
        }
        std::copy(bias, bias + n, y);
        for (int64_t w = 0; w < p.width; ++w)
          for (int64_t i = 0; i < n; ++i) y[i] += line[w][i] * weight[w][i];
        if (p.silu) silu(y, n);
        if (p.out_gate.data) {
          read(p.out_gate, t * p.out_gate.token + c, n, gate);
          for (int64_t i = 0; i < n; ++i) y[i] *= gate[i];
        }
        write(p.out, t * p.out.token + c, n, y);
        std::rotate(line, line + 1, line + p.width);
      }
      for (int64_t i = 0; i < kept; ++i) write(p.state, place + i * p.state.head, n, line[i]);
    }
  }
}

}  // namespace
