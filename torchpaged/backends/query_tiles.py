"""Packed queries as tiles of one request each, and the blocks that each tile may see: static shapes, numbers
made on the device.

A kernel that takes rectangles, such as FlexAttention or ``scaled_dot_product_attention``, gets the tiles as
its batch. Shapes follow from the shapes of the batch alone, so that one graph serves all lengths, and nothing
here waits for the device.

Dimensions: T tokens, B requests, N tiles, TILE_Q rows of a tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.mask import Mask


class QueryTiles(NamedTuple):
    """Which queries are where.

    Attributes:
        request: ``[N]`` int64, the request of each tile; 0 for tiles without queries.
        token: ``[N, TILE_Q]`` int64, the row of each query in the packed batch; 0 where there is none.
        position: ``[N, TILE_Q]`` int64, its position in its sequence; negative where it sees nothing or there
            is none.
        row_of_token: ``[T]`` int64, where each token is among the ``N * TILE_Q`` rows; 0 for padding.
        is_query: ``[T]`` bool, whether a token is a request's.
        seq_lens: ``[N]`` int64, keys of each tile's request; 0 for tiles without queries.
    """

    request: Tensor
    token: Tensor
    position: Tensor
    row_of_token: Tensor
    is_query: Tensor
    seq_lens: Tensor


def num_tiles(num_tokens: int, num_reqs: int, tile_q: int) -> int:
    """The most tiles that so many tokens of so many requests fill."""
    return max((num_tokens + num_reqs * (tile_q - 1)) // tile_q, 1)


def query_tiles(seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int, tile_q: int) -> QueryTiles:
    """Cut the queries of each request into tiles.

    Args:
        seq_lens: ``[B]`` int32, at least one request.
        query_start_loc: ``[B + 1]`` int32.
        num_tokens: T, padding included.
        tile_q: TILE_Q.
    """
    device, last = seq_lens.device, seq_lens.shape[0] - 1
    starts, lens = query_start_loc.long(), seq_lens.long()
    query_lens = starts.diff()
    tiles_end = ((query_lens + tile_q - 1) // tile_q).cumsum(0)  # [B], the tile behind each request's last
    tiles_begin = torch.nn.functional.pad(tiles_end, (1, -1))
    tile = torch.arange(num_tiles(num_tokens, last + 1, tile_q), device=device)
    request = torch.searchsorted(tiles_end, tile, right=True)
    exists = request <= last
    request = request.clamp_max(last)
    row = torch.arange(tile_q, device=device)
    offset = (tile - tiles_begin[request])[:, None] * tile_q + row  # in the request's queries
    is_row = exists[:, None] & (offset < query_lens[request, None])
    token = torch.where(is_row, starts[request, None] + offset, 0)
    position = torch.where(is_row, (lens - query_lens)[request, None] + offset, -1)
    packed = torch.arange(num_tokens, device=device)
    owner = torch.searchsorted(starts[1:].contiguous(), packed, right=True)
    is_query = owner <= last
    owner = owner.clamp_max(last)
    row_of_token = torch.where(is_query, tiles_begin[owner] * tile_q + packed - starts[owner], 0)
    zero = torch.zeros_like(request)
    return QueryTiles(
        torch.where(exists, request, zero),
        token,
        position,
        row_of_token,
        is_query,
        torch.where(exists, lens[request], zero),
    )


def most_keys(mask: Mask, tile_q: int) -> int | None:
    """How many keys lie between the first and the last that the rows of one tile see; None: as many as
    there are."""
    ahead = 0 if mask.causal else mask.window_right
    in_window = mask.window_left + ahead + tile_q if mask.window_left >= 0 and ahead >= 0 else None
    in_chunk = mask.chunk_size + tile_q if mask.chunk_size and mask.causal else None
    if mask.chunk_size and not mask.causal:
        in_chunk = 2 * mask.chunk_size + tile_q
    bounds = [bound for bound in (in_window, in_chunk) if bound is not None]
    return min(bounds) if bounds else None


def visible_blocks(tiles: QueryTiles, mask: Mask, block_size: int) -> tuple[Tensor, Tensor]:
    """Which blocks of its request each tile needs: the first, and how many; ``[N]`` int64 both.

    All others hold no key that any row of the tile sees.
    """
    position = tiles.position
    first = torch.where(position >= 0, position, torch.iinfo(torch.int64).max).amin(1)
    last = position.amax(1)  # negative: no row sees anything
    sees = last >= 0
    first = torch.where(sees, first, 0)
    low, high = torch.zeros_like(first), tiles.seq_lens
    if mask.window_left >= 0:
        low = torch.maximum(low, first - mask.window_left)
    if mask.causal:
        high = torch.minimum(high, last + 1)
    if mask.window_right >= 0:
        high = torch.minimum(high, last + mask.window_right + 1)
    if mask.chunk_size:
        low = torch.maximum(low, first // mask.chunk_size * mask.chunk_size)
        high = torch.minimum(high, (last // mask.chunk_size + 1) * mask.chunk_size)
    first_block = low // block_size
    count = (high + block_size - 1) // block_size - first_block
    return first_block, torch.where(sees, count.clamp_min(0), 0)


def listed_blocks(block_table: Tensor, tiles: QueryTiles, first: Tensor, count: Tensor, width: int) -> Tensor:
    """The ids of the blocks that each tile needs, ``[N, width]`` int32; 0 behind the last, garbage of the
    table is never given on."""
    column = torch.arange(width, device=block_table.device)
    at = (first[:, None] + column).clamp_max(block_table.shape[1] - 1)
    return torch.where(column < count[:, None], block_table[tiles.request[:, None], at], 0)
