"""Which request a program of the prefill kernel works for, found on the device."""

import triton
import triton.language as tl


@triton.jit
def find_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr):
    """The request that query tile ``tile`` belongs to: request r's tiles begin at ``starts[r] // TOKENS +
    r``.

    Counts the requests that begin at or before ``tile``: one round of loads where bisection would wait for
    seven in a row.
    """
    LANES: tl.constexpr = 128
    count = 0
    for first in range(0, num_reqs, LANES):
        request = first + tl.arange(0, LANES)
        begin = (
            tl.load(starts_ptr + request, mask=request < num_reqs, other=0, cache_modifier=".cg") // TOKENS
            + request
        )
        count += tl.sum(((begin <= tile) & (request < num_reqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def tiles_of_longer(starts_ptr, first, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """Query tiles of the requests ``first + [0, 32)``; those of at most SKIPPED tokens have none.

    As many as a warp has threads: sums over them need no barrier, and their results are known to be the same
    in all threads.
    """
    request = first + tl.arange(0, 32)
    start = tl.load(starts_ptr + request, mask=request < num_reqs, other=0, cache_modifier=".cg")
    query_len = (
        tl.load(starts_ptr + request + 1, mask=request < num_reqs, other=0, cache_modifier=".cg") - start
    )
    return tl.where(query_len > SKIPPED, (query_len + TOKENS - 1) // TOKENS, 0)


@triton.jit
def count_longer_tiles(starts_ptr, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """All query tiles of requests of more than SKIPPED tokens. A sum alone: what a program without a tile
    spends its time on."""
    tiles = tl.zeros([32], tl.int32)
    for first in tl.range(0, num_reqs, 32, loop_unroll_factor=4):
        tiles += tiles_of_longer(starts_ptr, first, num_reqs, TOKENS, SKIPPED)
    return tl.sum(tiles, 0)


@triton.jit
def find_longer_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """``(request, its first tile)`` of query tile ``tile``, counting requests of more than SKIPPED
    tokens only."""
    before = 0
    found = tl.zeros([32], tl.int32)
    found_first = tl.zeros([32], tl.int32)
    for first in tl.range(0, num_reqs, 32, loop_unroll_factor=4):
        tiles = tiles_of_longer(starts_ptr, first, num_reqs, TOKENS, SKIPPED)
        first_tile = before + tl.cumsum(tiles, 0) - tiles
        mine = (first_tile <= tile) & (tile < first_tile + tiles)  # of one lane in one round
        found = tl.where(mine, first + tl.arange(0, 32), found)
        found_first = tl.where(mine, first_tile, found_first)
        before += tl.sum(tiles, 0)
    return tl.sum(found, 0), tl.sum(found_first, 0)
