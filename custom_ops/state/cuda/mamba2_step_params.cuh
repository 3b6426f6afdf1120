// What the kernel of Mamba 2's single tokens is given.
#pragma once

#include "../../cuda/bulk.cuh"
#include "mamba2_step_config.cuh"

struct Params {  // packed by custom_ops/state/cuda/mamba2_step.py, in this order
  const char *x, *weight, *bias, *dt, *a_log, *dt_bias, *skip_weight, *gate;
  char *conv_state, *state, *out;
  int *semaphore;
  const int *slots, *lens, *starts;
  // strides in elements
  i64 x_token, weight_channel, conv_slot, conv_row, dt_token, gate_token, gate_head;
  i64 state_slot, state_head, out_token, out_head;
  float min_step, max_step;
  int num_reqs, num_tokens;
};
static_assert(sizeof(Params) == 224, "as custom_ops/state/cuda/mamba2_step.py packs it");

constexpr bool BY_KEY = false, DELTA = false, NORMALIZE = false, OUT_FLOAT = false;
constexpr int TURNS = 1;
constexpr bool IN_REGISTERS = true;  // a state does not lie in shared memory
