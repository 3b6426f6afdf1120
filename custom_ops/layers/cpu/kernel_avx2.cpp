// x86-64 with AVX2, FMA and F16C.
#define VEC_WIDTH 8
#include "linear_kernel_impl.h"
torchpaged::LinearKernels torchpaged::linear_kernels_avx2(bool is_double) { return kernels_for(is_double); }
