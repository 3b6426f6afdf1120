"""Kernels that one call launches are compiled at the same time, each in a thread: the compilers leave
Python's lock free.

A mixed batch has two, prefill and decode. Only what a process compiles first gains by it; what is on disk is
loaded in no time either way.
"""

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

import torch

from torchpaged.custom_ops import ahead
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.kernel_store import Launch

_compiled: set[Hashable] = set()


def compile_together(key: Hashable, device: torch.device, *launches: Launch) -> None:
    """Compile the kernels of ``launches`` unless it was done for ``key``.

    The key need not tell everything: a kernel that is not compiled yet is so by its launch. Nothing is done
    within a capture, where another thread must not call the driver, and while kernels are gathered
    (`custom_ops.ahead`), which compiles these beside all others. What a compiler raises is raised here.
    """
    if (
        key in _compiled
        or launching.INTERPRET
        or device.type != "cuda"
        or ahead.here() is not None
        or torch.cuda.is_current_stream_capturing()
    ):
        return
    missing = [launch for launch in launches if not launch.is_stored()]
    if len(missing) > 1:
        for launch in missing:
            launch.kernel.load()  # imported by one thread
        with ThreadPoolExecutor(len(missing)) as threads:
            for done in [threads.submit(launch.compile, device) for launch in missing]:
                done.result()
    _compiled.add(key)
