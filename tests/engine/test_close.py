"""`Generator.close`: the model is as it was, nothing stays allocated, and who had requests learns of it."""

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of

from torchpaged import ClosedError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, detach
from torchpaged.hf.attached import MARK, put_in, take_out
from torchpaged.hf.packed_mixers import is_packed, mixers_of
from torchpaged.model_state import hooks_of

pytestmark = pytest.mark.timeout(300)  # a hang is a failure
PROMPT = [5, 6, 7]
TINY = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)
ENGINES = {
    "graphs": {"graphs": True, "compile": False},
    "no graphs": {"graphs": False},
    "fused": {"graphs": True, "compile": False, "fuse": True},
    "background": {"graphs": True, "compile": False, "start": True},
}


def engine(model: Any, *, start: bool = False, **options: Any) -> Generator:
    generator = Generator(model, max_batch_size=2, max_seq_len=64, block_size=4, **options)
    return generator.start() if start else generator


def facts(model: Any) -> dict[str, Any]:
    """What a model is, to be compared with what it was."""
    return {
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "forwards": ["forward" in vars(module) for module in model.modules()],
        "hooks": [len(hooks_of(module)) for module in model.modules()],
        "weights": [parameter.data_ptr() for parameter in model.parameters()],
    }


def trained(make_llama: Callable[..., Any]) -> Any:
    llama = make_llama(**TINY).train()
    llama.model.layers[0].eval()
    llama.set_attn_implementation("eager")
    return llama


def assert_as_before(model: Any, before: dict[str, Any]) -> None:
    """But for where the weights lie, which fusing moves."""
    after = facts(model)
    assert {name: value for name, value in after.items() if name != "weights"} == {
        name: value for name, value in before.items() if name != "weights"
    }


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_the_model_is_as_it_was(make_llama: Callable[..., Any], options: dict[str, Any]) -> None:
    llama = trained(make_llama)
    ids = torch.tensor([[*PROMPT, 50]])
    before, logits = facts(llama), llama(ids).logits
    with engine(llama, **options) as generator:
        assert generator.generate([PROMPT])[0].token_ids
        assert facts(llama) != before
    assert_as_before(llama, before)
    torch.testing.assert_close(llama(ids).logits, logits)
    assert repr(generator) == "Generator(closed)"
    with engine(llama, **options) as again:
        assert again.generate([PROMPT])[0].token_ids


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_one_that_is_dropped_is_closed(make_llama: Callable[..., Any], options: dict[str, Any]) -> None:
    """At once, in the middle of a request."""
    llama = trained(make_llama)
    before, generator = facts(llama), engine(llama, **options)
    generator.submit(PROMPT, LONG)
    background = generator._calls.background
    gc.disable()
    try:
        del generator
        assert_as_before(llama, before)
    finally:
        gc.enable()
    assert background is None or not background._thread.is_alive()


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_one_that_the_garbage_collector_finds(
    make_llama: Callable[..., Any], options: dict[str, Any]
) -> None:
    """It may come in the middle of a forward: the model stays paged until the next one is closed."""
    llama = trained(make_llama)
    before, others = facts(llama), set(threading.enumerate())
    generator = engine(llama, **options)
    threads = {*threading.enumerate()} - others
    assert len(threads) == ("start" in options)
    cycle = [generator]
    cycle.append(cycle)
    del generator, cycle
    gc.collect()
    assert llama.config._attn_implementation == "torchpaged"
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()  # what the thread had
    engine(llama, graphs=False).close()
    assert_as_before(llama, before)


