"""The start of a Generator behind its model: kernels compiled side by side, graphs captured, every other kind
of step run once; StartReport: what it was spent on, and what was compiled too late for it.

    report = start(model, rows, options, decided, loop, prefill_graphs, clock)"""

import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchpaged.custom_ops import compiles
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.engine.decisions import Decisions
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import DecodeRows
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.options import GeneratorOptions
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.engine.warm_up import WarmUp, step_forms
from torchpaged.graphs.bucketed import BucketedGraphs

_LOG = logging.getLogger("torchpaged.engine")


@dataclass
class StartPhase:
    """One part of a start.

    Attributes:
        name: "model" (fusing it, pools, backend), "kernels" (compiled side by side ahead of their
            launches), "decode graphs", "prefill graphs" or "warm-up".
        seconds: it took.
        count: kernels, graphs or steps.
        compiled: kernels and graphs of torch.compile that were compiled meanwhile, by all threads of the
            process; what came from a disk is none.
    """

    name: str
    seconds: float = 0.0
    count: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class StartReport:
    """What the start of a Generator was spent on.

    Attributes:
        phases: in their order.
        warmed_up: whether all that a step can need was compiled; then a later compilation is warned of.
        reason: why, or why not.
    """

    phases: tuple[StartPhase, ...]
    warmed_up: bool
    reason: str

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def compiled(self) -> int:
        """Kernels and graphs compiled in all phases."""
        return sum(phase.compiled for phase in self.phases)

    def __repr__(self) -> str:
        """In short; as a string it is a table."""
        return one_line(
            self,
            f"{self.seconds:.2f} s in {counted(len(self.phases), 'phase')}",
            f"{self.compiled} compiled",
            f"warmed_up={self.warmed_up}",
        )

    def __str__(self) -> str:
        lines = [f"{'phase':<15} {'seconds':>8} {'count':>6} {'compiled':>9}"]
        total = StartPhase("in all", self.seconds, 0, self.compiled)
        for phase in (*self.phases, total):
            count = str(phase.count) if phase.count else "-"
            lines.append(f"{phase.name:<15} {phase.seconds:>8.2f} {count:>6} {phase.compiled:>9}")
        return "\n".join([*lines, f"warm-up: {self.reason}"])


class StartClock:
    """Times the phases of a start.

    clock = StartClock()            # the phase "model" begins
    with clock.phase("decode graphs") as phase: phase.count = capture()
    report = clock.report(True, "automatic: on a GPU")
    """

    def __init__(self) -> None:
        compiles.watch_torch()
        self._phases = [StartPhase("model")]
        self._started, self._before = time.perf_counter(), compiles.count()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[StartPhase]:
        """Time the block; what lies behind it until the next one counts, too."""
        self._end()
        self._phases.append(StartPhase(name))
        yield self._phases[-1]

    def _end(self) -> None:
        compiles.watch_torch()  # it may have been imported
        phase, now, count = self._phases[-1], time.perf_counter(), compiles.count()
        phase.seconds, phase.compiled = now - self._started, count - self._before
        self._started, self._before = now, count

    def report(self, warmed_up: bool, reason: str) -> StartReport:
        """Of the phases so far."""
        self._end()
        return StartReport(tuple(self._phases), warmed_up, reason)


class LateCompiles:
    """Counts what is compiled while steps run.

    Args:
        stats: whose ``late_compiles`` count it.
        warns: whether the first one is logged as a warning: after a warm-up there should be none.
    """

    def __init__(self, stats: GeneratorStats, warns: bool) -> None:
        self._stats, self._warns = stats, warns

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the process compiles within the block."""
        before = compiles.count()
        try:
            yield
        finally:
            if compiles.count() != before:
                self._add(compiles.since(before))

    def _add(self, events: list[compiles.Compiled]) -> None:
        self._stats.late_compiles += len(events)
        if self._warns:
            self._warns = False
            said = ", ".join(
                f"{name} ({compiler}, {seconds:.1f} s)" for compiler, name, seconds in events[:4]
            )
            _LOG.warning(
                "compiled in the middle of serving, though the start was warmed up: %s; requests waited for "
                "it. Generator.stats.late_compiles counts such, and this is said once. Please report it",
                said,
            )


def start(
    model: PagedModelProtocol,
    rows: DecodeRows,
    options: GeneratorOptions,
    decided: Decisions,
    loop: DecodeLoop | None,
    prefill_graphs: PrefillGraphs | None,
    clock: StartClock,
) -> StartReport:
    """Do at once what ``decided`` says; returns what it took, with the phases that ``clock`` has already.

    Args:
        model: the paged model; none of its requests runs.
        rows, options, decided: of the engine.
        loop, prefill_graphs: of its steps; None where there are none.
        clock: of the start.

    Raises:
        CaptureError: a bucket could not be captured.
        Exception: what a step raised, with ``warm_up=True``; "auto" logs it and goes on.
    """
    device, progress = torch.device(model.device), options.progress
    on_gpu, columns, block_size = device.type == "cuda", rows.max_blocks_per_req, rows.block_size

    def steps() -> WarmUp:
        runners = prefill_graphs.runners if prefill_graphs is not None and decided.ahead else []
        forms = step_forms(
            options.max_batch_size,
            min(options.step_tokens, options.max_batch_size * columns * block_size),
            columns,
            block_size,
            captured=runners[-1].buckets[-1] if runners else 0,
            decodes=loop is None or not decided.ahead,
            one_prompt=options.batch_invariant,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0,
        )
        return WarmUp(model, rows, forms)

    if decided.warm_up and on_gpu:
        with clock.phase("kernels") as phase:
            graphs = _captured(loop, prefill_graphs) if decided.ahead else ()
            phase.count = steps().gather(graphs, progress)
    if loop is not None and decided.ahead:
        with clock.phase("decode graphs") as phase:
            loop.runner.capture()
            phase.count = _count(loop.runner) + _count(loop.runner.prefix_graphs)
        if prefill_graphs is not None:
            with clock.phase("prefill graphs") as phase:
                prefill_graphs.capture()
                phase.count = sum(map(_count, prefill_graphs.runners))
    if not decided.warm_up:
        return clock.report(False, decided.warm_up_reason)
    try:
        with clock.phase("warm-up") as phase:
            phase.count = steps().run(progress)  # by the graphs that there are now
            gc.collect()  # else what compiling left is visited in the middle of the first requests: 0.3 s
    except Exception as error:
        if options.warm_up is True:
            raise
        reason = f"automatic: a step of padding failed: {type(error).__name__}: {error}"
        _LOG.warning("the start goes on without its warm-up: %s", reason)
        return clock.report(False, reason)
    return clock.report(True, decided.warm_up_reason)


def _captured(
    loop: DecodeLoop | None, prefill_graphs: PrefillGraphs | None
) -> Iterator[tuple[BucketedGraphs, int]]:
    """The graphs to come, and their buckets."""
    if loop is not None:
        runner, second = loop.runner, loop.runner.prefix_graphs
        yield from ((runner, bucket) for bucket in runner.buckets)
        if second is not None:
            yield from ((second, bucket) for bucket in second.can_pay(second.buckets))
    for prefills in () if prefill_graphs is None else prefill_graphs.runners:
        yield from ((prefills, bucket) for bucket in prefills.buckets)


def _count(graphs: BucketedGraphs | None) -> int:
    return 0 if graphs is None else sum(report.captured for report in graphs.report())
