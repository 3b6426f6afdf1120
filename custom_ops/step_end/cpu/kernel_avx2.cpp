// x86-64 with AVX2, FMA and F16C.
#define VEC_WIDTH 8
#include "sampler_impl.h"
int64_t torchpaged::sample_row_avx2(const LogitRow& row) { return sample_row(row); }
