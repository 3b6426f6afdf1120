"""What backend ``flex`` compiles: FlexAttention with the masks and scores of one kind and shape of call. Who
calls it: flex_call.py. Layers with the same functions share what was compiled.
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
from torchpaged.backends.query_tiles import QueryTiles
from torchpaged.backends.spec import MaskMod, ScoreMod
from torchpaged.custom_ops.attention.mask import Mask

WIDE = 64  # rows of a tile of the kernel for prompts


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


class Inputs(NamedTuple):
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


Compiled = Callable[[Inputs], tuple[Tensor, Tensor | None]]


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


def kernel_options(shape: Shape) -> Any:
    """Tiles of its GPU kernels: none wider than a block, and its decode kernel for groups of powers of two
    alone."""
    if shape.device.type != "cuda":
        return None
    group, wide = shape.sizes[2] // shape.sizes[6], max(shape.sizes[3], shape.sizes[-1]) > 256
    options: dict[str, Any] = {"BLOCK_N": 16 if wide else min(shape.block_size, 64)}
    if wide:  # few rows fill an SM's registers and shared memory
        options |= {"num_warps": 8, "num_stages": 1}
    if shape.tile_q == WIDE or group & (group - 1):
        rows = min(max(shape.tile_q, 16), 32 if wide else WIDE)
        return {"num_warps": 4, "FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": rows} | options
    return options


def compile_call(shape: Shape, mods: Mods) -> Compiled:
    """The call of this shape, which compiles when it first runs."""
    from torch.nn.attention import flex_attention as theirs

    options, on_cpu = kernel_options(shape), shape.device.type == "cpu"

    def call(given: Inputs) -> tuple[Tensor, Tensor | None]:
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


def _flex(theirs: Any, options: Any, shape: Shape, mods: Mods, given: Inputs) -> tuple[Tensor, Tensor | None]:
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


def _packed(shape: Shape, given: Inputs, y: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
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


def _mask_mod(shape: Shape, mods: Mods, given: Inputs) -> Callable[..., Tensor]:
    """Of tiles, their rows and the pool's slots: as FlexAttention asks."""
    block_size, tiles = shape.block_size, given.tiles

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        query, owner = tiles.position[b, row], tiles.request[b]
        block = given.logical[owner, slot // block_size]
        key = block * block_size + slot % block_size
        seen = (block >= 0) & (query >= 0) & (key < given.lens[owner]) & shape.mask.sees(query, key, h)
        return seen if mods.mask_mod is None else seen & mods.mask_mod(owner, h, query, key)

    return mask_mod


def _score_mod(shape: Shape, mods: Mods, given: Inputs) -> Callable[..., Tensor] | None:
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
