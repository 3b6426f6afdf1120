"""The decode kernel's schedule: which run of work units, (request, kv head, key tile), a program takes, and
which others have a part of a pair.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.block_sparse import ordinals, slash_of
from torchpaged.custom_ops.attention.triton.rows import visible_range


class Schedule(NamedTuple):
    """How many work units, (request, kv head, key tile), there are, and how many programs share them.

    Attributes:
        unit, unit_end: this program's run.
        ends: of the requests scanned at once, the first unit behind each, ``[REQS]``.
        unwritten: there are rows that no unit covers.
    """

    total: Any
    programs: Any
    unit: Any
    unit_end: Any
    ends: Any
    unwritten: Any


class WorkTile(NamedTuple):
    """Units of one (request, kv head) pair that one program takes.

    Attributes:
        start: the request's first token row.
        tile, count: first key tile, of the pair's ``num_tiles``, and how many.
        first_unit: of the pair.
        first_key: of ``tile``, an ordinal (`place`).
        end_key: behind the pair's last key, likewise.
    """

    request: Any
    start: Any
    query_len: Any
    seq_len: Any
    kv_head: Any
    num_tiles: Any
    tile: Any
    count: Any
    first_unit: Any
    first_key: Any
    end_key: Any


@triton.jit
def key_range(seq_len, query_len, SPEC: tl.constexpr, TILING: tl.constexpr):
    """``(first tile, end key)`` of what any query of a request sees, in ordinals (`place`); end 0 if none.
    Both bounds grow with the position."""
    TILE_KV: tl.constexpr = TILING.tile_kv
    last = seq_len - 1
    first = tl.maximum(seq_len - query_len, 0)
    low, _ = visible_range(first, seq_len, SPEC)
    _, end = visible_range(last, seq_len, SPEC)
    end = tl.where((query_len > 0) & (last >= 0), tl.minimum(end, seq_len), 0)
    low, end = tl.where(end > low, low, 0), tl.where(end > low, end, 0)
    if TILING.verticals > 0:
        slash, verticals = slash_of(first, SPEC, TILING)
        low, end = ordinals(low, end, slash, verticals, SPEC, TILING)
    return low // TILE_KV, end


@triton.jit
def scan_tiles(batch, first_req, SPEC: tl.constexpr, TILING: tl.constexpr):
    """Key tiles of requests ``first_req ... first_req + REQS``: ``[REQS]``, 0 for those that see nothing or
    are not ours."""
    request = first_req + tl.arange(0, TILING.reqs)
    inside = request < batch.num_reqs
    seq_len = tl.load(batch.seq_lens + request, mask=inside, other=0)
    start = tl.load(batch.starts + request, mask=inside, other=0)
    query_len = tl.load(batch.starts + request + 1, mask=inside, other=0) - start
    if TILING.longest > 0:
        query_len = tl.where(query_len > TILING.longest, 0, query_len)
    first, end = key_range(seq_len, query_len, SPEC, TILING)
    return (end + TILING.tile_kv - 1) // TILING.tile_kv - first


@triton.jit
def divide(a, b):
    """``a // b`` of numbers that are not negative: half the instructions of the division of signed ones."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def run_start(program, total, programs):
    """``program * total // programs`` in 32 bits: first unit of the program's run."""
    base = divide(total, programs)
    return program * base + divide(program * (total - base * programs), programs)


@triton.jit
def owner(unit, total, programs):
    """The program whose run holds ``unit``: a guess that is off by one at most, put right."""
    guess = ((unit + 1).to(tl.float32) * programs / total).to(tl.int32)
    guess += (run_start(guess + 1, total, programs) <= unit).to(tl.int32)
    return guess - (run_start(guess, total, programs) > unit).to(tl.int32)


@triton.jit
def add_pairs(a, b, other_a, other_b):
    """For `tl.reduce`: two reductions in one pass through the threads."""
    return a + other_a, b + other_b


@triton.jit
def add_and_maximum(a, b, other_a, other_b):
    """As `add_pairs`: a sum and a maximum."""
    return a + other_a, tl.maximum(b, other_b)


@triton.jit
def schedule(batch, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The tile scheduler's first half: all units, counted by one scan of the lengths, and this
    program's run of them."""
    tiles = scan_tiles(batch, 0, SPEC, TILING)
    total, busy = tl.reduce((tiles, (tiles > 0).to(tl.int32)), 0, add_pairs)
    if not TILING.one_scan:
        for first_req in range(TILING.reqs, batch.num_reqs, TILING.reqs):
            more = scan_tiles(batch, first_req, SPEC, TILING)
            more_total, more_busy = tl.reduce((more, (more > 0).to(tl.int32)), 0, add_pairs)
            total += more_total
            busy += more_busy
    total *= SPEC.num_kv_heads
    used = tl.load(batch.starts + batch.num_reqs)  # token rows of requests; those after it are padding
    pairs = tl.maximum(busy * SPEC.num_kv_heads, 1)
    wanted = tl.maximum(tl.minimum(tl.num_programs(0), total // TILING.min_tiles), 1)
    programs = tl.maximum(divide(wanted, pairs), 1) * pairs  # equal lengths: runs end where pairs end
    programs = tl.where((programs > wanted) | (programs * 4 < wanted * 3), wanted, programs)
    program = tl.program_id(0)
    unit = run_start(program, total, programs)
    unit_end = tl.where(program < programs, run_start(program + 1, total, programs), unit)
    unwritten = (busy < batch.num_reqs) | (used < batch.num_tokens)  # one bit kept, not four numbers
    ends = tl.cumsum(tiles, 0) * SPEC.num_kv_heads
    return Schedule(total, programs, unit, unit_end, ends, unwritten)


@triton.jit
def work_tile(unit, unit_end, ends, batch, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The tile scheduler's second half: the `WorkTile` that begins at ``unit`` and ends with its pair, or at
    ``unit_end``."""
    request, before = tl.reduce(
        ((ends <= unit).to(tl.int32), tl.where(ends <= unit, ends, 0)), 0, add_and_maximum
    )
    if not TILING.one_scan:
        scanned = TILING.reqs
        while (request == scanned) & (scanned < batch.num_reqs):
            more = scan_tiles(batch, scanned, SPEC, TILING)
            more = tl.cumsum(more, 0) * SPEC.num_kv_heads + before
            request += tl.sum((more <= unit).to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(more <= unit, more, 0), 0))
            scanned += TILING.reqs
    start = tl.load(batch.starts + request)
    query_len = tl.load(batch.starts + request + 1) - start
    seq_len = tl.load(batch.seq_lens + request)
    first_tile, end_key = key_range(seq_len, query_len, SPEC, TILING)
    num_tiles = (end_key + TILING.tile_kv - 1) // TILING.tile_kv - first_tile
    kv_head = divide(unit - before, num_tiles)
    first_unit = before + kv_head * num_tiles
    tile = unit - first_unit
    count = tl.minimum(num_tiles - tile, unit_end - unit)
    first_key = (first_tile + tile) * TILING.tile_kv
    return WorkTile(
        request, start, query_len, seq_len, kv_head, num_tiles, tile, count, first_unit, first_key, end_key
    )
