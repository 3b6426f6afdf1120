// Heads of one value column, of linear_attention and others; and what all heads need. Part of
// state_kernel_impl.h.
#pragma once
#include <cmath>
#include <vector>

#include "state_kernel.h"
#include "../../cpu/numbers.h"

namespace {

constexpr double NORM_EPS = 1e-6;  // as in custom_ops/state/call.py

template <typename A>
struct Scratch {
  std::vector<A> numbers, q, k, keep, change;
  A* state;  // at a cache line
  void fit(int64_t size, int64_t key_dim, int64_t decays) {
    numbers.resize(size + LANES<A>);
    state = reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(numbers.data()) + 63) & ~uintptr_t(63));
    for (auto* each : {&q, &k}) each->resize(key_dim);
    for (auto* each : {&keep, &change}) each->resize(decays);
  }
};
template <typename A> thread_local Scratch<A> scratch;

template <typename A>
void read_key(const Recurrence& p, const Operand& t, int64_t token, int64_t key_head, A scale, A* to) {
  read(t, token * t.token + key_head * t.head, p.key_dim, to);
  if (p.normalize) scale /= std::sqrt(sum_of_squares(to, p.key_dim) + A(NORM_EPS));
  for (int64_t i = 0; i < p.key_dim; ++i) to[i] *= scale;
}

// Whether all of rows of n numbers are finite.
template <typename A>
bool are_finite(const A* x, int64_t n, int64_t rows = 1, int64_t stride = 0) {
  const int64_t whole = n / LANES<A> * LANES<A>;
  W<A> zeros{};  // NaN, once a number is not
  A rest = 0;
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    for (int64_t i = 0; i < whole; i += LANES<A>) zeros += wide(x + i) * 0;
    for (int64_t i = whole; i < n; ++i) rest += x[i] * 0;
  }
  return total<A>(zeros) + rest == 0;
}

// Decays of one part: those of two make NaN of a number that is infinite, and stays so.
template <typename A>
void join(int64_t n, A* keep, A* change) {
  for (int64_t i = 0; i < n; ++i) change[i] += keep[i];
}

// Whether states need no copy while a row's tokens are taken.
template <typename A>
bool stays(const Recurrence& p, const Row& row) {
  const Number own = sizeof(A) == 8 ? Number::Double : Number::Float;
  return p.state.dtype == own && !row.begins && row.end - row.begin == 1;
}
template <typename A> A* in_pool(const Recurrence& p, int64_t place) {
  return static_cast<A*>(p.state.data) + place;
}

// A head of one value column: a state is a vector.
template <typename A, bool BY_KEY, bool JOINED>
A column(const Recurrence& p, const Scratch<A>& s, A* state, const A* keep, const A* change, A v, A beta) {
  const int64_t whole = p.key_dim / LANES<A> * LANES<A>;
  W<A> kept = *keep + W<A>{}, changed = *change + W<A>{};
  const auto look_up = [&](int64_t r) {
    if (BY_KEY) kept = wide(keep + r), changed = wide(change + r);
  };
  A u = v;
  if (p.delta_rule) {
    W<A> seen{};
    for (int64_t r = 0; r < whole; r += LANES<A>) {
      look_up(r);
      seen += wide(s.k.data() + r) * (JOINED ? changed : kept + changed) * wide(state + r);
    }
    u -= total<A>(seen);
    for (int64_t r = whole; r < p.key_dim; ++r) {
      const int64_t d = BY_KEY ? r : 0;
      u -= s.k[r] * (JOINED ? change[d] : keep[d] + change[d]) * state[r];
    }
  }
  u *= beta;
  W<A> sums{};
  for (int64_t r = 0; r < whole; r += LANES<A>) {
    look_up(r);
    W<A>& at = wide(state + r);
    const W<A> added = changed * at + wide(s.k.data() + r) * u;
    at = JOINED ? added : kept * at + added;
    sums += wide(s.q.data() + r) * at;
  }
  A out = total<A>(sums);
  for (int64_t r = whole; r < p.key_dim; ++r) {
    const int64_t d = BY_KEY ? r : 0;
    const A added = change[d] * state[r] + s.k[r] * u;
    state[r] = JOINED ? added : keep[d] * state[r] + added;
    out += s.q[r] * state[r];
  }
  return out;
}

