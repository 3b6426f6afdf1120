"""Kernels per layer: which module of a model launches which kernels, also when a CUDA graph launches them.

    report = kernels_per_layer(lambda: runner.launch_eager(8), model, replay=lambda: runner.replay(8))
    report.to_dict()  # of a KernelReport
    rich.print(report_table(report))

The eager step runs with a range per module; each kernel belongs to the innermost module around its launch. A
replay has no modules: its kernels take those of the eager run's kernels of the same name and order
(`match_kernels`), and what fits nowhere is reported as unmatched, with the modules of its neighbours. On a
CPU it reports the same of ops. ``report_table`` needs rich.
"""

from typing import TYPE_CHECKING, Any

from torchpaged.profiling.kernel_report.attribute import kernels_per_layer
from torchpaged.profiling.kernel_report.report import KernelReport, layer_groups

if TYPE_CHECKING:
    from torchpaged.profiling.kernel_report.table import report_table

__all__ = ["KernelReport", "kernels_per_layer", "layer_groups", "report_table"]


def __getattr__(name: str) -> Any:
    if name == "report_table":  # rich is optional
        from torchpaged.profiling.kernel_report.table import report_table

        return report_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