def test_the_last_of_several_gives_back(make_llama: Callable[..., Any]) -> None:
    """Whatever was switched between them, and whichever is dropped."""
    llama = trained(make_llama)
    before, kept = facts(llama), engine(llama, graphs=False)
    dropped = engine(llama.train(), graphs=False, fuse=True)
    last = engine(llama, graphs=False)
    last.close()
    assert len(kept.generate([PROMPT], LONG)[0].token_ids) == 50
    assert not any(module.training for module in llama.modules())
    del dropped
    kept.close()
    before["training"] = [True] * len(before["training"])
    assert_as_before(llama, before)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_pools_and_graphs_are_freed(make_llama: Callable[..., Any], options: dict[str, Any]) -> None:
    """With the closed Generator, and a stream of it, still there."""
    generator = engine(make_llama(**TINY), **options)
    stream = generator.stream([generator.submit(PROMPT, LONG)])
    next(stream)
    watched = [weakref.ref(tensor) for tensor in generator.model.kv_cache.tensors().values()]
    watched += [weakref.ref(thing) for thing in (generator.model, generator.loop, generator.runner) if thing]
    gc.disable()  # it may come at any time: the pools are free now
    try:
        generator.close()
    finally:
        gc.enable()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert [event.finish_reason for event in stream][-1] == "cancelled"
    assert not generator.has_unfinished
    assert generator.stats.new_tokens > 0
    assert generator.stats.finished == {"cancelled": 1}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_requests_in_flight_end_as_cancelled(make_llama: Callable[..., Any], options: dict[str, Any]) -> None:
    """A suspended stream has the events that it was not given yet, too, and a generate() of another thread
    returns what there is. A background loop waits for the other thread at the first token, and for the end
    at the sixth."""
    generator = engine(make_llama(**TINY), **options)
    step, stats, requests = generator._stepper.step, generator.stats, generator._stepper.requests
    if "start" in options:
        generator._stepper.step = lambda: (  # type: ignore[method-assign]
            step() if stats.new_tokens < (6 if len(requests) == 2 else 1) else None
        )
    first = generator.submit(PROMPT, LONG)
    stream = generator.stream([first])
    events = [next(stream)]
    outputs: list[Any] = []
    other = threading.Thread(target=lambda: outputs.extend(generator.generate([PROMPT], LONG)))
    if "start" in options:  # else the stream would have to be read for the other one to be let in
        other.start()
        while stats.new_tokens < 6:
            time.sleep(0.001)
    generator.close()
    events += list(stream)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["cancelled"]
    assert events[-1].token_id is None
    if "start" in options:
        other.join(60)
        assert [output.finish_reason for output in outputs] == ["cancelled"]


CALLS: dict[str, Callable[[Generator], Any]] = {
    "submit": lambda generator: generator.submit(PROMPT),
    "generate": lambda generator: generator.generate([PROMPT]),
    "stream": lambda generator: generator.stream(),
    "stream of one": lambda generator: generator.stream([0]),
    "step": lambda generator: generator.step(),
    "cancel": lambda generator: generator.cancel(0),
    "start": lambda generator: generator.start(),
    "events": lambda generator: generator.events(0),
    "metrics": lambda generator: generator.metrics(),
    "reset_prefix_cache": lambda generator: generator.reset_prefix_cache(),
}


@pytest.fixture(scope="module")
def closed(make_llama: Callable[..., Any]) -> Generator:
    generator = engine(make_llama(**TINY), graphs=False)
    generator.generate([PROMPT], SamplingParams(max_new_tokens=1))
    generator.close()
    return generator


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_later_calls_are_refused(closed: Generator, call: Callable[[Generator], Any]) -> None:
    with pytest.raises(ClosedError, match=r"the Generator is closed.*make a new Generator"):
        call(closed)


def test_closing_twice_is_no_error(closed: Generator) -> None:
    closed.close()


def test_close_in_the_middle_of_an_exception(make_llama: Callable[..., Any]) -> None:
    llama = make_llama(**TINY)
    before = facts(llama)
    with pytest.raises(KeyError, match="mine"), engine(llama, graphs=False) as generator:
        for _event in generator.stream([generator.submit(PROMPT, LONG)]):
            raise KeyError("mine")
    assert facts(llama) == before


