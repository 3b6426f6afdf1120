"""A fault at any stage hurts the request that it is about, and no other, whichever thread makes the steps:
the others get the tokens that they get alone, all blocks come back, nothing hangs, and the engine goes on."""

import errno
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_requests import EACH, ENGINES, LONG, PROMPTS, TINY, Letters, faulty_model

from torchpaged import TorchpagedError
from torchpaged.cache.cached_text import CachedText
from torchpaged.custom_ops.errors import RequestError
from torchpaged.engine import Generator, RequestOutput, SamplingParams
from torchpaged.engine.device import LogitsRows, WholeStepRunner
from torchpaged.engine.outputs import TextStream
from torchpaged.engine.sequence import Sequence

pytestmark = pytest.mark.timeout(300)  # a hang is a failure
POISON, CULPRIT, ALWAYS = 90, 2, 10**9  # a token of the prompt of request 2 alone
PROMPTS = [*PROMPTS[:CULPRIT], [50, 51, POISON, 53, 54], *PROMPTS[CULPRIT + 1 :]]
# The only one with an argument for the processor.
EACH = [
    SamplingParams(**{**vars(params), "extra_args": (float(i == CULPRIT),)}) for i, params in enumerate(EACH)
]
#: Room for 13 blocks in the pool: requests are put back, and their blocks go to the host.
FEW_BLOCKS: dict[str, Any] = {"num_blocks": 14, "host_cache_memory": 2**20, "preemption": "swap"}


@pytest.fixture(scope="module")
def model(llama: Any) -> Any:
    return faulty_model(llama)


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

    def before(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, about: Callable[..., bool] = lambda *_: True
    ) -> None:
        """Ask it in front of a method, where its arguments are ``about`` the request."""
        call = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            if about(*args):
                self()
            return call(*args, **kwargs)

        patch.setattr(owner, name, asked)


def is_culprit(sequence: Any, *_: Any) -> bool:
    return POISON in sequence.prompt


def at_forward(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generator.model, "fault", switch)


