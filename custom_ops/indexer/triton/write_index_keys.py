"""write_index_keys: one program stores one key."""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.indexer.check import check_write_index_keys
from torchpaged.custom_ops.triton.cache_writes import to_fp8
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_launchable
from torchpaged.custom_ops.triton.records import KeyPool, Tokens


@triton.jit
def write_index_keys_kernel(
    keys, slots_ptr, pool, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    """``keys``: `Tokens`, ``pool``: `KeyPool`. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        d = tl.arange(0, WIDTH_PAD)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        key = tl.load(keys.ptr + token * keys.token + d, mask=d < WIDTH, other=0.0)
        at = pool.ptr + block * pool.block + offset * pool.slot + d
        if pool.scale is None:
            tl.store(at, key, mask=d < WIDTH)
        else:
            number = as_numbers(key).to(tl.float32)
            # a NaN stays one in its scale
            top = tl.reduce(tl.abs(number), 0, _larger)
            scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 448.0))
            rounded = to_fp8(tl.div_rn(number, scale), 448.0, pool.ptr.dtype.element_ty)
            tl.store(at, rounded, mask=d < WIDTH)
            tl.store(pool.scale + block * pool.scale_block + offset * pool.scale_slot, scale)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def write_index_keys(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None) -> None:
    """Launch; arguments as in ``custom_ops/indexer/schema.py``."""
    require_launchable(k)
    check_write_index_keys(k, k_cache, slot_mapping, k_scale)
    if not k.shape[0]:
        return
    launch_kernel(
        write_index_keys_kernel,
        (k.shape[0],),
        *(Tokens.of(k[:, None]), slot_mapping, KeyPool.of(k_cache, k_scale)),
        BLOCK_SIZE=k_cache.shape[1],
        WIDTH=k.shape[1],
        WIDTH_PAD=next_power_of_2(k.shape[1]),
        num_warps=1,
    )