@pytest.mark.parametrize("graphs", [True, False])
def test_close_behind_a_step_that_raised(
    make_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """And whose repair raises: the model is given back, and streams do not wait for it."""
    llama = make_llama(**TINY)
    before = facts(llama)
    generator = engine(llama, graphs=graphs, **({"compile": False} if graphs else {}))
    stream = generator.stream([generator.submit(PROMPT, LONG)])
    next(stream)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(generator._stepper, "reset", broken)
        with pytest.raises(RuntimeError, match="the device is lost"):
            generator.close()
    assert facts(llama) == before
    with pytest.raises(ClosedError):
        list(stream)
    generator.close()


def test_a_step_can_not_close_its_own_generator(make_llama: Callable[..., Any]) -> None:
    llama = make_llama(**TINY)
    generator = engine(llama, graphs=False)
    hook = llama.register_forward_hook(lambda *_: generator.close())
    generator.submit(PROMPT)
    with pytest.raises(TorchpagedError, match="from inside one of its own steps"):
        while generator.has_unfinished:
            generator.step()
    hook.remove()
    assert len(generator.generate([PROMPT], LONG)[0].token_ids) == 50
    generator.close()


def test_a_paged_model_of_the_callers_goes_on(make_llama: Callable[..., Any]) -> None:
    from torchpaged.hf import PagedModel

    paged = PagedModel(make_llama(**TINY), num_blocks=40, block_size=4)
    tokens = []
    for _turn in range(2):
        with Generator(paged, max_batch_size=2, max_seq_len=64, compile=False) as generator:
            generator.submit(PROMPT, LONG)
            generator.step()
            tokens.append(generator.generate([PROMPT], LONG)[0].token_ids)
    assert tokens[0] == tokens[1]


def test_a_request_that_fills_the_pool_says_so(make_llama: Callable[..., Any]) -> None:
    """One that ends by what was asked for, or by max_seq_len, does not."""
    with engine(make_llama(**TINY), num_blocks=7, graphs=False) as generator:
        [output] = generator.generate([PROMPT], LONG)
        assert output.finish_reason == "out_of_blocks"
        assert len(PROMPT) + len(output.token_ids) == 6 * 4 + 1  # the last token is in no block
        exact = SamplingParams(max_new_tokens=len(output.token_ids), ignore_eos=True)
        assert generator.generate([PROMPT], exact)[0].finish_reason == "length"
        with pytest.raises(ValueError, match=r"at most 23 tokens \(max_seq_len 64, 6 blocks of 4\), got 24"):
            generator.submit([1] * 24)
    with engine(make_llama(**TINY), num_blocks=40, graphs=False) as generator:
        many = SamplingParams(max_new_tokens=1000, ignore_eos=True)
        assert generator.generate([PROMPT], many)[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_that_was_attached_meanwhile_stays_so(name: str) -> None:
    """Until it is detached, which gives back what was before the engine."""
    model = model_of(name)
    before = model.config._attn_implementation, [vars(part).get("forward") for part in model.modules()]
    generator = engine(model)
    attach(model)
    generator.close()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        cache = PagedCache(model.config, 1, 40, block_size=4)
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want, rtol=1e-4, atol=1e-4)
    detach(model)
    assert before == (
        model.config._attn_implementation,
        [vars(part).get("forward") for part in model.modules()],
    )


@pytest.mark.parametrize("engine_first", [True, False])
def test_forwards_that_two_hold_go_with_the_last(engine_first: bool) -> None:
    """Of an engine over an attached model, in whatever order they end."""
    model = model_of("lfm2")
    before = [vars(part).get("forward") for part in model.modules()]
    generator = engine(attach(model))
    for end in (generator.close, lambda: detach(model))[:: 1 if engine_first else -1]:
        assert all(map(is_packed, mixers_of(model)))
        end()
    assert [vars(part).get("forward") for part in model.modules()] == before
    assert not any(hasattr(part, MARK) for part in model.modules())


@pytest.mark.parametrize("first", [0, 1])
def test_a_module_of_two_models_keeps_its_forward_until_both_are_closed(first: int) -> None:
    """As of two heads over one backbone: the engine that is closed first leaves the other its forwards."""
    model = model_of("lfm2").eval()
    other = type(model)(model.config).eval()
    other.model, other.lm_head = model.model, model.lm_head
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engines = [engine(each, graphs=False) for each in (model, other)]
    want = engines[1 - first].generate([PROMPT], params)[0].token_ids
    engines[first].close()
    assert all(map(is_packed, mixers_of(model)))
    assert engines[1 - first].generate([PROMPT], params)[0].token_ids == want
    engines[1 - first].close()
    assert not any(hasattr(part, MARK) or "forward" in vars(part) for part in mixers_of(model))


def test_a_pickle_of_a_model_that_an_engine_runs_is_one_that_none_runs() -> None:
    """What is unpickled has its class's forwards on the instance, in the place of ours: behind an engine of
    its own it has none."""
    model = model_of("mamba").eval()
    before = facts(model)["forwards"]
    with engine(model, compile=False):
        twin = pickle.loads(pickle.dumps(model))
        want = engine(model, compile=False).generate([PROMPT], SamplingParams(4))[0].token_ids
    with engine(twin, compile=False) as generator:
        assert generator.generate([PROMPT], SamplingParams(4))[0].token_ids == want
    assert facts(twin)["forwards"] == before
    assert not any(hasattr(module, MARK) for module in twin.modules())


def test_a_forward_of_another_module_comes_back() -> None:
    """One of the same class, whose function is the class's, but not the module that it runs on."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].forward = model[1].forward
    put_in({model[0]: ("forward", lambda self, x: x)})
    assert model[0](2) == 2
    take_out(model)
    assert model[0].forward.__self__ is model[1]
