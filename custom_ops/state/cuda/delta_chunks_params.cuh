// What the kernel of a gated delta net's chunks is given.
#pragma once

#include "../../cuda/machine.cuh"
#include "delta_chunks_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/delta_chunks.py, in this order
  const char *q, *k, *beta;
  const float *g;
  char *out, *records;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, g_token, beta_token, out_token, out_head;  // strides in elements
  float scale, eps;  // eps: added to the squared norm of a key or query
  int num_reqs, num_tokens;
};
static_assert(sizeof(Params) == 152, "as custom_ops/state/cuda/delta_chunks.py packs it");
