"""rope_write_latent: what lies between the down-projections of latent attention and ``mla_attention``, in one
launch.

The first programs take a token each: they norm its latent, rotate its key and store both in their row of the
pool. The others take a tile of tokens and one head: those of the first columns multiply the query with the
head's up-projection on tensor cores, one more per head rotates the rest of it. Programs of one head and its
columns follow each other, so that tiles of tokens find its weights in L2. Everything is rounded once, when it
is stored.

The first terms' weights, of few tokens all of them, are read before the kernels ahead have ended, and so are
slots of query tokens (docs/stream_order.md).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from torchpaged.custom_ops.mla.call import LatentWriteCall
from torchpaged.custom_ops.mla.check import check_rope_write_latent
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, num_scales
from torchpaged.custom_ops.mla.triton.write_latent import store_fp8_latent
from torchpaged.custom_ops.triton.cache_writes import end_write
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats, require_fp8
from torchpaged.custom_ops.triton.records import KeyPool, Matrix, Tokens

_TILE_RANK = 64  # columns of a latent per program: one token of 16 heads of 512 fills a GPU


class LatentNorm(NamedTuple):
    """Pointer to the weights of the latent's norm, or None, and its epsilon."""

    weight: Any
    eps: float


class LatentSizes(NamedTuple):
    """What the kernel is compiled for; tiles and pads are powers of 2."""

    nope: int
    rank: int
    groups_pad: int
    rope: int
    half_pad: int
    block_size: int
    tile_tokens: int
    tile_rank: int
    tile_nope: int
    fp8: bool


