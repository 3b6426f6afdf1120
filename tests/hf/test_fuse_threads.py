"""Two threads over one fused model: each gets what it gets alone, wherever the other is in its forward."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import build
from many_threads import in_threads

from torchpaged import TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.layers import LayerPlan
from torchpaged.hf import PagedCache, fuse

pytestmark = pytest.mark.timeout(300)
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPTS = [list(range(3, 9)), list(range(30, 50))]


@pytest.fixture
def halfway(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any], Callable[[], Any]], list[Any]]:
    """Run two functions in threads, the second while a fused layer of the first is under way; the first goes
    on when the second is done, or waits for it."""

    def both(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
        plain, met, done = LayerPlan.feed, threading.Event(), threading.Event()
        earlier, found = set[int](), dict[int, Any]()

        def feed(*args: Any) -> Any:
            if threading.get_ident() in earlier and not met.is_set():
                met.set()
                done.wait(0.5)
            return plain(*args)

        def begin() -> None:
            earlier.add(threading.get_ident())
            found[0] = first()

        def follow() -> None:
            assert met.wait(60)
            found[1] = second()
            done.set()

        monkeypatch.setattr(LayerPlan, "feed", feed)
        in_threads([begin, follow])
        return [found[0], found[1]]

    return both


@pytest.mark.parametrize("graphs", [False, True])
def test_two_engines_over_one_model(halfway: Any, graphs: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = build("Llama")
    options: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "graphs": graphs, "compile": False}
    with Generator(model, fuse=True, **options) as one, Generator(model, fuse=True, **options) as two:
        want = [one.generate([prompt], GREEDY) for prompt in PROMPTS]
        one.reset_prefix_cache()
        calls = [(one, PROMPTS[:1]), (two, PROMPTS[1:])]
        found = halfway(*(lambda g=g, p=p: g.generate(p, GREEDY) for g, p in calls))
        assert [[o.token_ids for o in outputs] for outputs in found] == [[o.token_ids] for [o] in want]
    assert not caplog.records, "a step raised and was made again"


def test_a_plain_forward_beside_an_engine(halfway: Any) -> None:
    model = build("Llama")
    prompt = torch.tensor([PROMPTS[1]])
    with Generator(model, max_batch_size=2, max_seq_len=64, fuse=True, graphs=False) as generator:
        want = generator.generate(PROMPTS[:1], GREEDY)[0].token_ids
        generator.reset_prefix_cache()
        with torch.inference_mode():
            alone = model(prompt).logits, model.get_decoder()(prompt).last_hidden_state

            def plain() -> Any:
                with torch.inference_mode():
                    return model(prompt).logits, model.get_decoder()(prompt).last_hidden_state

            outputs, beside = halfway(lambda: generator.generate(PROMPTS[:1], GREEDY), plain)
        assert outputs[0].token_ids == want
        assert all(torch.equal(x, y) for x, y in zip(alone, beside, strict=True))


def test_forwards_that_wait_for_each_other_are_refused() -> None:
    """Hooks of two models that run the other one, in two threads at once: one of them raises, and the other
    gets its logits."""
    one, two = build("Llama"), build("Llama")
    both, inside, prompt = threading.Barrier(2), set[int](), torch.tensor([PROMPTS[1]])

    def run(model: Any) -> Any:
        with torch.inference_mode():
            return model(input_ids=prompt, past_key_values=PagedCache(model.config, 1, 64)).logits

    def hook(other: Any) -> Any:
        def called(*_: Any) -> None:
            if threading.get_ident() not in inside:
                inside.add(threading.get_ident())
                both.wait(60)
                run(other)

        return called

    fuse(one, count=False)
    fuse(two, count=False)
    want = run(one)
    for model, other in ((one, two), (two, one)):
        model.get_decoder().layers[0].register_forward_hook(hook(other))
    right, errors = list[Any](), list[TorchpagedError]()

    def tried(model: Any) -> None:
        try:
            right.append(run(model))
        except TorchpagedError as error:
            errors.append(error)

    in_threads([lambda m=model: tried(m) for model in (one, two)])  # type: ignore[misc]
    [error], [logits] = errors, right
    assert "each other" in str(error)
    assert torch.equal(logits, want)


@pytest.mark.parametrize("paged", [True, False])
def test_a_forward_inside_another_of_the_same_model(paged: bool) -> None:
    """As a hook may run one: the outer one's picked logits stay those that were asked for."""
    model, prompt = build("Llama"), torch.tensor([PROMPTS[1]])
    fuse(model, count=False)
    inside: list[Any] = []

    def run(paged: bool = True, **options: Any) -> Any:
        if paged:
            options["past_key_values"] = PagedCache(model.config, 1, 64)
        with torch.inference_mode():
            return model(input_ids=prompt, **options).logits

    def hook(*_: Any) -> None:
        if not inside:
            inside.append(None)
            inside[0] = run(paged)

    want = run()
    model.get_decoder().layers[0].register_forward_hook(hook)
    torch.testing.assert_close(run(logits_to_keep=torch.tensor([3, 7])), want[:, [3, 7]])
    torch.testing.assert_close(inside[0], want, rtol=1e-4, atol=1e-4)


def test_two_caches(halfway: Any) -> None:
    model = build("Llama")
    fuse(model)
    prompt = torch.tensor([PROMPTS[1]])

    def run(part: Any) -> Any:
        with torch.inference_mode():
            return part(input_ids=prompt, past_key_values=PagedCache(model.config, 1, 64))[0]

    parts = model, model.get_decoder()
    want = [run(part) for part in parts]
    found = halfway(*(lambda part=part: run(part) for part in parts))
    assert all(torch.equal(x, y) for x, y in zip(want, found, strict=True))
