// x86-64 with AVX-512's products of bf16 beside what kernel_avx512.cpp takes (2020 and later).
#define VEC_WIDTH 16
#define ROW_TILE 4
#include "attention_kernel_impl.h"
torchpaged::Kernels torchpaged::kernels_avx512_bf16(torchpaged::Dtype dtype) { return kernels_for(dtype); }
