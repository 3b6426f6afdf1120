// What the decode kernel of states is given, and how its shared memory is laid out.
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

constexpr int WARPS = THREADS / 32;
constexpr int NUMBER = STATE_FLOAT ? 4 : 2;  // bytes
constexpr int VEC = 16 / NUMBER;             // columns of a thread
constexpr int CHUNKS = VALUE_DIM / VEC;      // threads of a row of the state
constexpr int GROUPS = THREADS / CHUNKS;     // rows at a time
constexpr int ROWS = KEY_DIM / GROUPS;       // rows of a thread
constexpr int PARTS = CHUNKS < 32 ? WARPS : GROUPS;
constexpr int ROW_BYTES = VALUE_DIM * NUMBER, STATE_BYTES = KEY_DIM * ROW_BYTES;
constexpr int FACTORS = BY_KEY ? 4 : 2;
static_assert(CHUNKS <= THREADS && THREADS % CHUNKS == 0 && (CHUNKS % 32 == 0 || 32 % CHUNKS == 0), "rows");
static_assert(KEY_DIM % GROUPS == 0 && KEY_DIM % 64 == 0 && VALUE_DIM <= THREADS, "whole rows");

// Where in shared memory things are, in bytes from its begin; custom_ops/state/cuda/decode.py counts alike.
constexpr int FACTORS_AT = STATE_BYTES;                              // [2, KEY_DIM, FACTORS], turn and turn
constexpr int SUMS_AT = FACTORS_AT + 2 * KEY_DIM * FACTORS * 4;      // [PARTS, 2, VALUE_DIM]
constexpr int UPDATE_AT = SUMS_AT + PARTS * 2 * VALUE_DIM * 4;       // [VALUE_DIM]
constexpr int PRODUCT_AT = UPDATE_AT + VALUE_DIM * 4;                // [2], of key and query
constexpr int BARRIER_AT = PRODUCT_AT + 8;
constexpr int SHARED_BYTES = BARRIER_AT + 8;
