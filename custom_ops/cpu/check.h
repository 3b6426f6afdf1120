// Argument checks in the words of custom_ops/attention/check.py: name, expected, got. All run before anything
// is written.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

// Behind an op's function: it is the default and the .cpu overload on a CPU. Schemas, tags and fakes live in
// Python (custom_ops/*/schema.py): with a 2.11 target the stable ABI can set neither.
#define REGISTER_OP(op)                             \
  STABLE_TORCH_LIBRARY_IMPL(torchpaged, CPU, m) {   \
    for (const char* name : {#op, #op ".cpu"}) m.impl(name, TORCH_BOX(&op)); \
  }

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
  STD_TORCH_CHECK(t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name,
                  ": expected a contiguous last dimension (stride 1), got stride ", t.stride(t.dim() - 1),
                  "; call .contiguous()");
}

inline void check_cpu(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu(), name, ": expected device cpu, got another device");
}

inline void check_float(const char* name, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  STD_TORCH_CHECK(
      s == ScalarType::Float || s == ScalarType::BFloat16 || s == ScalarType::Half, name,
      ": expected torch.float32, torch.bfloat16 or torch.float16 for the cpu backend, got another dtype; "
      "the reference backend takes every dtype");
}

// The range of a tensor's addresses; empty if it holds nothing.
struct Span {
  const char *begin, *end;
  explicit Span(const Tensor& t) : begin(static_cast<const char*>(t.const_data_ptr())), end(begin) {
    if (t.numel() == 0) return;
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    end = begin + (last + 1) * int64_t(t.element_size());
  }
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// Each element of a tensor that is written has memory of its own: see check_own_elements in
// custom_ops/memory.py.
inline void check_own_elements(const char* name, const Tensor& t) {
  for (int64_t i = 0; i < t.dim(); ++i) {
    int64_t reach = 0;  // of the dimensions of smaller strides
    for (int64_t j = 0; j < t.dim(); ++j)
      if (t.stride(j) < t.stride(i) || (t.stride(j) == t.stride(i) && j < i))
        reach += (t.size(j) - 1) * t.stride(j);
    STD_TORCH_CHECK(t.size(i) < 2 || t.stride(i) > reach, name,
                    ": expected memory of its own for each element, got a stride of ", t.stride(i),
                    "; allocate it with torch.empty");
  }
}

inline void check_apart(const char* name, const Tensor& t, const char* written, const Tensor& target) {
  STD_TORCH_CHECK(!Span(t).meets(Span(target)), name, ": expected memory apart from ", written,
                  "'s, which the op writes, got overlapping tensors");
}

// What is written is of the dtype of `x`, or e4m3 with a scale of its own, one positive finite number.
inline void check_results_dtype(const char* name, const Tensor& x, const Tensor& out,
                                const std::optional<Tensor>& output_scale) {
  if (!output_scale) {
    STD_TORCH_CHECK(out.scalar_type() == x.scalar_type(), "out: expected the dtype of ", name,
                    ", got another");
    return;
  }
  check_dtype("out", out, ScalarType::Float8_e4m3fn, "torch.float8_e4m3fn");
  check_dtype("output_scale", *output_scale, ScalarType::Float, "torch.float32");
  check_cpu("output_scale", *output_scale);
  STD_TORCH_CHECK(output_scale->dim() < 2 && output_scale->numel() == 1,
                  "output_scale: expected one scale, got ", shape_of(*output_scale));
  const float scale = *static_cast<const float*>(output_scale->const_data_ptr());
  STD_TORCH_CHECK(scale > 0 && scale <= 3.4028234664e38f,
                  "output_scale: expected positive finite numbers, got ", scale);
  check_apart("output_scale", *output_scale, "out", out);
}

// Whether two pools of the same strides share an element, `distance` elements apart: see pools_meet in
// custom_ops/memory.py.
inline bool meet(const int64_t* strides, const int64_t* sizes, int dims, int64_t distance, int64_t width_k,
                 int64_t width_v) {
  if (dims == 0) return 1 - width_v <= distance && distance <= width_k - 1;
  int64_t reach = std::max(width_k, width_v) - 1;
  for (int i = 1; i < dims; ++i) reach += (sizes[i] - 1) * strides[i];
  const int64_t stride = strides[0];
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b != 0 && a < 0); };
  const int64_t low = -floor_div(reach - distance, stride), high = floor_div(distance + reach, stride);
  for (int64_t step = std::max(low, 1 - sizes[0]); step <= std::min(high, sizes[0] - 1); ++step)
    if (meet(strides + 1, sizes + 1, dims - 1, distance - step * stride, width_k, width_v)) return true;
  return false;
}

inline bool pools_meet(const Tensor& k_cache, const Tensor& v_cache) {
  const Span k(k_cache), v(v_cache);
  if (!k.meets(v)) return false;
  int64_t strides[3], sizes[3];
  int dims = 0;
  for (int i = 0; i < 3; ++i) {
    if (k_cache.stride(i) != v_cache.stride(i)) return true;
    if (k_cache.size(i) < 2 || k_cache.stride(i) == 0) continue;
    int at = dims++;
    for (; at > 0 && strides[at - 1] < k_cache.stride(i); --at) {
      strides[at] = strides[at - 1];
      sizes[at] = sizes[at - 1];
    }
    strides[at] = k_cache.stride(i);
    sizes[at] = k_cache.size(i);
  }
  return meet(strides, sizes, dims, (v.begin - k.begin) / int64_t(k_cache.element_size()), k_cache.size(3),
              v_cache.size(3));
}

// `stores`: the op writes tokens. Values that are the first columns of the keys may then not be given, else
// they may.
inline void check_pools(const Tensor& k_cache, const Tensor& v_cache, bool stores = false) {
  STD_TORCH_CHECK(k_cache.dim() == 4,
                  "k_cache: expected shape [num_blocks, block_size, num_kv_heads, head_dim], got ",
                  shape_of(k_cache));
  check_dims("v_cache", v_cache, {k_cache.size(0), k_cache.size(1), k_cache.size(2), -1});
  STD_TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(),
                  "v_cache: expected the dtype of k_cache, got another");
  check_cpu("k_cache", k_cache);
  check_cpu("v_cache", v_cache);
  check_last_dim("k_cache", k_cache);
  check_last_dim("v_cache", v_cache);
  for (int i = 0; i < 4; ++i)
    STD_TORCH_CHECK(k_cache.size(i) > 0 && v_cache.size(i) > 0,
                    "k_cache, v_cache: expected at least one block, token per block, head and column, got ",
                    shape_of(k_cache), " and ", shape_of(v_cache));
  if (!pools_meet(k_cache, v_cache)) return;
  bool latent =
      !stores && k_cache.const_data_ptr() == v_cache.const_data_ptr() && v_cache.size(3) < k_cache.size(3);
  for (int i = 0; i < 3; ++i) latent = latent && k_cache.stride(i) == v_cache.stride(i);
  STD_TORCH_CHECK(latent,
                  "v_cache: expected memory apart from k_cache's, got pools that share memory; allocate one "
                  "pool for each");
}

template <typename T>
const T* data(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <typename T>
T* mutable_data(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

}  // namespace torchpaged
