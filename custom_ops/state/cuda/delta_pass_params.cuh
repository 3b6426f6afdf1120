// What the kernel that goes from chunk to chunk of a gated delta net is given.
#pragma once

#include "../../cuda/machine.cuh"
#include "delta_pass_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/delta_pass.py, in this order
  const char *q, *k, *v, *scores, *solved;
  const float *since, *left, *decay, *seen;
  char *state, *out;
  float *joined;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;  // strides in elements
  i64 state_slot, state_head, state_row;
  int num_reqs, num_tokens, segment, unused;
};
static_assert(sizeof(Params) == 224, "as custom_ops/state/cuda/delta_pass.py packs it");
