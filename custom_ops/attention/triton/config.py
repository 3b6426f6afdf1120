"""Tile shapes and launch parameters, from shapes and dtypes alone: the same for every length, so that a graph
serves all.

No autotuning at run time: it would launch and synchronise inside a capture. Figures behind the choices:
docs/log/decode.md, docs/log/prefill_triton.md.
"""

from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops.attention.call import Specialisation
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.triton import launching

#: Most query rows (query tokens x heads of a group) of the decode kernel.
MAX_DECODE_ROWS = 128
#: How many requests the decode kernel scans at once (few sizes, few compiles); more are scanned piece
#: by piece.
SCANS = (16, 128, 1024)


class DecodeTiles(NamedTuple):
    """``rows`` and ``keys`` per tile, Triton's launch options, programs per multiprocessor, least tiles of
    one program.

    ``slices``: slices that a tile of keys is cut into, one per warp; 0 = the warps share one softmax state
    (many rows).
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    slices: int = 0


class Tiles(NamedTuple):
    """``rows`` (query tokens x heads of a group) and ``keys`` per tile, and Triton's launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def keys_of_a_block(block_size: int, keys: int) -> int:
    """Keys per tile, ``keys`` at most, that divide the blocks of a mask, so that tiles that no row sees can
    be left out; ``keys`` where that would be less than 16, the least that products take."""
    fewer = min(keys, block_size & -block_size)
    return fewer if fewer >= 16 else keys


def hidden_tiles(spec: Specialisation, keys: int) -> tuple[int, bool]:
    """``verticals`` and ``holes`` of a tiling with ``keys`` per tile."""
    pattern = spec.block_sparse
    if pattern is None:
        return 0, False
    verticals = 0 if pattern.block_size % keys else pattern.verticals_of(spec.group)
    return verticals, verticals == 0


def heads_apart(spec: Specialisation, max_query_len: int) -> bool:
    """Whether prefill tiles are of one query head each: heads of a kv head see other verticals, and a query
    may fill a tile (docs/log/block_sparse.md)."""
    pattern = spec.block_sparse
    if pattern is None or max_query_len < 128:
        return False
    return pattern.verticals_of(spec.group) != pattern.verticals_of(1)


def padded_widths(dim: int, dim_v: int, kv_itemsize: int) -> dict[str, int]:
    """Columns of a tile of keys, ``dim_pad``, and of one of values, ``dim_v_pad``: powers of two.

    Over fp8 both are at least 64 where one is: products of 64 rows read both, converted, from one place in
    shared memory, and where their lines differ in bytes ptxas 12.8 loses that place for all values behind
    the first 16 keys (tests/custom_ops/triton/test_sass.py).
    """
    pads = tuple(max(16, launching.next_power_of_2(width)) for width in (dim, dim_v))
    least = 64 if kv_itemsize == 1 and max(pads) >= 64 else 16
    return {"dim_pad": max(pads[0], least), "dim_v_pad": max(pads[1], least)}


def decode_tiles(
    head_dim: int, rows: int, kv_itemsize: int, itemsize: int, hip: bool = torch.version.hip is not None
) -> DecodeTiles:
    """Tiles of the decode kernel: rows padded to what mma.sync needs (8 in slices, else 16), since it waits
    for memory anyway."""
    wide = launching.next_power_of_2(head_dim) * kv_itemsize
    if rows <= 16 and itemsize < 4 and not hip:
        rows = max(8, rows)
        if wide > 256:
            return DecodeTiles(rows, 32, 2, 4, 2, 2, slices=2)
        if kv_itemsize == 1:  # conversions take instructions: many small programs
            return DecodeTiles(rows, 16, 1, 3, 8, 4, slices=1)
        return (
            DecodeTiles(rows, 64, 4, 3, 2, 1, slices=4)
            if wide > 128
            else DecodeTiles(rows, 64, 4, 4, 2, 2, slices=4)
        )
    rows = max(16, rows)
    if itemsize == 4:
        return DecodeTiles(rows, 16 if head_dim > 128 else 32, 4, 3, 2, 4)
    return DecodeTiles(rows, 32 if wide > 256 else 64, 4, 4 if wide >= 256 else 5, 2, 4)


