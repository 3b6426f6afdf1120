"""How attention kernels write their `Results`."""

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.cache_writes import to_fp8


@triton.jit
def stored(results, out):
    """What is written for float32 ``out``: over the scale, if there is one.

    By its inverse, which is finite so that a zero stays one: a division of each number is many instructions.
    """
    if results.scale is not None:
        inverse = tl.minimum(tl.div_rn(1.0, tl.load(results.scale)), 3.4028234663852886e38)
        out = to_fp8(out * inverse, 448.0, results.out.dtype.element_ty)
    return out.to(results.out.dtype.element_ty)


@triton.jit
def store_rows(results, out, lse, token, head, valid, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Write ``out [M, WIDTH_PAD]`` and ``lse [M]`` of rows (token, head)."""
    column = tl.arange(0, WIDTH_PAD)
    head = head.to(tl.int64)  # as the query's heads: a head's stride may be that of a whole sequence
    at = results.out + (token.to(tl.int64) * results.o_token + head * results.o_head)[:, None]
    at += column[None, :]
    mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(at, stored(results, out), mask=mask)
    if results.lse is not None:
        tl.store(results.lse + token.to(tl.int64) * results.l_token + head * results.l_head, lse, mask=valid)
