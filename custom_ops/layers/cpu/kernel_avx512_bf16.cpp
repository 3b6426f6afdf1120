// x86-64 with AVX-512's products of bf16 beside what kernel_avx512.cpp takes (2020 and later).
#define VEC_WIDTH 16
#include "linear_kernel_impl.h"
torchpaged::LinearKernels torchpaged::linear_kernels_avx512_bf16() { return kernels_for_bf16(); }
