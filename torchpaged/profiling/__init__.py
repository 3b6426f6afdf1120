"""Profiling: ranges of the host's work for NVTX and torch.profiler, and kernels per layer
in ``kernel_report``.

docs/profiling.md shows both. The library's code opens ranges by `range`, which does nothing until
somebody profiles.
"""

from torchpaged.profiling.ranges import (
    DOMAIN,
    NOTHING,
    ProfilingUnavailableError,
    check_writable,
    enabled,
    is_on,
    range,
    ranged_attention,
    recorded,
    trace,
)

__all__ = [
    "DOMAIN",
    "NOTHING",
    "ProfilingUnavailableError",
    "check_writable",
    "enabled",
    "is_on",
    "range",
    "ranged_attention",
    "recorded",
    "trace",
]
