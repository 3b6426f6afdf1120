"""What a Generator is doing, for people and for Prometheus: load, memory, latencies.

    metrics = generator.metrics()
    print(metrics.running, metrics.utilisation, metrics.first_token.percentile(0.99))
    text = metrics.prometheus()

While steps run there are counters only; everything else is computed when it is asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchpaged.cache.disk_tier import DiskTier
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.engine.outputs import BOUNDS, GeneratorStats, LatencyHistogram
from torchpaged.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineMetrics:
    """A Generator at one moment. Counters are since its construction.

    Attributes:
        running, waiting: requests.
        finished: requests by ``finish_reason``.
        preemptions, swapped: requests put back to wait, since blocks were short, and those of them whose
            blocks go to the host.
        num_blocks, blocks_used: of the pool; those that wait for a request with the same beginning are not in
            use.
        useful_tokens: tokens whose keys and values are in blocks in use, each block counted once.
        utilisation: share of the places in blocks in use that hold one of these; 1 while none is in use.
        prompt_tokens, new_tokens: of all requests.
        prefix_hit_rate: share of prompts' tokens that were found in the prefix cache when their requests
            began; 0 before any. What one that was put back finds of its own is not counted.
        missed_tokens: the others of these tokens, by the reason why they are computed once more or at all: as
            `torchpaged.cache.PrefixCacheStats` has it.
        evicted_blocks: of the prefix cache, given up for other tokens.
        host_tokens, disk_tokens: that came back from the host, and those of them that a disk had.
        disk_blocks: that the disk has.
        disk_errors: blocks that could not be written to it, or not be read back, by reason.
        late_compiles: kernels and graphs compiled while steps ran, each of which requests waited for.
        queue: seconds from `Generator.submit` until a request first ran.
        first_token: seconds from `Generator.submit` to a request's first token.
        between_tokens: seconds from one token of a request to its next one. Tokens of one launch share its
            seconds. The wait of a request that was put back is not in it.
        end_to_end: seconds from `Generator.submit` to a request's end, of those that ended by a token.
    """

    running: int
    waiting: int
    finished: dict[str, int]
    preemptions: int
    swapped: int
    num_blocks: int
    blocks_used: int
    useful_tokens: int
    utilisation: float
    prompt_tokens: int
    new_tokens: int
    prefix_hit_rate: float
    missed_tokens: dict[str, int]
    evicted_blocks: int
    host_tokens: int
    disk_tokens: int
    disk_blocks: int
    disk_errors: dict[str, int]
    late_compiles: int
    queue: LatencyHistogram
    first_token: LatencyHistogram
    between_tokens: LatencyHistogram
    end_to_end: LatencyHistogram

    def __repr__(self) -> str:
        return repr_of_fields(self)

    def prometheus(self) -> str:
        """The same in Prometheus' text format, version 0.0.4; names begin with ``torchpaged_``."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        yield from _metric("requests_running", "gauge", "Requests that run.", self.running)
        yield from _metric("requests_waiting", "gauge", "Requests that wait.", self.waiting)
        yield from _by_reason("requests_finished_total", "Requests that ended", self.finished)
        yield from _metric("preemptions_total", "counter", "Requests put back to wait.", self.preemptions)
        yield from _metric("swapped_total", "counter", "Of these, to the host.", self.swapped)
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
        yield from _by_reason("missed_tokens_total", "Tokens looked up and not found", self.missed_tokens)
        yield from _metric(
            "evicted_blocks_total", "counter", "Blocks given up for other tokens.", self.evicted_blocks
        )
        yield from _metric("host_tokens_total", "counter", "Tokens back from the host.", self.host_tokens)
        yield from _metric("disk_tokens_total", "counter", "Of these, from a disk.", self.disk_tokens)
        yield from _metric("disk_blocks", "gauge", "Blocks on the disk.", self.disk_blocks)
        yield from _by_reason("disk_errors_total", "Blocks not written or not read back", self.disk_errors)
        yield from _metric(
            "late_compiles_total", "counter", "Kernels compiled while steps ran.", self.late_compiles
        )
        yield from _histogram("queue_seconds", "Seconds until a request first ran.", self.queue)
        yield from _histogram("first_token_seconds", "Seconds to the first token.", self.first_token)
        yield from _histogram("between_tokens_seconds", "Seconds between tokens.", self.between_tokens)
        yield from _histogram("end_to_end_seconds", "Seconds to a request's last token.", self.end_to_end)


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP torchpaged_{name} {words}"
    yield f"# TYPE torchpaged_{name} {kind}"


def _metric(name: str, kind: str, words: str, value: Any) -> Iterator[str]:
    yield from _head(name, kind, words)
    yield f"torchpaged_{name} {value}"


def _by_reason(name: str, words: str, counts: dict[str, int]) -> Iterator[str]:
    yield from _head(name, "counter", f"{words}, by reason.")
    for reason, count in sorted(counts.items()):
        escaped = reason.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        yield f'torchpaged_{name}{{reason="{escaped}"}} {count}'


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
        swapped=scheduler.swapped,
        num_blocks=scheduler.pool.num_usable,
        blocks_used=used,
        useful_tokens=useful,
        utilisation=useful / (used * size) if used else 1.0,
        prompt_tokens=stats.prompt_tokens,
        new_tokens=stats.new_tokens,
        prefix_hit_rate=prefixes.hit_tokens / max(prefixes.queried_tokens, 1),
        missed_tokens=dict(prefixes.missed_tokens),
        evicted_blocks=prefixes.evicted_blocks,
        host_tokens=prefixes.host_tokens,
        disk_tokens=prefixes.disk_tokens,
        disk_blocks=0 if disk is None else disk.num_on_disk,
        disk_errors={} if disk is None else dict(disk.errors),
        late_compiles=stats.late_compiles,
        queue=stats.queue.copy(),
        first_token=stats.first_token.copy(),
        between_tokens=stats.between_tokens.copy(),
        end_to_end=stats.end_to_end.copy(),
    )
