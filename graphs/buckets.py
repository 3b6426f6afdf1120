"""Batch buckets: the batch sizes a graph is captured for; a batch is padded up to the next one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from torchpaged.custom_ops.errors import ArgumentError


def default_buckets(max_batch_size: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256, then every 16, and the maximum itself: at most 7 padded rows below 256 (vLLM's list)."""
    if max_batch_size < 1:
        raise ArgumentError("max_batch_size", "at least 1 row", str(max_batch_size))
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_batch_size + 1, 16)]
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})


def check_buckets(buckets: Sequence[int], max_batch_size: int) -> list[int]:
    """``buckets`` sorted and without duplicates; the largest must hold ``max_batch_size`` rows."""
    sizes = sorted(set(buckets))
    if not sizes or sizes[0] < 1 or sizes[-1] != max_batch_size:
        raise ArgumentError("buckets", f"batch sizes of at least 1, the largest {max_batch_size} (max_batch_size)", str(list(buckets)))
    return sizes


def bucket_for(buckets: Sequence[int], num_rows: int) -> int:
    """The smallest bucket that holds ``num_rows``; ``buckets`` ascending.

    Raises:
        ArgumentError: there is no row, or more than the largest bucket holds.
    """
    index = bisect.bisect_left(buckets, num_rows)
    if num_rows < 1 or index == len(buckets):
        raise ArgumentError(
            "input_ids", f"1 to {buckets[-1]} rows (the largest bucket)", str(num_rows), "split the batch, or build larger buckets"
        )
    return buckets[index]
