// What the kernel of chunks of Kimi delta attention is given.
#pragma once

#include "../../cuda/machine.cuh"
#include "key_chunks_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/key_chunks.py, in this order
  const char *q, *k, *beta;
  const float *g;
  char *out, *queries, *known, *keys, *scores, *solved;  // from queries on: `Chunks`
  float *since, *left, *decay;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, g_token, g_head, beta_token, out_token, out_head;  // in elements
  float scale, eps;  // eps: added to the squared norm of a key or query
  int num_reqs, num_tokens;
};
static_assert(sizeof(Params) == 216, "as custom_ops/state/cuda/key_chunks.py packs it");
