// causal_conv, CHANNELS at a time; part of state_kernel_impl.h.
#pragma once
#include "state_kernel.h"
#include "../../cpu/numbers.h"

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

// A single token's sums y over n channels; its inputs move on in the pool itself, with lines `line` apart.
template <typename A, int WIDTH, typename T>
void slide(const T* x, const T* __restrict gate, T* __restrict state, int64_t line,
           const A (*__restrict weight)[CHANNELS], const A* __restrict bias, int64_t n, A* __restrict y) {
  T gated[CHANNELS];
  if (gate) {
    for (int64_t i = 0; i < n; ++i) from_float(A(to_float(x[i]) * to_float(gate[i])), gated + i);
    x = gated;
  }
  for (int64_t i = 0; i < n; ++i) {
    A sum = bias[i] + weight[WIDTH - 1][i] * to_float(x[i]);
    for (int j = 0; j < WIDTH - 1; ++j) sum += weight[j][i] * to_float(state[j * line + i]);
    y[i] = sum;
  }
  for (int j = 0; j < WIDTH - 2; ++j) std::copy_n(state + (j + 1) * line, n, state + j * line);
  std::copy_n(x, n, state + (WIDTH - 2) * line);
}

// `slide` over channels from c on of the token of a row that goes on. What lies at element `next` of the pool
// is fetched from memory meanwhile.
template <typename A, int WIDTH>
void slide_row(const Convolution& p, const Row& row, int64_t c, int64_t next, int64_t n,
               const A (*weight)[CHANNELS], const A* bias, A* y) {
  by_dtype<A>(p.x.dtype, [&](auto* dtype) {
    typedef std::remove_pointer_t<decltype(dtype)> T;
    T* const state = static_cast<T*>(p.state.data);
    for (int64_t j = 0; j < WIDTH - 1; ++j)
      for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(state + next + j * p.state.head + i, 1);
    const T* const gate = static_cast<const T*>(p.in_gate.data);
    slide<A, WIDTH>(static_cast<const T*>(p.x.data) + row.begin * p.x.token + c,
                    gate ? gate + row.begin * p.in_gate.token + c : nullptr,
                    state + row.slot * p.state.token + c, p.state.head, weight, bias, n, y);
  });
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
    const auto finish = [&](int64_t t) {
      if (p.silu) silu(y, n);
      if (p.out_gate.data) {
        read(p.out_gate, t * p.out_gate.token + c, n, gate);
        for (int64_t i = 0; i < n; ++i) y[i] *= gate[i];
      }
      write(p.out, t * p.out.token + c, n, y);
    };
    for (const Row* row = rows; row < rows + num_rows; ++row) {
      const int64_t place = row->slot * p.state.token + c;
      if (row->end - row->begin == 1 && !row->begins && p.width <= 4) {
        const bool is_last = row + 1 == rows + num_rows, stays = is_last && c + CHANNELS >= end;
        const int64_t next = stays ? place : is_last ? rows->slot * p.state.token + c + CHANNELS
                                                     : row[1].slot * p.state.token + c;
        const auto slides = p.width == 2 ? slide_row<A, 2> : p.width == 3 ? slide_row<A, 3> : slide_row<A, 4>;
        slides(p, *row, c, next, n, weight, bias, y);
        finish(row->begin);
        continue;
      }
      A* line[MAX_WIDTH];
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
        finish(t);
        std::rotate(line, line + 1, line + p.width);
      }
      for (int64_t i = 0; i < kept; ++i) write(p.state, place + i * p.state.head, n, line[i]);
    }
  }
}

}  // namespace
