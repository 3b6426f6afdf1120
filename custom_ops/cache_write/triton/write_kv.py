"""write_kv: one program stores one token's keys and values, all heads at once."""

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


@triton.jit
def write_heads(
    source,
    pool,
    token,
    slot,
    head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store the keys, or the values, of one token: ``head [HEADS_PAD, 1]`` of it."""
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < NUM_HEADS) & (d < DIM)
    # [HEADS_PAD, DIM_PAD]
    x = tl.load(source.ptr + token * source.token + head * source.head + d, mask=mask, other=0.0)
    if LIMIT > 0:
        x = x.to(tl.float32)
        if pool.scale is not None:
            x = x / tl.load(pool.scale + head * pool.scale_head, mask=head < NUM_HEADS, other=1.0)
        x = to_fp8(x, LIMIT, pool.ptr.dtype.element_ty)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = pool.ptr + block * pool.block + offset * pool.slot + head * pool.head + d
    tl.store(target, x.to(pool.ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    k,
    v,
    k_pool,
    v_pool,
    slot_ptr,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    ARE_QUERY_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``k``, ``v``: `Tokens`; ``k_pool``, ``v_pool``: `Pool`. Grid: (num_tokens,). LIMIT: as `fp8_limit`
    gives it."""
    begin_write(ARE_QUERY_TOKENS, PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = load_early(slot_ptr + token)
    wait_for_tokens(ARE_QUERY_TOKENS, PDL)
    if slot >= 0:
        # int64: a head's stride may be that of a whole sequence
        head = tl.arange(0, HEADS_PAD)[:, None].to(tl.int64)
        write_heads(k, k_pool, token, slot, head, NUM_HEADS, DIM, DIM_PAD, BLOCK_SIZE, LIMIT)
        write_heads(v, v_pool, token, slot, head, NUM_HEADS, DIM_V, DIM_V_PAD, BLOCK_SIZE, LIMIT)
    end_write(ARE_QUERY_TOKENS, PDL)


def write_kv(call: WriteCall) -> None:
    """Launch `write_kv_kernel`; arguments as in ``custom_ops/cache_write/schema.py``."""
    k, v, k_cache, v_cache, slot_mapping, scales, are_query_tokens = call
    require_launchable(k)
    check_write_kv(call)
    require_fp8(k_cache)
    if not k.shape[0]:
        return
    num_heads, dim, dim_v = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    launch_kernel(
        write_kv_kernel,
        (k.shape[0],),
        Tokens.of(k),
        Tokens.of(v),
        Pool.of(k_cache, scales.k_scale),
        Pool.of(v_cache, scales.v_scale),
        slot_mapping.contiguous(),
        NUM_HEADS=num_heads,
        HEADS_PAD=next_power_of_2(num_heads),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        DIM_V=dim_v,
        DIM_V_PAD=next_power_of_2(dim_v),
        BLOCK_SIZE=k_cache.shape[1],
        LIMIT=fp8_limit(k_cache),
        ARE_QUERY_TOKENS=are_query_tokens,
        num_warps=4,
        **early_launch(k.device),
    )