def prefill_tiles(
    head_dim: int,
    group: int,
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    large: bool,
    tree_positions: bool = False,
) -> Tiles:
    """Tiles of the prefill kernel.

    ``max_seq_len``: tokens that a row of the block table holds; ``large``: the device has Hopper's shared
    memory (`has_large_tiles`); ``tree_positions``: a tree's window, chunks or ALiBi, which count the tokens
    that each query sees and take as much shared memory as another stage and a half.
    """
    rows = launching.next_power_of_2(group)
    # float32 has no exact tensor-core path: plain FMAs, whose accumulators fill the registers
    if itemsize == 4:
        return Tiles(max(16, rows), 16 if head_dim > 128 else 32, 4, 1)
    if not large:
        return Tiles(max(32, rows), 32, 4, 2) if head_dim > 128 else Tiles(max(64, rows), 64, 4, 2)
    if tree_positions:  # at most 64 query tokens
        return Tiles(max(64, rows), 32, 8, 2)
    if head_dim > 128:
        return Tiles(max(128, rows), 32, 8, 3)
    # few tiles of keys per program: two small programs per multiprocessor
    if max_query_len <= 512 and max_seq_len <= 1024:
        return Tiles(max(64, rows), 64, 4, 2)
    return Tiles(max(128, rows), 128, 8, 3)


def decode_len_in_mixed(group: int, num_reqs: int, num_tokens: int, max_query_len: int) -> int:
    """Longest query of a mixed batch that the decode kernel takes: as many as fill 8 rows, the least that its
    products have.

    Twice as many would serve more of speculative verification, but cost plain decodes up to 5 % of a mixed
    batch. 0 where the shapes leave no room for queries shorter than ``max_query_len``.
    """
    if num_reqs == 1 or num_tokens >= num_reqs * max_query_len:
        return 0
    longest = min(MAX_DECODE_QUERY_LEN, 1 << (max(1, 8 // group).bit_length() - 1))
    return longest if group * longest <= MAX_DECODE_ROWS else 0


def most_tiles_of_longer(num_reqs: int, num_tokens: int, skip: int, tokens: int) -> int:
    """Most tiles of ``tokens`` query tokens that the requests with more than ``skip`` query tokens can have,
    from shapes alone.

    A query of n tokens has (n - 1) // tokens + 1 tiles; there are no more such requests than ``num_tokens``
    suffices for. At least 1: the decode launch counts on this one standing before it.
    """
    longer = min(num_reqs, num_tokens // (skip + 1))
    return max(1, longer + (num_tokens - longer) // tokens)


def programs_for_longer(num_reqs: int, num_tokens: int, skip: int, tokens: int) -> tuple[int, int]:
    """Programs per kv head of the prefill kernel in a mixed batch: those of a tile each, those that share out
    the tiles past these.

    A program that finds no tile takes a multiprocessor for about a microsecond, and there would be one for
    every decode. Rounding up the tiles of 4 to 8 chunks is all that ``num_tokens`` leaves room for; only
    batches of many queries just too long for the decode kernel have more tiles than that.
    """
    most = most_tiles_of_longer(num_reqs, num_tokens, skip, tokens)
    single = min(most, num_tokens // tokens + 4)
    return single, min(most - single, 8)


def has_large_tiles(device: torch.device) -> bool:
    """Whether a thread block may use 227 KiB of shared memory: compute capability 9.0 and 10.0."""
    if device.type != "cuda" or torch.version.hip is not None:
        return launching.INTERPRET
    return launching.capability(device)[0] in (9, 10)


def num_programs(device: torch.device, tiles: DecodeTiles) -> int:
    """Programs of a decode launch: as many as fit the device at once, whatever the batch is."""
    return 7 if launching.INTERPRET else tiles.programs_per_sm * launching.num_sms(device)


def decode_options(device: torch.device, tiles: DecodeTiles) -> dict[str, Any]:
    """Launch options of the decode kernel. Without ``maxnreg`` ptxas aims at an occupancy of its own
    and spills."""
    options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if device.type == "cuda" and torch.version.hip is None:
        options["maxnreg"] = max_registers(tiles)
    return options | ({"launch_pdl": True} if launching.launches_early(device) else {})


def max_registers(tiles: DecodeTiles) -> int:
    """Registers per thread with which ``programs_per_sm`` programs share the 65536 of a multiprocessor."""
    return min(255, 65536 // (32 * tiles.num_warps * tiles.programs_per_sm) // 8 * 8)


def merged_parts(head_dim_v: int) -> int:
    """Partial results that a merging program of the decode kernel reads at once: as many as fit
    its registers."""
    return 4 if head_dim_v <= 128 else 2
