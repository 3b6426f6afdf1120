"""What buckets cost and did: figures, a table, and the name of the op that kept a step from being captured.

print(bucket_table(runner.report()))"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.graphs.capture import synchronises


@dataclass
class BucketReport:
    """What a bucket cost and did.

    Attributes:
        bucket: rows of the graph: requests that decode, or tokens of a prefill.
        capture_ms: warm-up and capture, milliseconds; compilation, where there is one, falls into
            the warm-up.
        record_ms: the capture alone, milliseconds.
        num_bytes: device memory taken, bytes.
        hits: replays.
        padded_rows: rows replayed that held no request, or no token.
        captured: whether the graph exists.
    """

    bucket: int
    capture_ms: float = 0.0
    record_ms: float = 0.0
    num_bytes: int = 0
    hits: int = 0
    padded_rows: int = 0
    captured: bool = False

    def __repr__(self) -> str:
        cost = [f"captured in {self.capture_ms:.1f} ms", of_bytes(self.num_bytes)]
        return one_line(
            self,
            f"bucket={self.bucket}",
            *(cost if self.captured else ["not captured"]),
            counted(self.hits, "replay"),
            counted(self.padded_rows, "padded row"),
        )


def bucket_table(reports: Sequence[BucketReport], bucket: str = "bucket", padded: str = "padded rows") -> str:
    """The reports as lines of text with a heading, in which ``bucket`` and ``padded`` name the first and last
    column; buckets that were not captured show dashes."""
    lines = [
        f"{bucket:>6} {'warm-up + capture ms':>20} {'capture ms':>10} {'MiB':>8} {'replays':>8} {padded:>11}"
    ]
    for r in reports:
        cost = (
            f"{r.capture_ms:>20.1f} {r.record_ms:>10.1f} {r.num_bytes / 2**20:>8.1f}"
            if r.captured
            else f"{'-':>20} {'-':>10} {'-':>8}"
        )
        lines.append(f"{r.bucket:>{len(bucket)}} {cost} {r.hits:>8} {r.padded_rows:>{len(padded)}}")
    return "\n".join(lines)


def device_memory(device: torch.device) -> int:
    """Bytes of the GPU that torch holds; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def describe_bucket(bucket: int, device: torch.device, what: str = "batch") -> str:
    """A bucket and what memory is left, for a progress bar."""
    if device.type != "cuda":
        return f"{what} {bucket}"
    free, _ = torch.cuda.mem_get_info(device)
    return f"{what} {bucket}, {free / 2**30:.1f} GiB free"


class _Watch(TorchDispatchMode):
    """Remembers the op that fails, or that hands a device value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.culprit: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.culprit is None and synchronises(func, args):
            self.culprit = str(func)
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.culprit = self.culprit or str(func)
            raise


def find_culprit(launch: Callable[[], Tensor], device: torch.device) -> tuple[str | None, Exception | None]:
    """By running an uncompiled step once more: the first op that synchronises or fails, and what the step
    raises; None where all goes well."""
    watch, on_gpu, raised = _Watch(), device.type == "cuda", None
    mode = torch.cuda.get_sync_debug_mode() if on_gpu else 0
    try:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        with watch:
            launch()
    except Exception as error:
        raised = error
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode(mode)
    return watch.culprit, raised
