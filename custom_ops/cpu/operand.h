// A tensor as kernels see it.
#pragma once
#include <cstdint>

namespace torchpaged {

enum class Number { Float, BFloat16, Half, Double };

inline int64_t size_of(Number dtype) {  // in bytes
  return dtype == Number::Double ? 8 : dtype == Number::Float ? 4 : 2;
}

// A tensor whose last dimension is contiguous; strides in elements. data may be null: there is none.
struct Operand {
  Number dtype;
  void* data;
  int64_t token, head;
};

}  // namespace torchpaged
