"""mla_attention: lays tiles and parts out by shapes, and launches. Records of arguments: as those of
``attention/triton/paged_attention.py``."""

from typing import Any, NamedTuple, Self

import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import check_mla_attention
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE
from torchpaged.custom_ops.mla.triton import config
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.kernel_store import Launch
from torchpaged.custom_ops.triton.records import Batch, Results
from torchpaged.custom_ops.triton.stored_kernel import KernelRef

_ATTEND = KernelRef(
    "mla.triton.attend",
    "mla_kernel",
    unspecialised=("num_reqs", "num_tokens", "num_tiles", "tiles_per_req", "num_parts", "table_row"),
)
_SELECTED = KernelRef(
    "mla.triton.attend_selected",
    "selected_kernel",
    unspecialised=("num_reqs", "num_parts", "table_row", "top_k", "indices_row"),
)
_MERGE = KernelRef("mla.triton.merge", "merge_kernel", unspecialised=("num_reqs", "num_parts"))


class Latents(NamedTuple):
    """Pointers to queries and to the pool, their strides, and the scale of the scores."""

    q: Any
    kv: Any
    scale: Any
    q_token: Any
    q_head: Any
    kv_block: Any
    kv_slot: Any


class Parts(NamedTuple):
    """Pointers to the parts of rows: sums of values, and maxima with totals."""

    acc: Any
    state: Any

    @classmethod
    def of(cls, call: LatentCall, num_parts: int) -> Self:
        """Scratch memory for so many parts of each row; none for one."""
        scratch = call.q.shape[0] * call.q.shape[1] * num_parts if num_parts > 1 else 0
        return cls(
            acc=torch.empty(scratch * call.rank, dtype=torch.float32, device=call.q.device),
            state=torch.empty(scratch * 2, dtype=torch.float32, device=call.q.device),
        )


class Sizes(NamedTuple):
    """What `mla_kernel` is compiled for.

    Attributes:
        rank_pad, rope_pad: columns of a tile of latents and of one of rotated keys.
        fp8: rows of the pool are those of ``mla/fp8_rows.py``.
        pinned: what they are converted to, 16 bits, goes through shared memory, by an instruction in PTX.
        split: contexts are cut into parts.
        tile_m, tile_kv: rows and keys of a tile; ``tile_heads``: heads of its rows.
    """

    num_heads: int
    rank: int
    rank_pad: int
    rope: int
    rope_pad: int
    block_size: int
    fp8: bool
    pinned: bool
    causal: bool
    split: bool
    tile_m: int
    tile_heads: int
    tile_kv: int


class AttendArguments(NamedTuple):
    """Of `mla_kernel`; ``num_tiles``: of query tokens, ``tiles_per_req`` or 0 as in `request_of`."""

    num_reqs: int
    num_tokens: int
    num_tiles: int
    tiles_per_req: int
    num_parts: int
    table_row: int
    batch: Batch
    inputs: Latents
    results: Results
    parts: Parts


class SelectedArguments(NamedTuple):
    """Of `selected_kernel`."""

    num_reqs: int
    num_parts: int
    table_row: int
    top_k: int
    indices_row: int
    batch: Batch
    inputs: Latents
    indices_ptr: Any
    results: Results
    parts: Parts


class MergeArguments(NamedTuple):
    """Of `merge_kernel`."""

    num_reqs: int
    num_parts: int
    starts_ptr: Any
    results: Results
    parts: Parts

    def launch(self, sizes: Sizes) -> None:
        """Put the parts together, if there are several."""
        if self.num_parts == 1:
            return
        constants = {"NUM_HEADS": sizes.num_heads, "RANK": sizes.rank, "RANK_PAD": sizes.rank_pad}
        options = {**constants, "MAX_PARTS": config.MAX_PARTS, "num_warps": 4}
        Launch(_MERGE, (self.results.out.shape[0] * sizes.num_heads,), self, options)()