// Heads [first, first + n) of one token, whose decays are made; v becomes the output.
template <typename A, bool BY_KEY, bool JOINED>
void columns(const Recurrence& p, Scratch<A>& s, int64_t t, int64_t first, int64_t n, A* __restrict state,
             const A* __restrict beta, A* __restrict v) {
  const int64_t keys = p.key_dim, decays = BY_KEY ? keys : 1;
  const auto read_keys = [&](int64_t key_head) {
    read_key(p, p.q, t, key_head, A(p.scale), s.q.data());
    read_key(p, p.k, t, key_head, A(1), s.k.data());
  };
  A *__restrict keep = s.keep.data(), *__restrict change = s.change.data();
  if (JOINED) join(n * decays, keep, change);
  const bool shares_keys = first / p.group == (first + n - 1) / p.group;
  if (keys == 1 && shares_keys) {  // of one key head: numbers side by side
    read_keys(first / p.group);
    const A query = s.q[0], key = s.k[0];
    for (int64_t h = 0; h < n; ++h) {
      const A seen = key * (JOINED ? change[h] : keep[h] + change[h]) * state[h];
      const A u = beta[h] * (p.delta_rule ? v[h] - seen : v[h]);
      const A added = change[h] * state[h] + key * u;
      state[h] = JOINED ? added : keep[h] * state[h] + added;
      v[h] = query * state[h];
    }
    return;
  }
  int64_t key_head = -1, h = 0;
  if (BY_KEY && keys == LANES<A> && !p.delta_rule && shares_keys) {  // as in Mamba 1
    read_keys(key_head = first / p.group);
    const W<A> query = wide(s.q.data()), key = wide(s.k.data());
    for (; h + 4 <= n; h += 4) {
      W<A> products[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t d = (h + i) * keys;
        W<A>& at = wide(state + d);
        const W<A> added = wide(change + d) * at + key * (v[h + i] * beta[h + i]);
        at = JOINED ? added : wide(keep + d) * at + added;
        products[i] = query * at;
      }
      totals(products, v + h);
    }
  }
  for (; h < n; ++h) {
    if ((first + h) / p.group != key_head) read_keys(key_head = (first + h) / p.group);
    const int64_t d = h * decays;
    v[h] = column<A, BY_KEY, JOINED>(p, s, state + h * keys, keep + d, change + d, v[h], beta[h]);
  }
}

// Heads [first, first + n) of a row. Of each token fill(t, keep, change, beta, v) tells the decays, in two
// parts, beta, which is 1 else, and the values; take(t, v) gets the outputs.
template <typename A, bool BY_KEY, typename Fill, typename Take>
void recur_columns(const Recurrence& p, const Row& row, int64_t first, int64_t n, const Fill& fill,
                   const Take& take) {
  Scratch<A>& s = scratch<A>;
  const int64_t keys = p.key_dim, decays = BY_KEY ? keys : 1;
  s.fit(n * keys, keys, n * decays);
  A v[COLUMNS], beta[COLUMNS];
  const int64_t place = row.slot * p.state.token + first * p.state.head;
  const bool joined = p.state.head == keys && (p.state_key == 1 || keys == 1);
  const bool copies = !joined || !stays<A>(p, row);
  A* state = copies ? s.state : in_pool<A>(p, place);
  if (row.begins) std::fill(state, state + n * keys, A(0));
  else if (copies && joined) read(p.state, place, n * keys, state);
  else if (copies)
    for (int64_t h = 0; h < n; ++h)
      read(p.state, place + h * p.state.head, keys, state + h * keys, p.state_key);
  bool finite = row.begins || are_finite(state, n * keys);
  std::fill(beta, beta + n, A(1));
  for (int64_t t = row.begin; t < row.end; ++t) {
    fill(t, s.keep.data(), s.change.data(), beta, v);
    if (finite) columns<A, BY_KEY, false>(p, s, t, first, n, state, beta, v);
    else columns<A, BY_KEY, true>(p, s, t, first, n, state, beta, v);
    finite = finite && are_finite(v, n);
    take(t, v);
  }
  if (copies && joined) write(p.state, place, n * keys, state);
  else if (copies)
    for (int64_t h = 0; h < n; ++h)
      write(p.state, place + h * p.state.head, keys, state + h * keys, p.state_key);
}

// The same of linear_attention.
template <typename A, bool BY_KEY>
void recur_given_columns(const Recurrence& p, const Row& row, int64_t first, int64_t n) {
  const int64_t keys = p.key_dim, decays = BY_KEY ? keys : 1;
  const auto fill = [&](int64_t t, A* keep, A* change, A* beta, A* v) {
    read(p.v, t * p.v.token + first * p.v.head, n, v, p.v.head);
    if (p.beta.data) read(p.beta, t * p.beta.token + first, n, beta);
    const A* g = static_cast<const A*>(p.g.data) + t * p.g.token + first * (BY_KEY ? p.g.head : 1);
    if (!BY_KEY || p.g.head == keys) split_exps(g, n * decays, keep, change);
    else for (int64_t h = 0; h < n; ++h)
      split_exps(g + h * p.g.head, keys, keep + h * keys, change + h * keys);
  };
  recur_columns<A, BY_KEY>(p, row, first, n, fill, [&](int64_t t, const A* v) {
    write(p.out, t * p.out.token + first * p.out.head, n, v, p.out.head);
  });
}

}  // namespace
