// What the kernel that goes from chunk to chunk of long rows is given.
#pragma once

#include "../../cuda/bulk.cuh"
#include "delta_pass_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/delta_pass.py, in this order
  Map of_q, of_k, of_v, of_out, of_known, of_scores, of_solved;  // boxes of 64 tokens and columns
  const char *q, *k, *v, *records;
  // BY_KEY, in place of records: `Chunks` of custom_ops/state/triton/records.py, and its queries and keys are
  // q and k
  const char *known, *scores, *solved;
  const float *since, *left, *decay;
  char *state, *out;
  float *joined;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;  // strides in elements
  i64 state_slot, state_head, state_row;
  int num_reqs, num_tokens, segment;
};
static_assert(sizeof(Params) == 1152, "as custom_ops/state/cuda/delta_pass.py packs it");
