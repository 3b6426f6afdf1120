// linear_attention, heads of several value columns; part of state_kernel_impl.h.
#pragma once
#include "columns.h"

namespace {

template <typename A>
A beta_of(const Recurrence& p, int64_t token, int64_t head) {
  A beta = 1;
  if (p.beta.data) read(p.beta, token * p.beta.token + head, 1, &beta);
  return beta;
}

// A token's step over a tile of value columns, `stride` numbers from row to row; v becomes the output.
template <typename A, bool BY_KEY, bool JOINED>
void step(const Recurrence& p, const Scratch<A>& s, A* __restrict state, int64_t stride, A beta, A* v) {
  const A *__restrict q = s.q.data(), *__restrict k = s.k.data(), *__restrict keep = s.keep.data(),
          *__restrict change = s.change.data();
  const int64_t rows = p.key_dim;
  W<A> u[4], out[4] = {};
  for (int i = 0; i < 4; ++i) u[i] = wide(v + i * LANES<A>);
  if (p.delta_rule) {
    W<A> seen[4] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t d = BY_KEY ? r : 0;
      const A key = k[r] * (JOINED ? change[d] : keep[d] + change[d]);
      for (int i = 0; i < 4; ++i) seen[i] += key * wide(state + r * stride + i * LANES<A>);
    }
    for (int i = 0; i < 4; ++i) u[i] -= seen[i];
  }
  for (int i = 0; i < 4; ++i) u[i] *= beta;
  for (int64_t r = 0; r < rows; ++r) {
    const A kept = keep[BY_KEY ? r : 0], changed = change[BY_KEY ? r : 0], key = k[r], query = q[r];
    for (int i = 0; i < 4; ++i) {
      W<A>& at = wide(state + r * stride + i * LANES<A>);
      const W<A> added = changed * at + key * u[i];
      at = JOINED ? added : kept * at + added;
      out[i] += query * at;
    }
  }
  for (int i = 0; i < 4; ++i) wide(v + i * LANES<A>) = out[i];
}

template <typename A, bool BY_KEY>
void recur_tiles(const Recurrence& p, const Row& row, int64_t head) {
  Scratch<A>& s = scratch<A>;
  const int64_t decays = BY_KEY ? p.key_dim : 1;
  s.fit(p.key_dim * TILE<A>, p.key_dim, decays);
  A v[TILE<A>];
  for (int64_t c = 0; c < p.value_dim; c += TILE<A>) {
    const int64_t n = std::min(TILE<A>, p.value_dim - c);
    const int64_t place = row.slot * p.state.token + head * p.state.head + c;
    const bool copies = !stays<A>(p, row) || n < TILE<A>;
    A* state = copies ? s.state : in_pool<A>(p, place);
    const int64_t stride = copies ? TILE<A> : p.state_key;
    if (row.begins || n < TILE<A>) std::fill(s.state, s.state + p.key_dim * TILE<A>, A(0));
    if (copies && !row.begins)
      for (int64_t r = 0; r < p.key_dim; ++r) read(p.state, place + r * p.state_key, n, state + r * stride);
    bool finite = row.begins || are_finite(state, TILE<A>, p.key_dim, stride);
    std::fill(v, v + TILE<A>, A(0));
    for (int64_t t = row.begin; t < row.end; ++t) {
      read_key(p, p.q, t, head / p.group, A(p.scale), s.q.data());
      read_key(p, p.k, t, head / p.group, A(1), s.k.data());
      // g is float32, or float64 over float64
      const A* g = static_cast<const A*>(p.g.data) + t * p.g.token + head * (BY_KEY ? p.g.head : 1);
      split_exps(g, decays, s.keep.data(), s.change.data());
      read(p.v, t * p.v.token + head * p.v.head + c, n, v);
      const A beta = beta_of<A>(p, t, head);
      if (finite) step<A, BY_KEY, false>(p, s, state, stride, beta, v);
      else {
        join(decays, s.keep.data(), s.change.data());
        step<A, BY_KEY, true>(p, s, state, stride, beta, v);
      }
      finite = finite && are_finite(v, TILE<A>);  // where a number of a column is not, its output is neither
      write(p.out, t * p.out.token + head * p.out.head + c, n, v);
      std::fill(v + n, v + TILE<A>, A(0));
    }
    for (int64_t r = 0; copies && r < p.key_dim; ++r)
      write(p.state, place + r * p.state_key, n, state + r * stride);
  }
}

template <typename A>
void recur(const Recurrence& p, const Row& row, int64_t first, int64_t end) {
  if (p.value_dim == 1)
    for (int64_t h = first; h < end; h += COLUMNS) {
      const int64_t n = std::min(COLUMNS, end - h);
      const auto columns = p.decays_by_key ? recur_given_columns<A, true> : recur_given_columns<A, false>;
      columns(p, row, h, n);
    }
  else
    for (int64_t h = first; h < end; ++h)
      p.decays_by_key ? recur_tiles<A, true>(p, row, h) : recur_tiles<A, false>(p, row, h);
}

}  // namespace