def mla_attention(call: LatentCall) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``. Every choice here depends on shapes, never on
    lengths.

    Raises:
        ArgumentError: also for latents over 512 columns and rotated keys over 128.
    """
    launching.require_launchable(call.q)
    check_mla_attention(call)
    launching.require_fp8(call.kv_cache)
    launching.require_fp8(call.out, "output")
    q, rank = call.q, call.rank
    rope, num_reqs = q.shape[2] - rank, call.block_table.shape[0]
    if q.dtype == torch.float64 or rank > config.MAX_RANK or rope > config.MAX_ROPE:
        raise ArgumentError(
            "kv_cache",
            f"at most {config.MAX_RANK} + {config.MAX_ROPE} columns of 16 or 32 bits for the triton backend",
            f"{rank} + {rope} of {q.dtype}",
            "use the reference backend",
        )
    if not num_reqs:
        call.as_attention().empty()
    elif not q.shape[0]:
        return
    elif call.indices is None:
        _launch(call, rank, rope, num_reqs)
    else:
        _launch_selected(call, call.indices, rank, rope, num_reqs)


def _launch(call: LatentCall, rank: int, rope: int, num_reqs: int) -> None:
    q, device, block_size = call.q, call.q.device, call.kv_cache.shape[1]
    num_tokens, num_heads, _ = q.shape
    heads = launching.next_power_of_2(num_heads)
    rows = heads * launching.next_power_of_2(min(call.max_query_len, num_tokens))
    rank_pad, rope_pad = (max(16, launching.next_power_of_2(size)) for size in (rank, rope))
    fp8 = call.kv_cache.dtype == ROW_DTYPE
    chosen = config.tiles(rank_pad + rope_pad, rows, q.element_size(), launching.is_hopper(device), fp8)
    tile_heads = min(chosen.rows, heads)
    tokens, head_tiles = chosen.rows // tile_heads, -(-num_heads // tile_heads)
    per_req = -(-call.max_query_len // tokens)
    num_tiles = num_tokens // tokens + num_reqs
    if num_reqs * per_req <= num_tiles:
        num_tiles = num_reqs * per_req
    else:
        per_req = 0
    programs, capacity = num_tiles * head_tiles, call.block_table.shape[1] * block_size
    num_parts = config.num_parts(programs, capacity, device, chosen)
    parts = Parts.of(call, num_parts)
    results = Results.of(call)
    arguments = AttendArguments(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_tiles=num_tiles,
        tiles_per_req=per_req,
        num_parts=num_parts,
        table_row=call.block_table.stride(0),
        batch=Batch(*call[2:5]),
        inputs=Latents(q, call.kv_cache, call.scale, *q.stride()[:2], *call.kv_cache.stride()[:2]),
        results=results,
        parts=parts,
    )
    widths = {"rank": rank, "rank_pad": rank_pad, "rope": rope, "rope_pad": rope_pad}
    sizes = _sizes(call, chosen, num_parts, tile_heads, **widths)
    options = {"SIZES": sizes, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    Launch(_ATTEND, (programs * num_parts,), arguments, options)()
    MergeArguments(num_reqs, num_parts, call.query_start_loc, results, parts).launch(sizes)


def _sizes(call: LatentCall, chosen: config.Tiles, num_parts: int, tile_heads: int, **widths: int) -> Sizes:
    fp8 = call.kv_cache.dtype == ROW_DTYPE
    return Sizes(
        num_heads=call.q.shape[1],
        block_size=call.kv_cache.shape[1],
        fp8=fp8,
        pinned=fp8 and call.q.element_size() == 2 and _takes_ptx(),
        causal=call.causal,
        split=num_parts > 1,
        tile_m=chosen.rows,
        tile_heads=tile_heads,
        tile_kv=chosen.keys,
        **widths,
    )


def _launch_selected(call: LatentCall, indices: torch.Tensor, rank: int, rope: int, num_reqs: int) -> None:
    q, device = call.q, call.q.device
    num_tokens, num_heads, _ = q.shape
    rank_pad, rope_pad = (max(16, launching.next_power_of_2(size)) for size in (rank, rope))
    rows = launching.next_power_of_2(num_heads)
    fp8 = call.kv_cache.dtype == ROW_DTYPE
    chosen = config.tiles(rank_pad + rope_pad, rows, q.element_size(), launching.is_hopper(device), fp8)
    programs = num_tokens * -(-num_heads // chosen.rows)
    num_parts = config.num_parts(programs, indices.shape[1], device, chosen)
    parts, results = Parts.of(call, num_parts), Results.of(call)
    arguments = SelectedArguments(
        num_reqs=num_reqs,
        num_parts=num_parts,
        table_row=call.block_table.stride(0),
        top_k=indices.shape[1],
        indices_row=indices.stride(0),
        batch=Batch(*call[2:5]),
        inputs=Latents(q, call.kv_cache, call.scale, *q.stride()[:2], *call.kv_cache.stride()[:2]),
        indices_ptr=indices,
        results=results,
        parts=parts,
    )
    widths = {"rank": rank, "rank_pad": rank_pad, "rope": rope, "rope_pad": rope_pad}
    sizes = _sizes(call, chosen, num_parts, chosen.rows, **widths)
    options = {"SIZES": sizes, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    Launch(_SELECTED, (programs * num_parts,), arguments, options)()
    MergeArguments(num_reqs, num_parts, call.query_start_loc, results, parts).launch(sizes)


def _takes_ptx() -> bool:
    return torch.version.hip is None
