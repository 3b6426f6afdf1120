"""FlexAttention over a paged pool, one call: what backend ``flex`` (flex.py) launches.

Queries are cut into tiles of one request each (query_tiles.py), the batch of the higher-order op. Keys and
values are the pool itself, not gathered: the block mask lists the blocks of each tile's request that the tile
can see. Mask and lists are made on the device in each call, in shapes that follow from the batch's shapes:
there is nothing to plan, and one graph serves all lengths.

What runs is compiled per shape (flex_compiled.py); in eager calls tokens and requests are padded to powers of
two, so that there are few.

Where a spec asks for batch invariance, tiles are of one size and run in the kernel that goes through a
request's blocks one after the other: other requests of the batch change neither.
"""

import torch
from torch import Tensor

from torchpaged.backends.flex_compiled import PLAIN, WIDE, Inputs, Mods, Shape, compile_call
from torchpaged.backends.query_tiles import query_tiles, visible_blocks
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError, CaptureError

#: Of a tile, with the query heads of one kv head, in FlexAttention's decode kernel: more spill registers.
_MOST_ROWS = 64


def attend(call: AttentionCall, own: Mods = PLAIN) -> None:
    """The kernel of the op."""
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    _check_pools(k_cache, v_cache, block_table, seq_lens)
    num_tokens, num_reqs, block_size = q.shape[0], call.num_reqs, k_cache.shape[1]
    mask, compiler = call.mask, variables.get("TORCHPAGED_FLEX_COMPILER")
    tokens, reqs = _power_of_two(num_tokens), _power_of_two(num_reqs)
    q = _padded(q, tokens, 0)
    lens = _padded(seq_lens, reqs, 0)
    starts = torch.cat([query_start_loc, query_start_loc[-1:].expand(reqs - num_reqs)])
    tile_q = WIDE if own.batch_invariant else _tile_q(call.max_query_len, call.group)
    tiles = query_tiles(lens, starts, tokens, tile_q)
    first, count = visible_blocks(tiles, mask, block_size)
    listed, logical = _lists(block_table, tiles.request, first, count, reqs, k_cache.shape[0], compiler)
    shape = Shape(
        compiler,
        q.device,
        q.dtype,
        tile_q,
        (tokens, reqs, *q.shape[1:], *k_cache.shape, v_cache.shape[3]),
        block_size,
        mask,
        call.scale,
        call.logits_soft_cap,
        call.alibi_slopes is not None,
        call.sinks is not None,
        lse is not None,
    )
    compiled = own.compiled.get(shape)
    if compiled is None:
        if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "flex: this shape has not been compiled, and can't be while a graph is captured; "
                "run the step once before"
            )
        compiled = own.compiled[shape] = compile_call(shape, own)
    lists = count.int()[:, None, None], listed[:, None, None], logical
    y, total = compiled(Inputs(q, k_cache, v_cache, tiles, lens, *lists, call.alibi_slopes, call.sinks))
    out.copy_(y[:num_tokens])
    if lse is not None and total is not None:
        lse.copy_(total[:num_tokens])


def _tile_q(max_query_len: int, group: int) -> int:
    """Rows of a tile: all queries of a request in FlexAttention's decode kernel, or 64 in the other one."""
    rows = _power_of_two(max_query_len)
    return rows if rows == 1 or rows * group <= _MOST_ROWS else WIDE


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _padded(tensor: Tensor, size: int, value: int) -> Tensor:
    missing = size - tensor.shape[0]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def _lists(
    block_table: Tensor,
    request: Tensor,
    first: Tensor,
    count: Tensor,
    num_reqs: int,
    num_blocks: int,
    compiler: str,
) -> tuple[Tensor, Tensor]:
    """The block mask's numbers, as FlexAttention indexes them: by blocks of the pool.

    Returns:
        ``[N, num_blocks]`` int32, the blocks that each tile sees; and ``[num_reqs, num_blocks]`` int32, where
        in its request's sequence each block of the pool lies, -1 for others. A fused kernel asks for those
        that are listed alone, so that the rest stays as it was found.
    """
    device, width = block_table.device, min(block_table.shape[1], num_blocks)
    fused = compiler == "inductor" and device.type == "cuda"
    column = torch.arange(width, device=device)
    at = (first[:, None] + column).clamp_max(block_table.shape[1] - 1)
    is_listed = column < count[:, None]
    # [N, width]; num_blocks: of no request
    block = torch.where(is_listed, block_table[request[:, None], at], num_blocks).long()
    listed = torch.empty(len(request), num_blocks, dtype=torch.int32, device=device)
    if not fused:
        listed.zero_()
    listed[:, :width] = torch.where(is_listed, block, 0)
    size = num_reqs * (num_blocks + 1)
    flat = (
        torch.empty(size, dtype=torch.int32, device=device)
        if fused
        else torch.full((size,), -1, dtype=torch.int32, device=device)
    )
    flat[(request[:, None] * (num_blocks + 1) + block).flatten()] = at.int().flatten()
    return listed, flat.view(num_reqs, num_blocks + 1)[:, :num_blocks]


def _check_pools(k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """The pools lie as FlexAttention reads them uncopied. Where values are checked at all, a request's blocks
    hold finite numbers, also behind its last token."""
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        if pool.shape[0] > 1 and pool.stride(0) != pool.shape[1] * pool.stride(1):
            raise ArgumentError(
                name,
                "the tokens of all blocks at one stride, so that the pool is one row of slots",
                f"strides {pool.stride()}",
                "allocate [num_blocks, block_size, num_kv_heads, width] in this order",
            )
    if not reads_values(k_cache.device):
        return
    block_size = k_cache.shape[1]
    used = torch.arange(block_table.shape[1], device=block_table.device) * block_size < seq_lens[:, None]
    blocks = block_table[used].long()
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not bool(pool[blocks].isfinite().all()):
            raise ArgumentError(
                name,
                "finite numbers in every slot of the requests' blocks, written or not",
                "NaN or infinity",
                "FlexAttention multiplies hidden values by 0: allocate pools with torch.zeros",
            )
