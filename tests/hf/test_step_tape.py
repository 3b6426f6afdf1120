"""Decode steps of fused models on a CPU, run from a recording of their ops: the same bits as from Python, and
Python again wherever a step or a model is another one than was recorded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_models import FAMILIES, build
from many_threads import in_threads
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from torchpaged import ArgumentError, AttentionMetadata
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel, fuse, step_tape, unfuse
from torchpaged.hf.step_tape import StepTape, _Recording
from torchpaged.profiling.kernel_report.trace import module_ranges

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]
#: Families whose steps have products, norms or experts of transformers' own between ours.
FROM_PYTHON = {
    *("GptOss", "minicpm3", "granitemoehybrid", "granite_rope", "nemotron_h", "nemotron_dense"),
}
_WEIGHT = torch.ones(16, 16)
PROMPTS = [list(range(3, 9)), list(range(30, 50))]
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=3)
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "max_logprobs": 3}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number, of steps that ran from a recording."""
    count, run = [0], StepTape.run

    def counted(self: StepTape, *args: Any) -> Tensor:
        plain, called = args[-1], list[int]()
        out = run(self, *args[:-1], lambda: called.append(1) or plain())
        count[0] += not called
        return out

    monkeypatch.setattr(StepTape, "run", counted)
    return count


def generated(engine: Generator) -> list[Any]:
    return [(out.token_ids, out.logprobs) for out in engine.generate(PROMPTS, PARAMS)]


def step_of(num_reqs: int = 1) -> tuple[Tensor, AttentionMetadata]:
    metadata = AttentionMetadata.from_lists(
        query_lens=[1] * num_reqs,
        seq_lens=[5] * num_reqs,
        block_tables=[[1 + i] for i in range(num_reqs)],
        block_size=16,
    )
    return torch.arange(7, 7 + num_reqs), metadata


