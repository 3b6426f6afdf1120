"""Profiling: ranges of the host's work for NVTX and torch.profiler, and kernels per layer
in ``kernel_report``.

docs/profiling.md shows both. The library's code opens ranges by `range`, which does nothing until
a profile is taken.
"""

from torchpaged.profiling.ranges import ProfilingUnavailableError, enabled, range, recorded, trace

__all__ = ["ProfilingUnavailableError", "enabled", "range", "recorded", "trace"]