@triton.jit
def _store_rotated(
    source, target, cos_sin, here, ROPE: tl.constexpr, HALF_PAD: tl.constexpr, ROTATION: tl.constexpr
):
    """Rotate rows of ROPE numbers; pointers ``[rows, 1]``, ``here`` which of them there are."""
    HALF: tl.constexpr = ROPE // 2
    d = tl.arange(0, HALF_PAD)[None, :]
    mask = here & (d < HALF)
    if ROTATION == "halves":
        first, second = d, HALF + d
    else:
        first, second = 2 * d, 2 * d + 1
    x1 = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + d, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin + HALF + d, mask=mask, other=0.0).to(tl.float32)
    if ROTATION == "pairs_to_halves":
        first, second = d, HALF + d
    tl.store(target + first, (x1 * cos - x2 * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(target + second, (x2 * cos + x1 * sin).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _write_row(kv_c, k_pe, pool, norm, cos_sin, token, slot, SIZES: tl.constexpr, ROTATION: tl.constexpr):
    """The row of one token in the pool."""
    RANK: tl.constexpr = SIZES.rank
    column = tl.arange(0, SIZES.groups_pad)[:, None] * 128 + tl.arange(0, 128)[None, :]
    latent = tl.load(kv_c.ptr + token * kv_c.token + column, mask=column < RANK, other=0.0).to(tl.float32)
    if norm.weight is not None:
        weight = tl.load(norm.weight + column, mask=column < RANK, other=0.0).to(tl.float32)
        squares = tl.sum(tl.sum(latent * latent, axis=1), axis=0)
        latent = latent * tl.rsqrt(squares / RANK + norm.eps) * weight
    at = pool.ptr + slot // SIZES.block_size * pool.block + slot % SIZES.block_size * pool.slot
    if SIZES.fp8:
        store_fp8_latent(at, latent, RANK, SIZES.groups_pad)
        key_at = (at + RANK + 4 * ((RANK + 127) // 128)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        tl.store(at + column, latent.to(pool.ptr.dtype.element_ty), mask=column < RANK)
        key_at = at + RANK
    row = tl.arange(0, 1)[:, None]
    _store_rotated(
        k_pe.ptr + token * k_pe.token + row,
        key_at + row,
        cos_sin + row,
        row == 0,
        SIZES.rope,
        SIZES.half_pad,
        ROTATION,
    )


@triton.jit
def rope_write_latent_kernel(
    q,
    kv_c,
    k_pe,
    up_keys,
    q_out,
    pool,
    norm,
    positions_ptr,
    cos_sin,
    slot_ptr,
    num_tokens,
    SIZES: tl.constexpr,
    ROTATION: tl.constexpr,
    ARE_QUERY_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``q``, ``kv_c``, ``k_pe``, ``q_out``: `Tokens`; ``up_keys``: `Tokens`, of heads and their rows;
    ``pool``: `KeyPool`; ``cos_sin``: `Matrix`. Grid: (num_tokens + tiles of tokens x heads x (tiles of the
    rank + 1),)."""
    if PDL and ARE_QUERY_TOKENS:
        tl.extra.cuda.gdc_launch_dependents()
    TILE: tl.constexpr = SIZES.tile_tokens
    TILE_RANK: tl.constexpr = SIZES.tile_rank
    TILE_NOPE: tl.constexpr = SIZES.tile_nope
    COLUMNS: tl.constexpr = (SIZES.rank + TILE_RANK - 1) // TILE_RANK
    program = tl.program_id(0)
    tiles = (num_tokens + TILE - 1) // TILE
    rest = tl.maximum(program - num_tokens, 0) // tiles
    head, column = (rest // (COLUMNS + 1)).to(tl.int64), rest % (COLUMNS + 1)
    r = column * TILE_RANK + tl.arange(0, TILE_RANK)[None, :]
    n = tl.arange(0, TILE_NOPE)
    weights = up_keys.ptr + head * up_keys.token + n[:, None] * up_keys.head + r
    multiplies = (program >= num_tokens) & (r < SIZES.rank)
    weight = tl.load(weights, mask=multiplies & (n[:, None] < SIZES.nope), other=0.0)
    if PDL and not ARE_QUERY_TOKENS:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + program, mask=program < num_tokens, other=-1, cache_modifier=".cg")
    if PDL and ARE_QUERY_TOKENS:
        tl.extra.cuda.gdc_wait()
    if program < num_tokens:
        token = program.to(tl.int64)
        if slot >= 0:
            rotation_at = cos_sin.ptr + tl.load(positions_ptr + token) * cos_sin.row
            _write_row(kv_c, k_pe, pool, norm, rotation_at, token, slot, SIZES, ROTATION)
    else:
        tokens = ((program - num_tokens) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
        here = tokens < num_tokens
        source = q.ptr + tokens * q.token + head * q.head
        target = q_out.ptr + tokens * q_out.token + head * q_out.head
        if column < COLUMNS:
            x = tl.load(source + n[None, :], mask=here & (n < SIZES.nope)[None, :], other=0.0)
            y = tl.dot(as_numbers(x), as_numbers(weight), input_precision="ieee")
            for begin in range(TILE_NOPE, SIZES.nope, TILE_NOPE):
                inside = begin + n < SIZES.nope
                at = weights + begin * up_keys.head
                weight = tl.load(at, mask=inside[:, None] & (r < SIZES.rank), other=0.0)
                x = tl.load(source + begin + n[None, :], mask=here & inside[None, :], other=0.0)
                y = tl.dot(as_numbers(x), as_numbers(weight), y, input_precision="ieee")
            tl.store(target + r, y.to(target.dtype.element_ty), mask=here & (r < SIZES.rank))
        else:
            position = tl.load(positions_ptr + tokens, mask=here, other=0)
            _store_rotated(
                source + SIZES.nope,
                target + SIZES.rank,
                cos_sin.ptr + position * cos_sin.row,
                here,
                SIZES.rope,
                SIZES.half_pad,
                ROTATION,
            )
    end_write(ARE_QUERY_TOKENS, PDL)


def rope_write_latent(call: LatentWriteCall) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``, in float32, bfloat16 or float16."""
    q, kv_c, k_pe, positions, cos_sin, slot_mapping, up_keys, q_out, kv_cache = call[:9]
    require_floats(q=q)
    check_rope_write_latent(call)
    require_fp8(kv_cache)
    (tokens, num_heads, _), (_, nope, rank), rope = q.shape, up_keys.shape, k_pe.shape[1]
    if not tokens:
        return
    tile, tile_nope = (16, min(next_power_of_2(max(nope, 16)), 128)) if tokens <= 16 else (64, 64)
    if q.dtype == torch.float32:  # whose products are of single numbers, and would spill
        tile, tile_nope = 16, 16
    columns = -(-rank // _TILE_RANK)
    launch_kernel(
        rope_write_latent_kernel,
        (tokens + -(-tokens // tile) * num_heads * (columns + 1),),
        *(Tokens.of(q), Tokens.of(kv_c[:, None]), Tokens.of(k_pe[:, None]), Tokens.of(up_keys)),
        *(Tokens.of(q_out), KeyPool.of(kv_cache, None), LatentNorm(call.kv_norm, call.norm_eps)),
        *(positions.contiguous(), Matrix.of(cos_sin), slot_mapping.contiguous(), tokens),
        SIZES=LatentSizes(
            nope=nope,
            rank=rank,
            groups_pad=next_power_of_2(num_scales(rank)),
            rope=rope,
            half_pad=next_power_of_2(rope // 2),
            block_size=kv_cache.shape[1],
            tile_tokens=tile,
            tile_rank=_TILE_RANK,
            tile_nope=tile_nope,
            fp8=kv_cache.dtype == ROW_DTYPE,
        ),
        ROTATION=call.rotation,
        ARE_QUERY_TOKENS=call.are_query_tokens,
        num_warps=4,
        **early_launch(q.device),
    )
