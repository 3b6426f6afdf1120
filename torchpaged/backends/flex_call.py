"""FlexAttention over a paged pool, one call: what backend ``flex`` (flex.py) launches.

Queries are cut into tiles of one request each (query_tiles.py), the batch of the higher-order op. Keys and
values are the pool itself, not gathered: the block mask lists the blocks of each tile's request that the tile
can see. Mask and lists are made on the device in each call, in shapes that follow from the batch's shapes:
there is nothing to plan, and one graph serves all lengths.

The op is compiled once per kind and shape of call; in eager calls tokens and requests are padded to powers of
two, so that there are few. Layers with the same functions share what was compiled.

Where a spec asks for batch invariance, tiles are of one size and run in the kernel that goes through a
request's blocks one after the other: who else is in the batch changes neither.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.library_op import Held
from torchpaged.backends.query_tiles import QueryTiles, query_tiles, visible_blocks
from torchpaged.backends.spec import MaskMod, ScoreMod
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.mask import Mask
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError

#: Of a tile, with the query heads of one kv head, in FlexAttention's decode kernel: more spill registers.
_MOST_ROWS = 64
_WIDE = 64  # rows of a tile of the kernel for prompts


class Shape(NamedTuple):
    """All that a compiled call is specialised on, besides what dynamo guards by itself."""

    compiler: str
    device: torch.device
    dtype: torch.dtype
    tile_q: int
    sizes: tuple[int, ...]
    block_size: int
    mask: Mask
    scale: float
    soft_cap: float
    alibi: bool
    sinks: bool
    lse: bool


class _Inputs(NamedTuple):
    """The tensors of a compiled call: the op's, padded, and the block mask's."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tiles: QueryTiles
    lens: Tensor
    num_listed: Tensor
    listed: Tensor
    logical: Tensor
    slopes: Tensor | None
    sinks: Tensor | None


Compiled = Callable[[_Inputs], tuple[Tensor, Tensor | None]]


@dataclass(eq=False)
class Mods:
    """What a layer asks for beyond the op's arguments, and the calls that were compiled with it."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    batch_invariant: bool = False
    compiled: dict[Shape, Compiled] = field(default_factory=dict)


PLAIN = Mods()
MODS: Held[Mods] = Held("session of a backend with mods")
#: One per functions and kind, for as long as a session holds it. The functions live as long as it does, so
#: that no other has their id.
_SHARED: weakref.WeakValueDictionary[tuple[int, int, bool], Mods] = weakref.WeakValueDictionary()


def shared_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None, batch_invariant: bool) -> Mods:
    """The same `Mods` for the same functions."""
    key = (id(score_mod), id(mask_mod), batch_invariant)
    mods = _SHARED.get(key)
    if mods is None:
        mods = _SHARED[key] = Mods(score_mod, mask_mod, batch_invariant)
    return mods


# -------------------------------------------------------------------------------------------------- one call
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
    tile_q = _WIDE if own.batch_invariant else _tile_q(call.max_query_len, call.group)
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
            raise RuntimeError(
                "flex: this shape has not been compiled, and can't be while a graph is captured; "
                "run the step once before"
            )
        compiled = own.compiled[shape] = _compile(shape, own)
    lists = count.int()[:, None, None], listed[:, None, None], logical
    y, total = compiled(_Inputs(q, k_cache, v_cache, tiles, lens, *lists, call.alibi_slopes, call.sinks))
    out.copy_(y[:num_tokens])
    if lse is not None and total is not None:
        lse.copy_(total[:num_tokens])


def _tile_q(max_query_len: int, group: int) -> int:
    """Rows of a tile: all queries of a request in FlexAttention's decode kernel, or 64 in the other one."""
    rows = _power_of_two(max_query_len)
    return rows if rows == 1 or rows * group <= _MOST_ROWS else _WIDE


def _kernel_options(shape: Shape) -> Any:
    """Tiles of its GPU kernels: none wider than a block, and its decode kernel for groups of powers of two
    alone."""
    if shape.device.type != "cuda":
        return None
    group, wide = shape.sizes[2] // shape.sizes[6], max(shape.sizes[3], shape.sizes[-1]) > 256
    options: dict[str, Any] = {"BLOCK_N": 16 if wide else min(shape.block_size, 64)}
    if wide:  # few rows fill an SM's registers and shared memory
        options |= {"num_warps": 8, "num_stages": 1}
    if shape.tile_q == _WIDE or group & (group - 1):
        rows = min(max(shape.tile_q, 16), 32 if wide else _WIDE)
        return {"num_warps": 4, "FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": rows} | options
    return options


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


