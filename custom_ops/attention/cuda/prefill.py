"""Prefill attention of the ``cuda`` backend on Hopper: which calls ``prefill.cu`` takes, its constants,
tensor maps and launch.

What the copy engine knows of the caches is made once per pool (their addresses, shapes and strides) and kept:
pools do not move.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.cuda.prefill_constants import PREFILL
from torchpaged.custom_ops.attention.triton.config import bounded_masks
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.pools import FP8

PARAMS = struct.Struct("12Q5q2f15i4x3Q24x")  # struct Params of prefill_shapes.cuh behind its three maps
MAX_DIM = 256
#: Widths of keys and values that fp8 queries go with.
FP8_QUERY_WIDTHS = ((64, 64), (128, 128), (256, 256))
_SHARED_BYTES = 226 << 10
_MAX_COORDINATE = 2**31 - 1
_MOST_RAW_STAGES = 8
_WORTH_STEPS = 8  # WORTH of prefill_tiles.cuh
TURNS = 5  # of prefill_shares.cuh


class Suffixes(NamedTuple):
    """What a launch over shared prefixes is merged with: attention over the rest of each request, of the
    decode launch behind it, which leaves its output where the merged one goes.

    Attributes:
        order: ``[T]`` int64, the token rows in the order in which ``query_start_loc`` counts them.
        own_lse: ``[T, num_heads]`` float32, contiguous, of that launch.
        ctas: for the prefixes; the other multiprocessors are the decode launch's from the beginning.
        paired: whether two CTAs share the copies of keys and values, a tile each; then ``ctas`` is even.
    """

    order: Tensor
    own_lse: Tensor
    ctas: int
    paired: bool


#: Prepares a decode launch: what launches it, and numbers of its semaphore for each request.
Behind = Callable[[], tuple[Callable[[], None], int]]


@dataclass(frozen=True)
class PrefillShape:
    """How the prefill kernel is cut, from the widths of keys and values alone.

    Attributes:
        groups: math warpgroups of 64 packed query rows; 2, or 3 where a row's state is small.
        keys: of a step.
        k_stages, v_stages: steps of keys and of values that are on their way or in use.
        q_buffers: tiles of queries; 2 where there is room.
        raw_stages: steps of keys or of values of an fp8 cache that are on their way or being converted.
    """

    groups: int
    keys: int
    k_stages: int
    v_stages: int
    q_buffers: int
    raw_stages: int = 0

    @property
    def rows(self) -> int:
        """Packed query rows of a tile."""
        return self.groups * 64

    @property
    def threads(self) -> int:
        """Of a CTA; one warpgroup loads."""
        return (self.groups + 1) * 128


@functools.cache
def prefill_shape(dim: int, dim_v: int, wide: bool = True) -> PrefillShape:
    """The cut for keys of ``dim`` and values of ``dim_v`` columns; not ``wide``: two warpgroups at most."""
    groups = 3 if wide and max(dim, dim_v) <= 64 else 2
    keys = 128 if dim <= 192 and dim_v <= 128 else 64
    for q_buffers in (2, 1):
        left, k_stages, v_stages = _SHARED_BYTES - q_buffers * groups * 64 * dim * 2, 0, 0
        # in turns: keys are asked for first
        while left >= (need := keys * 2 * (dim if k_stages == v_stages else dim_v)):
            left -= need
            k_stages, v_stages = (
                (k_stages + 1, v_stages) if k_stages == v_stages else (k_stages, v_stages + 1)
            )
        if k_stages >= 3 and v_stages >= 2:
            break
    return PrefillShape(groups, keys, k_stages, v_stages, q_buffers)


@functools.cache
def prefill_shape_fp8(dim: int, dim_v: int) -> PrefillShape:
    """The same over an fp8 cache, whose numbers come as they are and are converted into the stages: two of
    each, and as many more that still come."""
    for keys in (128, 64) if dim <= 192 and dim_v <= 128 else (64,):
        left = _SHARED_BYTES - keys * 4 * (dim + dim_v)
        for q_buffers in (2, 1):
            raw = (left - q_buffers * 128 * dim * 2) // (keys * max(dim, dim_v))
            if raw >= 3 or (keys == 64 and q_buffers == 1):
                return PrefillShape(2, keys, 2, 2, q_buffers, min(raw, _MOST_RAW_STAGES))
    raise AssertionError("the last cut is taken")


@functools.cache
def prefill_shape_fp8_queries(dim: int, dim_v: int, wide: bool) -> PrefillShape:
    """The same with fp8 queries: keys are read as they come, values are turned on their way. ``raw_stages``
    are of values alone; ``wide``: steps of 192 keys where a head is 128 wide."""
    if wide and dim == dim_v == 128:
        return PrefillShape(2, 192, 3, 2, 2, 2)
    groups, keys = 2, 128 if max(dim, dim_v) <= 128 else 64
    left = _SHARED_BYTES - 2 * groups * 64 * dim
    stages = min(left // (keys * (dim + 2 * dim_v)), 4)
    return PrefillShape(groups, keys, stages, stages, 2, stages)


def refuse(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    dim_v: int,
    group: int,
    block_size: int,
    compute: tuple[int, int],
    *,
    scale: float = 1.0,
    sinks_dtype: torch.dtype | None = None,
    fp8_queries: bool = False,
) -> str | None:
    """Why the kernel can't take these numbers, or None. ``dtype``: of results, and of queries but for
    ``fp8_queries``; ``compute``: the device's compute capability."""
    if compute != (9, 0):
        return f"compute capability {compute[0]}.{compute[1]}: the kernel is written for 9.0"
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype not in (dtype, *FP8):
        return f"dtypes {dtype} and {kv_dtype}"
    if fp8_queries and kv_dtype != torch.float8_e4m3fn:
        return f"fp8 queries over a cache of {kv_dtype}: both are e4m3"
    if fp8_queries and (dim, dim_v) not in FP8_QUERY_WIDTHS:
        return f"fp8 queries of head_dim {dim}/{dim_v}"
    if (
        any(width % 32 or not 32 <= width <= MAX_DIM or (width % 64 and width > 96) for width in (dim, dim_v))
        or dim_v == 160
    ):
        return f"head_dim {dim}/{dim_v}"
    keys = shape_for(dim, dim_v, kv_dtype, block_size, plain=True, fp8_queries=fp8_queries).keys
    if block_size % 8 or keys % block_size:
        return f"block_size {block_size}: not a divisor of {keys} that is a multiple of 8"
    if not 1 <= group <= prefill_shape(dim, dim_v, wide=False).rows:
        return f"{group} query heads per kv head"
    if not scale > 0:
        return f"scale {scale}: a row's largest score is sought before it is scaled"
    if sinks_dtype not in (None, dtype):
        return f"sinks of {sinks_dtype} beside queries of {dtype}"
    return None


