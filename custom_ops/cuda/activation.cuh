// Activations of gates: 1 silu, 2 gelu (tanh), 3 gelu (erf), anything else none.
#pragma once

#include "machine.cuh"

template <int ACTIVATION> __device__ __forceinline__ float activate(float x) {
  if constexpr (ACTIVATION == 1)
    // beyond 2^126 the fast division gives 0 for any x
    return __fdividef(x, 1.f + exp2_(fminf(-x * LOG2E, 126.f)));
  else if constexpr (ACTIVATION == 2)
    return 0.5f * x * (1.f + tanh_(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  else if constexpr (ACTIVATION == 3)
    return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
  else
    return x;
}
