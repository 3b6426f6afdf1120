// A tensor as kernels see it.
#pragma once
#include <cstdint>

namespace torchpaged {

enum class Number { Float, BFloat16, Half, Double };

// A tensor whose last dimension is contiguous; strides in elements. data may be null: there is none.
struct Operand {
  Number dtype;
  void* data;
  int64_t token, head;
};

}  // namespace torchpaged
