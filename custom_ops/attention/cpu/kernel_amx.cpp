// x86-64 with AMX for bf16 beside what kernel_avx512.cpp takes (2023 and later).
#define VEC_WIDTH 16
#define ROW_TILE 4
#include "attention_kernel_impl.h"
torchpaged::Kernels torchpaged::kernels_amx(torchpaged::Dtype dtype) { return kernels_for(dtype); }
