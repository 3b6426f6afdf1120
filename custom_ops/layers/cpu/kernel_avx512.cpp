// x86-64 with AVX-512 F, BW, VL, DQ.
#define VEC_WIDTH 16
#include "linear_kernel_impl.h"
torchpaged::LinearKernels torchpaged::linear_kernels_avx512(bool is_double) { return kernels_for(is_double); }
