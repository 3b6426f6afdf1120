"""Ctrl-C at any line of the decode loop, its runner, its rows and its rings: the requests go on to the same
tokens, or an error says that they can't."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.engine import Generator, SamplingParams, decode_loop
from torchpaged.engine.device import launch_tokens, prefill_tokens, request_rows, row_tensors, whole_steps
from torchpaged.graphs import bucketed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DEVICE = (launch_tokens, prefill_tokens, request_rows, row_tensors, whole_steps)
TRACED = {str(Path(module.__file__)) for module in (decode_loop, *DEVICE, bucketed) if module.__file__}
PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44, 45, 46], [70], [15, 16]]
LENGTHS = [9, 4, 13, 7]
POINTS = 90


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the traced files that runs while it is on; ``None``:
    counts them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.where = at, 0, ""

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in TRACED else None

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def run(model: Any, at: int | None) -> tuple[list[list[int]], Interrupt]:
    """All requests to their ends, through an interrupt at line ``at``."""
    generator = Generator(
        model,
        block_size=4,
        max_batch_size=3,
        max_seq_len=32,
        prefill_chunk_size=16,
        compile=False,
        steps_per_launch=3,
        buckets=[1, 2, 3],
        num_blocks=26,
        lookahead=0,
        capture_ahead=False,
    )
    params = [
        SamplingParams(
            max_new_tokens=n, temperature=0.9 * (i % 2), seed=i, repetition_penalty=1.2, ignore_eos=True
        )
        for i, n in enumerate(LENGTHS)
    ]
    requests = [generator.submit(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    sequences = [generator._stepper.requests[request] for request in requests]
    interrupt = Interrupt(at)
    for _ in range(100):
        if not generator.has_unfinished:
            break
        try:
            with interrupt:
                generator.step()
        except KeyboardInterrupt:
            interrupt.at = 0
    return [sequence.output for sequence in sequences], interrupt


@pytest.fixture(scope="module")
def uninterrupted(model: Any) -> tuple[list[list[int]], int]:
    tokens, interrupt = run(model, None)
    assert [len(t) for t in tokens] == LENGTHS
    return tokens, interrupt.count


@pytest.mark.parametrize("share", range(POINTS // 15))
def test_no_token_is_lost_or_doubled(
    model: Any, uninterrupted: tuple[list[list[int]], int], share: int
) -> None:
    want, lines = uninterrupted
    wrong, refused = [], []
    for point in range(share, POINTS, POINTS // 15):
        at = 1 + point * lines // POINTS
        try:
            tokens, interrupt = run(model, at)
        except TorchpagedError as error:
            refused.append((at, str(error)))
            continue
        assert interrupt.where
        if tokens != want:
            wrong.append((at, interrupt.where, tokens))
    assert not wrong
    assert all("make a new Generator" in message for _, message in refused), refused
