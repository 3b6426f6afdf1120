"""Which row of a batch a token, or a tile of tokens, belongs to: found on the device, by bisection of
``query_start_loc``."""

import triton
import triton.language as tl


@triton.jit
def find_row(at, starts_ptr, num_rows, TOKENS=None):
    """The last row that begins at or before a token; with TOKENS, at or before a tile of so many.

    Row ``r`` has the tiles from ``starts[r] // TOKENS + r`` on: as many as it needs at least, and some that
    hold nothing. So a grid of ``num_tokens // TOKENS + num_rows`` tiles is known without the lengths.
    """
    low = tl.zeros_like(at)
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(starts_ptr + middle)
        if TOKENS is not None:
            begin = begin // TOKENS + middle
        begins = begin <= at
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit
def find_row_of_tile(tile, starts_ptr, num_rows, TOKENS):
    """`find_row` of a tile, and the tile's number within the row; the last row has what the tokens behind it
    need, too."""
    row = find_row(tile, starts_ptr, num_rows, TOKENS)
    return row, tile - tl.load(starts_ptr + row) // TOKENS - row