@pytest.fixture
def paged() -> PagedModel:
    model = build("Llama")
    fuse(model)
    return PagedModel(model, num_blocks=16)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_bits_as_from_python(name: str, replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log probabilities of two requests, the second of which comes later and makes the batch
    another one."""
    with Generator(build(name), fuse=True, **SIZES) as engine:
        found = [generated(engine), generated(engine)]
    assert (replayed[0] > 0) == (name not in FROM_PYTHON)
    monkeypatch.setattr(step_tape, "MAX_TOKENS", 0)
    with Generator(build(name), fuse=True, **SIZES) as engine:
        assert found == [generated(engine), generated(engine)]


def test_steps_of_rolling_windows_come_from_python(replayed: list[int]) -> None:
    """Their tables are made anew for each."""
    model = build("Mistral", max_position_embeddings=512)
    sizes = {**SIZES, "max_seq_len": 256, "block_size": 4, "prefill_chunk_size": 8, "share_prefixes": False}
    with Generator(model, fuse=True, **sizes) as engine:
        assert engine.model.rings.blocks is not None
        generated(engine)
    assert not replayed[0]


@torch.inference_mode()
def test_logits_stay_behind_later_steps(paged: PagedModel, replayed: list[int]) -> None:
    """Also of the steps that were recorded; and weights that are written are those of the next step."""
    step, other = step_of(), step_of(2)
    first = paged(*step)
    kept = [paged(*step) for _ in range(5)]
    assert replayed[0] == 3
    with torch.inference_mode(False), torch.no_grad():
        paged.model.lm_head.weight.mul_(2)
    assert torch.equal(paged(*step), 2 * first)
    assert all(torch.equal(each, first) for each in kept)
    assert torch.equal(paged(*other)[:1], 2 * first)
    assert paged(*step).shape == (1, 99) and replayed[0] == 4


@torch.inference_mode()
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda model: setattr(model.model.layers[0].mlp.up_proj.weight, "data", torch.ones(96, 64)),
            "where",
        ),
        (lambda model: setattr(model.config, "num_hidden_layers", 1), "num_hidden_layers"),
        (lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: setattr(model.model.norm, "variance_epsilon", 1.0), "variance_epsilon"),
    ],
)
def test_a_changed_model_is_refused_as_from_python(
    change: Callable[[Any], None], error: str, paged: PagedModel, replayed: list[int]
) -> None:
    step = step_of()
    for _ in range(4):
        paged(*step)
    assert replayed[0] == 1
    change(paged.model)
    with pytest.raises(ArgumentError, match=error):
        paged(*step)


@torch.inference_mode()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.lm_head.weight, "data", 2 * model.lm_head.weight),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(2 * model.lm_head.weight)),
        lambda model: setattr(model.model.norm, "weight", nn.Parameter(torch.ones(64))),
        lambda model: setattr(model.model.layers[1], "forward", lambda x, **_: x),
    ],
)
def test_what_python_takes_of_a_changed_model_is_taken(
    change: Callable[[Any], None], paged: PagedModel, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of()
    before, *_ = (paged(*step) for _ in range(4))
    with torch.inference_mode(False), torch.no_grad():
        change(paged.model)
    found = [paged(*step) for _ in range(4)]
    assert replayed[0] == 1 and not torch.equal(found[0], before)
    monkeypatch.setattr(step_tape, "MAX_TOKENS", 0)
    assert all(torch.equal(each, paged(*step)) for each in found)


@torch.inference_mode()
def test_a_class_with_another_forward_is_refused(paged: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step, kind = step_of(), type(paged.model.model)
    for _ in range(4):
        paged(*step)
    monkeypatch.setattr(kind, "forward", lambda self, **_: None)
    with pytest.raises(ArgumentError, match="the class LlamaModel has another forward"):
        paged(*step)


@torch.inference_mode()
def test_python_runs_where_something_looks_at_it(
    paged: PagedModel, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of modules, another call of all modules, autocast and training; then the recording again."""
    step, calls = step_of(), list[Any]()
    want, *_ = (paged(*step) for _ in range(4))
    for watching in (module_ranges(paged.model), ModuleTracker()):
        with watching:
            assert torch.equal(paged(*step), want)
    plain = nn.Module.__call__
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda self, *a, **k: calls.append(self) or plain(self, *a, **k))
        assert torch.equal(paged(*step), want)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArgumentError, match="bfloat16"):
        paged(*step)
    paged.model.train()
    paged(*step)
    paged.model.eval()
    with torch.inference_mode(False), torch.no_grad():
        paged(*step)
    assert calls and replayed[0] == 1
    assert torch.equal(paged(*step), want) and replayed[0] == 2


@torch.inference_mode()
def test_other_steps_come_from_python(paged: PagedModel, replayed: list[int]) -> None:
    """Of several tokens of a request, with groups of shared prefixes, by other ops, which may be
    a user's, and of many requests."""
    (ids, step), ops = step_of(), BACKEND_OPS["cpu"]
    many = torch.arange(step_tape.MAX_TOKENS + 1)
    for given in (
        (ids, replace(step, max_query_len=2), ops),
        (ids, replace(step, prefixes=object()), ops),
        (ids, step, ops._replace(linear=print)),
        (many, step, ops),
    ):
        tape = StepTape(paged.model)
        for _ in range(4):
            tape.run(*given, lambda: paged._cache.run(paged.model, ids, step))
    assert not replayed[0]


@torch.inference_mode()
def test_an_unfused_model_and_one_fused_again(paged: PagedModel, replayed: list[int]) -> None:
    step = step_of()
    want, *_ = (paged(*step) for _ in range(4))
    unfuse(paged.model)
    torch.testing.assert_close([paged(*step) for _ in range(5)], [want] * 5)
    assert replayed[0] == 1
    with torch.inference_mode(False):
        fuse(paged.model)
    assert all(torch.equal(paged(*step), want) for _ in range(4))
    assert replayed[0] == 2


