"""The noise of a row's tokens: its random bits, exact, and good enough to tell which may win.

What a token's noise is: `torchpaged.custom_ops.step_end.reference`. Philox4x32-10 with the two halves of each
product in one instruction, which Triton's own takes two for.
"""

import triton
import triton.language as tl

#: `coarse_score` is never below the exact score by more than half of this many temperatures and half of
#: `ROUNDING` of the score, and above it by more for one token in a hundred alone, those with the least noise.
MARGIN: tl.constexpr = tl.constexpr(1.2e-3)
ROUNDING: tl.constexpr = tl.constexpr(1e-6)
#: What `coarse_score` leaves out of every score: -log(log(2)), in temperatures.
LEFT_OUT: tl.constexpr = tl.constexpr(0.36651292058166435)


@triton.jit
def noise_bits(seed, counter, quarter):
    """Random bits of tokens ``4 * quarter ... 4 * quarter + 3``: ``[N, 4]`` uint32 of ``[N]``."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = quarter.to(tl.uint32)
    d = tl.zeros_like(a)
    b, c = d + (counter & 0xFFFFFFFF).to(tl.uint32), d + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        p, q = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b = (q >> 32).to(tl.uint32) ^ b ^ k0, q.to(tl.uint32)
        c, d = (p >> 32).to(tl.uint32) ^ d ^ k1, p.to(tl.uint32)
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [quarter.shape[0], 4])


@triton.jit
def natural_log(x):
    """Logarithm of normal positive numbers to float32's precision (Cephes' logf): without the branches of the
    library's for all others."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    significand = (bits & 0x007FFFFF) + 0x3F3504F3
    f = significand.to(tl.float32, bitcast=True) - 1.0  # in [sqrt(1/2) - 1, sqrt(2) - 1)
    p = ((7.0376836292e-2 * f - 1.1514610310e-1) * f + 1.1676998740e-1) * f - 1.2420140846e-1
    p = (((p * f + 1.4249322787e-1) * f - 1.6668057665e-1) * f + 2.0000714765e-1) * f - 2.4999993993e-1
    p = (p * f + 3.3333331174e-1) * f * f * f - 2.12194440e-4 * exponent - 0.5 * f * f
    return f + p + 0.693359375 * exponent


@triton.jit
def gumbel_noise(bits):
    """The noise of random bits, to float32's precision."""
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - v) is exponential noise. Where v is small, 1 - v would lose its bits: the first terms of the
    # series are taken there. Elsewhere 1 - v comes from the bits, exact to its last one where it is small.
    series = v * (1.0 + v * (0.5 + v * (0.3333333432674408 + v * 0.25)))
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(v < 0.015625, series, -natural_log(u))
    return -natural_log(exponential)


@triton.jit
def coarse_log2(x, PTX: tl.constexpr):
    """Logarithm of normal positive numbers to base 2 with an error of 2**-22, absolute between 1/2 and 2 and
    relative elsewhere: an instruction of NVIDIA's."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return natural_log(x) * 1.4426950408889634


@triton.jit
def coarse_score(z, bits, temperature, PTX: tl.constexpr):
    """``z`` and its noise times the temperature, less `LEFT_OUT`; how good: `MARGIN`. NaN where z is."""
    f = bits.to(tl.float32)
    # Of v and u = 1 - v, exponential noise to base 2: v / log(2) below 2**-10, elsewhere -log2(u), whose
    # error there is 2e-4 of it. u stays above 2**-16, so that no logarithm is infinite; what that changes
    # makes scores larger, never smaller.
    small = f * 3.3590361566e-10 + 1.6795180783e-10
    u = f * -2.3282709094e-10 + 1.0
    exponential = tl.where(f < 4194304.0, small, -coarse_log2(u, PTX))
    return z - (temperature * 0.6931471805599453) * coarse_log2(exponential, PTX)
