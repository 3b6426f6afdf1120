"""The ``flex`` backend: torch's FlexAttention over the paged pool, with block masks made from the batch's own
metadata.

    torchpaged.select_backend(spec, "flex")                 # any head_dim; runs where it is named
    layer = PagedAttention(8, 64, score_mod=function)       # what no paged kernel takes: functions of yours
    mine = flex_backend("tanh_bias", score_mod=function)    # the same as a backend, with a name of its own

Queries are cut into tiles of one request each (query_tiles.py), the batch of the higher-order op. Keys and
values are the pool itself, not gathered: the block mask lists the blocks of each tile's request that the tile
can see. Mask and lists are made on the device in each call, in shapes that follow from the batch's shapes:
there is nothing to plan, and one graph serves all lengths.

The op is compiled once per kind and shape of call; in eager calls tokens and requests are padded to powers of
two, so that there are few. Layers with the same functions share what was compiled.

Where a spec asks for batch invariance, tiles are of one size and run in the kernel that goes through a
request's blocks one after the other: who else is in the batch changes neither.

TORCHPAGED_FLEX_COMPILER=eager runs the higher-order op unfused, over the whole
pool: for tests and for debugging a mod.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.library_op import Held, attention_op
from torchpaged.backends.query_tiles import Mask, query_tiles, visible_blocks
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport, MaskMod, ScoreMod, check_mods
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError

#: Of a tile, with the query heads of one kv head, in FlexAttention's decode kernel: more spill registers.
_MOST_ROWS = 64
_WIDE = 64  # rows of a tile of the kernel for prompts
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Shape(NamedTuple):
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


@dataclass(eq=False)
class Mods:
    """What a layer asks for beyond the op's arguments, and the calls that were compiled with it."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    batch_invariant: bool = False
    compiled: dict[_Shape, Callable[..., tuple[Tensor, Tensor | None]]] = field(default_factory=dict)


_PLAIN = Mods()
_MODS: Held[Mods] = Held("session of a backend with mods")
#: One per functions and kind, for as long as a session holds it. The functions live as long as it does, so
#: that no other has their id.
_SHARED: weakref.WeakValueDictionary[tuple[int, int, bool], Mods] = weakref.WeakValueDictionary()


def _shared(score_mod: ScoreMod | None, mask_mod: MaskMod | None, batch_invariant: bool) -> Mods:
    key = (id(score_mod), id(mask_mod), batch_invariant)
    mods = _SHARED.get(key)
    if mods is None:
        mods = _SHARED[key] = Mods(score_mod, mask_mod, batch_invariant)
    return mods


