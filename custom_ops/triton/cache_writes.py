"""What the kernels that write into a KV cache do at their begin and at their end, for the sake of
``paged_attention`` behind them.

It reads the context's keys and values early (docs/stream_order.md). So a kernel that writes such keys holds
it back and makes them visible before it ends; one that writes the query tokens' own does not, and reads where
they go before it waits.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.interpreter import INTERPRET


@triton.jit
def begin_write(ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr):
    """PDL: the kernel is launched with programmatic dependent launch. Query tokens' writes wait by
    `wait_for_tokens`."""
    if PDL:
        if ARE_QUERY_TOKENS:
            tl.extra.cuda.gdc_launch_dependents()
        else:
            tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_tokens(ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr):
    """Ahead of every load but those of slots, positions and constants of a step. Every program comes here."""
    if PDL and ARE_QUERY_TOKENS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_early(ptr):
    """A slot or position, from L2: a first-level cache may hold an older step's."""
    return tl.load(ptr, cache_modifier=".cg")


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """``x`` inside an fp8 dtype's range ``[-LIMIT, LIMIT]``, infinities too; NaN stays NaN, which a plain
    minimum would drop."""
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """float32 ``x`` in an fp8 dtype whose largest number is LIMIT: saturated, rounded to nearest even, NaN
    as NaN.

    e5m2 from its bits: what Triton makes of a conversion depends on version and device. Before compute
    capability 8.9, Triton 3.6 rounds ties away from zero and turns NaN into -0.
    """
    x = saturate(x, LIMIT)
    if dtype == tl.float8e5:
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - ((127 - 15) << 2)
        # Below 2^-14, e5m2's smallest normal number, the addition rounds: neighbours of 128.0 are 2^-16
        # apart, as e5m2's subnormals are.
        steps = (tl.abs(x) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
        small = tl.where(size < 0x38800000, steps, normal)
        code = tl.where(size > 0x7F800000, 0x7F, small) | ((bits >> 24) & 0x80)
        fp8 = code.to(tl.uint8).to(tl.float8e5, bitcast=True)
    elif INTERPRET:  # whose own conversion loses what rounding carries into the exponent: 31 becomes 16
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        steps = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        small = tl.where(size < 0x3C800000, steps, normal)
        code = tl.where(size > 0x7F800000, 0x7F, small) | ((bits >> 24) & 0x80)
        fp8 = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        fp8 = x.to(dtype)
    return fp8


@triton.jit
def end_write(ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr):
    """After the last store. That all programs have ended starts the kernel behind, but does not say that
    their stores can be seen."""
    if PDL and not ARE_QUERY_TOKENS:
        fence()


@triton.jit
def fence():
    """For every thread: its stores before can be seen by the whole GPU, its loads behind find nothing that
    was in L1 before."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
