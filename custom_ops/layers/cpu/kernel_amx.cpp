// x86-64 with AMX for bf16 beside what kernel_avx512.cpp takes (2023 and later).
#define VEC_WIDTH 16
#include "linear_kernel_impl.h"
#include "tile_products.h"
torchpaged::LinearKernels torchpaged::linear_kernels_amx() {
  return {&pack_pairs, &sum_products_by_tiles, &finish<float>};
}
