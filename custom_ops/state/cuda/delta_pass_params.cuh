// What the kernel that goes from chunk to chunk of a gated delta net is given.
#pragma once

#include "../../cuda/bulk.cuh"
#include "delta_pass_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/delta_pass.py, in this order
  Map of_q, of_k, of_v, of_out;  // boxes of 64 tokens and columns
  const char *q, *k, *v, *records;
  char *state, *out;
  float *joined;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;  // strides in elements
  i64 state_slot, state_head, state_row;
  int num_reqs, num_tokens, segment, unused;
  i64 padding;
};
static_assert(sizeof(Params) == 704, "as custom_ops/state/cuda/delta_pass.py packs it");
