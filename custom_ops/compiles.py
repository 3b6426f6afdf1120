"""What was compiled in this process: every compiler of ours reports here, and torch.compile does.

    before = compiles.count()
    ...
    late = compiles.since(before)     # [Compiled(compiler="nvrtc", name="decode.cu", seconds=1.9)]

What is loaded from a disk is not compiled. Threads share the list: it says what the process did meanwhile.
"""

import sys
import time
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    """One kernel, or one graph of torch.compile.

    Attributes:
        compiler: "nvrtc", "triton" or "torch.compile".
        name: the source's file, the kernel's, or the number that torch gives the compilation.
        seconds: it took.
    """

    compiler: str
    name: str
    seconds: float


_EVENTS: list[Compiled] = []


def note(compiler: str, name: str, seconds: float) -> None:
    """A compiler has made something."""
    _EVENTS.append(Compiled(compiler, name, seconds))


def count() -> int:
    """How often compilers have run so far."""
    return len(_EVENTS)


def since(before: int) -> list[Compiled]:
    """What was compiled since `count` was ``before``."""
    return _EVENTS[before:]


def watch_torch() -> None:
    """Have torch.compile report from now on, if it was imported: its import takes longer than a start."""
    if "torch._dynamo" not in sys.modules:
        return
    # No public call says that torch.compile compiled; tests/custom_ops/test_compiles.py notices a change.
    from torch._dynamo.callback import callback_handler

    if _ended not in callback_handler.end_callbacks:  # torch.compiler.reset() forgets them
        callback_handler.register_start_callback(_begun)
        callback_handler.register_end_callback(_ended)


_begun_at = 0.0  # torch compiles one at a time


def _begun(_: Any) -> None:
    global _begun_at
    _begun_at = time.perf_counter()


def _ended(arguments: Any) -> None:
    note("torch.compile", f"graph {arguments.compile_id}", time.perf_counter() - _begun_at)
