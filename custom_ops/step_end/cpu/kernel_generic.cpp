// Any processor.
#define VEC_WIDTH 4
#include "sampler_impl.h"
int64_t torchpaged::sample_row_generic(const LogitRow& row) { return sample_row(row); }
