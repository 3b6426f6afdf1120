"""What a Generator is doing, for people and for Prometheus: load, memory, latencies.

    metrics = generator.metrics()
    print(metrics.running, metrics.utilisation, metrics.first_token.percentile(0.99))
    text = metrics.prometheus()

While steps run there are counters only; everything else is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchpaged.cache.disk_tier import DiskTier
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.engine.latency import BOUNDS, LatencyHistogram
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineMetrics:
    """A Generator at one moment. Counters are since its construction.

    Attributes:
        running, waiting: requests.
        finished: requests by ``finish_reason``.
        preemptions: requests put back to wait, since blocks were short.
        num_blocks, blocks_used: of the pool; those that wait for a request with the same beginning are not in
            use.
        useful_tokens: tokens whose keys and values are in blocks in use, each block counted once.
        utilisation: share of the places in blocks in use that hold one of these; 1 while none is in use.
        prompt_tokens, new_tokens: of all requests.
        prefix_hit_rate: share of prompts' tokens that were found in the prefix cache when their requests
            began; 0 before any. What one that was put back finds of its own is not counted.
        host_tokens, disk_tokens: that came back from the host, and those of them that a disk had.
        disk_blocks: that the disk has.
        disk_errors: blocks that could not be written to it, or not be read back, by reason.
        first_token: seconds from `Generator.submit` to a request's first token.
        between_tokens: seconds from one token of a request to its next one. Tokens of one launch share its
            seconds. The wait of a request that was put back is not in it.
    """

    running: int
    waiting: int
    finished: dict[str, int]
    preemptions: int
    num_blocks: int
    blocks_used: int
    useful_tokens: int
    utilisation: float
    prompt_tokens: int
    new_tokens: int
    prefix_hit_rate: float
    host_tokens: int
    disk_tokens: int
    disk_blocks: int
    disk_errors: dict[str, int]
    first_token: LatencyHistogram
    between_tokens: LatencyHistogram

    def __repr__(self) -> str:
        return repr_of_fields(self)

    def prometheus(self) -> str:
        """The same in Prometheus' text format, version 0.0.4; names begin with ``torchpaged_``."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        yield from _metric("requests_running", "gauge", "Requests that run.", self.running)
        yield from _metric("requests_waiting", "gauge", "Requests that wait.", self.waiting)
        yield from _head("requests_finished_total", "counter", "Requests that ended, by reason.")
        for reason, count in sorted(self.finished.items()):
            yield f'torchpaged_requests_finished_total{{reason="{reason}"}} {count}'
        yield from _metric("preemptions_total", "counter", "Requests put back to wait.", self.preemptions)
        yield from _metric("blocks", "gauge", "Blocks of the pool.", self.num_blocks)
        yield from _metric("blocks_used", "gauge", "Blocks in use.", self.blocks_used)
        yield from _metric("useful_tokens", "gauge", "Tokens in blocks in use.", self.useful_tokens)
        yield from _metric(
            "utilisation_ratio", "gauge", "Share of places in blocks in use with a token.", self.utilisation
        )
        yield from _metric("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens)
        yield from _metric("new_tokens_total", "counter", "Tokens of outputs.", self.new_tokens)
        yield from _metric(
            "prefix_hit_ratio", "gauge", "Share of tokens looked up that were found.", self.prefix_hit_rate
        )
        yield from _metric("host_tokens_total", "counter", "Tokens back from the host.", self.host_tokens)
        yield from _metric("disk_tokens_total", "counter", "Of these, from a disk.", self.disk_tokens)
        yield from _metric("disk_blocks", "gauge", "Blocks on the disk.", self.disk_blocks)
        yield from _head("disk_errors_total", "counter", "Blocks not written or not read back, by reason.")
        for reason, count in sorted(self.disk_errors.items()):
            yield f'torchpaged_disk_errors_total{{reason="{reason}"}} {count}'
        yield from _histogram("first_token_seconds", "Seconds to the first token.", self.first_token)
        yield from _histogram("between_tokens_seconds", "Seconds between tokens.", self.between_tokens)


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP torchpaged_{name} {words}"
    yield f"# TYPE torchpaged_{name} {kind}"


def _metric(name: str, kind: str, words: str, value: Any) -> Iterator[str]:
    yield from _head(name, kind, words)
    yield f"torchpaged_{name} {value}"


def _histogram(name: str, words: str, histogram: LatencyHistogram) -> Iterator[str]:
    yield from _head(name, "histogram", words)
    below = 0
    for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
        below += count
        yield f'torchpaged_{name}_bucket{{le="{bound}"}} {below}'
    yield f"torchpaged_{name}_sum {histogram.total}"
    yield f"torchpaged_{name}_count {histogram.count}"


def measured(scheduler: Scheduler, stats: GeneratorStats) -> EngineMetrics:
    """Of these requests and blocks, between two steps."""
    size, tails, full = scheduler.block_size, 0, set[int]()
    for sequence in scheduler.running:
        num_full, tail = divmod(min(sequence.num_computed, len(sequence.blocks) * size), size)
        full.update(sequence.blocks[:num_full])
        tails += tail
    disk = None if scheduler.prefixes is None else scheduler.prefixes.host
    disk = disk if isinstance(disk, DiskTier) else None
    used, useful, prefixes = scheduler.pool.num_used, len(full) * size + tails, stats.prefix_cache
    return EngineMetrics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        finished=dict(stats.finished),
        preemptions=scheduler.preemptions,
        num_blocks=scheduler.pool.num_usable,
        blocks_used=used,
        useful_tokens=useful,
        utilisation=useful / (used * size) if used else 1.0,
        prompt_tokens=stats.prompt_tokens,
        new_tokens=stats.new_tokens,
        prefix_hit_rate=prefixes.hit_tokens / max(prefixes.queried_tokens, 1),
        host_tokens=prefixes.host_tokens,
        disk_tokens=prefixes.disk_tokens,
        disk_blocks=0 if disk is None else disk.num_on_disk,
        disk_errors={} if disk is None else dict(disk.errors),
        first_token=stats.first_token.copy(),
        between_tokens=stats.between_tokens.copy(),
    )
