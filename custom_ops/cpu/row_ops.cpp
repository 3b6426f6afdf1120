// merge_attn_states: small arithmetic over rows.
#include <cmath>

#define VEC_WIDTH 4
#include "check.h"
#include "parallel.h"
#include "vec.h"

namespace torchpaged {
namespace {

template <typename T>
void merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
           const Tensor& out, const Tensor* lse, const float* scale) {
  const int64_t heads = out.size(1), dim = out.size(2);
  auto row = [](const Tensor& t, int64_t i, int64_t h) { return i * t.stride(0) + h * t.stride(1); };
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      const int64_t i = w / heads, h = w % heads;
      const float a = data<float>(lse_a)[row(lse_a, i, h)], b = data<float>(lse_b)[row(lse_b, i, h)];
      // A NaN or +inf lives on in its own weight, whatever the maximum makes of it; a side that saw nothing
      // is not read.
      const bool empty_a = a == -INFINITY, empty_b = b == -INFINITY, empty = empty_a && empty_b;
      const float top = empty_a ? b : empty_b ? a : std::max(a, b);
      const float ea = empty_a ? 0.0f : std::exp(a - top), eb = empty_b ? 0.0f : std::exp(b - top),
                  total = ea + eb;
      const T *xa = data<T>(out_a) + row(out_a, i, h), *xb = data<T>(out_b) + row(out_b, i, h);
      const auto merged = [&](int64_t d) {
        return (empty_a ? 0.0f : (ea / total) * to_float(xa[d])) +
               (empty_b ? 0.0f : (eb / total) * to_float(xb[d]));
      };
      void* y = static_cast<char*>(out.mutable_data_ptr()) + row(out, i, h) * out.element_size();
      if (scale)
        for (int64_t d = 0; d < dim; ++d) static_cast<uint8_t*>(y)[d] = to_e4m3(merged(d) / *scale);
      else
        for (int64_t d = 0; d < dim; ++d) from_float(merged(d), static_cast<T*>(y) + d);
      if (lse) mutable_data<float>(*lse)[row(*lse, i, h)] = empty ? -INFINITY : top + std::log(total);
    }
  };
  for_each_range(out.size(0) * heads, 4 * dim, body);  // two reads, a division and a write of each number
}

}  // namespace

void merge_attn_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out,
                       std::optional<Tensor> lse, std::optional<Tensor> output_scale) {
  check_dims("out_a", out_a, {-1, -1, -1});
  check_float("out_a", out_a);
  const int64_t tokens = out_a.size(0), heads = out_a.size(1);
  const Tensor* outs[] = {&out_a, &out_b, &out};
  const char* out_names[] = {"out_a", "out_b", "out"};
  for (int i = 0; i < 3; ++i) {
    check_dims(out_names[i], *outs[i], {tokens, heads, out_a.size(2)});
    if (i < 2) {
      STD_TORCH_CHECK(outs[i]->scalar_type() == out_a.scalar_type(), out_names[i],
                      ": expected the dtype of out_a, got another");
    }
    check_cpu(out_names[i], *outs[i]);
    check_last_dim(out_names[i], *outs[i]);
  }
  check_results_dtype("out_a", out_a, out, output_scale);
  const Tensor* states[] = {&lse_a, &lse_b, lse ? &*lse : nullptr};
  const char* state_names[] = {"lse_a", "lse_b", "lse"};
  for (int i = 0; i < 3; ++i) {
    if (!states[i]) continue;
    check_dims(state_names[i], *states[i], {tokens, heads});
    check_dtype(state_names[i], *states[i], ScalarType::Float, "torch.float32");
    check_cpu(state_names[i], *states[i]);
  }
  check_own_elements("out", out);
  if (lse) check_own_elements("lse", *lse);
  if (lse && output_scale) check_apart("output_scale", *output_scale, "lse", *lse);
  const Tensor* target = lse ? &*lse : nullptr;
  const float* scale = output_scale ? data<float>(*output_scale) : nullptr;
  switch (out_a.scalar_type()) {
    case ScalarType::BFloat16: return merge<bf16>(out_a, lse_a, out_b, lse_b, out, target, scale);
    case ScalarType::Half: return merge<fp16>(out_a, lse_a, out_b, lse_b, out, target, scale);
    default: return merge<float>(out_a, lse_a, out_b, lse_b, out, target, scale);
  }
}
REGISTER_OP(merge_attn_states)

}  // namespace torchpaged
