"""The activations of gates, for the kernels of all families."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """``silu``, ``gelu_tanh`` or ``gelu`` of float32 ``x``. The tanh of GELU's approximation is written as
    a sigmoid."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 * sqrt(2 / pi)
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y
