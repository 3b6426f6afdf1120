"""What kernels do otherwise in Triton's interpreter."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)  # as `triton.jit` asks where it makes a kernel


@triton.jit
def as_numbers(x):
    """``x``; in the interpreter in float32: it keeps bf16 as integers, arithmetic on which is silently
    wrong."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x
