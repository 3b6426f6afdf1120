// What the decode kernel of states is given.
#pragma once

#include "../../cuda/bulk.cuh"
#include "state_decode_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/decode.py, in this order
  const char *q, *k, *v, *beta;
  const float *g;
  char *state, *out;
  const int *slots, *lens, *starts;
  i64 q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token;  // strides in elements
  i64 state_slot, state_head, out_token, out_head;
  float scale, eps;  // eps: added to the squared norm of a key or query
  int num_reqs, num_tokens;
};
static_assert(sizeof(Params) == 200, "as custom_ops/state/cuda/decode.py packs it");

constexpr int TURNS = 2;  // a token's key and query are made while the last one's are read
constexpr bool IN_REGISTERS = false;  // a state lies in shared memory
