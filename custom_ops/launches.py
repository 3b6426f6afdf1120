"""What watches the launches of kernels that are written in Python: nothing, or a profiler.

    launches.around = lambda op, arguments: some_context_manager      # None again: nothing

The functions behind the ops run at every eager call and while a graph is captured, also in compiled code,
where ranges of the caller's own would break the graph. They do not run at a replay, and kernels in C++ don't
come by here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

#: Called with the op's name and its positional arguments; the launch happens inside what it returns.
around: Callable[[str, tuple[Any, ...]], AbstractContextManager[None]] | None = None