# -------------------------------------------------------------------------------------------------- one call
def _attend(call: AttentionCall, own: Mods = _PLAIN) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    _check_pools(k_cache, v_cache, block_table, seq_lens)
    num_tokens, num_reqs = q.shape[0], block_table.shape[0]
    mask = Mask(call.causal, call.window_left, call.window_right, call.chunk_size)
    compiler, group = variables.get("TORCHPAGED_FLEX_COMPILER"), q.shape[1] // k_cache.shape[2]
    tokens, reqs = _power_of_two(num_tokens), _power_of_two(num_reqs)
    q = _padded(q, tokens, 0)
    lens = _padded(seq_lens, reqs, 0)
    starts = torch.cat([query_start_loc, query_start_loc[-1:].expand(reqs - num_reqs)])
    tile_q = _WIDE if own.batch_invariant else _tile_q(call.max_query_len, group)
    tiles = query_tiles(lens, starts, tokens, tile_q)
    first, count = visible_blocks(tiles, mask, k_cache.shape[1])
    listed, logical = _lists(block_table, tiles.request, first, count, reqs, k_cache.shape[0], compiler)
    shape = _Shape(
        compiler,
        q.device,
        q.dtype,
        tile_q,
        (tokens, reqs, *q.shape[1:], *k_cache.shape, v_cache.shape[3]),
        k_cache.shape[1],
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
    result, result_lse = compiled(
        q,
        k_cache,
        v_cache,
        tiles.token,
        tiles.position,
        tiles.request,
        lens,
        tiles.row_of_token,
        tiles.is_query,
        count.int()[:, None, None],
        listed[:, None, None],
        logical,
        call.alibi_slopes,
        call.sinks,
    )
    out.copy_(result[:num_tokens])
    if lse is not None and result_lse is not None:
        lse.copy_(result_lse[:num_tokens])


def _attend_plain(call: AttentionCall, mods: Tensor | None) -> None:
    _attend(call, _PLAIN if mods is None else _MODS.of(mods))


def _attend_with_mods(call: AttentionCall, mods: Tensor | None) -> None:
    _attend(call, _MODS.of(mods))


def _tile_q(max_query_len: int, group: int) -> int:
    """Rows of a tile: all queries of a request in FlexAttention's decode kernel, or 64 in the other one."""
    rows = _power_of_two(max_query_len)
    return rows if rows == 1 or rows * group <= _MOST_ROWS else _WIDE


def _kernel_options(shape: _Shape) -> Any:
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
def _compile(shape: _Shape, mods: Mods) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The call of this shape, which compiles when it first runs."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    block_size, mask, cap = shape.block_size, shape.mask, shape.soft_cap
    num_slots, kernel_options = shape.sizes[4] * block_size, _kernel_options(shape)

    def call(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        token: Tensor,
        position: Tensor,
        request: Tensor,
        lens: Tensor,
        row_of_token: Tensor,
        is_query: Tensor,
        count: Tensor,
        listed: Tensor,
        logical: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        def mask_mod(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            query, owner = position[b, row], request[b]
            block = logical[owner, slot // block_size]
            key = block * block_size + slot % block_size
            seen = (block >= 0) & (query >= 0) & (key < lens[owner])
            if mask.causal:
                seen = seen & (key <= query)
            if mask.window_left >= 0:
                seen = seen & (key >= query - mask.window_left)
            if mask.window_right >= 0:
                seen = seen & (key <= query + mask.window_right)
            if mask.chunk_size:
                seen = seen & (key // mask.chunk_size == query // mask.chunk_size)
            if mods.mask_mod is not None:
                seen = seen & mods.mask_mod(owner, h, query, key)
            return seen

        def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            if cap:
                score = cap * torch.tanh(score / cap)
            if slopes is None and mods.score_mod is None:
                return score
            query, owner = position[b, row], request[b]
            key = logical[owner, slot // block_size] * block_size + slot % block_size
            if slopes is not None:
                score = score + slopes[h] * (key - query)
            return score if mods.score_mod is None else mods.score_mod(score, owner, h, query, key)

        changes_scores = bool(cap) or slopes is not None or mods.score_mod is not None
        block_mask = BlockMask.from_kv_blocks(
            count,
            listed,
            BLOCK_SIZE=(128, block_size),  # its tiles must divide 128, queries may be fewer
            mask_mod=mask_mod,
            seq_lengths=(shape.tile_q, num_slots),
            compute_q_blocks=False,
        )
        keys, values = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        y, aux = flex_attention(
            q[token].transpose(1, 2),
            keys,
            values,
            score_mod if changes_scores else None,
            block_mask,
            shape.scale,
            enable_gqa=q.shape[1] != k_cache.shape[2],
            kernel_options=kernel_options,
            return_aux=AuxRequest(lse=shape.lse or shape.sinks),
        )
        y = y.transpose(1, 2).flatten(0, 1)[row_of_token]  # [T, H, head_dim_v]
        if not (shape.lse or shape.sinks):
            return torch.where(is_query[:, None, None], y, 0.0), None
        lse: Any = aux.lse  # there, since it was asked for
        total = lse.transpose(1, 2).flatten(0, 1)[row_of_token]  # [T, H]
        nothing = ~is_query[:, None] | (total == float("-inf"))
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.float())
            y = (y * torch.exp(total - with_sink)[..., None]).to(y.dtype)
            total = with_sink
        return torch.where(nothing[..., None], 0.0, y), torch.where(nothing, float("-inf"), total)

    # dynamo counts compilations per code object, and gives up at a few: each shape has one of its own
    own = types.FunctionType(
        call.__code__.replace(), call.__globals__, "flex_call", call.__defaults__, call.__closure__
    )
    return torch.compile(own, fullgraph=True, dynamic=False, backend=shape.compiler)


# ----------------------------------------------------------------------------------------------- the backend
class FlexCapabilities(Capabilities):
    """What depends on more than one thing at once."""

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run; empty if it can."""
        reasons = super().reject(spec)
        if spec.kv_dtype not in (None, spec.dtype):
            reasons.append(
                f"kv dtype {spec.kv_dtype} is not the queries' {spec.dtype}, which FlexAttention asks for"
            )
        if (
            spec.device.type == "cuda"
            and spec.block_size is not None
            and (spec.block_size < 16 or spec.block_size & (spec.block_size - 1))
        ):
            reasons.append(
                f"block_size {spec.block_size} is not a power of two of at least 16, "
                "the least tile of its GPU kernels"
            )
        narrowest = min(spec.head_dim, spec.head_dim_v or spec.head_dim)
        if spec.device.type == "cuda" and narrowest < 16:
            reasons.append(f"head_dim {narrowest} is below 16, the least of its GPU kernels")
        if (
            spec.device.type == "cpu"
            and variables.get("TORCHPAGED_FLEX_COMPILER") == "inductor"
            and not spec.uses.isdisjoint({"lse", "sinks"})
        ):
            reasons.append("lse and sinks: torch's compiled FlexAttention returns no log-sum-exp on a CPU")
        if spec.device.type == "cpu" and spec.batch_invariant and self.batch_invariant:
            reasons.append("batch_invariant: torch's FlexAttention on a CPU reads keys in the pool's order")
        return reasons


CAPABILITIES = FlexCapabilities(
    device_types=("cuda", "cpu"),
    dtypes=_FLOATS,
    kv_dtypes=_FLOATS,
    graph_support=GraphSupport.ALWAYS,
    min_compute_capability=(7, 0),
    finite_pools=True,
    mods=True,
    batch_invariant=True,
)


def _unavailable() -> str | None:
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no flex_attention with AuxRequest; pip install 'torch>=2.11'"
    return None


class FlexSession(Session):
    """Gives the op what its other arguments don't tell: a layer's functions, and whether it is to be
    batch-invariant.

    Args:
        own: functions of the backend's, for all its layers; None: each layer's spec has its own, or none.
        arguments: as `Session` takes them.
    """

    def __init__(self, own: tuple[ScoreMod | None, MaskMod | None] | None, *arguments: Any) -> None:
        self._own = own
        self._mods: list[Mods] = []  # that the handles stand for
        super().__init__(*arguments)

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        score_mod, mask_mod = self._own or (spec.score_mod, spec.mask_mod)
        if score_mod is None and mask_mod is None and not spec.batch_invariant:
            return {}
        self._mods.append(_shared(score_mod, mask_mod, spec.batch_invariant))
        return {"mods": _MODS.add(self._mods[-1])}

    def close(self) -> None:
        """Forget the functions."""
        super().close()
        self._mods = []


BACKEND = Backend(
    name="flex",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_flex", _attend_plain, mods="Tensor?"),
    unavailable=_unavailable,
    session=partial(FlexSession, None),
)
#: Of backends with mods: without their session's handle it refuses, where the plain one has nothing to add.
OPS_WITH_MODS = attention_op("torchpaged_flex_mods", _attend_with_mods, mods="Tensor?")


def flex_backend(
    name: str,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    graph_support: GraphSupport = GraphSupport.ALWAYS,
) -> Backend:
    """A backend whose attention is changed by functions of one's own, as torch's FlexAttention takes them.

    They hold for all layers of its sessions, whatever door they come through. A single layer's functions are
    arguments of `torchpaged.PagedAttention`.

    The functions get and give tensors without dimensions, and are traced once: what they read may change in
    place between calls. They come after scale, soft cap and ALiBi, and hide keys besides what causality,
    window, chunks and lengths hide. Positions are those of the sequence, not of the packed batch or the pool.

    Args:
        name: of the backend, for `torchpaged.register_backend` and messages.
        score_mod: ``(score, request, head, query_position, key_position) -> score``.
        mask_mod: ``(request, head, query_position, key_position) -> bool``.
        graph_support: what the functions allow; less than ALWAYS if they look at anything that a replay would
            not see change.

    Returns:
        A `Backend`: open a session of it, or register it. It always needs its session's workspace, which
        modules, caches and runners pass by themselves.

    Raises:
        ArgumentError: neither function was given, or one that can't be called.
    """
    check_mods(score_mod, mask_mod)
    if score_mod is None and mask_mod is None:
        raise ArgumentError(
            "score_mod, mask_mod",
            "at least one function",
            "none",
            "without them, backend 'flex' does the same",
        )
    return Backend(
        name=name,
        capabilities=replace(CAPABILITIES, graph_support=graph_support, mods=False),
        ops=OPS_WITH_MODS,
        unavailable=_unavailable,
        session=partial(FlexSession, (score_mod, mask_mod)),
    )
