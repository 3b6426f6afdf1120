// What the kernel of a gated delta net's single tokens is given.
#pragma once

#include "../../cuda/bulk.cuh"
#include "delta_step_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/delta_step.py, in this order
  const char *x, *weight, *bias, *a, *b, *a_log, *dt_bias, *gate, *norm_weight;
  char *conv_state, *state, *out;
  const int *slots, *lens, *starts;
  // strides in elements
  i64 x_token, weight_channel, conv_slot, conv_row, a_token, a_group, b_token, b_group;
  i64 gate_token, gate_group, norm_head, state_slot, state_head, out_token, out_head;
  float scale, beta_scale, bound, eps, key_eps;  // key_eps: added to the squared norm of a key or query
  int num_reqs, num_tokens;
};
static_assert(sizeof(Params) == 272, "as custom_ops/state/cuda/delta_step.py packs it");

constexpr bool DELTA = true, NORMALIZE = true, OUT_FLOAT = false;
constexpr int TURNS = 1;
constexpr bool IN_REGISTERS = true;  // a state does not lie in shared memory
