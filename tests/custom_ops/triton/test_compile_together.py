"""The kernels of one call are compiled side by side, once, and never within a capture; the compiler is
a stand-in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchpaged.custom_ops.triton import compile_together as module
from torchpaged.custom_ops.triton.compile_together import compile_together
from torchpaged.custom_ops.triton.kernel_store import Launch

DEVICE = torch.device("cuda", 1)


class Kernel:
    """Counts; its compilation ends when that of another kernel has begun."""

    def __init__(self, meeting: threading.Barrier | None = None, error: str = "") -> None:
        self.meeting, self.error = meeting, error
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        if self.meeting is not None:
            self.meeting.wait(200)
        if self.error:
            raise RuntimeError(self.error)
        self.compiled.append((arguments, grid, options))

    def load(self) -> Kernel:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((arguments, grid, options))


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices that threads made current."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(index: torch.device) -> Iterator[None]:
        current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_compiled", set())
    yield current


def launches(*kernels: Kernel) -> list[Launch]:
    return [Launch(kernel, (3,), (1, 2), {"TILE": i}) for i, kernel in enumerate(kernels)]


def test_side_by_side_on_the_right_device_and_once(devices: list[torch.device]) -> None:
    meeting = threading.Barrier(2)
    one, other = Kernel(meeting), Kernel(meeting)
    for _ in range(2):
        compile_together("key", DEVICE, *launches(one, other))
    assert one.compiled == [((1, 2), (3,), {"TILE": 0})]
    assert other.compiled == [((1, 2), (3,), {"TILE": 1})]
    assert not one.launched
    assert devices == [DEVICE, DEVICE]
    launches(one, other)[1]()
    assert other.launched == other.compiled, "a launch has the arguments that were compiled for"


def test_an_error_is_raised_and_not_remembered() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="too many registers"):
            compile_together("key", DEVICE, *launches(Kernel(), Kernel(error="too many registers")))


@pytest.mark.parametrize("where", ["capture", "cpu"])
def test_nothing_within_a_capture_or_on_a_cpu(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: where == "capture")
    kernel, other = Kernel(), Kernel()
    compile_together("key", torch.device("cpu") if where == "cpu" else DEVICE, *launches(kernel, other))
    assert not kernel.compiled
    assert not other.compiled
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compile_together("key", DEVICE, *launches(kernel, other))
    assert len(kernel.compiled) == len(other.compiled) == 1


def test_what_is_stored_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    one, stored, other = Kernel(), Kernel(), Kernel()
    monkeypatch.setattr(Launch, "is_stored", lambda self: self.kernel is stored)
    compile_together("key", DEVICE, *launches(one, stored, other))
    assert not stored.compiled
    assert len(one.compiled) == len(other.compiled) == 1


def test_a_kernel_alone_is_compiled_by_its_launch() -> None:
    kernel = Kernel()
    compile_together("key", DEVICE, *launches(kernel))
    assert not kernel.compiled


def test_a_grid_of_two_dimensions_is_refused() -> None:
    """A stored kernel would be launched over the first one alone."""
    kernel = Kernel()
    with pytest.raises(ValueError, match="grid: expected one dimension"):
        Launch(kernel, (4, 2), (torch.zeros(1),), {})()  # type: ignore[arg-type]
    assert not kernel.launched
