"""A fault at any stage hurts the request that it is about, or the call that met it, and no other: the others
get the tokens that they get alone, all blocks come back, nothing hangs, and the engine goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import EACH, ENGINES, PROMPTS, TINY, faulty_model

from torchpaged import TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.device import LogitsRows, WholeStepRunner

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.timeout(120)  # a hang is a failure
POISON, CULPRIT = 90, 2  # a token of the prompt of request 2 alone
PROMPTS = [*PROMPTS[:CULPRIT], [50, 51, POISON, 53, 54], *PROMPTS[CULPRIT + 1 :]]
# The only one with an argument for the processor.
EACH = [
    SamplingParams(**{**vars(params), "extra_args": (float(i == CULPRIT),)}) for i, params in enumerate(EACH)
]


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    return faulty_model(make_llama(**TINY))


class Switch:
    """Raises ``error`` where it is asked, ``times`` times at most, once it is on.

    Attributes:
        raised: how often it did.
    """

    def __init__(self, error: BaseException, times: int) -> None:
        self.error, self.times, self.is_on, self.raised = error, times, False, 0

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.is_on and self.raised < self.times:
            self.raised += 1
            raise self.error

    def before(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Ask it in front of a method."""
        call = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            self()
            return call(*args, **kwargs)

        patch.setattr(owner, name, asked)


def at_forward(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generator.model, "fault", switch)


