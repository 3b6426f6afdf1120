// Any processor.
#define VEC_WIDTH 4
#include "linear_kernel_impl.h"
torchpaged::LinearKernels torchpaged::linear_kernels_generic(bool is_double) {
  return kernels_for(is_double);
}
