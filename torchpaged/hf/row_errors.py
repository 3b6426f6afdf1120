"""Errors of the rows of a paged cache, which say what to do."""

import torch

from torchpaged.cache import BlockPool
from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError, UnsupportedModelError
from torchpaged.custom_ops.words import counted

#: What to do about a prompt that does not go on behind the cached tokens.
ANOTHER_PROMPT = (
    "call cache.reset() before another prompt, and before the same one again; generate(use_cache=False) runs "
    "all tokens in every step: give it use_cache=True"
)


def incomplete() -> ArgumentError:
    """The error of rows of which some layers hold more tokens than others."""
    return ArgumentError(
        "past_key_values",
        "a PagedCache whose forwards all completed",
        "one whose last forward raised, or still runs, between two layers",
        "its layers hold different tokens: call cache.reset() and start from the prompt",
    )


def other_rows(rows: int, got: int) -> ArgumentError:
    """The error of a forward over other rows than the cache's."""
    return ArgumentError(
        "input_ids",
        f"{counted(rows, 'row')}, as in this cache's first batch",
        counted(got, "row"),
        "call cache.reset() before another batch",
    )


def several_devices(name: str, rows: torch.device | None, keys: torch.device) -> UnsupportedModelError:
    """The error of model ``name``, whose layers lie on several devices."""
    return UnsupportedModelError(
        f"{name}: its layers lie on {rows} and {keys} (device_map), and a PagedCache keeps its tables and "
        "lengths on one; load the model on one device, or use DynamicCache(config=model.config)"
    )


def too_few_blocks(
    pool: BlockPool, rows: int, more: int, blocks_per_row: int, max_seq_len: int
) -> BlockPoolExhaustedError:
    """The error of a pool that has not ``more`` blocks for each row."""
    full = rows * blocks_per_row
    return BlockPoolExhaustedError(
        rows * more,
        pool.num_free,
        pool.num_usable,
        f"{counted(rows, 'row')} of max_seq_len={max_seq_len} take {full} blocks and the null block if they "
        f"share none: build the PagedCache with num_blocks={full + 1}, or without num_blocks",
    )


def too_long(tokens: int, max_seq_len: int, is_prompt: bool) -> ArgumentError:
    """The error of rows of more tokens than fit; ``is_prompt``: several of them come at once, behind
    others."""
    return ArgumentError(
        "max_seq_len",
        f"room for {tokens} tokens per row (padding included)",
        str(max_seq_len),
        "build a PagedCache with a larger max_seq_len, or generate fewer tokens"
        + (f"; {ANOTHER_PROMPT}" if is_prompt else ""),
    )
