// x86-64 with AVX2, FMA and F16C (2013 and later).
#define VEC_WIDTH 8
#define ROW_TILE 2
#include "attention_kernel_impl.h"
torchpaged::Kernels torchpaged::kernels_avx2(torchpaged::Dtype dtype) { return kernels_for(dtype); }
