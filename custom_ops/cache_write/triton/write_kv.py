"""write_kv: one program stores one token's keys and values, all heads at once."""

from typing import NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.cache_write.call import WriteCall
from torchpaged.custom_ops.cache_write.check import check_write_kv
from torchpaged.custom_ops.triton.cache_writes import (
    begin_write,
    end_write,
    load_early,
    to_fp8,
    wait_for_tokens,
)
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import (
    early_launch,
    fp8_limit,
    next_power_of_2,
    require_fp8,
    require_launchable,
)
from torchpaged.custom_ops.triton.records import Pool, Tokens


class WriteSizes(NamedTuple):
    """What the kernel is compiled for; pads: powers of 2; ``limit``: as `fp8_limit` gives it."""

    heads: int
    heads_pad: int
    dim: int
    dim_pad: int
    dim_v: int
    dim_v_pad: int
    block_size: int
    limit: float


@triton.jit
def write_heads(
    source, pool, token, slot, head, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SIZES: tl.constexpr
):
    """Store the keys, or the values, of one token: ``head [HEADS_PAD, 1]`` of it."""
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < SIZES.heads) & (d < DIM)
    # [HEADS_PAD, DIM_PAD]
    x = tl.load(source.ptr + token * source.token + head * source.head + d, mask=mask, other=0.0)
    if SIZES.limit > 0:
        x = x.to(tl.float32)
        if pool.scale is not None:
            x = x / tl.load(pool.scale + head * pool.scale_head, mask=head < SIZES.heads, other=1.0)
        x = to_fp8(x, SIZES.limit, pool.ptr.dtype.element_ty)
    block, offset = slot // SIZES.block_size, slot % SIZES.block_size
    target = pool.ptr + block * pool.block + offset * pool.slot + head * pool.head + d
    tl.store(target, x.to(pool.ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    k, v, k_pool, v_pool, slot_ptr, SIZES: tl.constexpr, ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr
):
    """``k``, ``v``: `Tokens`; ``k_pool``, ``v_pool``: `Pool`. Grid: (num_tokens,)."""
    begin_write(ARE_QUERY_TOKENS, PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = load_early(slot_ptr + token)
    wait_for_tokens(ARE_QUERY_TOKENS, PDL)
    if slot >= 0:
        # int64: a head's stride may be that of a whole sequence
        head = tl.arange(0, SIZES.heads_pad)[:, None].to(tl.int64)
        write_heads(k, k_pool, token, slot, head, SIZES.dim, SIZES.dim_pad, SIZES)
        write_heads(v, v_pool, token, slot, head, SIZES.dim_v, SIZES.dim_v_pad, SIZES)
    end_write(ARE_QUERY_TOKENS, PDL)


def write_kv(call: WriteCall) -> None:
    """Launch `write_kv_kernel`; arguments as in ``custom_ops/cache_write/schema.py``."""
    k, v, k_cache, v_cache, slot_mapping, scales, are_query_tokens = call
    require_launchable(k)
    check_write_kv(call)
    require_fp8(k_cache)
    if not k.shape[0]:
        return
    sizes = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    padded = (n for size in sizes for n in (size, next_power_of_2(size)))
    launch_kernel(
        write_kv_kernel,
        (k.shape[0],),
        *(Tokens.of(k), Tokens.of(v)),
        *(Pool.of(k_cache, scales.k_scale), Pool.of(v_cache, scales.v_scale)),
        slot_mapping.contiguous(),
        SIZES=WriteSizes._make((*padded, k_cache.shape[1], fp8_limit(k_cache))),
        ARE_QUERY_TOKENS=are_query_tokens,
        num_warps=4,
        **early_launch(k.device),
    )
