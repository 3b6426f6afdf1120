"""A kernel report: what was counted and timed, what could not be placed, and all of it as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchpaged.profiling.kernel_report.data import ModuleKernels, Totals, UnmatchedKernels
from torchpaged.profiling.kernel_report.layers import layer_groups


@dataclass
class KernelReport(Totals):
    """Kernels by module.

    Attributes:
        kind: "kernel", or "op" where no GPU took part.
        steps: steps, or launches of a graph, that the counts and times add up.
        modules: in order of their first kernel.
        unmatched: kernels whose module is not known.
        missing: kernels that the eager run had and the replay does not have, by module; once per kind
            of launch.
    """

    kind: str
    steps: int = 1
    modules: list[ModuleKernels] = field(default_factory=list)
    unmatched: list[UnmatchedKernels] = field(default_factory=list)
    missing: list[ModuleKernels] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every kernel found its module and none of the eager run's is missing."""
        return not self.unmatched and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """As plain data; ``share`` is of ``total_us``, ``kernels_each`` of a layer group is per layer
        and step."""
        total = self.total_us

        def sums(count: int, total_us: float) -> dict[str, Any]:
            return {"count": count, "total_us": total_us, "share": total_us / total if total else 0.0}

        def row(entry: ModuleKernels | UnmatchedKernels) -> dict[str, Any]:
            return {
                **sums(entry.count, entry.total_us),
                "kernels": [dict(vars(kernel)) for kernel in entry.kernels],
            }

        groups = [group for group in layer_groups(self) if group.indices]
        return {
            "kind": self.kind,
            "steps": self.steps,
            "count": self.count,
            "total_us": total,
            "complete": self.is_complete,
            "layers": [
                {
                    "layers": group.name,
                    "num_layers": len(group.indices),
                    "kernels_each": group.kernels_each,
                    "unmatched_each": group.unmatched_each,
                    **sums(group.count, group.total_us),
                }
                for group in groups
            ],
            "modules": [{"module": entry.module, **row(entry)} for entry in self.modules],
            "unmatched": [{**entry.between._asdict(), **row(entry)} for entry in self.unmatched],
            "missing": [
                {"module": m.module, "kernels": [{"name": k.name, "count": k.count} for k in m.kernels]}
                for m in self.missing
            ],
        }
