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

    __repr__ = repr_of_fields

    def prometheus(self) -> str:
        """The same in Prometheus' text format, version 0.0.4; names begin with ``torchpaged_``."""
        lines: list[str] = []
        for field, (name, kind, words) in _METRICS.items():
            lines += [f"# HELP torchpaged_{name} {words}", f"# TYPE torchpaged_{name} {kind}"]
            lines += _samples(f"torchpaged_{name}", getattr(self, field))
        return "\n".join([*lines, ""])


#: Name, kind and words of each metric, by the field that has it.
_METRICS = {
    "running": ("requests_running", "gauge", "Requests that run."),
    "waiting": ("requests_waiting", "gauge", "Requests that wait."),
    "finished": ("requests_finished_total", "counter", "Requests that ended, by reason."),
    "preemptions": ("preemptions_total", "counter", "Requests put back to wait."),
    "swapped": ("swapped_total", "counter", "Of these, to the host."),
    "num_blocks": ("blocks", "gauge", "Blocks of the pool."),
    "blocks_used": ("blocks_used", "gauge", "Blocks in use."),
    "useful_tokens": ("useful_tokens", "gauge", "Tokens in blocks in use."),
    "utilisation": ("utilisation_ratio", "gauge", "Share of places in blocks in use with a token."),
    "prompt_tokens": ("prompt_tokens_total", "counter", "Tokens of prompts."),
    "new_tokens": ("new_tokens_total", "counter", "Tokens of outputs."),
    "prefix_hit_rate": ("prefix_hit_ratio", "gauge", "Share of tokens looked up that were found."),
    "missed_tokens": ("missed_tokens_total", "counter", "Tokens looked up and not found, by reason."),
    "evicted_blocks": ("evicted_blocks_total", "counter", "Blocks given up for other tokens."),
    "host_tokens": ("host_tokens_total", "counter", "Tokens back from the host."),
    "disk_tokens": ("disk_tokens_total", "counter", "Of these, from a disk."),
    "disk_blocks": ("disk_blocks", "gauge", "Blocks on the disk."),
    "disk_errors": ("disk_errors_total", "counter", "Blocks not written or not read back, by reason."),
    "late_compiles": ("late_compiles_total", "counter", "Kernels compiled while steps ran."),
    "queue": ("queue_seconds", "histogram", "Seconds until a request first ran."),
    "first_token": ("first_token_seconds", "histogram", "Seconds to the first token."),
    "between_tokens": ("between_tokens_seconds", "histogram", "Seconds between tokens."),
    "end_to_end": ("end_to_end_seconds", "histogram", "Seconds to a request's last token."),
}


def _samples(name: str, value: Any) -> Iterator[str]:
    """The lines of one metric: a number, counts by reason, or a histogram."""
    if isinstance(value, dict):
        for reason, count in sorted(value.items()):
            escaped = reason.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'{name}{{reason="{escaped}"}} {count}'
    elif isinstance(value, LatencyHistogram):
        below = 0
        for bound, count in zip((*BOUNDS, "+Inf"), value.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {value.total}"
        yield f"{name}_count {value.count}"
    else:
        yield f"{name} {value}"


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
