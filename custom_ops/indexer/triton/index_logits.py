"""index_logits: one program scores a tile of positions for one query token.

The heads of a token are the rows of a product with the tile's keys; what comes out is clipped, weighted and
summed over them. A program whose tile the token does not see writes -inf and reads no key.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.check import check_index_logits
from torchpaged.custom_ops.triton.find_row import find_row
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_launchable
from torchpaged.custom_ops.triton.records import Batch, KeyPool, Tokens

#: The largest number of heads and the widest key: their products fill the registers.
MAX_HEADS, MAX_WIDTH = 128, 256


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "table_row", "num_columns"])
def index_logits_kernel(
    num_reqs,
    num_tokens,
    table_row,
    num_columns,
    q,
    weights,
    pool,
    batch,
    logits,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """``q``, ``weights``, ``logits``: `Tokens`, ``pool``: `KeyPool`. Grid: (num_tokens x tiles of
    positions,), tokens of one tile side by side, since those of a request share its keys."""
    token, tile = tl.program_id(0) % num_tokens, tl.program_id(0) // num_tokens
    request = find_row(token, batch.starts, num_reqs)
    seq_len = tl.load(batch.seq_lens + request)
    position = seq_len - tl.load(batch.starts + request + 1) + token
    end = tl.minimum(seq_len, position + 1) if CAUSAL else seq_len
    end = tl.where((position >= 0) & (token < tl.load(batch.starts + num_reqs)), end, 0)
    n = tile * TILE + tl.arange(0, TILE)
    sees = n < end
    result = tl.full([TILE], float("-inf"), tl.float32)
    token = token.to(tl.int64)
    if tile * TILE < end:
        h, d = tl.arange(0, HEADS_PAD), tl.arange(0, WIDTH_PAD)
        rows = q.ptr + token * q.token + h[:, None].to(tl.int64) * q.head + d[None, :]
        queries = tl.load(rows, mask=(h < NUM_HEADS)[:, None] & (d < WIDTH)[None, :], other=0.0)
        factors = tl.load(weights.ptr + token * weights.token + h, mask=h < NUM_HEADS, other=0.0)
        block = tl.load(batch.table + request.to(tl.int64) * table_row + n // BLOCK_SIZE, mask=sees, other=0)
        block, slot = block.to(tl.int64), tl.where(sees, n % BLOCK_SIZE, 0)
        at = pool.ptr + block * pool.block + slot * pool.slot
        keys = tl.load(at[None, :] + d[:, None], mask=sees[None, :] & (d < WIDTH)[:, None], other=0.0)
        keys = as_numbers(keys.to(queries.dtype))
        s = tl.dot(as_numbers(queries), keys, input_precision="ieee")  # [heads, positions]
        s = tl.where(s < 0, 0.0, s) * factors[:, None]  # NaN stays
        summed = tl.sum(tl.where((h < NUM_HEADS)[:, None], s, 0.0), 0)
        if pool.scale is not None:
            scales = pool.scale + block * pool.scale_block + slot * pool.scale_slot
            summed *= tl.load(scales, mask=sees, other=1.0)
        result = tl.where(sees, summed, result)
    tl.store(logits.ptr + token * logits.token + n, result, mask=n < num_columns)


def index_logits(call: IndexCall) -> None:
    """Launch; arguments as in ``custom_ops/indexer/schema.py``.

    Raises:
        ArgumentError: also for more than 128 heads, keys of more than 256 numbers, and float64.
    """
    require_launchable(call.q)
    check_index_logits(call)
    q, k_cache, logits = call.q, call.k_cache, call.logits
    num_tokens, num_heads, width = q.shape
    if num_heads > MAX_HEADS or width > MAX_WIDTH or q.element_size() == 8:
        raise ArgumentError(
            "q",
            f"at most {MAX_HEADS} heads of {MAX_WIDTH} numbers of 16 or 32 bits for the triton backend",
            f"{num_heads} of {width}, {q.dtype}",
            "use the reference backend",
        )
    if not logits.numel():
        return
    if not call.block_table.shape[0]:
        logits.fill_(float("-inf"))
        return
    wide = width > 128 or q.element_size() == 4
    tile = 32 if wide else 128
    launch_kernel(
        index_logits_kernel,
        (num_tokens * triton.cdiv(logits.shape[1], tile),),
        *(call.block_table.shape[0], num_tokens, call.block_table.stride(0), logits.shape[1], Tokens.of(q)),
        *(Tokens.of(call.weights), KeyPool.of(k_cache, call.k_scale), Batch(*call[3:6]), Tokens.of(logits)),
        NUM_HEADS=num_heads,
        HEADS_PAD=max(16, next_power_of_2(num_heads)),
        WIDTH=width,
        WIDTH_PAD=max(16, next_power_of_2(width)),
        BLOCK_SIZE=k_cache.shape[1],
        CAUSAL=call.causal,
        TILE=tile,
        num_warps=4,
        num_stages=1,
    )
