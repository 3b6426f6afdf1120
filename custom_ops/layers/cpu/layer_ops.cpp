// linear: checks in the words of custom_ops/layers/check.py, and its pieces for threads.
#include <vector>

#include "linear_kernel.h"
#include "../../cpu/operands.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

constexpr int64_t PIECE = 48;               // rows of a weight
constexpr int64_t KEPT = int64_t(1) << 22;  // bytes of memory that a thread keeps for its next call

LinearKernels choose(const Linear& p) {
  // What a norm gives is not rounded to bf16 ahead of its product.
  [[maybe_unused]] const bool of_bf16 = p.weight.dtype == Number::BFloat16 && !p.norm_weight.data;
#if defined(TORCHPAGED_AMX)
  if (of_bf16 && may_use_amx()) return linear_kernels_amx();
#endif
#if defined(TORCHPAGED_AVX512_BF16)
  if (of_bf16 && has_bf16_products()) return linear_kernels_avx512_bf16();
#endif
  return TORCHPAGED_BEST(linear_kernels)(p.x.dtype == Number::Double);
}

}  // namespace

Gate gate_of(const std::string& activation) {
  if (activation == "none") return Gate::None;
  if (activation == "silu") return Gate::Silu;
  if (activation == "gelu_tanh") return Gate::GeluTanh;
  STD_TORCH_CHECK(activation == "gelu", "activation: expected one of none, silu, gelu_tanh, gelu, got '",
                  activation, "'");
  return Gate::Gelu;
}

void run_linear(Linear p) {
  const bool is_double = p.x.dtype == Number::Double;
  p.ahead = p.tokens > 1 && asks_ahead();
  p.side_by_side = p.tokens == 1 && reads_side_by_side();
  const LinearKernels kernels = choose(p);
  const int64_t packed = p.tokens * packed_size(p), size = is_double ? 8 : 4,
                bytes = (packed + p.tokens * p.outputs) * size + 64;
  static thread_local std::vector<char> kept;
  std::vector<char> own_memory;
  std::vector<char>& memory = bytes > KEPT ? own_memory : kept;
  if (int64_t(memory.size()) < bytes) memory.resize(bytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data());
  char* const inputs = memory.data() + ((begin + 63) & ~uintptr_t(63)) - begin;  // at a cache line
  char* const sums = inputs + packed * size;
  kernels.inputs(p, inputs);
  for_each_range((p.outputs + PIECE - 1) / PIECE, PIECE * p.inputs * (p.tokens + size_of(p.weight.dtype) / 2),
                 [&](int64_t begin, int64_t end) {
                   kernels.products(p, inputs, sums, begin * PIECE, std::min(end * PIECE, p.outputs));
                 });
  for_each_range(p.tokens, 8 * p.outputs,
                 [&](int64_t begin, int64_t end) { kernels.results(p, sums, begin, end); });
}

void store_sums(const Linear& p, void* sums) { choose(p).results(p, sums, 0, p.tokens); }

void linear(Tensor x, Tensor weight, Tensor out, std::optional<Tensor> bias, std::optional<Tensor> scale,
            std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double norm_eps,
            double norm_offset, std::string activation) {
  Linear p{};
  p.x = operand("x", x, {-1, -1});
  p.tokens = x.size(0); p.inputs = x.size(1);
  p.weight = operand("weight", weight, {-1, p.inputs});
  p.outputs = weight.size(0);
  p.gate = gate_of(activation);
  STD_TORCH_CHECK(p.gate == Gate::None || p.outputs % 2 == 0, "weight: expected an even number of rows: the ",
                  "gate's, then as many of up, got ", p.outputs);
  const int64_t width = p.gate == Gate::None ? p.outputs : p.outputs / 2;
  const ScalarType own = x.scalar_type(),
                   exact = own == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  p.out = operand("out", out, {p.tokens, width});
  if (residual) p.residual = operand("residual", *residual, {p.tokens, width});
  if (bias) p.bias = operand("bias", *bias, {p.outputs});
  if (scale) p.scale = operand("scale", *scale, {p.outputs});
  if (norm_weight) p.norm_weight = operand("norm_weight", *norm_weight, {p.inputs});
  const Named same[] = {{"weight", &weight}, {"out", &out}, {"residual", pointer(residual)},
                        {"bias", pointer(bias)}};
  for (const Named& each : same)
    if (each.tensor) check_as(each.name, *each.tensor, own, own);
  if (scale) check_as("scale", *scale, exact, exact);
  if (norm_weight) check_as("norm_weight", *norm_weight, own, ScalarType::Float);
  STD_TORCH_CHECK(norm_eps > 0, "norm_eps: expected a positive number, got ", norm_eps);
  STD_TORCH_CHECK(norm_weight || norm_offset == 0, "norm_offset: expected 0 without norm_weight, got ",
                  norm_offset, "; give the weight of the norm");
  check_written("out", out, {{"x", &x}, {"weight", &weight}, {"bias", pointer(bias)},
                             {"scale", pointer(scale)}, {"residual", pointer(residual)},
                             {"norm_weight", pointer(norm_weight)}});
  if (!p.tokens || !p.outputs) return;
  p.norm_eps = norm_eps; p.norm_offset = norm_offset;
  run_linear(p);
}
REGISTER_OP(linear)

}  // namespace torchpaged
