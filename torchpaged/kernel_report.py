"""Kernels per layer, under a shorter name than `torchpaged.profiling.kernel_report`."""

from __future__ import annotations

from typing import Any

from torchpaged.profiling import kernel_report as _kernel_report
from torchpaged.profiling.kernel_report import *  # noqa: F403
from torchpaged.profiling.kernel_report import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(_kernel_report, name)
