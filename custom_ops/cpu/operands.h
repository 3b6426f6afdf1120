// What ops make of tensors, and checks of it. Only for units that are compiled for every processor.
#pragma once
#include "check.h"
#include "instruction_set.h"
#include "operand.h"

namespace torchpaged {

inline Number number_of(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Number::Float;
    case ScalarType::BFloat16: return Number::BFloat16;
    case ScalarType::Half: return Number::Half;
    case ScalarType::Double: return Number::Double;
    default:
      STD_TORCH_CHECK(false, name, ": expected torch.bfloat16, torch.float16, torch.float32 or "
                      "torch.float64, got another dtype");
  }
}

// What the op reads: its size, place and strides; `dims` of -1 are any.
inline Operand operand(const char* name, const Tensor& t, std::initializer_list<int64_t> dims) {
  check_dims(name, t, dims);
  check_cpu(name, t);
  check_last_dim(name, t);
  void* data = const_cast<void*>(t.const_data_ptr());
  return {number_of(name, t), data, t.stride(0), t.dim() > 2 ? t.stride(1) : 1};
}

inline void check_as(const char* name, const Tensor& t, ScalarType own, ScalarType other) {
  STD_TORCH_CHECK(t.scalar_type() == own || t.scalar_type() == other, name,
                  ": expected the inputs' dtype or the one of sums, got another");
}

struct Named { const char* name; const Tensor* tensor; };

inline void check_written(const char* target, const Tensor& written, std::initializer_list<Named> read) {
  if (written.numel()) check_own_elements(target, written);
  for (const Named& each : read)
    if (each.tensor) check_apart(each.name, *each.tensor, target, written);
}

inline const Tensor* pointer(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

}  // namespace torchpaged
