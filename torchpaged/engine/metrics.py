"""What a Generator is doing, for people and for Prometheus: load, memory, latencies.

    metrics = generator.metrics()
    print(metrics.running, metrics.utilisation, metrics.first_token.percentile(0.99))
    text = metrics.prometheus()

While steps run there are counters only; everything else is computed when it is asked for.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from torchpaged.cache.disk_tier import DiskTier
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.engine.outputs import BOUNDS, GeneratorStats, LatencyHistogram
from torchpaged.engine.scheduler import Scheduler


def _metric(name: str, words: str) -> Any:
    """A field that Prometheus knows by this name; its end says of what kind it is."""
    kinds = {"total": "counter", "seconds": "histogram"}
    return field(metadata={"prometheus": (name, kinds.get(name.split("_")[-1], "gauge"), words)})


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

    running: int = _metric("requests_running", "Requests that run.")
    waiting: int = _metric("requests_waiting", "Requests that wait.")
    finished: dict[str, int] = _metric("requests_finished_total", "Requests that ended, by reason.")
    preemptions: int = _metric("preemptions_total", "Requests put back to wait.")
    swapped: int = _metric("swapped_total", "Of these, to the host.")
    num_blocks: int = _metric("blocks", "Blocks of the pool.")
    blocks_used: int = _metric("blocks_used", "Blocks in use.")
    useful_tokens: int = _metric("useful_tokens", "Tokens in blocks in use.")
    utilisation: float = _metric("utilisation_ratio", "Share of places in blocks in use with a token.")
    prompt_tokens: int = _metric("prompt_tokens_total", "Tokens of prompts.")
    new_tokens: int = _metric("new_tokens_total", "Tokens of outputs.")
    prefix_hit_rate: float = _metric("prefix_hit_ratio", "Share of tokens looked up that were found.")
    missed_tokens: dict[str, int] = _metric(
        "missed_tokens_total", "Tokens looked up and not found, by reason."
    )
    evicted_blocks: int = _metric("evicted_blocks_total", "Blocks given up for other tokens.")
    host_tokens: int = _metric("host_tokens_total", "Tokens back from the host.")
    disk_tokens: int = _metric("disk_tokens_total", "Of these, from a disk.")
    disk_blocks: int = _metric("disk_blocks", "Blocks on the disk.")
    disk_errors: dict[str, int] = _metric(
        "disk_errors_total", "Blocks not written or not read back, by reason."
    )
    late_compiles: int = _metric("late_compiles_total", "Kernels compiled while steps ran.")
    queue: LatencyHistogram = _metric("queue_seconds", "Seconds until a request first ran.")
    first_token: LatencyHistogram = _metric("first_token_seconds", "Seconds to the first token.")
    between_tokens: LatencyHistogram = _metric("between_tokens_seconds", "Seconds between tokens.")
    end_to_end: LatencyHistogram = _metric("end_to_end_seconds", "Seconds to a request's last token.")

    __repr__ = repr_of_fields

    def prometheus(self) -> str:
        """The same in Prometheus' text format, version 0.0.4; names begin with ``torchpaged_``."""
        lines: list[str] = []
        for each in fields(self):
            name, kind, words = each.metadata["prometheus"]
            lines += [f"# HELP torchpaged_{name} {words}", f"# TYPE torchpaged_{name} {kind}"]
            lines += _samples(f"torchpaged_{name}", getattr(self, each.name))
        return "\n".join([*lines, ""])


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
    own: dict[str, Any] = {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preemptions": scheduler.preemptions,
        "swapped": scheduler.swapped,
        "blocks_used": used,
        "useful_tokens": useful,
        "utilisation": useful / (used * size) if used else 1.0,
        "prefix_hit_rate": prefixes.hit_tokens / max(prefixes.queried_tokens, 1),
        "disk_blocks": 0 if disk is None else disk.num_on_disk,
        "disk_errors": {} if disk is None else dict(disk.errors),
    }
    others = {each.name for each in fields(EngineMetrics)} - own.keys()

    def counters(record: object) -> dict[str, Any]:
        """Of these names, as they are now."""
        return {name: deepcopy(count) for name, count in vars(record).items() if name in others}

    return EngineMetrics(**own, **counters(prefixes), **counters(stats))  # a name in both raises