@torch.inference_mode()
def test_code_of_users_is_never_left_out(replayed: list[int]) -> None:
    """A class of theirs, and a forward around the one that fuse() gave."""
    for number in range(2):
        model, seen = build("Llama"), list[int]()
        if number == 0:
            kind = type(model.model)
            model.model.__class__ = type("Mine", (kind,), {"__module__": "mine", "calls": seen})
        fuse(model)
        if number:
            forward = model.model.embed_tokens.forward
            model.model.embed_tokens.forward = lambda x: seen.append(1) or forward(x)  # noqa: B023
            model.model._torchpaged_fusion.look(model)
        paged, step = PagedModel(model, num_blocks=16), step_of()
        seen.clear()
        for _ in range(6):
            paged(*step)
        assert not replayed[0] and len(seen) == 6 * number


def test_a_step_that_breaks_off_is_computed_again(
    replayed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a replay of states, which it has moved on."""
    with Generator(build("lfm2"), fuse=True, share_prefixes=False, **SIZES) as engine:
        want, run = generated(engine), StepTape.run
        broken = list[int]()

        def run_broken(self: StepTape, *args: Any) -> Tensor:
            if replayed[0] > 25 and self._calls and not broken:
                broken.append(1)
                for func, given, options in self._calls[:7]:
                    func(*given, **options)
                raise RuntimeError("in the middle")
            return run(self, *args)

        monkeypatch.setattr(StepTape, "run", run_broken)
        assert [tokens for tokens, _ in generated(engine)] == [tokens for tokens, _ in want]
    assert broken and "in the middle" in caplog.text


def test_engines_of_one_model_in_threads(replayed: list[int]) -> None:
    model, found = build("qwen3_5_text"), dict[int, list[Any]]()
    with Generator(model, fuse=True, **SIZES) as one, Generator(model, fuse=True, **SIZES) as two:
        want = generated(one)

        def work(number: int, engine: Generator) -> None:
            found[number] = [generated(engine) for _ in range(3)]

        in_threads([lambda: work(0, one), lambda: work(1, two)])
    assert all([tokens for tokens, _ in each] == [t for t, _ in want] for x in found.values() for each in x)
    assert replayed[0] > 60


# -------------------------------------------------------------------------------------- what is not recorded
def _reads(x: Tensor, out: Tensor) -> None:
    x.mul(x.sum().item())


def _lists(x: Tensor, out: Tensor) -> None:
    out.new_empty(len(x.tolist()))


def _writes(x: Tensor, out: Tensor) -> None:
    x.add_(1)


def _unwritten(x: Tensor, out: Tensor) -> None:
    linear(x.new_empty(x.shape), out)  # as if something wrote it that is no op


def _unknown(x: Tensor, out: Tensor) -> None:
    linear(torch.sort(x).values, out)


def linear(x: Tensor, out: Tensor) -> None:
    BACKEND_OPS["cpu"].linear(x, _WEIGHT, out)


@torch.inference_mode()
@pytest.mark.parametrize("step", [_reads, _lists, _writes, _unwritten, _unknown])
def test_what_a_replay_would_miss_is_no_recording(step: Callable[[Tensor, Tensor], None]) -> None:
    x = torch.ones(1, 16)
    for inner, whole in ((step, False), (lambda x, out: None, True)):
        with _Recording() as recording:
            out = x.new_empty(1, 16)
            inner(x, out)
            linear(x.view(1, 16), out)
        assert recording.gives(out) == whole, recording.why_not


@torch.inference_mode()
def test_numbers_and_memory_that_are_new_each_time_differ() -> None:
    """A number of the host's, a tensor that is made of one, or from outside."""

    def recorded(number: float, bias: Tensor | None) -> list[Any]:
        x = _WEIGHT[:1]
        with _Recording() as recording:
            out = x.new_empty(1, 16)
            BACKEND_OPS["cpu"].linear(x, _WEIGHT, out, bias=bias, norm_weight=_WEIGHT[0], norm_eps=number)
        kept.append(recording)
        assert recording.gives(out)
        return recording.described

    kept: list[Any] = []
    assert recorded(1.0, None) == recorded(1.0, None) != recorded(2.0, None)
    assert recorded(1.0, torch.ones(16)) != recorded(1.0, torch.ones(16))
    assert recorded(1.0, _WEIGHT[0]) == recorded(1.0, _WEIGHT[0]) != recorded(1.0, _WEIGHT[1])
