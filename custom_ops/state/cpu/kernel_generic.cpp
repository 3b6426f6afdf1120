// Any processor.
#define VEC_WIDTH 4
#include "state_kernel_impl.h"
torchpaged::StateKernels torchpaged::state_kernels_generic(bool is_double) { return kernels_for(is_double); }
