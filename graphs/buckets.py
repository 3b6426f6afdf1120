"""Buckets: the sizes a graph is captured for, requests of a decode step or tokens of a prefill step; a step
is padded up to the next one.

default_buckets(64)                                        # a fixed list
# the list that costs least for the batches that were seen
buckets_by_cost(64, step_ms, seen=runner.histogram())
"""

import bisect
import itertools
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchpaged.custom_ops.checks import check_sizes, is_int
from torchpaged.custom_ops.errors import ArgumentError

#: Milliseconds, and the buckets behind a 0.
_Way = tuple[float, tuple[int, ...]]


def default_buckets(max_batch_size: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256, then every 16, and the maximum itself: at most 7 padded rows below 256
    (vLLM's list)."""
    check_sizes(max_batch_size=max_batch_size)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_batch_size + 1, 16)]
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})


def default_prefix_buckets(max_batch_size: int) -> list[int]:
    """Those of `default_buckets` that second graphs of decode steps are captured for, which read shared
    prefixes once: every 16 from 16 on. Such a graph takes half as long again to capture, and is rarely
    replayed."""
    sizes = default_buckets(max_batch_size)
    return [size for size in sizes if size <= 16 or size % 16 == 0 or size == max_batch_size]


#: Above so many tokens a prefill step keeps the GPU busy for longer than Python takes to launch it, also of
#: a small model on a slow host: 4,096 tokens of a 1B model took 25 ms from Python, and take 14 at the rate
#: of graphs (docs/log/serving_prompts.md).
MAX_PREFILL_BUCKET = 8192


def default_prefill_buckets(max_num_tokens: int) -> list[int]:
    """Numbers of tokens of prefill graphs, the largest ``max_num_tokens``, at most `MAX_PREFILL_BUCKET`:
    doubling where the weights' bytes set a step's time, then close enough that padding costs less than
    launches would, and doubling where chunks fill the graph that they take."""
    check_sizes(max_num_tokens=max_num_tokens)
    largest = min(max_num_tokens, MAX_PREFILL_BUCKET)
    sizes = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
    return sorted({size for size in sizes if size < largest} | {largest})


def check_buckets(buckets: Sequence[int], max_batch_size: int | None) -> list[int]:
    """``buckets`` sorted and without duplicates; the largest must hold ``max_batch_size`` rows. None: it may
    hold any number."""
    given = list(buckets) if isinstance(buckets, Iterable) else []
    sizes = sorted(set(map(int, given))) if all(map(is_int, given)) else []
    if not sizes or sizes[0] < 1 or sizes[-1] != (max_batch_size or sizes[-1]):
        wanted = f"batch sizes of at least 1, the largest {max_batch_size} (max_batch_size)"
        raise ArgumentError(
            "buckets",
            "a list of sizes of at least 1" if max_batch_size is None else wanted,
            reprlib.repr(buckets),
        )
    return sizes


def bucket_for(buckets: Sequence[int], num_rows: int) -> int:
    """The smallest bucket that holds ``num_rows``; ``buckets`` ascending.

    Raises:
        ArgumentError: there is no row, or more than the largest bucket holds.
    """
    index = bisect.bisect_left(buckets, num_rows)
    if num_rows < 1 or index == len(buckets):
        raise ArgumentError(
            "input_ids",
            f"1 to {buckets[-1]} rows (the largest bucket)",
            str(num_rows),
            "split the batch, or build larger buckets",
        )
    return buckets[index]


def _check_counts(counts: Mapping[int, float], max_batch_size: int) -> None:
    wrong = next((n for n, count in counts.items() if not 1 <= n <= max_batch_size or count < 0), None)
    if wrong is not None:
        raise ArgumentError(
            "seen",
            f"counts of at least 0 for 1 to {max_batch_size} rows",
            f"{counts[wrong]} for {wrong} rows",
        )


def buckets_by_cost(
    max_batch_size: int,
    step_ms: Callable[[int], float],
    *,
    seen: Mapping[int, float] | None = None,
    bucket_ms: float = 100.0,
) -> list[int]:
    """The buckets for which padded steps and captures together cost least; an exact dynamic program over
    batch sizes.

    Args:
        max_batch_size: rows of the largest bucket, which is always there.
        step_ms: time of a step of that many rows, milliseconds; measured at a few sizes and interpolated,
            for instance.
        seen: how often each number of rows comes up in what the graphs will serve
            (`DecodeGraphRunner.histogram` of a trial, scaled up); default: every size 1000 times.
        bucket_ms: what one more bucket costs, in milliseconds of decoding one would give for it: its capture,
            and its memory.

    Returns:
        Batch sizes, ascending.

    Raises:
        ArgumentError: no size, or counts for sizes that can't occur.
    """
    check_sizes(max_batch_size=max_batch_size)
    counts = dict.fromkeys(range(1, max_batch_size + 1), 1000.0) if seen is None else dict(seen)
    _check_counts(counts, max_batch_size)
    sizes = range(1, max_batch_size + 1)
    below = [0.0, *itertools.accumulate(counts.get(n, 0.0) for n in sizes)]  # steps of up to n rows
    times = [0.0, *map(step_ms, sizes)]

    def cheapest(n: int, ways: Iterable[_Way]) -> _Way:
        """To serve up to ``n`` rows with ``n`` as the largest bucket, behind one of ``ways`` to serve
        fewer."""
        cost, buckets = min(
            (cost + bucket_ms + (below[n] - below[buckets[-1]]) * times[n], buckets) for cost, buckets in ways
        )
        return cost, (*buckets, n)

    best: list[_Way] = [(0.0, (0,))]
    for n in sizes:
        best.append(cheapest(n, best))
    return list(best[-1][1][1:])
