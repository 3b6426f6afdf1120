// x86-64 with AVX-512 F, BW, VL, DQ.
#define VEC_WIDTH 16
#define ROW_TILE 4
#include "attention_kernel_impl.h"
torchpaged::Kernels torchpaged::kernels_avx512(torchpaged::Dtype dtype) { return kernels_for(dtype); }