def at_prompt_of_culprit(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    model = generator.model
    patch.setattr(model, "fault", lambda call: switch() if POISON in model.tokens else None)


def at_many_rows(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    """More requests than fit."""

    def of_many(decodes: Any, chunks: Any) -> bool:
        return len(decodes) + len(chunks) > 1

    packed = generator._stepper._packed
    switch.before(patch, packed, "prefill", lambda chunks, decodes=(): of_many(decodes, chunks))
    switch.before(patch, packed, "decode", lambda decodes: of_many(decodes, ()))
    if generator.loop is not None:
        switch.before(patch, generator.loop.runner, "launch", lambda num_rows: num_rows > 1)


def at_sampling(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    if generator.loop is None:
        switch.before(patch, generator._stepper._packed, "sample")
    else:
        switch.before(patch, generator.loop.rows, "finish_rows")


def before_tokens(
    generator: Generator,
    switch: Switch,
    patch: pytest.MonkeyPatch,
    about: Callable[..., bool] = lambda *_: True,
) -> None:
    """In front of each token, those of a launch among them that are an event and nothing else."""
    patch.setattr(Sequence, "plain", property(lambda _: range(0), lambda *_: None))
    switch.before(patch, generator._stepper._acceptor, "accept", about)


def at_reading(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    if generator.loop is None:
        before_tokens(generator, switch, patch)
    else:
        switch.before(patch, generator.loop.launches, "collect")


def at_prefixes_of_culprit(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    poison = POISON.to_bytes(8, "little")

    def about(text: Any, *_: Any) -> bool:
        return poison in text._data

    original = CachedText.take

    def take(text: Any, **options: Any) -> Any:
        if about(text):
            switch()
        return original(text, **options)

    patch.setattr(CachedText, "take", take)


def at_capture(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    """Without graphs: where it would be launched."""
    if generator.runner is None:
        return at_forward(generator, switch, patch)
    switch.before(patch, WholeStepRunner, "_capture_one")


def at_processor(generator: Generator, switch: Switch, patch: pytest.MonkeyPatch) -> None:
    generator.asked = switch  # type: ignore[attr-defined]


def at(owner: Callable[[Any], Any], name: str, *about: Callable[..., bool]) -> Callable[..., None]:
    """In front of that method of an engine's part."""
    return lambda generator, switch, patch: switch.before(patch, owner(generator), name, *about)


#: Behind a decode step.
at_third_token = functools.partial(before_tokens, about=lambda s, *_: is_culprit(s) and s.num_output == 2)
at_scheduling = at(lambda g: g.scheduler, "schedule")
at_blocks = at(lambda g: g.pool, "allocate")
#: In the middle of a plan, behind others that got theirs.
at_blocks_of_culprit = at(lambda g: g.scheduler._demand, "lacks_after", is_culprit)
#: Of blocks that are found; none are at first.
at_fork = at(lambda g: g.pool, "fork_kept")
at_put_back = at(lambda g: g.scheduler.blocks, "put_back")
at_swap_out = at(lambda g: g.prefix_cache.host.blocks, "swap_out")
at_swap_in = at(lambda g: g.prefix_cache.host.blocks, "swap_in")
#: Of the culprit, whose stream alone looks for one.
at_stop_strings = at(lambda g: TextStream, "push", lambda stream, token: bool(stream._stop))


class Fault(NamedTuple):
    """The stage, the error, how often it comes, whether it is about one request, options of the engine."""

    inject: Callable[..., None]
    error: BaseException
    times: int = 1
    about_one: bool = False
    options: dict[str, Any] | None = None


BOOM = RuntimeError("boom")
FAULTS: dict[str, Fault] = {
    "a launch": Fault(at_forward, BOOM),
    "out of memory, twice": Fault(at_forward, torch.OutOfMemoryError("boom"), 2),
    "out of memory, of more than one": Fault(at_many_rows, torch.OutOfMemoryError("boom"), ALWAYS),
    "the prompt of a request": Fault(at_prompt_of_culprit, BOOM, ALWAYS, True),
    "a token of a request": Fault(at_third_token, BOOM, ALWAYS, True),
    "sampling": Fault(at_sampling, BOOM),
    "a logits processor": Fault(at_processor, ValueError("boom")),
    "a logits processor at a request": Fault(at_processor, ValueError("boom"), ALWAYS, True),
    "stop strings of a request": Fault(at_stop_strings, ValueError("boom"), ALWAYS, True),
    "reading tokens": Fault(at_reading, BOOM),
    "scheduling": Fault(at_scheduling, MemoryError("boom")),
    "giving blocks": Fault(at_blocks, MemoryError("boom")),
    "blocks of a request": Fault(at_blocks_of_culprit, MemoryError("boom"), ALWAYS, True),
    "a fork": Fault(at_fork, MemoryError("boom")),
    "prefixes of a request": Fault(at_prefixes_of_culprit, BOOM, ALWAYS, True),
    "preemption": Fault(at_put_back, BOOM, options=FEW_BLOCKS),
    "a launch while one is put back": Fault(at_forward, BOOM, options=FEW_BLOCKS),
    "a request while others are put back": Fault(at_prompt_of_culprit, BOOM, ALWAYS, True, FEW_BLOCKS),
    "a copy to the host": Fault(at_swap_out, BOOM, options=FEW_BLOCKS),
    "a copy from the host": Fault(at_swap_in, BOOM, options=FEW_BLOCKS),
    "out of memory at a capture": Fault(at_capture, torch.OutOfMemoryError("boom")),
    "Ctrl-C in a step": Fault(at_forward, KeyboardInterrupt("boom")),
    "always": Fault(at_forward, BOOM, ALWAYS),
}


def engine(model: Any, fault: str, options: dict[str, Any]) -> Generator:
    """Whose logits processor asks `at_processor`'s switch: always, or about rows of the culprit."""
    model.fault, about_one = lambda call: None, FAULTS[fault].about_one

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
    assert generator.scheduler.max_running == generator.scheduler.max_batch_size


# -------------------------------------------------------------------------------------------- ways to call it
def by_generate(generator: Generator, prompts: list[Any], each: list[Any]) -> list[RequestOutput]:
    return generator.generate(prompts, each)


def by_background(generator: Generator, prompts: list[Any], each: list[Any]) -> list[RequestOutput]:
    try:
        return generator.start().generate(prompts, each)
    except TorchpagedError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def by_stream(generator: Generator, prompts: list[Any], each: list[Any]) -> list[RequestOutput]:
    ids = [generator.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
    return collected(ids, generator.stream(ids))


def by_steps(generator: Generator, prompts: list[Any], each: list[Any]) -> list[RequestOutput]:
    ids = [generator.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True)]

    def events() -> Any:
        try:
            while generator.has_unfinished:
                yield from generator.step()
        except BaseException:
            for request in ids:  # `step` leaves them as they are
                generator.cancel(request)
            generator.step()
            raise

    return collected(ids, events())


def collected(ids: list[int], events: Any) -> list[RequestOutput]:
    found = {request: RequestOutput(request, [], [], "", "") for request in ids}
    for event in events:
        one = found[event.request_id]
        assert not one.finish_reason
        tokens = [] if event.token_id is None else [event.token_id]
        found[event.request_id] = replace(
            one, token_ids=one.token_ids + tokens, finish_reason=event.finish_reason or "", error=event.error
        )
    return list(found.values())


WAYS = {"generate": by_generate, "stream": by_stream, "steps": by_steps, "start()": by_background}


@pytest.mark.slow_cases(
    but=(
        *("generate-launches of 3-*", "stream-launches of 3-a token*", "stream-graphs-preemption"),
        *("steps-no graphs-a launch w*", "steps-launches of 3-out of memory, o*", "steps-graphs-always"),
        *("start()-graphs-the prompt*", "start()-launches of 3-out of memory, o*", "start()-graphs-Ctrl*"),
        *("start()-no graphs-always", "start()-no graphs-a fork"),
    )
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault(
    llama: Any,
    want: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    options: dict[str, Any],
    fault: str,
) -> None:
    """What passes hurts none; what one request causes ends that one with its error; what is no matter of a
    request is raised."""
    inject, error, times, about_one, more = FAULTS[fault]
    more = dict(more or {})
    model = faulty_model(llama, more.pop("num_blocks", 70))
    switch, generator = Switch(error, times), engine(model, fault, {**options, **more})
    each = EACH
    if inject is at_stop_strings:
        generator.tokenizer = Letters()
        each = [replace(params, stop=("\0",) * (i == CULPRIT)) for i, params in enumerate(EACH)]
    run = WAYS[way]
    with generator, monkeypatch.context() as patch:
        if inject in (at_swap_in, at_fork):  # something to find; with few blocks on the host
            generator.generate(PROMPTS, EACH)
            generator.generate([list(range(30, 78))] * (inject is at_swap_in), LONG)
        inject(generator, switch, patch)
        switch.is_on = True
        if isinstance(error, KeyboardInterrupt) or fault == "always":
            with pytest.raises(type(error), match="boom"):
                run(generator, PROMPTS, each)
        else:
            outputs = run(generator, PROMPTS, each)
            hurt = [i for i, output in enumerate(outputs) if output.finish_reason == "error"]
            assert hurt == ([CULPRIT] if about_one and switch.raised else [])
            for i, (output, tokens) in enumerate(zip(outputs, want, strict=True)):
                assert output.token_ids == (tokens[: len(output.token_ids)] if i in hurt else tokens), i
                assert output.finish_reason == ("error" if i in hurt else "length")
            for output in (outputs[i] for i in hurt):
                assert isinstance(output.error, RequestError)
                assert output.error.__cause__ is error
                assert "boom" in str(output.error)
        # Graphs hold what a processor did at their capture: it is asked there, and in steps that sample
        # prompts' tokens.
        assert switch.raised
        switch.is_on = False
        assert_unharmed(generator, want)


@pytest.mark.parametrize("way", WAYS)
def test_two_that_fail_among_samples_that_share_blocks(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """All samples of the culprit's prompt, and one of another: those beside them are whole, and a batch of
    three has one that is not at most times."""
    prompts, each = [PROMPTS[1], PROMPTS[CULPRIT], PROMPTS[0]], [replace(EACH[1], max_new_tokens=5)] * 3
    generator, run = engine(model, "a launch", ENGINES["graphs"]), WAYS[way]
    several = [[(p, s) for s in replace(e, n=3).samples()] for p, e in zip(prompts, each, strict=True)]
    flat, params = zip(*[pair for pairs in several for pair in pairs], strict=True)
    alone = [generator.generate([p], s)[0].token_ids for p, s in zip(flat, params, strict=True)]
    seed = params[1].seed

    def about(sequence: Any, *_: Any) -> bool:
        second = sequence.prompt.tolist() == PROMPTS[1] and sequence.sampling.seed == seed
        return bool(second and sequence.num_output == 3) or is_culprit(sequence)

    with generator, monkeypatch.context() as patch:
        switch = Switch(BOOM, ALWAYS)
        before_tokens(generator, switch, patch, about)
        switch.is_on = True
        outputs = run(generator, list(flat), list(params))
        assert [output.finish_reason == "error" for output in outputs] == [
            *(False, True, False),
            *(True, True, True),
            *(False, False, False),
        ]
        for output, tokens in zip(outputs, alone, strict=True):
            assert output.token_ids == (tokens if output.error is None else tokens[: len(output.token_ids)])
        assert len(outputs[1].token_ids) == 3
        switch.is_on = False
        assert_unharmed(generator, want)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_it_is_the_request_of_another_call(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The call whose step raised goes on; the open stream has the error. A request that comes meanwhile waits
    for the end of the search, and one that is cancelled then is."""
    generator = engine(model, "a launch", options)
    with generator, monkeypatch.context() as patch:
        ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, CULPRIT)]
        stream = generator.stream(ids)
        found = [next(stream)]
        switch = Switch(BOOM, ALWAYS)
        switch.is_on = True
        before_tokens(generator, switch, patch, is_culprit)
        gone = generator.submit(PROMPTS[1], EACH[1])
        while generator._stepper._bisection is None:
            generator.step()
        late = generator.submit(PROMPTS[1], EACH[1])
        generator.cancel(gone)
        assert generator.generate([PROMPTS[3]], EACH[3])[0].token_ids == want[3]
        found += stream
        of_ids = {request: [e for e in found if e.request_id == request] for request in ids}
        assert [event.token_id for event in of_ids[ids[0]]] == want[0]
        assert of_ids[ids[1]][-1].finish_reason == "error"
        rest = list(generator.stream())
        assert [e.token_id for e in rest if e.request_id == late] == want[1]
        switch.is_on = False
        assert_unharmed(generator, want)


def test_a_step_that_can_not_be_taken_back(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That error is raised at once, and by each call until it can be; then its requests go on."""
    generator = engine(model, "a launch", ENGINES["no graphs"])
    request = generator.submit(PROMPTS[0], EACH[0])
    with monkeypatch.context() as patch:
        lost, boom = Switch(RuntimeError("the device is lost"), ALWAYS), Switch(BOOM, 1)
        lost.is_on = boom.is_on = True
        lost.before(patch, type(generator.model.session), "reset")
        patch.setattr(generator.model, "fault", boom)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is lost"):
                generator.step()
        with pytest.raises(RuntimeError, match="the device is lost"):
            generator.submit(PROMPTS[1])
    assert [event.token_id for event in generator.stream([request])] == want[0]
    assert_unharmed(generator, want)


def test_a_tokenizer_that_can_not_repeat_what_it_did(
    model: Any, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step is taken back: its requests end, others that come are served."""
    generator = engine(model, "a launch", ENGINES["no graphs"])
    generator.tokenizer = Letters()
    ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 1)]
    events = []
    while sum(event.token_id is not None for event in events) < 4:
        events += generator.step()
    with monkeypatch.context() as patch:
        patch.setattr(Letters, "decode", lambda *_, **__: 1 // 0)
        switch = Switch(BOOM, 1)
        switch.is_on = True
        patch.setattr(generator.model, "fault", switch)
        events += generator.stream(ids)
    ends = [event for event in events if event.finish_reason]
    assert {event.request_id for event in ends} == set(ids)
    assert all("could not decode its tokens once more" in str(event.error) for event in ends)
    generator.tokenizer = None
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
