// What the ops share that write tokens into pools: cache_ops.cpp has it.
#pragma once
#include "check.h"

namespace torchpaged {

// Rows of numbers by token and head; strides in bytes.
struct TokenRows { ScalarType dtype; const char* data; int64_t token, head; };

inline TokenRows rows_of(const Tensor& x) {
  const int64_t size = x.element_size();
  return {x.scalar_type(), static_cast<const char*>(x.const_data_ptr()), x.stride(0) * size,
          x.stride(1) * size};
}

void check_token_writes(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slot_mapping, const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale);

// Stores what `check_token_writes` has found to fit; numbers of float may go into pools of any dtype.
void store_tokens(const TokenRows& x, const Tensor& cache, const Tensor& slot_mapping,
                  const std::optional<Tensor>& scale);

}  // namespace torchpaged