# ------------------------------------------------------------------------------------------ what is compiled
def _compile(shape: Shape, mods: Mods) -> Compiled:
    """The call of this shape, which compiles when it first runs."""
    from torch.nn.attention import flex_attention as theirs

    options, on_cpu = _kernel_options(shape), shape.device.type == "cpu"

    def call(given: _Inputs) -> tuple[Tensor, Tensor | None]:
        tiles = _flex(theirs, options, shape, mods, given)
        return tiles if on_cpu else _packed(shape, given, *tiles)

    # dynamo counts compilations per code object, and gives up at a few: each shape has one of its own
    own = types.FunctionType(
        call.__code__.replace(), call.__globals__, "flex_call", call.__defaults__, call.__closure__
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=shape.compiler)
    if not on_cpu:
        return compiled
    # Inductor's template for CPUs raises where something is fused behind it, as of one token's tile.
    return lambda given: _packed(shape, given, *compiled(given))


def _flex(
    theirs: Any, options: Any, shape: Shape, mods: Mods, given: _Inputs
) -> tuple[Tensor, Tensor | None]:
    """``[N, H, TILE_Q, head_dim_v]`` and, where it is needed, the log-sum-exp ``[N, H, TILE_Q]``; traced."""
    block_mask = theirs.BlockMask.from_kv_blocks(
        given.num_listed,
        given.listed,
        BLOCK_SIZE=(128, shape.block_size),  # its tiles must divide 128, queries may be fewer
        mask_mod=_mask_mod(shape, mods, given),
        seq_lengths=(shape.tile_q, shape.sizes[4] * shape.block_size),
        compute_q_blocks=False,
    )
    keys, values = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (given.k_cache, given.v_cache))
    y, aux = theirs.flex_attention(
        given.q[given.tiles.token].transpose(1, 2),
        keys,
        values,
        _score_mod(shape, mods, given),
        block_mask,
        shape.scale,
        enable_gqa=given.q.shape[1] != given.k_cache.shape[2],
        kernel_options=options,
        return_aux=theirs.AuxRequest(lse=shape.lse or shape.sinks),
    )
    return y, aux.lse


def _packed(shape: Shape, given: _Inputs, y: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of the tiles in the order of the tokens: ``[T, H, head_dim_v]`` and ``[T, H]``."""
    row, is_query = given.tiles.row_of_token, given.tiles.is_query
    y = y.transpose(1, 2).flatten(0, 1)[row]
    if lse is None:
        return torch.where(is_query[:, None, None], y, 0.0), None
    total = lse.transpose(1, 2).flatten(0, 1)[row]
    nothing = ~is_query[:, None] | (total == float("-inf"))
    if given.sinks is not None:
        with_sink = torch.logaddexp(total, given.sinks.float())
        y = (y * torch.exp(total - with_sink)[..., None]).to(y.dtype)
        total = with_sink
    return torch.where(nothing[..., None], 0.0, y), torch.where(nothing, float("-inf"), total)


def _mask_mod(shape: Shape, mods: Mods, given: _Inputs) -> Callable[..., Tensor]:
    """Of tiles, their rows and the pool's slots: as FlexAttention asks."""
    block_size, tiles = shape.block_size, given.tiles

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        query, owner = tiles.position[b, row], tiles.request[b]
        block = given.logical[owner, slot // block_size]
        key = block * block_size + slot % block_size
        seen = (block >= 0) & (query >= 0) & (key < given.lens[owner]) & shape.mask.sees(query, key, h)
        return seen if mods.mask_mod is None else seen & mods.mask_mod(owner, h, query, key)

    return mask_mod


def _score_mod(shape: Shape, mods: Mods, given: _Inputs) -> Callable[..., Tensor] | None:
    """Likewise; None where scores stay as they are."""
    block_size, tiles, cap, slopes = shape.block_size, given.tiles, shape.soft_cap, given.slopes

    def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is None and mods.score_mod is None:
            return score
        query, owner = tiles.position[b, row], tiles.request[b]
        key = given.logical[owner, slot // block_size] * block_size + slot % block_size
        if slopes is not None:
            score = score + slopes[h] * (key - query)
        return score if mods.score_mod is None else mods.score_mod(score, owner, h, query, key)

    return score_mod if cap or slopes is not None or mods.score_mod is not None else None
