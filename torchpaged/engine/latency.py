"""LatencyHistogram: how long things took, in buckets."""

from bisect import bisect_left
from dataclasses import dataclass, field

from torchpaged.custom_ops.errors import ArgumentError

#: Upper bounds of a histogram's buckets in seconds, ten per decade from 0.1 ms to 1,000 s.
BOUNDS = tuple(round(10 ** (k / 10 - 4), 9) for k in range(71))


@dataclass
class LatencyHistogram:
    """Seconds, counted in buckets a quarter wider than the one before: what is read from it is known to that.

    Attributes:
        counts: by bucket of `BOUNDS`, and of what took longer than the last.
        total: of all seconds.
        count: how many.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1), repr=False)
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """``count`` waits of as many seconds each."""
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total += seconds * count
        self.count += count

    def percentile(self, share: float) -> float | None:
        """Seconds that ``share`` of all, 0 to 1, took at most; None before the first. Beyond the last bound
        that bound.

        Raises:
            ArgumentError: no share.
        """
        if not 0 <= share <= 1:
            raise ArgumentError("share", "a number from 0 to 1", repr(share))
        if not self.count:
            return None
        wanted, below = share * self.count, 0
        for bound, before, count in zip(BOUNDS, (0.0, *BOUNDS), self.counts, strict=False):
            if count and below + count >= wanted:
                return before + (bound - before) * (wanted - below) / count
            below += count
        return BOUNDS[-1]

    def copy(self) -> "LatencyHistogram":
        """Another one that counts no further."""
        return LatencyHistogram(list(self.counts), self.total, self.count)
