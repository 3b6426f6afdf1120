"""capture_bucket: warm-up and capture of one bucket, timed, with garbage collection off; a failure names the
bucket and the op. And what buckets cost and did, as figures and a table.

    graph = capture_bucket(launch, backend, pool, report, device, warmup_iters=2, step="decode step",
                           eager=launch_eager)
    print(bucket_table(runner.report()))

Called where the step's inputs are padding, so that nothing is written into the caches."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.graphs.capture import CaptureBackend, Captured, synchronises


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


def capture_bucket(
    launch: Callable[[], Tensor],
    backend: CaptureBackend,
    pool: Any,
    report: BucketReport,
    device: torch.device,
    *,
    warmup_iters: int,
    step: str,
    eager: Callable[[], Tensor],
    advice: str = "",
    is_warm: bool = False,
) -> Captured:
    """Capture ``launch`` and write into ``report`` what it cost.

    Args:
        launch: the step over its static buffers.
        backend, pool: how it becomes a graph, and in which memory.
        report: of the bucket.
        device: where the step runs.
        warmup_iters: runs before the capture.
        step: what it is, for the error: "decode step".
        eager: the same step uncompiled, run once more after a failure to find the op.
        advice: what still works, for the end of the error.
        is_warm: steps like it have run: capture it at once, and only if that fails behind a warm-up.

    Raises:
        CaptureError: the step can't be captured; what the attempt took is freed.
    """
    if device.type == "cuda":
        # a capture begins with this anyway: what it frees would count as negative memory of the bucket
        torch.cuda.empty_cache()
    started, before = time.perf_counter(), device_memory(device)
    try:
        with no_garbage_collection():
            graph, warm = None, started
            if is_warm:
                # A kernel that a capture can't load; what else it is, is raised below.
                with contextlib.suppress(Exception):
                    graph = backend.capture(launch, pool)
            if graph is None:
                backend.warmup(launch, warmup_iters)
                warm = time.perf_counter()
                graph = backend.capture(launch, pool)
    except Exception as error:
        raise CaptureError(
            f"bucket {report.bucket}: the {step} could not be captured{_cause(error, eager, device, advice)}"
        ) from error
    ended = time.perf_counter()
    report.capture_ms, report.record_ms, report.captured = (ended - started) * 1e3, (ended - warm) * 1e3, True
    report.num_bytes = device_memory(device) - before
    return graph


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection during a capture could free device memory inside it. Collecting ahead of every capture is
    left to the caller: it takes longer than a capture does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cause(error: Exception, eager: Callable[[], Tensor], device: torch.device, advice: str) -> str:
    """Free what a failed capture took; which op it was, what it said, and the advice unless eager steps are
    refused, too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    culprit: str | None = None
    if not isinstance(error, torch.OutOfMemoryError):
        culprit, raised = find_culprit(eager, device)
        error = raised or error  # the compiler may say no more than that it saw an exception
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    # what torch.compile could not trace stands in the line behind the kind of failure
    explained = [line.split(": ", 1)[1] for line in more[:1] if line.lstrip().startswith("Explanation: ")]
    reason = ": ".join([first.strip(), *explained])
    advice = "" if isinstance(error, ArgumentError) else advice
    return f"{f' at {culprit}' if culprit else ''}: {reason}{advice}"
