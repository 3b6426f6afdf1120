"""Rows of fp8 latents (``mla/fp8_rows.py``) as the attention kernels read them."""

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.interpreter import INTERPRET, as_numbers


@triton.jit
def fp8_tile(at, seen, dtype: tl.constexpr, SIZES: tl.constexpr):
    """Latents ``[N, C]`` and rotated keys ``[E, N]`` of the rows that begin at ``at [N]``, as numbers of
    ``dtype``; of rows that are not ``seen [N]`` (None: all are) nothing is read, they are zeros."""
    RANK: tl.constexpr = SIZES.rank
    RANK_PAD: tl.constexpr = SIZES.rank_pad
    GROUP: tl.constexpr = 128 if RANK_PAD > 128 else RANK_PAD
    SCALES: tl.constexpr = (RANK + 127) // 128
    g = tl.arange(0, RANK_PAD // GROUP)
    column = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    e = tl.arange(0, SIZES.rope_pad)
    codes_at = at[:, None, None] + column[None, :, :]
    scales_at = (at + RANK).to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + g[None, :]
    k_pe_at = (at + RANK + 4 * SCALES).to(tl.pointer_type(tl.bfloat16), bitcast=True)[None, :] + e[:, None]
    if seen is None and RANK == RANK_PAD and SIZES.rope == SIZES.rope_pad:
        codes, scales, k_pe = tl.load(codes_at), tl.load(scales_at), tl.load(k_pe_at)
    else:
        if seen is None:
            seen = tl.full(at.shape, 1, tl.int1)
        codes = tl.load(codes_at, mask=seen[:, None, None] & (column < RANK)[None, :, :], other=0.0)
        scales = tl.load(scales_at, mask=seen[:, None] & (g < SCALES)[None, :], other=0.0)
        k_pe = tl.load(k_pe_at, mask=seen[None, :] & (e < SIZES.rope)[:, None], other=0.0)
    numbers = (codes.to(tl.float32) * scales[:, :, None]).to(dtype)
    if SIZES.pinned and not INTERPRET:
        # An instruction that the compiler may not move: it would put the conversion behind shared memory, and
        # do it twice, by single bytes where the tile is read transposed.
        numbers = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [numbers], numbers.dtype, is_pure=False, pack=2
        )
    return tl.reshape(numbers, [at.shape[0], RANK_PAD]), as_numbers(k_pe).to(dtype)
