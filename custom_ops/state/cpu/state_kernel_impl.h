// The kernels behind state_kernel.h; include once per translation unit after defining VEC_WIDTH.
#include "channels.h"
#include "convolution.h"
#include "gates.h"
#include "recurrence.h"

namespace {

template <typename A>
StateKernels kernels_of() {
  return {&convolve<A>, &recur<A>, &scan<A>, &rg_lru<A>, &gates_of<A>, &gated_norms<A>};
}

StateKernels kernels_for(bool is_double) {
  return is_double ? kernels_of<double>() : kernels_of<float>();
}

}  // namespace
