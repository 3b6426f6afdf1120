"""BucketedGraphs over static inputs of its own making: no attention, no metadata, no runner."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError, CaptureError
from torchpaged.graphs import BucketedGraphs, TapeCapture
from torchpaged.graphs.capture import EagerCapture


class Numbers:
    """Static inputs of eight numbers; padding is -1."""

    def __init__(self) -> None:
        self.numbers, self.scale = torch.arange(8.0), torch.ones(())
        self.resets = 0

    def tensors(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers, "scale": self.scale}

    def view(self, bucket: int) -> tuple[Tensor, Tensor]:
        return self.numbers[:bucket], self.scale

    @contextlib.contextmanager
    def padding(self, bucket: int) -> Iterator[None]:
        before = self.numbers.clone()
        self.numbers[:bucket] = -1.0
        try:
            yield
        finally:
            self.numbers.copy_(before)

    def reset(self) -> None:
        self.resets += 1


def graphs(inputs: Numbers, step: Any = None, **options: Any) -> BucketedGraphs:
    return BucketedGraphs(
        inputs,
        lambda bucket: step or (lambda numbers, scale: numbers * scale + bucket),
        buckets=[2, 8],
        device="cpu",
        **{"capture": TapeCapture(), **options},
    )


def test_each_bucket_has_its_own_callable_and_replays_what_the_inputs_hold() -> None:
    inputs = Numbers()
    g = graphs(inputs)
    g.capture()
    assert inputs.numbers.tolist() == list(range(8)), (
        "a capture runs on padding and leaves the inputs as they were"
    )
    inputs.scale.fill_(10.0)
    assert g.start(2).output.tolist() == [2.0, 12.0]
    assert g.start(3).output.tolist() == [8.0 + 10 * n for n in range(8)]
    inputs.numbers.zero_()
    assert g.start(1).output.tolist() == [2.0, 2.0]
    assert [(r.bucket, r.hits, r.padded_rows) for r in g.report()] == [(2, 2, 1), (8, 1, 5)]
    assert g.histogram() == {1: 1, 2: 1, 3: 1}
    assert g.start_eager(3, lambda numbers, scale: numbers + scale).tolist() == [10.0] * 3


def test_a_bucket_is_captured_when_it_is_asked_for() -> None:
    g = graphs(Numbers())
    with pytest.raises(CaptureError, match="bucket 2: not captured yet"):
        g.start(1)
    assert g.start(1, capture=True).output.tolist() == [2.0, 3.0]
    assert g.is_captured(2)
    assert not g.is_captured(8)
    assert g.capture_for(7) == 8
    assert g.is_captured(8)
    with pytest.raises(ArgumentError, match="1 to 8 rows"):
        g.start(9)


def test_what_broke_off_is_put_right_before_the_next_start() -> None:
    inputs, fail = Numbers(), [False]

    def step(numbers: Tensor, scale: Tensor) -> Tensor:
        if fail[0]:
            raise KeyboardInterrupt
        return numbers * scale

    g = graphs(inputs, step, capture=EagerCapture())
    g.capture()
    assert inputs.resets == 0
    fail[0] = True
    for call in (lambda: g.start(2), lambda: g.start_eager(2, step)):
        with pytest.raises(KeyboardInterrupt):
            call()
    fail[0] = False
    before = inputs.resets  # the second of the two began with a reset
    g.start(2)
    g.start(2)
    assert (before, inputs.resets) == (1, 2)


def test_a_tensor_that_moved_is_noticed() -> None:
    inputs = Numbers()
    g = graphs(inputs, debug=True)
    g.capture()
    inputs.scale = inputs.scale.clone()
    with pytest.raises(CaptureError, match="scale: expected at 0x"):
        g.start(2)


def test_a_capture_that_fails_names_the_bucket_and_the_op() -> None:
    g = graphs(Numbers(), lambda numbers, scale: numbers * scale.item())
    with pytest.raises(CaptureError, match=r"bucket 8: the step could not be captured at aten\.item"):
        g.capture()
