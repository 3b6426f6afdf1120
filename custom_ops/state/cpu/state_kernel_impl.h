// The kernels behind state_kernel.h; include once per translation unit after defining VEC_WIDTH.
#include "convolution.h"
#include "gates.h"
#include "recurrence.h"

namespace {

StateKernels kernels_for(bool is_double) {
  if (is_double) return {&convolve<double>, &recur<double>, &gates_of<double>, &gated_norms<double>};
  return {&convolve<float>, &recur<float>, &gates_of<float>, &gated_norms<float>};
}

}  // namespace
