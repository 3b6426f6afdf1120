"""Changes of a model between `submit` and a step: seen by two looks for all requests that come between two
steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.graphs import PackedGraphRunner, TapeCapture
from torchpaged.hf import fuse, unfuse
from torchpaged.model_state import ModelState

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
PROMPTS = [[5 + i, *range(7, 27)] for i in range(6)]


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)


def made(model: Any, **options: Any) -> Generator:
    return Generator(model, max_batch_size=8, max_seq_len=64, block_size=4, **options)


def replace_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(torch.linspace(-3, 3, 64))


def test_many_requests_are_two_looks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, looks = made(model, graphs=True, capture=TapeCapture(), compile=False), list[ModelState]()
    changed = ModelState.changed_but_weights

    def counted(self: ModelState) -> str | None:
        looks.append(self)
        return changed(self)

    monkeypatch.setattr(ModelState, "changed_but_weights", counted)
    ids = [generator.submit(prompt, PARAMS) for prompt in PROMPTS]
    assert len(looks) == 1
    generator.step()
    assert len(looks) == 2  # for what changed behind the first
    generator.step()
    assert len(looks) == 2
    ids.append(generator.submit(PROMPTS[0], PARAMS))
    assert len(looks) == 3
    generator.step()
    assert len(looks) == 4
    ids.append(generator.submit(PROMPTS[0], PARAMS))
    stream = generator.stream()
    assert len(looks) == 5  # the request's, which the stream relies on
    assert {event.request_id for event in stream} == set(ids)
    looks.clear()
    generator.stream()
    assert len(looks) == 1


class Adapted(torch.nn.Module):
    """A Linear with two adapters, and what peft's layers say of them."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.merged_adapters = base, ["a"], list[str]()
        self.scaling = {"a": 1.0, "b": -3.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * self.scaling[self.active_adapters[0]]


@pytest.mark.parametrize(("graphs", "later"), [(False, False), (False, True), (True, False)])
def test_an_adapter_switched_to_and_fro_between_steps(model: Any, graphs: bool, later: bool) -> None:
    """Blocks of a request that the other one computed are not found under this one; graphs refuse it. Without
    graphs the layer may come ``later`` than the engine."""
    attention = model.model.layers[0].self_attn
    adapted = Adapted(attention.v_proj)
    attention.v_proj = attention.v_proj if later else adapted
    generator = made(model, graphs=graphs, prefix_cache=True, prefill_chunk_size=8)
    attention.v_proj = adapted
    [want] = generator.generate([PROMPTS[0]], PARAMS)
    generator.reset_prefix_cache()
    request = generator.submit(PROMPTS[0], PARAMS)
    generator.step()
    adapted.active_adapters = ["b"]
    if graphs:
        with pytest.raises(ArgumentError, match=r"v_proj has active_adapters \['b'\]"):
            generator.step()
        adapted.active_adapters = ["a"]
        assert [event.token_id for event in generator.stream([request])] == want.token_ids
    else:
        list(generator.stream([request]))
        adapted.active_adapters = ["a"]
    assert generator.generate([PROMPTS[0]], PARAMS)[0].token_ids == want.token_ids


@pytest.mark.parametrize("change", ["number", "hook"])
@pytest.mark.parametrize("how", ["launched", "eager", "replayed"])
def test_a_number_or_hook_changed_and_changed_back_between_steps(model: Any, how: str, change: str) -> None:
    """Blocks that were computed with it are not found later; with graphs no step that runs the model's
    Python runs with it."""
    graphs: dict[str, Any] = {"capture": TapeCapture(), "compile": False} if how == "replayed" else {}
    graphs["graphs"] = how != "launched"
    generator = made(model, prefix_cache=True, prefill_chunk_size=8, **graphs)
    [want] = generator.generate([PROMPTS[0]], PARAMS)
    generator.reset_prefix_cache()
    request, layer = generator.submit(PROMPTS[0], PARAMS), model.model.layers[0]
    generator.step()
    if change == "number":
        layer.self_attn.scaling *= 8
        take_back = lambda: setattr(layer.self_attn, "scaling", layer.self_attn.scaling / 8)  # noqa: E731
    else:
        take_back = layer.register_forward_hook(lambda *given: given[2].roll(1, -1)).remove
    if how == "launched":
        list(generator.stream([request]))
    else:
        with pytest.raises(ArgumentError, match="has scaling|other forward hooks"):
            generator.step()
    take_back()
    if how != "launched":
        assert [event.token_id for event in generator.stream([request])] == want.token_ids
    assert generator.generate([PROMPTS[0]], PARAMS)[0].token_ids == want.token_ids


@pytest.mark.parametrize("more", [0, 1])
def test_a_change_behind_the_first_request_is_raised_by_the_step(model: Any, more: int) -> None:
    generator = made(model, graphs=True)
    ids = [generator.submit(PROMPTS[0], PARAMS)]
    norm = model.model.layers[0].input_layernorm.weight
    replace_norm(model)
    ids += [generator.submit(prompt, PARAMS) for prompt in PROMPTS[1 : 1 + more]]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="its graphs were made with"):
            generator.step()
    with pytest.raises(ArgumentError, match="its graphs were made with"):
        generator.submit(PROMPTS[2], PARAMS)
    assert generator.stats.steps == generator.stats.new_tokens == 0
    model.model.layers[0].input_layernorm.weight = norm  # as it was
    got = {event.request_id for event in generator.stream()}
    assert got == set(ids)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("graphs", [False, True])
