// delta_gates and gated_rms_norm: checks, and their pieces for threads.
#include <cmath>
#include <limits>

#include "state_kernel.h"
#include "../../cpu/operands.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

constexpr int64_t EXP_WORK = 8;  // multiply-adds that an exponential costs

// Groups of `width` numbers per token in all.
Operand groups_of(const char* name, const Tensor& t, int64_t num_tokens, int64_t width) {
  const Operand found = operand(name, t, {num_tokens, -1, -1});
  STD_TORCH_CHECK(t.size(1) * t.size(2) == width, name, ": expected groups of ", width,
                  " numbers per token in all, got ", shape_of(t));
  return found;
}

ScalarType sums_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace

void delta_gates(Tensor a, std::optional<Tensor> b, Tensor a_log, Tensor dt_bias, Tensor g, Tensor beta,
                 double beta_scale, double min_step, std::optional<double> max_step,
                 std::optional<double> bound) {
  Gates p{};
  p.a = operand("a", a, {-1, -1, -1});
  const int64_t tokens = a.size(0);
  p.groups = a.size(1); p.group_columns = a.size(2); p.columns = p.groups * p.group_columns;
  p.a_log = operand("a_log", a_log, {-1});
  p.num_heads = a_log.size(0);
  STD_TORCH_CHECK(p.num_heads ? p.columns % p.num_heads == 0 : !p.columns,
                  "a_log: expected a number of heads that divides a's ", p.columns, " numbers, got ",
                  shape_of(a_log));
  STD_TORCH_CHECK(!p.groups || p.num_heads % p.groups == 0, "a: expected a number of groups that divides ",
                  p.num_heads, " heads, got ", shape_of(a));
  if (b) {
    check_dims("b", *b, {tokens, p.groups, -1});
    p.b = groups_of("b", *b, tokens, p.num_heads);
    check_as("b", *b, a.scalar_type(), a.scalar_type());
  }
  STD_TORCH_CHECK(min_step >= 0, "min_step: expected a number of at least 0, got ", min_step);
  STD_TORCH_CHECK(!max_step || *max_step >= min_step, "max_step: expected None or at least min_step, ",
                  min_step, ", got ", max_step.value_or(0));
  STD_TORCH_CHECK(!bound || *bound < 0, "bound: expected None or a number below 0, got ", bound.value_or(0));
  check_as("a_log", a_log, a.scalar_type(), ScalarType::Float);
  p.dt_bias = operand("dt_bias", dt_bias, {p.columns});
  check_as("dt_bias", dt_bias, a.scalar_type(), ScalarType::Float);
  p.g = operand("g", g, {tokens, p.columns});
  p.beta = operand("beta", beta, {tokens, b ? p.num_heads : p.columns});
  check_as("g", g, sums_of(a), sums_of(a));
  check_as("beta", beta, sums_of(a), sums_of(a));
  check_written("g", g, {{"a", &a}, {"b", pointer(b)}, {"a_log", &a_log}, {"dt_bias", &dt_bias},
                         {"beta", &beta}});
  check_written("beta", beta, {{"a", &a}, {"b", pointer(b)}, {"a_log", &a_log}, {"dt_bias", &dt_bias}});
  if (!tokens || !p.columns) return;
  p.beta_scale = beta_scale; p.min_step = min_step;
  p.max_step = max_step.value_or(std::numeric_limits<double>::infinity());
  p.bounded = bound.has_value(); p.bound = bound.value_or(0);
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(p.a.dtype == Number::Double);
  for_each_range(tokens, 3 * EXP_WORK * p.columns,
                 [&](int64_t begin, int64_t end) { kernels.gates(p, begin, end); });
}
REGISTER_OP(delta_gates)

void gated_rms_norm(Tensor x, Tensor gate, Tensor weight, Tensor out, double eps, bool gate_first,
                    std::optional<Tensor> skip, std::optional<Tensor> skip_weight, std::string activation) {
  GatedNorm p{};
  p.x = operand("x", x, {-1, -1, -1});
  const int64_t tokens = x.size(0), numbers = x.size(1) * x.size(2);
  p.num_heads = x.size(1); p.width = x.size(2);
  p.gate = groups_of("gate", gate, tokens, numbers);
  p.gate_columns = gate.size(2);
  STD_TORCH_CHECK(!p.width || p.gate_columns % p.width == 0, "gate: expected whole heads of ", p.width,
                  " in each group, got ", shape_of(gate));
  check_as("gate", gate, x.scalar_type(), x.scalar_type());
  if (weight.dim() == 2) p.weight = operand("weight", weight, {p.num_heads, p.width});
  else p.weight = operand("weight", weight, {p.width});
  p.weight.head = weight.dim() == 2 ? weight.stride(0) : 0;
  check_as("weight", weight, x.scalar_type(), ScalarType::Float);
  STD_TORCH_CHECK(skip.has_value() == skip_weight.has_value(), "skip_weight: expected a tensor with skip, ",
                  "and None without, got ", skip_weight ? "a tensor" : "None");
  if (skip) {
    p.skip = groups_of("skip", *skip, tokens, numbers);
    p.skip_columns = skip->size(2);
    check_as("skip", *skip, x.scalar_type(), x.scalar_type());
    p.skip_weight = operand("skip_weight", *skip_weight, {skip->size(1)});
    check_as("skip_weight", *skip_weight, x.scalar_type(), ScalarType::Float);
  }
  p.out = operand("out", out, {tokens, p.num_heads, p.width});
  check_as("out", out, x.scalar_type(), x.scalar_type());
  STD_TORCH_CHECK(eps > 0, "eps: expected a positive number, got ", eps);
  p.sigmoid = activation == "sigmoid";
  STD_TORCH_CHECK(p.sigmoid || activation == "silu", "activation: expected one of silu, sigmoid, got '",
                  activation, "'");
  check_written("out", out, {{"x", &x}, {"gate", &gate}, {"weight", &weight}, {"skip", pointer(skip)},
                             {"skip_weight", pointer(skip_weight)}});
  if (!tokens || !numbers) return;
  p.eps = eps; p.gate_first = gate_first;
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(p.x.dtype == Number::Double);
  for_each_range(tokens * p.num_heads, (EXP_WORK + 8) * p.width,
                 [&](int64_t begin, int64_t end) { kernels.norms(p, begin, end); });
}
REGISTER_OP(gated_rms_norm)

}  // namespace torchpaged
