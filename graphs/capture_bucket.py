"""capture_bucket: warm-up and capture of one bucket, timed, with garbage collection off; a failure names the
bucket and the op.

    graph = capture_bucket(launch, backend, pool, report, device, warmup_iters=2, step="decode step",
                           eager=launch_eager)

Called where the step's inputs are padding, so that nothing is written into the caches."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.graphs.capture import CaptureBackend, Captured
from torchpaged.graphs.report import BucketReport, device_memory, find_culprit


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