def refuse_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> str | None:
    """Why the kernel can't read or write tensors that lie like these, or None. Shapes, strides and
    addresses only."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        unaligned = any(stride * cache.element_size() % 16 for stride in cache.stride()[:3])
        if cache.data_ptr() % 16 or cache.stride(3) != 1 or unaligned:
            return (
                f"{name} with strides {tuple(cache.stride())}: slots that begin at multiples of 16 bytes "
                "are needed"
            )
        box = pool_box(tuple(cache.shape), cache.stride(), 1 if q.dtype in FP8 else 2)
        if box is None:
            return (
                f"{name} with strides {tuple(cache.stride())}: heads side by side, or one behind the other "
                "in a block, are needed"
            )
        if max(box.sizes) > _MAX_COORDINATE or cache.shape[0] * box.where[2] > _MAX_COORDINATE:
            return f"{name} with {cache.shape[0]} blocks"
    for name, rows in (("q", q), ("out", out)):
        unaligned = any(stride * rows.element_size() % 16 for stride in rows.stride()[:2])
        if rows.data_ptr() % 16 or unaligned or rows.stride(2) != 1:
            return (
                f"{name} with strides {tuple(rows.stride())}: heads that begin at multiples of 16 bytes "
                "are needed"
            )
    return None


def why_not(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *, scale: float, sinks: Tensor | None
) -> str | None:
    """Why the kernel can't take a call with these tensors, or None: `refuse` and `refuse_layout`. Shapes,
    dtypes, strides and addresses only."""
    block_size, num_kv_heads, dim = k_cache.shape[1:]
    return refuse(
        out.dtype,
        k_cache.dtype,
        dim,
        v_cache.shape[3],
        q.shape[1] // num_kv_heads,
        block_size,
        gpu.capability(q.device.index or 0),
        scale=scale,
        sinks_dtype=None if sinks is None else sinks.dtype,
        fp8_queries=q.dtype in FP8,
    ) or refuse_layout(q, k_cache, v_cache, out)


def is_slower(
    num_tokens: int,
    num_reqs: int,
    num_kv_heads: int,
    group: int,
    dim: int,
    dim_v: int,
    capacity: int,
    programs: int,
) -> str | None:
    """Why Triton's kernel is the faster one for these shapes, or None. ``capacity``: tokens that a row of the
    block table holds; ``programs``: CTAs."""
    shape = prefill_shape(dim, dim_v)
    tiles = most_tiles(num_tokens, num_reqs, shape.rows // group) * num_kv_heads
    if capacity <= shape.keys and tiles * 2 <= programs:
        return (
            f"at most {capacity} keys and {tiles} tiles: the kernel takes longer to begin and end than "
            "Triton's for all"
        )
    return None


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    semaphore: Tensor | None = None,
    short: int = 0,
    behind: Behind | None = None,
) -> None:
    """The op's call where `why_not` has nothing against it, on checked arguments as in
    ``custom_ops/attention/schema.py``; the rest as in `prefill`."""
    masks = bounded_masks(window_left, window_right, chunk_size, block_table.shape[1] * k_cache.shape[1])
    if semaphore is None or not semaphore.numel():  # of no requests: padding is served, too
        semaphore = torch.zeros(1, dtype=torch.int32, device=q.device)
    prefill(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        scale,
        causal,
        semaphore,
        window_left=masks[0],
        window_right=masks[1],
        chunk=masks[2],
        soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        short=short,
        behind=behind,
    )


def prefill_config(
    dtype: torch.dtype,
    dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    causal: bool,
    lse: bool,
    *,
    dim_v: int = 0,
    kv_dtype: torch.dtype | None = None,
    scales: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    chunk: int = 0,
    soft_cap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    tree: bool = False,
    clocks: bool = False,
    patience: int = 0,
    beside: bool = True,
    short: int = 0,
    split: bool = False,
    paired: bool = False,
    every_lane: bool = False,
    fp8_queries: bool = False,
    cascade: bool = False,
) -> Config:
    """The constants of ``prefill.cu``.

    ``dtype``: of results, and of queries but for ``fp8_queries``, with which these are e4m3 as the cache is;
    ``dim_v``: width of values, 0: as keys; ``kv_dtype``: of the cache, None: ``dtype``; ``scales``: of fp8
    keys and values; ``short``: requests of up to so many query tokens are left to a decode launch behind this
    one; ``split``: few tiles may be cut into parts, for `paged_prefill_merge` behind this one; ``paired``:
    clusters of two CTAs share the copies of keys and values (`may_pair`); ``clocks``: count cycles;
    ``patience``: tries after which a wait is given up, 0: never; ``beside``: hold a step's exponentials in
    front of the wait for its products (without it, where the compiler puts them: for measurements);
    ``every_lane``: all lanes of a warp arrive at barriers, where one does for its warp: so that racecheck,
    which follows each lane for itself, sees the order.
    """
    half, dim_v, kv_dtype = dtype == torch.float16, dim_v or dim, kv_dtype or dtype
    plain = window_left < 0 and not (chunk or soft_cap or alibi)
    shape = shape_for(dim, dim_v, kv_dtype, block_size, plain=plain, fp8_queries=fp8_queries)
    values = {
        "DIM": dim,
        "DIM_V": dim_v,
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HALF": half,
        "KV_BYTES": kv_dtype.itemsize,
        "E5M2": kv_dtype == torch.float8_e5m2,
        "SCALES": scales,
        "Q_FP8": fp8_queries,
        "GROUPS": shape.groups,
        "KEYS": shape.keys,
        "K_STAGES": shape.k_stages,
        "V_STAGES": shape.v_stages,
        "Q_BUFFERS": shape.q_buffers,
        "RAW_STAGES": shape.raw_stages,
        "CAUSAL": causal,
        "WINDOW_LEFT": window_left,
        "WINDOW_RIGHT": window_right,
        "CHUNK": chunk,
        "TREE": tree,
        "SOFT_CAP": soft_cap,
        "ALIBI": alibi,
        "SINKS": sinks,
        "LSE": lse,
        "CLOCKS": clocks,
        "PATIENCE": patience,
        "EVERY_LANE": every_lane,
        "BESIDE": beside,
        "SHORT": short,
        "SPLIT": split,
        "PAIRED": paired,
        "CASCADE": cascade,
    }
    return PREFILL.config(values, exact=True)


def shape_for(
    dim: int,
    dim_v: int,
    kv_dtype: torch.dtype,
    block_size: int,
    *,
    plain: bool,
    fp8_queries: bool = False,
) -> PrefillShape:
    """The cut of a specialisation; not ``plain``: with masks or scores that cost registers."""
    if fp8_queries:
        # blocks are whole in the steps of either cut, and at most one for each of 16 lanes
        return prefill_shape_fp8_queries(dim, dim_v, plain and block_size in (16, 32, 64))
    if kv_dtype in FP8:
        return prefill_shape_fp8(dim, dim_v)
    return prefill_shape(dim, dim_v, wide=plain)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a CTA: the stages, the tiles of queries and what waits to be converted."""
    stages = config["KEYS"] * (config["K_STAGES"] * config["DIM"] + config["V_STAGES"] * config["DIM_V"])
    widest = config["DIM_V"] if config["Q_FP8"] else max(config["DIM"], config["DIM_V"])
    raw = config["RAW_STAGES"] * config["KEYS"] * widest
    multiplied = stages + config["Q_BUFFERS"] * config["GROUPS"] * 64 * config["DIM"]
    return multiplied * (1 if config["Q_FP8"] else 2) + raw


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: bool,
    tickets: Tensor,
    *,
    window_left: int = -1,
    window_right: int = -1,
    chunk: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    clocks: Tensor | None = None,
    patience: int = 0,
    beside: bool = True,
    short: int = 0,
    behind: Behind | None = None,
    paired: bool = False,
    every_lane: bool = False,
    suffixes: Suffixes | None = None,
) -> None:
    """Launch on checked arguments of shapes that `refuse` and `refuse_layout` let pass.

    Args:
        tickets: ``[1]`` or longer, int32, zeros; the kernel leaves zeros behind. Not shared by launches that
            may run at the same time.
        short: as in `prefill_config`. Then ``tickets`` is the semaphore of the decode launch.
        behind: prepares that decode launch, while this kernel is compiled if it has to be. Gives what
            launches it, and nothing else, and how many numbers of the semaphore a request has: the kernel
            uses the first one of a request that is its own.
        window_left, window_right, chunk: bounded by the table's tokens, as ``bounded_masks`` gives them.
        clocks: ``[multiprocessors, 5]``, int64, or None; gets each CTA's cycles in all, waiting for tiles,
            waiting for their first keys and storing, and its steps.
        patience, beside, every_lane: as in `prefill_config`.
        paired: whether CTAs share copies in clusters of two, where `may_pair` says that they can.
        suffixes: then the requests here are groups' prefixes, seen by all their queries (not ``causal``, no
            masks, ``sinks`` or ``alibi_slopes``), and ``behind`` the decode launch over the rest; ``out`` and
            ``lse`` get both together.
    """
    index, num_kv_heads, block_size = q.device.index or 0, k_cache.shape[2], k_cache.shape[1]
    group, dim, dim_v = q.shape[1] // num_kv_heads, q.shape[2], v_cache.shape[3]
    if not q.shape[0]:
        return
    programs = gpu.num_sms(index)
    tree = tree_mask is not None
    plain = window_left < 0 and not (chunk or soft_cap > 0 or alibi_slopes is not None)
    fp8_queries = q.dtype in FP8
    cut = shape_for(dim, dim_v, k_cache.dtype, block_size, plain=plain, fp8_queries=fp8_queries)
    if (k_scale is None) != (v_scale is None):  # one flag serves both
        one = torch.ones(1, dtype=torch.float32, device=q.device)
        k_scale, v_scale = one if k_scale is None else k_scale, one if v_scale is None else v_scale
    split = suffixes is not None or may_split(
        q.shape[0],
        block_table.shape[0],
        short,
        num_kv_heads,
        cut.rows // group,
        block_table.shape[1] * block_size // cut.keys,
        programs,
    )
    late = late_ctas(programs, short, split)
    paired = paired and plain and not (short or split) and may_pair(cut, block_size, k_cache.dtype)
    if suffixes is not None:
        paired = suffixes.paired
    specialisation = (
        index,
        out.dtype,
        k_cache.dtype,
        dim,
        dim_v,
        group,
        num_kv_heads,
        block_size,
        causal,
        window_left,
        window_right,
        chunk,
        soft_cap > 0,
        alibi_slopes is not None,
        sinks is not None,
        tree,
        k_scale is not None,
        lse is not None,
        clocks is not None,
        patience,
        beside,
        short,
        split,
        paired,
        every_lane,
        fp8_queries,
        suffixes is not None,
    )
    decodes, ticket_row = None, 0
    if behind is not None:
        _begin(*specialisation)
        decodes, ticket_row = behind()
    kernel, merge, shape = _specialised(*specialisation)
    early = gpu.launches_early(index)
    ctas = kernel.resident(shape.threads, 2, programs) if paired else programs
    if suffixes is not None:
        ctas = programs = suffixes.ctas
    sharers = 2 if paired else 1
    tiles = (
        most_tiles(q.shape[0], block_table.shape[0], shape.rows // group * sharers) * num_kv_heads * sharers
    )
    rows = shape.rows if suffixes is None else group  # of a box: a tile, or a token
    maps = queries_map(q.data_ptr(), q.dtype, tuple(q.shape), q.stride(0), q.stride(1), group, rows)
    where: tuple[int, ...] = ()
    for cache in (k_cache, v_cache):
        encoded, at = pool_map(cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride(), fp8_queries)
        maps, where = maps + encoded, where + at
    parts = (
        torch.empty(
            part_numbers(shape, dim_v, programs, tiles if suffixes else 0),
            dtype=torch.float32,
            device=q.device,
        )
        if split
        else None
    )
    lengths = (block_table, seq_lens, query_start_loc)
    pointers = (out, lse, *lengths, alibi_slopes, sinks, k_scale, v_scale, tickets, parts, clocks)
    arguments, late_arguments = (
        maps
        + PARAMS.pack(
            *(0 if t is None else t.data_ptr() for t in pointers),
            out.stride(0),
            out.stride(1),
            *((0, 0) if lse is None else lse.stride()),
            block_table.stride(0),
            scale,
            soft_cap,
            block_table.shape[0],
            q.shape[0],
            k_cache.shape[0],
            ticket_row,
            *where,
            head_stride(k_scale),
            head_stride(v_scale),
            ctas,
            late,
            is_late,
            0 if tree_mask is None else tree_mask.data_ptr(),
            0 if suffixes is None else suffixes.order.data_ptr(),
            0 if suffixes is None else suffixes.own_lse.data_ptr(),
        )
        for is_late in (0, 1)
    )
    if suffixes is not None:  # as below
        kernel.launch(ctas, shape.threads, arguments, early=False)
    elif short:  # the decode launch behind waits for nothing: all ahead must have ended when this one begins
        kernel.launch(programs - late, shape.threads, arguments, early=False)
    else:
        kernel.launch(ctas, shape.threads, arguments, early=early)
    if decodes is not None:
        decodes()
    if late:
        kernel.launch(late, shape.threads, late_arguments, early=early)
    if merge is not None:
        merge.launch(min(merge_items(shape, dim_v) * tiles, 2 * programs), 128, arguments, early=early)


def head_stride(scale: Tensor | None) -> int:
    """Numbers from one kv head's scale to the next: 0 where there is one for all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def most_tiles(num_tokens: int, num_reqs: int, tokens: int) -> int:
    """Tiles of ``tokens`` query tokens of one kv head that so many query tokens of so many requests take at
    most."""
    begun = min(num_reqs, num_tokens)
    return (num_tokens - begun) // tokens + begun


def may_split(
    num_tokens: int, num_reqs: int, short: int, num_kv_heads: int, tokens: int, steps: int, programs: int
) -> bool:
    """Whether tiles of ``tokens`` query tokens may be so few that they are worth cutting, by shapes: two for
    each of the ``programs`` are too many.

    Beside decodes no more than 4 requests are thought to be long; whatever there is, results are right.
    ``steps``: that the block table has room for.
    """
    tiles = most_tiles(num_tokens, min(num_reqs, 4) if short else num_reqs, tokens)
    return tiles * num_kv_heads * 2 <= programs and steps >= _WORTH_STEPS


def may_pair(shape: PrefillShape, block_size: int, kv_dtype: torch.dtype) -> bool:
    """Whether two CTAs can bring half of a step's blocks each, for both; not with masks at the low end, parts
    or a decode launch, for which this was not thought through."""
    return shape.groups == 2 and shape.keys // block_size >= 2 and kv_dtype not in FP8


def part_numbers(shape: PrefillShape, dim_v: int, programs: int, tiles: int = 0) -> int:
    """Numbers of 4 bytes that parts of tiles take, and what is said of them: PART_FLOATS and struct Cut
    of prefill_shapes.cuh. ``tiles``: with suffixes, tiles of all kv heads at most; 0: without."""
    part = (dim_v // 8 + 1) * (shape.threads - 128) * 4
    return programs * (TURNS if tiles else 1) * part + 16 + (tiles or programs) * 8


def merge_items(shape: PrefillShape, dim_v: int) -> int:
    """CTAs of the merge launch that a tile in parts keeps busy: ITEMS of prefill_merge.cu."""
    return shape.groups * dim_v // 32


def late_ctas(programs: int, short: int, split: bool) -> int:
    """How many of the ``programs`` CTAs are launched behind decode, where there is one (``short``: as in
    `prefill_config`): a third. So decode has multiprocessors from its start, whatever the lengths are, and
    prefill takes them when decode no longer needs them. Parts of tiles do not wait for that."""
    return programs // 3 if short and not split else 0


@functools.cache
def _config(
    index: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    dim_v: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    causal: bool,
    window_left: int,
    window_right: int,
    chunk: int,
    soft_cap: bool,
    alibi: bool,
    sinks: bool,
    tree: bool,
    scales: bool,
    lse: bool,
    clocks: bool,
    patience: int,
    beside: bool,
    short: int,
    split: bool,
    paired: bool,
    every_lane: bool,
    fp8_queries: bool,
    cascade: bool,
) -> Config:
    return prefill_config(
        dtype,
        dim,
        group,
        num_kv_heads,
        block_size,
        causal,
        lse,
        dim_v=dim_v,
        kv_dtype=kv_dtype,
        scales=scales,
        window_left=window_left,
        window_right=window_right,
        chunk=chunk,
        soft_cap=soft_cap,
        alibi=alibi,
        sinks=sinks,
        tree=tree,
        clocks=clocks,
        patience=patience,
        beside=beside,
        short=short,
        split=split,
        paired=paired,
        every_lane=every_lane,
        fp8_queries=fp8_queries,
        cascade=cascade,
    )


@functools.cache
def _begin(index: int, *specialisation: Any) -> None:
    """Compile in threads what `_specialised` will load."""
    config = _config(index, *specialisation)
    for file in ("prefill.cu", "prefill_merge.cu") if config["SPLIT"] else ("prefill.cu",):
        jit.compile_ahead(file, config, gpu.capability(index))


@functools.cache
def _specialised(index: int, *specialisation: Any) -> tuple[jit.Kernel, jit.Kernel | None, PrefillShape]:
    """The kernel of these shapes and features (`_config`), the one that puts its parts together, and
    its cut."""
    config, device = _config(index, *specialisation), torch.device("cuda", index)
    if config["SPLIT"]:
        jit.compile_ahead("prefill_merge.cu", config, gpu.capability(index))
    kernel = jit.kernel("prefill.cu", "paged_prefill", config, device, shared_bytes=shared_bytes(config))
    merge = (
        jit.kernel("prefill_merge.cu", "paged_prefill_merge", config, device, shared_bytes=0)
        if config["SPLIT"]
        else None
    )
    return kernel, merge, shape_of(config)


def shape_of(config: Config) -> PrefillShape:
    """The cut that constants stand for."""
    names = ("GROUPS", "KEYS", "K_STAGES", "V_STAGES", "Q_BUFFERS", "RAW_STAGES")
    return PrefillShape(*(config[name] for name in names))


def square_width(dim: int, itemsize: int = 2) -> int:
    """Columns of a square, which is 8 tokens high; the copy engine swizzles its lines of 128 or 64 bytes.
    ``itemsize``: bytes of a number that is multiplied."""
    return (64 if dim * itemsize % 128 else 128) // itemsize


@dataclass(frozen=True)
class Box:
    """A tensor map: sizes, strides of all dimensions but the first, in numbers, and the box that one
    copy takes.

    ``where``: coordinates that a head adds to the third and to the fourth dimension, and a block to
    the fourth.
    """

    sizes: list[int]
    strides: list[int]
    box: list[int]
    where: tuple[int, int, int] = (0, 0, 0)


def queries_box(
    shape: tuple[int, int, int], token_stride: int, head_stride: int, group: int, rows: int, itemsize: int = 2
) -> Box:
    """Queries ``[T, num_heads, head_dim]``: a square's columns of the heads of a group of the tokens of a
    tile of ``rows``."""
    tokens, heads, dim = shape
    box = [square_width(dim, itemsize), group, rows // group]
    return Box([dim, heads, tokens], [head_stride, token_stride], box)


def pool_box(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> Box | None:
    """A cache ``[num_blocks, block_size, num_kv_heads, width]``, of which a box is one head of one block;
    None: not to be seen like this.

    Dimensions: a square's columns; 8 slots; squares; groups of 8 slots. So a block comes as groups of 8
    tokens, each group one square after the other. Heads are further squares if they lie side by side in a
    slot, further groups if they lie one behind the other in a block.
    """
    (blocks, block_size, heads, dim), (block_stride, slot_stride, head_stride, _) = shape, strides
    width, groups = square_width(dim, itemsize), block_size // 8
    group_stride = 8 * slot_stride
    if heads == 1 or (
        head_stride >= dim and head_stride % width == 0 and slot_stride >= head_stride * (heads - 1) + dim
    ):
        head_square, head_group = (head_stride // width if heads > 1 else dim // width), 0
    elif head_stride % group_stride == 0:
        head_square, head_group = 0, head_stride // group_stride
    else:
        return None
    in_block = (heads - 1) * head_group + groups
    block_group = block_stride // group_stride if blocks > 1 else in_block
    if (blocks > 1 and block_stride % group_stride) or block_group < in_block:
        return None
    # the last coordinate of a block's groups ends with the pool: a block id that is one too large lies
    # outside, where the engine reads zeros
    sizes = [width, 8, (heads - 1) * head_square + dim // width, (blocks - 1) * block_group + in_block]
    return Box(
        sizes,
        [slot_stride, width, group_stride],
        [width, 8, dim // width, groups],
        (head_square, head_group, block_group),
    )


@functools.lru_cache(maxsize=1024)
def queries_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    token_stride: int,
    head_stride: int,
    group: int,
    rows: int,
) -> bytes:
    """The tensor map of queries."""
    box = queries_box(shape, token_stride, head_stride, group, rows, dtype.itemsize)
    return _map(address, dtype, box, swizzled=True)


@functools.lru_cache(maxsize=4096)
def pool_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    fp8_queries: bool = False,
) -> tuple[bytes, tuple[int, int, int]]:
    """The tensor map of one cache of one layer, and ``Box.where``."""
    box = pool_box(shape, strides, 1 if fp8_queries else 2)
    if box is None:
        raise ValueError(
            f"a pool of shape {shape} with strides {strides} has no box for a block: refuse_layout says so"
        )
    return _map(address, dtype, box, swizzled=fp8_queries or dtype.itemsize > 1), box.where


def _map(address: int, dtype: torch.dtype, box: Box, *, swizzled: bool) -> bytes:
    """128 bytes for the copy engine: zeros outside, swizzled as wgmma reads it; not of an fp8 cache that is
    read to be converted."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }.get(dtype, kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8)
    long, short = driver.cuuint64_t, driver.cuuint32_t
    swizzles = driver.CUtensorMapSwizzle
    wide = box.box[0] * dtype.itemsize == 128
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if wide else swizzles.CU_TENSOR_MAP_SWIZZLE_64B
    if not swizzled:
        swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    result: Any = driver.cuTensorMapEncodeTiled(
        kind,
        len(box.sizes),
        address,
        [long(n) for n in box.sizes],
        [long(n * dtype.itemsize) for n in box.strides],
        [short(n) for n in box.box],
        [short(1)] * len(box.box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, encoded = result
    if int(error):
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {error} for {box}")
    return ctypes.string_at(int(encoded.getPtr()), 128)