def at_culprit(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    model = generator.model
    patch.setattr(model, "fault", lambda call: switch() if POISON in model.tokens else None)


def at_sampling(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    if generator.loop is None:
        switch.before(patch, generator._stepper._packed, "sample")
    else:
        switch.before(patch, generator.loop.rows, "finish_rows")


def at_reading(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    if generator.loop is None:
        switch.before(patch, generator._stepper._acceptor, "accept")
    else:
        switch.before(patch, generator.loop, "collect")


def at_scheduling(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    switch.before(patch, generator.scheduler, "schedule")


def at_blocks(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    switch.before(patch, generator.pool, "allocate")


def at_capture(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    """Without graphs: where it would be launched."""
    if generator.runner is None:
        return at_forward(generator, switch, patch)
    switch.before(patch, WholeStepRunner, "_capture_one")


def at_processor(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    generator.asked = switch  # type: ignore[attr-defined]


#: The stage, the error, how often it comes, and whether it is about one request.
FAULTS: dict[str, tuple[Callable[..., None], BaseException, int, bool]] = {
    "a launch": (at_forward, RuntimeError("boom"), 1, False),
    "out of memory, twice": (at_forward, torch.OutOfMemoryError("boom"), 2, False),
    "a launch with a certain request": (at_culprit, RuntimeError("boom"), 10**9, True),
    "sampling": (at_sampling, RuntimeError("boom"), 1, False),
    "a logits processor": (at_processor, ValueError("boom"), 1, False),
    "a logits processor, at a certain request": (at_processor, ValueError("boom"), 10**9, True),
    "reading tokens": (at_reading, RuntimeError("boom"), 1, False),
    "scheduling": (at_scheduling, MemoryError("boom"), 1, False),
    "giving blocks": (at_blocks, MemoryError("boom"), 1, False),
    "out of memory at a capture": (at_capture, torch.OutOfMemoryError("boom"), 1, False),
    "Ctrl-C in a step": (at_forward, KeyboardInterrupt("boom"), 1, False),
}


def engine(model: Any, fault: str, options: dict[str, Any]) -> Generator:
    """Whose logits processor asks `at_processor`'s switch: always, or about rows of the culprit."""
    model.fault, about_one = lambda call: None, FAULTS[fault][3]

    def processor(logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        asked = getattr(generator, "asked", None)
        if asked is not None and (not about_one or bool((rows.extra_args[rows.seq_lens > 0] == 1).any())):
            asked()
        return logits

    shape = {"max_batch_size": 3, "max_seq_len": 64, "prefill_chunk_size": 16, "compile": False}
    shape |= {"logits_processor": processor, "max_extra_args": 1, "capture_ahead": False}
    generator = Generator(model, **{**shape, **options})
    return generator


@pytest.fixture(scope="module")
def want(model: Any) -> list[list[int]]:
    generator = engine(model, "a launch", {"graphs": False})
    found = [generator.generate([p], params)[0].token_ids for p, params in zip(PROMPTS, EACH, strict=True)]
    assert not any(POISON in tokens for tokens in found)
    return found


def assert_unharmed(generator: Generator, want: list[list[int]]) -> None:
    outputs = generator.generate(PROMPTS, EACH)
    assert [output.token_ids for output in outputs] == want
    assert generator.pool.num_used == 0
    assert not generator.has_unfinished


@pytest.mark.slow_cases("launches of 3-*", "graphs-*", but=("launches of 3-a l*", "launches of 3-out *"))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_with_a_background_loop(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fault: str
) -> None:
    """What passes hurts none; what one request causes ends that one; Ctrl-C in the thread ends those that
    there are."""
    inject, error, times, about_one = FAULTS[fault]
    switch, generator = Switch(error, times), engine(model, fault, options)
    with generator, monkeypatch.context() as patch:
        inject(generator, switch, patch)
        generator.start()
        switch.is_on = True
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(TorchpagedError, match="a step of the background loop raised") as caught:
                generator.generate(PROMPTS, EACH)
            assert caught.value.__cause__ is error
        else:
            outputs = generator.generate(PROMPTS, EACH)
            hurt = [i for i, output in enumerate(outputs) if output.finish_reason == "error"]
            assert hurt == ([CULPRIT] if about_one and switch.raised else [])
            for i, (output, tokens) in enumerate(zip(outputs, want, strict=True)):
                assert output.token_ids == ([] if i in hurt else tokens), i
            if hurt:
                assert "with this request alone raised" in str(outputs[CULPRIT].error)
                assert "boom" in str(outputs[CULPRIT].error)
        # Graphs hold what a processor did at their capture: it is asked there, and in steps that sample
        # prompts' tokens.
        assert switch.raised
        switch.is_on = False
        assert_unharmed(generator, want)


@pytest.mark.slow_cases("launches of 3-*", "graphs-*", but=("launches of 3-reading*", "launches of 3-out *"))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_without_one(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fault: str
) -> None:
    """The call whose step it is raises, and its requests end; a stream that was open goes on."""
    inject, error, times, _ = FAULTS[fault]
    switch, generator = Switch(error, times), engine(model, fault, options)
    with generator, monkeypatch.context() as patch:
        inject(generator, switch, patch)
        ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 3)]
        stream = generator.stream(ids)
        found: dict[int, list[int | None]] = {request: [] for request in ids}
        first = next(stream)
        found[first.request_id].append(first.token_id)
        switch.is_on = True
        with pytest.raises((type(error), TorchpagedError), match="boom"):
            generator.generate([PROMPTS[CULPRIT]], EACH[CULPRIT])
        switch.is_on = False
        assert generator._stepper.requests.keys() <= set(ids)
        for event in stream:
            found[event.request_id].append(event.token_id)
        assert list(found.values()) == [want[0], want[3]]
        assert_unharmed(generator, want)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_cancelled_at_every_stage(model: Any, want: list[list[int]], options: dict[str, Any]) -> None:
    """While it waits, between chunks of its prompt, at every token, in flight, and behind its end."""
    generator = engine(model, "a launch", options)
    others = [i for i in range(4) if i != 1]
    for stage in range(14):
        ids = {i: generator.submit(PROMPTS[i], EACH[i]) for i in range(4)}
        found: dict[int, list[int]] = {request: [] for request in ids.values()}
        steps = 0
        while generator.has_unfinished:
            if steps == stage:
                generator.cancel(ids[1])
            for event in generator.step():
                found[event.request_id] += [] if event.token_id is None else [event.token_id]
            steps += 1
        assert [found[ids[i]] for i in others] == [want[i] for i in others], stage
        assert found[ids[1]] == want[1][: len(found[ids[1]])], stage
        assert generator.pool.num_used == 0
    assert_unharmed(generator, want)


def test_files(model: Any, want: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a truncated file and a flipped bit are that call's error, while the loop runs."""
    path = tmp_path / "kept"
    with engine(model, "a launch", {"graphs": False}).start() as generator:
        generator.generate(PROMPTS, EACH)
        assert generator.snapshot(path)
        content = path.read_bytes()
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            switch = Switch(full, 1)
            switch.is_on = True
            switch.before(patch, Path, "write_bytes")
            with pytest.raises(OSError, match="No space left"):
                generator.snapshot(path)
        assert path.read_bytes() == content
        for broken in (content[:-100], content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], b""):
            path.write_bytes(broken)
            with pytest.raises(TorchpagedError, match="^path: "):
                generator.restore(path)
        assert_unharmed(generator, want)


def test_out_of_memory_at_the_start(make_llama: Callable[..., Any], want: list[list[int]]) -> None:
    """The model is as it was; a second try serves."""
    llama = make_llama(**TINY)
    before = llama.config._attn_implementation
    shape = {"max_batch_size": 3, "max_seq_len": 64, "block_size": 4, "compile": False}
    with pytest.MonkeyPatch.context() as patch:
        switch = Switch(torch.OutOfMemoryError("boom"), 1)
        switch.is_on = True
        switch.before(patch, WholeStepRunner, "_capture_one")
        with pytest.raises(torch.OutOfMemoryError, match="boom"):
            Generator(llama, **shape, capture_ahead=True)
    assert llama.config._attn_implementation == before
    plain = [SamplingParams(**{**vars(params), "extra_args": ()}) for params in EACH]
    with Generator(llama, **shape, capture_ahead=True) as generator:
        assert [output.token_ids for output in generator.generate(PROMPTS, plain)] == want
