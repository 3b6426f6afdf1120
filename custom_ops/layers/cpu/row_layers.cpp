// embedding and rms_norm: rows of a table, and rows over their root mean square. Checks in the words of
// custom_ops/layers/check.py.
#include <cmath>
#include <vector>

#define VEC_WIDTH 4
#include "../../cpu/numbers.h"
#include "../../cpu/operands.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

struct Norm {
  Operand x, weight, out, residual, post_residual;
  int64_t tokens, width;
  double eps, offset;
};

template <typename A>
void norm_rows(const Norm& p) {
  for_each_range(p.tokens, 4 * p.width, [&](int64_t begin, int64_t end) {
    std::vector<A> own(3 * p.width);
    A *const x = own.data(), *const other = x + p.width, *const weight = other + p.width;
    read(p.weight, 0, p.width, weight);
    for (int64_t t = begin; t < end; ++t) {
      read(p.x, t * p.x.token, p.width, x);
      if (p.residual.data) {
        read(p.residual, t * p.residual.token, p.width, other);
        for (int64_t i = 0; i < p.width; ++i) x[i] += other[i];
        write(p.residual, t * p.residual.token, p.width, x);
      }
      const A factor = 1 / std::sqrt(sum_of_squares(x, p.width) / A(p.width) + A(p.eps));
      for (int64_t i = 0; i < p.width; ++i) x[i] *= factor * (A(p.offset) + weight[i]);
      if (p.post_residual.data) {
        read(p.post_residual, t * p.post_residual.token, p.width, other);
        for (int64_t i = 0; i < p.width; ++i) x[i] += other[i];
      }
      write(p.out, t * p.out.token, p.width, x);
    }
  });
}

template <typename A>
void look_up(const Operand& weight, const int64_t* ids, int64_t stride, int64_t tokens, int64_t width,
             const Operand& out, const Operand& scale) {
  A factor = 1;
  if (scale.data) {
    read(scale, 0, 1, &factor);
    round_to(weight, 1, &factor);
  }
  std::vector<A> row(width);
  for (int64_t t = 0; t < tokens; ++t) {
    read(weight, ids[t * stride] * weight.token, width, row.data());
    for (int64_t i = 0; i < width; ++i) row[i] *= factor;
    write(out, t * out.token, width, row.data());
  }
}

}  // namespace

void rms_norm(Tensor x, Tensor weight, Tensor out, double eps, double offset, std::optional<Tensor> residual,
              std::optional<Tensor> post_residual) {
  Norm p{};
  p.x = operand("x", x, {-1, -1});
  p.tokens = x.size(0); p.width = x.size(1);
  p.weight = operand("weight", weight, {p.width});
  check_as("weight", weight, x.scalar_type(), ScalarType::Float);
  STD_TORCH_CHECK(eps > 0, "eps: expected a positive number, got ", eps);
  p.out = operand("out", out, {p.tokens, p.width});
  if (residual) p.residual = operand("residual", *residual, {p.tokens, p.width});
  if (post_residual) p.post_residual = operand("post_residual", *post_residual, {p.tokens, p.width});
  const Named same[] = {{"out", &out}, {"residual", pointer(residual)},
                        {"post_residual", pointer(post_residual)}};
  for (const Named& each : same)
    if (each.tensor) check_as(each.name, *each.tensor, x.scalar_type(), x.scalar_type());
  const auto check_target = [&](const char* name, const Tensor& target, const Tensor* other) {
    check_own_elements(name, target);
    for (const Named& each : {Named{"x", &x}, Named{"weight", &weight}, Named{"residual", other},
                              Named{"post_residual", pointer(post_residual)}})
      STD_TORCH_CHECK(!each.tensor || !Span(*each.tensor).meets(Span(target)), name,
                      ": expected memory apart from ", each.name,
                      "'s, got overlapping tensors; allocate it with torch.empty");
  };
  check_target("out", out, pointer(residual));
  if (residual) check_target("residual", *residual, nullptr);
  if (!p.tokens || !p.width) return;
  p.eps = eps; p.offset = offset;
  if (p.x.dtype == Number::Double) norm_rows<double>(p);
  else norm_rows<float>(p);
}
REGISTER_OP(rms_norm)

void embedding(Tensor input_ids, Tensor weight, Tensor out, std::optional<Tensor> scale) {
  check_dims("input_ids", input_ids, {-1});
  check_dtype("input_ids", input_ids, ScalarType::Long, "torch.int64");
  check_cpu("input_ids", input_ids);
  const int64_t tokens = input_ids.size(0);
  const Operand table = operand("weight", weight, {-1, -1});
  const Operand to = operand("out", out, {tokens, weight.size(1)});
  check_as("out", out, weight.scalar_type(), weight.scalar_type());
  Operand factor{};
  if (scale) {
    check_dims("scale", *scale, {});
    check_cpu("scale", *scale);
    factor = {number_of("scale", *scale), const_cast<void*>(scale->const_data_ptr()), 0, 1};
  }
  check_written("out", out, {{"weight", &weight}, {"scale", pointer(scale)}});
  const int64_t* ids = data<int64_t>(input_ids);
  const int64_t stride = input_ids.stride(0);
  for (int64_t t = 0; t < tokens; ++t)
    STD_TORCH_CHECK(ids[t * stride] >= 0 && ids[t * stride] < weight.size(0),
                    "input_ids: expected ids in [0, ", weight.size(0), "), got ", ids[t * stride]);
  const auto run = table.dtype == Number::Double ? &look_up<double> : &look_up<float>;
  run(table, ids, stride, tokens, weight.size(1), to, factor);
}
REGISTER_OP(embedding)

}  // namespace torchpaged
