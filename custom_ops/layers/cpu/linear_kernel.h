// The op linear: inputs are normed, weights read once from memory, in the order in which they lie, for all
// tokens. Compiled once per instruction set by kernel_*.cpp, chosen at run time by instruction_set.h.
#pragma once
#include <string>

#include "../../cpu/operand.h"

namespace torchpaged {

enum class Gate { None, Silu, GeluTanh, Gelu };

// Layouts: custom_ops/layers/schema.py.
struct Linear {
  Operand x, weight, bias, scale, residual, norm_weight, out;
  int64_t tokens, inputs, outputs;  // outputs: rows of the weight
  double norm_eps, norm_offset;
  Gate gate;
  bool ahead;         // rows are asked for while those before them are multiplied
  bool side_by_side;  // several rows go along with one token
};

constexpr int64_t ROWS = 3;  // of a weight that are multiplied together

// Numbers of a token as `inputs` packs them: whole vectors of any dtype.
inline int64_t packed_size(const Linear& p) { return (p.inputs + 31) / 32 * 32; }

// Packs the inputs of all tokens; sums of rows [first, end) of the weight, `first` a multiple of ROWS, for
// all tokens; results of tokens [first, end), whose sums change.
struct LinearKernels {
  void (*inputs)(const Linear&, void* packed);
  void (*products)(const Linear&, const void* packed, void* sums, int64_t first, int64_t end);
  void (*results)(const Linear&, void* sums, int64_t first, int64_t end);
};

LinearKernels linear_kernels_generic(bool is_double);
LinearKernels linear_kernels_avx2(bool is_double);
LinearKernels linear_kernels_avx512(bool is_double);
LinearKernels linear_kernels_avx512_bf16();  // of weights of bf16
LinearKernels linear_kernels_amx();          // the same

// Of ops that know their operands fit. `ahead` and `side_by_side` are set here.
Gate gate_of(const std::string& activation);
void run_linear(Linear p);
void store_sums(const Linear& p, void* sums);  // of `p.tokens` tokens: adds bias and residual, too

}  // namespace torchpaged
