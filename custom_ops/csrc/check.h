// Argument checks in the words of custom_ops/validation.py: name, expected, got. All run before anything is written.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace torchpaged {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

// -1 accepts any size. The message is built on failure only: these checks run at every call.
inline void check_dims(const char* name, const Tensor& t, std::initializer_list<int64_t> dims) {
  bool fits = t.dim() == int64_t(dims.size());
  int64_t i = 0;
  for (int64_t d : dims) {
    if (!fits) break;
    fits = d < 0 || t.size(i) == d;
    ++i;
  }
  if (fits) return;
  std::string want;
  for (int64_t d : dims) want += (want.empty() ? "" : ", ") + (d < 0 ? std::string("*") : std::to_string(d));
  STD_TORCH_CHECK(false, name, ": expected shape [", want, "], got ", shape_of(t));
}

inline void check_dtype(const char* name, const Tensor& t, ScalarType dtype, const char* dtype_name) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": expected ", dtype_name, ", got another dtype");
}

inline void check_last_dim(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name, ": expected a contiguous last dimension (stride 1), got stride ",
                  t.stride(t.dim() - 1), "; call .contiguous()");
}

inline void check_cpu(const char* name, const Tensor& t) { STD_TORCH_CHECK(t.is_cpu(), name, ": expected device cpu, got another device"); }

inline void check_float(const char* name, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  STD_TORCH_CHECK(s == ScalarType::Float || s == ScalarType::BFloat16 || s == ScalarType::Half, name,
                  ": expected torch.float32, torch.bfloat16 or torch.float16 for the cpu backend, got another dtype; "
                  "the reference backend takes every dtype");
}

inline void check_pools(const Tensor& k_cache, const Tensor& v_cache) {
  STD_TORCH_CHECK(k_cache.dim() == 4, "k_cache: expected shape [num_blocks, block_size, num_kv_heads, head_dim], got ", shape_of(k_cache));
  check_dims("v_cache", v_cache, {k_cache.size(0), k_cache.size(1), k_cache.size(2), -1});
  STD_TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(), "v_cache: expected the dtype of k_cache, got another");
  check_cpu("k_cache", k_cache);
  check_cpu("v_cache", v_cache);
  check_last_dim("k_cache", k_cache);
  check_last_dim("v_cache", v_cache);
}

template <typename T>
const T* data(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <typename T>
T* mutable_data(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

}  // namespace torchpaged
