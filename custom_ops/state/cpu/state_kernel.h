// causal_conv and linear_attention over packed rows, token by token, a state's numbers in registers and the
// first cache; selective_scan and rg_lru; delta_gates and gated_rms_norm. Compiled once per instruction set
// by kernel_*.cpp, chosen at run time by instruction_set.h.
#pragma once
#include "../../cpu/operand.h"

namespace torchpaged {

// A row that writes: its slot, its tokens that are no padding, and whether it begins from zeros.
struct Row { int64_t slot, begin, end; bool begins; };

constexpr int64_t MAX_WIDTH = 8;  // of a convolution
constexpr int64_t COLUMNS = 128;  // heads of one value column that are taken together

// Layouts: custom_ops/state/schema.py. All have the dtype of x.
struct Convolution {
  Operand x, weight, bias, in_gate, out_gate, out;  // weight.token: from channel to channel
  Operand state;  // token: from slot to slot, head: from input to input
  int64_t width;
  bool silu;
};

struct Recurrence {
  Operand q, k, v, g, beta, out;
  Operand state;  // token: from slot to slot, head: from head to head
  int64_t state_key, num_heads, group, key_dim, value_dim;  // group: heads of a key head
  double scale;
  bool delta_rule, normalize, decays_by_key;
};

// Those of a group stand side by side: group_columns numbers of a, gate_columns of a gate.
struct Gates {
  Operand a, b, a_log, dt_bias, g, beta;
  int64_t groups, columns, group_columns, num_heads;
  double beta_scale, min_step, max_step, bound;
  bool bounded;
};

struct GatedNorm {
  Operand x, gate, weight, out, skip, skip_weight;  // weight.head: from the weight of one head to the next's
  int64_t num_heads, width, gate_columns, skip_columns;
  double eps;
  bool gate_first, sigmoid;
};

// Of heads of one value column; recurrence.v is x.
struct SelectiveScan {
  Recurrence recurrence;
  Operand dt, a_log, dt_bias, skip_weight, gate;  // a_log.token: from channel to channel
};

// weights: token from block to block, head from row to row.
struct RgLru {
  Recurrence recurrence;
  Operand input_weight, input_bias, recurrent_weight, recurrent_bias, recurrent_param, gate;
  int64_t width;  // of a block
  bool ahead;     // weights are asked for while those before them are multiplied
};

// Channels [first, end) of all rows; heads [first, end) of one row; channels, and blocks of channels, of all
// rows; tokens; heads of all tokens.
struct StateKernels {
  void (*convolve)(const Convolution&, const Row* rows, int64_t num_rows, int64_t first, int64_t end);
  void (*recur)(const Recurrence&, const Row&, int64_t first, int64_t end);
  void (*scan)(const SelectiveScan&, const Row* rows, int64_t num_rows, int64_t first, int64_t end);
  void (*rg_lru)(const RgLru&, const Row* rows, int64_t num_rows, int64_t first, int64_t end);
  void (*gates)(const Gates&, int64_t first, int64_t end);
  void (*norms)(const GatedNorm&, int64_t first, int64_t end);
};

StateKernels state_kernels_generic(bool is_double);
StateKernels state_kernels_avx2(bool is_double);
StateKernels state_kernels_avx512(bool is_double);

}  // namespace torchpaged