def test_blocks_of_other_weights_are_forgotten_by_the_step(model: Any, graphs: bool, more: int) -> None:
    """In place: graphs go on with the new numbers."""
    generator = made(model, graphs=graphs)
    generator.generate(PROMPTS[:2], PARAMS)
    ids = [generator.submit(PROMPTS[0], PARAMS)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    ids += [generator.submit(prompt, PARAMS) for prompt in PROMPTS[1 : 1 + more]]
    got: dict[int, list[int | None]] = {}
    for event in generator.stream():
        got.setdefault(event.request_id, []).append(event.token_id)
    plain = made(model, graphs=False, prefix_cache=False)
    assert [got[i] for i in ids] == [out.token_ids for out in plain.generate(PROMPTS[: 1 + more], PARAMS)]
    assert generator.stats.prefix_cache.hit_tokens == 0


def test_blocks_of_another_scale_of_embeddings_are_forgotten() -> None:
    """Gemma's, a buffer that is not saved."""
    model = model_of("gemma2")
    generator = made(model, graphs=False)
    generator.generate(PROMPTS[:1], PARAMS)
    with torch.no_grad():
        model.get_input_embeddings().embed_scale.mul_(2)
    got = generator.generate(PROMPTS[:1], PARAMS)[0].token_ids
    assert got == made(model, graphs=False, prefix_cache=False).generate(PROMPTS[:1], PARAMS)[0].token_ids
    assert generator.stats.prefix_cache.hit_tokens == 0


def test_parts_may_change_behind_the_first_request_without_graphs(model: Any) -> None:
    generator = made(model, graphs=False)
    first = [out.token_ids for out in generator.generate(PROMPTS[:2], PARAMS)]
    ids = [generator.submit(PROMPTS[0], PARAMS)]
    replace_norm(model)
    ids.append(generator.submit(PROMPTS[1], PARAMS))
    got: dict[int, list[int | None]] = {}
    for event in generator.stream():
        got.setdefault(event.request_id, []).append(event.token_id)
    plain = made(model, graphs=False, prefix_cache=False)
    want = [out.token_ids for out in plain.generate(PROMPTS[:2], PARAMS)]
    assert [got[i] for i in ids] == want != first


def scale_scores(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 8


def turn_slower(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.1)


def cap_logits(model: Any) -> None:
    model.config.final_logit_softcapping = 0.1


@pytest.mark.parametrize("change", [scale_scores, turn_slower, cap_logits])
@pytest.mark.parametrize("graphs", [False, True])
def test_numbers_of_modules_are_looked_at(model: Any, graphs: bool, change: Callable[[Any], None]) -> None:
    """A changed scale of scores or rotation, or number of the config, which some models read in a forward:
    with graphs it is refused, without them kept blocks are of no use."""
    model.config.final_logit_softcapping = None
    generator = made(model, graphs=graphs)
    generator.generate(PROMPTS[:2], PARAMS)
    change(model)
    if graphs:
        with pytest.raises(
            ArgumentError, match=r"self_attn has scaling|inv_freq was written|config has final"
        ):
            generator.generate(PROMPTS[:2], PARAMS)
        return
    found = [out.token_ids for out in generator.generate(PROMPTS[:2], PARAMS)]
    assert generator.stats.prefix_cache.hit_tokens == 0
    plain = made(model, graphs=False, prefix_cache=False)
    assert found == [out.token_ids for out in plain.generate(PROMPTS[:2], PARAMS)]


def with_hook(model: Any) -> Callable[[], Any]:
    return model.model.layers[1].register_forward_hook(lambda *given: given[2].roll(1, -1)).remove


def with_other_weight(model: Any) -> Callable[[], Any]:
    """A tensor in place of the one that graphs read."""
    norm = model.model.layers[1].input_layernorm
    before, norm.weight = norm.weight, torch.nn.Parameter(torch.linspace(-3, 3, 64))
    return lambda: setattr(norm, "weight", before)


def watched(
    generator: Generator, change: Callable[[], Callable[[], Any]], prompt: list[int], other: int | None
) -> list[int]:
    """What `generate` gives of ``prompt`` once a change has come, was refused, and has gone; the request
    ``other``, which waits meanwhile, goes on."""
    take_back, submitted = change(), generator.stats.new_tokens
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"layers\.1.* (has other forward hooks|lies elsewhere)"):
            generator.generate([prompt], PARAMS)
    assert generator.stats.new_tokens == submitted
    take_back()
    (output,) = generator.generate([prompt], PARAMS)
    assert other is None or other in {event.request_id for event in generator.stream()}
    return output.token_ids


@pytest.mark.parametrize("change", [with_hook, with_other_weight])
@pytest.mark.parametrize("waits", [False, True], ids=["alone", "another-waits"])
@pytest.mark.parametrize("length", [6, 20], ids=["replayed", "launched"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not-yet"])
def test_modules_are_looked_at_while_a_prompt_is_replayed(
    model: Any, length: int, captured: bool, waits: bool, change: Callable[[Any], Callable[[], Any]]
) -> None:
    """Of what is computed meanwhile nothing is given out or found later, and nothing is captured."""
    with torch.no_grad():  # so that what a hook moves shows in the tokens; a factor, the norm would take out
        model.lm_head.weight.copy_(torch.randn(99, 64, generator=torch.Generator().manual_seed(0)))
    options = {"capture": TapeCapture(), "compile": False, "prefill_buckets": [8], "prefill_chunk_size": 32}
    generator = made(model, graphs=True, capture_ahead=captured, **options)
    prompt = list(range(7, 7 + length))
    other = generator.submit(PROMPTS[3], PARAMS) if waits else None
    found = watched(generator, lambda: change(model), prompt, other)
    plain = made(model, graphs=False, prefix_cache=False)
    (want,) = plain.generate([prompt], PARAMS)
    assert found == want.token_ids


def test_graphs_over_what_unfuse_freed_are_not_replayed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a rotation goes with it, weights stay where they are: on a GPU a replay would read memory
    that is not there any more."""
    fuse(model, ("rope",), count=False)
    options = {"capture": TapeCapture(), "compile": False, "prefill_buckets": [8]}
    generator, replays = made(model, graphs=True, **options), list[Any]()
    replay = PackedGraphRunner._replay

    def counted(*given: Any) -> None:
        replays.append(given)
        replay(*given)

    monkeypatch.setattr(PackedGraphRunner, "_replay", counted)
    generator.generate([PROMPTS[0][:6]], PARAMS)
    before = len(replays)
    assert before
    unfuse(model)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="has another forward|has other forward hooks"):
            generator.generate([PROMPTS[0][:6]], PARAMS)
    assert len(replays) == before


@pytest.mark.parametrize("graphs", [True, False])
def test_fused_weights_made_in_inference_mode(make_llama: Callable[..., Any], graphs: bool) -> None:
    """Fusing gives them other ``data``: then they neither count writes nor say that they are such weights."""
    with torch.inference_mode():
        models = [make_llama(vocab_size=99, hidden_size=64, intermediate_size=96) for _ in range(2)]
    tokens = []
    for model, fused in zip(models, (True, False), strict=True):
        with made(model, fuse=fused, graphs=graphs, compile=False) as generator:
            tokens.append([output.token_ids for output in generator.generate(PROMPTS, PARAMS)])
    assert tokens[0] == tokens[1]
