"""A line on the screen for each kernel of ours that Triton compiled, as NVRTC's have one (``cuda/jit.py``),
and a count of them (``custom_ops/compiles.py``).

Triton calls its compilation listener when a kernel is ready, and says whether it came from the disk. What it
calls earlier does not know that, or costs every launch; so the line stands behind the wait, with its seconds.
"""

import functools
import sys
from typing import Any

from torchpaged.custom_ops import compiles

_OURS = "torchpaged."


@functools.cache
def install() -> None:
    """Listen from now on, together with a listener that is there already."""
    from triton import knobs

    before = knobs.compilation.listener

    def listener(
        *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        if before is not None:
            before(
                src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit
            )
        _say(src, metadata, times, cache_hit)

    knobs.compilation.listener = listener


def _say(src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool) -> None:
    # a source read from a file has no function
    module = str(getattr(getattr(src, "fn", None), "__module__", ""))
    if cache_hit or not module.startswith(_OURS):
        return
    compiles.note("triton", src.name, times.total / 1e6)
    if sys.stderr is None or not sys.stderr.isatty():
        return
    architecture = metadata["target"].arch
    place = f"sm_{architecture}" if isinstance(architecture, int) else architecture
    print(
        f"torchpaged: compiled {src.name} for {place} in {times.total / 1e6:.1f} s",
        file=sys.stderr,
        flush=True,
    )
