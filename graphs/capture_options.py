"""How graphs are captured: what runners take and hand on, and its checks."""

from collections.abc import Callable
from typing import TypedDict

import torch

from torchpaged.custom_ops.checks import check_callable
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.addresses import Watch
from torchpaged.graphs.capture import CaptureBackend, CudaCapture, EagerCapture
from torchpaged.graphs.step import Ranges, StepSession

Progress = Callable[[int, int, str], None]


class CaptureOptions(TypedDict, total=False):
    """What runners hand on to `BucketedGraphs`, which says what it means."""

    capture: str | CaptureBackend
    warmup_iters: int
    warms_each: bool
    progress: Progress | None
    watch: Watch | None
    debug: bool | None
    ranges: Ranges | None
    session: StepSession | None


def capture_backend_for(capture: str | CaptureBackend, device: torch.device) -> CaptureBackend:
    """``capture``, or for "auto" CUDA graphs on a GPU and an eager capture elsewhere;
    raises `ArgumentError`."""
    check_capture(capture)
    if not isinstance(capture, str):
        return capture
    return CudaCapture(device) if device.type == "cuda" else EagerCapture()


def check_capture(capture: str | CaptureBackend) -> None:
    """Refuse what is neither "auto" nor a `CaptureBackend`."""
    if capture != "auto" and (isinstance(capture, type) or not isinstance(capture, CaptureBackend)):
        raise ArgumentError("capture", "'auto' or a CaptureBackend", repr(capture))


def check_progress(progress: Progress | None) -> None:
    """Refuse what can't be called."""
    check_callable("progress", progress, "progress(done, total, text)")
