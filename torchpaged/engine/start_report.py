"""StartReport: what a Generator's start was spent on; and what was compiled too late for it.

print(generator.start_report)
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchpaged.custom_ops import compiles
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.engine.outputs import GeneratorStats

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
