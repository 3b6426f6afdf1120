// x86-64 with AVX-512 F, BW, VL, DQ.
#define VEC_WIDTH 16
#include "sampler_impl.h"
int64_t torchpaged::sample_row_avx512(const LogitRow& row) { return sample_row(row); }
