"""Beam searches of an accelerated model: their steps come from a graph, their tokens are transformers'."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import torchpaged.hf as hf
from torchpaged.engine import generate_call
from torchpaged.engine.replayed_steps import ReplayedSteps
from torchpaged.graphs.capture import EagerCapture
from torchpaged.hf.row_changes import LateCopies

pytestmark = pytest.mark.filterwarnings("ignore:torchpaged. this call of an accelerated model")


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ReplayedSteps]:
    """The steps of each call."""
    made = list[ReplayedSteps]()

    class Noted(ReplayedSteps):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(generate_call, "ReplayedSteps", Noted)
    return made


def prompts(rows: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    ids[-1, :padding] = mask[-1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("rows", "padding", "options"),
    [
        (1, 0, {"num_beams": 10}),
        (2, 4, {"num_beams": 3, "num_return_sequences": 2}),
        (2, 0, {"num_beams": 2, "eos_token_id": list(range(30)), "length_penalty": 2.0}),
        (1, 0, {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3}),
    ],
    ids=["ten", "padded", "ends", "processors"],
)
def test_tokens_are_transformers(
    model: Any, calls: list[ReplayedSteps], fuse: bool, rows: int, padding: int, options: dict[str, Any]
) -> None:
    """Across blocks of 16, with forks and copies in most steps."""
    call = {**prompts(rows, 9, padding), "do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(**call | options)
    hf.accelerate(model, max_batch_size=3, max_seq_len=64, fuse=fuse)
    assert torch.equal(model.generate(**call | options), want)
    if want.shape[1] == 49:
        assert [steps.num_replayed for steps in calls] == [37]  # of 39, those behind the captured one
    assert torch.equal(model.generate(**call | options), want)


@torch.no_grad()
def test_late_copies_are_those_made_at_once(model: Any) -> None:
    """Of two reorderings without a step between, of one whose step is not replayed, of more copies than a
    step makes; those of a step are not made again by the next one."""
    orders = [([0, 0, 1], [1, 1, 2]), ([1, 1, 2],), (), ([0, 0, 0, 0, 2],)]
    ways, seen = ("at once", "late"), dict[str, list[torch.Tensor]]()
    for way in ways:
        cache = hf.PagedCache(model.config, max_batch_size=5, max_seq_len=64)
        model.set_attn_implementation("torchpaged")
        steps = [model(**prompts(3, 9), past_key_values=cache).logits[:, -1:]]
        late = LateCopies(cache, 2, torch.device("cpu"))
        cache.late_copies = late if way == "late" else None
        for parents in orders:
            for order in parents:
                cache.reorder_cache(torch.tensor(order))
            if len(parents) == 2:
                late.flush()
            late.stage()
            late.launch()
            ids = torch.arange(3, 3 + len(cache.rows.blocks))[:, None]
            steps.append(model(ids, past_key_values=cache).logits)
        seen[way] = steps
    for one, other in zip(*(seen[way] for way in ways), strict=True):
        assert torch.equal(one, other)


def test_beams_that_draw(model: Any, calls: list[ReplayedSteps]) -> None:
    call = {**prompts(1, 9), "do_sample": True, "num_beams": 3, "max_new_tokens": 20, "eos_token_id": None}
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    want = model.generate(**call)
    hf.accelerate(model, max_batch_size=3, max_seq_len=64)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**call), want)
    assert calls[0].num_replayed > 0


def test_steps_that_can_not_be_captured(
    model: Any, calls: list[ReplayedSteps], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = {**prompts(1, 9), "num_beams": 4, "max_new_tokens": 12, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(**call)
    hf.accelerate(model, max_batch_size=3, max_seq_len=64)

    tries = list[Any]()

    def refuse(self: Any, step: Any, pool: Any) -> Any:
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(EagerCapture, "capture", refuse)
    monkeypatch.setattr("torchpaged.engine.replayed_steps.HostCapture", type(None))
    assert torch.equal(model.generate(**call), want)
    assert calls[0].num_replayed == 0
    assert len(tries) == 1  # of a call
    assert "launched from Python: operation not permitted" in caplog.text


@pytest.mark.parametrize("when", ["before", "behind"])
def test_hooks_run_at_every_step(model: Any, calls: list[ReplayedSteps], when: str) -> None:
    """They may count steps, or add what differs from step to step."""
    seen = list[int]()

    def steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.shape[1])
        return output * (1 + len(seen) % 3)

    call = {**prompts(1, 9), "num_beams": 3, "max_new_tokens": 12, "eos_token_id": None}
    model.set_attn_implementation("eager")
    norm = model.model.layers[0].input_layernorm
    hook = norm.register_forward_hook(steer)
    want = model.generate(**call)
    if when == "behind":
        hook.remove()
    hf.accelerate(model, max_batch_size=3, max_seq_len=64)
    if when == "behind":
        norm.register_forward_hook(steer)
    seen.clear()
    assert torch.equal(model.generate(**call), want)
    assert seen == [9] + [1] * 11
    assert calls[0].num_replayed == 0


def test_rings_are_not_captured(calls: list[ReplayedSteps]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(
        vocab_size=99, num_hidden_layers=2, sliding_window=16, max_position_embeddings=1024, **sizes
    )
    config.pad_token_id = 0
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    call = {**prompts(1, 9), "num_beams": 2, "eos_token_id": None, "do_sample": False}
    hf.accelerate(model, max_batch_size=1, max_seq_len=1024)
    for tokens in (8, 620):  # so few need no rings
        model.generate(**call, max_new_tokens=tokens)
    assert [steps.num_replayed for steps in calls] == [5, 0]


@pytest.mark.parametrize("graphs", [False, True])
def test_beams_share_their_prompt_unless_they_are_replayed(
    model: Any, calls: list[ReplayedSteps], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, init = list[bool](), hf.PagedCache.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        made.append(options["cascade"])
        init(self, *args, **options)

    hf.accelerate(model, max_batch_size=3, max_seq_len=64, graphs=graphs)
    monkeypatch.setattr(hf.PagedCache, "__init__", noted)
    model.generate(**prompts(1, 9), num_beams=2, max_new_tokens=6, eos_token_id=None)
    assert made == [not graphs]
    assert len(calls) == graphs


def test_nothing_stays_behind_a_call(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's memory does not wait for the garbage collector."""
    hf.accelerate(model, max_batch_size=3, max_seq_len=64)
    graphs = list[weakref.ref[Any]]()
    close = ReplayedSteps.close

    def noted(self: ReplayedSteps) -> None:
        graphs.append(weakref.ref(self._graph))
        close(self)

    monkeypatch.setattr(ReplayedSteps, "close", noted)
    before = vars(model).copy()
    gc.collect()
    gc.disable()
    try:
        model.generate(**prompts(1, 9), num_beams=2, max_new_tokens=8, eos_token_id=None)
        assert [graph() for graph in graphs] == [None]
    finally:
        gc.enable()
    assert vars(model) == before
