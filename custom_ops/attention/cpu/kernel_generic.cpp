// Any processor: four floats at a time, which compilers lower to SSE2 or NEON.
#define VEC_WIDTH 4
#define ROW_TILE 2
#include "attention_kernel_impl.h"
torchpaged::Kernels torchpaged::kernels_generic(torchpaged::Dtype dtype) { return kernels_for(dtype); }
