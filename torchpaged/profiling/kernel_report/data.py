"""The rows of a kernel report: counts and times per module and kernel name, and what could not be placed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class KernelTime:
    """Runs of one kernel: how many, and their time in microseconds."""

    name: str
    count: int = 0
    total_us: float = 0.0


class _Sums:
    kernels: list[KernelTime]

    @property
    def count(self) -> int:
        """Kernel runs."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def total_us(self) -> float:
        """Their time, microseconds."""
        return sum(kernel.total_us for kernel in self.kernels)


@dataclass
class ModuleKernels(_Sums):
    """Kernels of one module, without those of its children. ``module`` None: launched outside the model."""

    module: str | None
    kernels: list[KernelTime] = field(default_factory=list)


class Between(NamedTuple):
    """Where an unmatched kernel ran: the module of the last matched kernel before it and of the next one; ""
    where there is none."""

    after: str | None
    before: str | None


#: In place of ``after``: compiled code launched it, called by the module that ``before`` names, or from
#: outside the model.
COMPILED = "(compiled code)"


@dataclass
class UnmatchedKernels(_Sums):
    """Kernels whose module can't be told, by their neighbours."""

    between: Between
    kernels: list[KernelTime] = field(default_factory=list)


class Totals:
    """Sums over kernels by module and those without one; ``steps``: how many steps they add up."""

    modules: list[ModuleKernels]
    unmatched: list[UnmatchedKernels]
    steps: int

    @property
    def count(self) -> int:
        """All kernel runs."""
        return sum(row.count for row in (*self.modules, *self.unmatched))

    @property
    def total_us(self) -> float:
        """All kernels' time, microseconds."""
        return sum(row.total_us for row in (*self.modules, *self.unmatched))
