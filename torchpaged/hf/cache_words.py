"""A `torchpaged.hf.PagedCache` in words: its sizes and its memory. It imports these functions, so that its
type has no name here."""

from typing import Any

from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.hf.row_states import describe_states

_NOT_MADE = "made with the first keys"


def in_one_line(cache: Any) -> str:
    """Of its repr."""
    num_bytes = sum(layer.num_bytes for layer in cache.paged)
    size = of_bytes(num_bytes) if num_bytes else _NOT_MADE
    parts = [f"{_blocks(cache)} in {counted(len(cache.paged), 'paged layer')}", size]
    if not cache.paged:
        parts = [_rows(cache), *describe_states(cache.states)]
    choice = getattr(cache.backend, "choice", None)  # made with the first keys
    return one_line(cache, *parts, "backend not chosen yet" if choice is None else f"backend={choice.name!r}")


def described(cache: Any) -> str:
    """See `PagedCache.describe`."""
    parts = [_paged(cache) if cache.paged else _rows(cache)]
    rings, rolling = cache.rows.rolling, sum(layer.rolls for layer in cache.paged)
    if rings is not None:
        parts.append(
            f"a row keeps {counted(rings.blocks.blocks_per_ring, 'block')} in "
            f"{counted(rolling, 'layer')} with a window of {rings.blocks.window}"
        )
    parts += describe_states(cache.states)
    if cache.dense_reason:
        parts.append(f"gathered: {cache.name} {cache.dense_reason}")
    return "; ".join(parts)


def _blocks(cache: Any) -> str:
    return f"{counted(cache.num_blocks, 'block')} of {counted(cache.block_size, 'token')}"


def _rows(cache: Any) -> str:
    return f"{counted(cache.rows.max_rows, 'row')} of {counted(cache.max_seq_len, 'token')}"


def _paged(cache: Any) -> str:
    tokens = cache.pool.num_usable * cache.block_size
    grows = [layer for layer in cache.paged if not layer.rolls]
    per_token = sum(layer.num_bytes for layer in grows) // (cache.num_blocks * cache.block_size)
    num_bytes = sum(layer.num_bytes for layer in cache.paged)
    size = f"{of_bytes(num_bytes)} ({per_token} bytes per token)" if num_bytes else _NOT_MADE
    return f"{_blocks(cache)} = {counted(tokens, 'token')} in {counted(len(grows), 'paged layer')}, {size}"
