"""Mixtures of experts on a CPU: what the experts of an attached model run for few tokens."""

import copy
import functools
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.engine import Generator, SamplingParams
from torchpaged.few_tokens import MAX_TOKENS, of_few_tokens, own_forward, takes_few_tokens
from torchpaged.hf import PagedCache, attach, detach, paged
from torchpaged.hf.families import family_of

FAMILIES = ["mixtral", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "minimax", "lfm2_moe"]
PROMPT = [5, 9, 3, 7]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Any weight is large; the tokens of each call of the op."""
    found: list[int] = []
    native = BACKEND_OPS["cpu"]

    def apply_experts(x: Tensor, *args: Any, **options: Any) -> None:
        found.append(x.shape[0])
        native.apply_experts(x, *args, **options)

    monkeypatch.setattr("torchpaged.few_tokens.MIN_NUMBERS", 1)
    ops = {"cpu": native._replace(apply_experts=apply_experts)}
    monkeypatch.setattr("torchpaged.few_tokens.BACKEND_OPS", ops)
    yield found


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def given(name: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> Any:
    """The experts of a layer, with our forward."""
    module = experts_of(model_of(name).to(dtype))[0]
    made = of_few_tokens(module)
    assert made is not None
    setattr(module, made[0], made[1].__get__(module))
    return module


def routed(module: Any, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, and each token's experts with their weights."""
    generator = torch.Generator().manual_seed(tokens)
    weight = module.gate_up_proj
    states = torch.randn(tokens, weight.shape[2], generator=generator).to(weight.dtype)
    index = torch.rand(tokens, weight.shape[0], generator=generator).topk(2).indices
    return states, index, torch.rand(tokens, 2, generator=generator).to(weight.dtype)


def theirs(module: Any, *inputs: Tensor) -> Tensor:
    out: Tensor = type(module).forward(module, *inputs)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, MAX_TOKENS])
def test_is_as_near_as_theirs(tokens: int, dtype: torch.dtype, calls: list[int]) -> None:
    module = given(dtype=dtype)
    inputs = routed(module, tokens)
    wide = copy.deepcopy(module).double()
    wide.config._experts_implementation = "eager"  # torch's grouped products know no float64
    with torch.no_grad():
        got, other = module(*inputs), theirs(module, *inputs)
        exact = theirs(wide, inputs[0].double(), inputs[1], inputs[2].double())
    assert calls == [tokens]
    assert (got.shape, got.dtype) == (other.shape, dtype)
    assert bool(((got - exact).abs() <= 2 * (other - exact).abs().amax() + 1e-6).all())


def test_a_tokens_bits_do_not_follow_from_the_others() -> None:
    module = given()
    states, index, weights = routed(module, 9)
    with torch.no_grad():
        whole = module(states, index, weights)
        assert torch.equal(module(states[4:5], index[4:5], weights[4:5])[0], whole[4])


def test_inputs_of_any_strides(calls: list[int]) -> None:
    """As a router's that cuts off or transposes what it sorted."""
    module = given()
    inputs = routed(module, 3)
    cut = tuple(torch.cat((x, x), -1)[:, : x.shape[1]] for x in inputs)
    turned = tuple(x.T.contiguous().T for x in inputs)
    with torch.no_grad():
        want = module(*inputs)
        assert torch.equal(module(*cut), want)
        assert torch.equal(module(*turned), want)
    assert calls == [3, 3, 3]


def test_rows_of_experts_that_other_processes_have_are_zero(calls: list[int]) -> None:
    """transformers gives such rows a number past the last expert."""
    module = given()
    states, index, weights = routed(module, 3)
    index[0, 1] = index[2] = module.num_experts
    module._is_expert_parallel = True
    with torch.no_grad():
        got = module(states, index, weights)
        torch.testing.assert_close(got, theirs(module, states, index, weights))
    assert not got[2].any()
    assert calls == [3]


def test_what_else_is_theirs_bit_for_bit(calls: list[int]) -> None:
    """Many tokens, gradients, vmap, autocast, traces, another activation, another implementation, weights of
    other strides."""
    module = given()
    few, many = routed(module, 2), routed(module, MAX_TOKENS + 1)
    with torch.no_grad():
        assert torch.equal(module(*many), theirs(module, *many))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(*few), theirs(module, *few))
        mapped = torch.vmap(lambda weights: module(*few[:2], weights))(few[2][None])
        assert torch.equal(mapped[0], theirs(module, *few))
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*few), theirs(module, *few))
        act, module.act_fn = module.act_fn, torch.nn.Tanh()
        assert torch.equal(module(*few), theirs(module, *few))
        module.act_fn = act
        module.config._experts_implementation = "batched_mm"
        assert torch.equal(module(*few), theirs(module, *few))
        module.config._experts_implementation = "grouped_mm"
        down, module.down_proj = module.down_proj, torch.nn.Parameter(module.down_proj.mT.contiguous().mT)
        assert torch.equal(module(*few), theirs(module, *few))
        module.down_proj = down
    module(*few).sum().backward()
    assert module.down_proj.grad is not None
    assert not calls
    with torch.no_grad():
        module(*few)
    assert calls == [2]


def test_which_modules() -> None:
    # biases, no gate, a gate of its own, a loop
    for name in ("gpt_oss", "nemotron_h", "deepseek_v4", "dbrx"):
        assert all(of_few_tokens(module) is None for module in experts_of(model_of(name))), name
    [module, *_] = experts_of(model_of("mixtral").double())
    assert of_few_tokens(module) is None
    [module, *_] = experts_of(model_of("mixtral"))
    assert of_few_tokens(module) is not None
    module.config._experts_implementation = "eager"
    assert of_few_tokens(module) is None


def test_a_subclass_with_a_forward_of_its_own_keeps_it(calls: list[int]) -> None:
    """Also one whose class comes once the forward is given."""
    module = given("mixtral")

    class Twice(type(module)):  # type: ignore[misc]
        def forward(self, *inputs: Tensor) -> Any:
            return 2 * super().forward(*inputs)

    inputs = routed(module, 2)
    with torch.no_grad():
        once = theirs(module, *inputs)
        module.__class__ = Twice
        assert torch.equal(module(*inputs), 2 * once)
        del module.forward
        assert of_few_tokens(module) is None
    assert not calls


def test_experts_that_a_user_registers_by_that_name_are_run(calls: list[int]) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module = given("mixtral")
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = lambda module, states, *routed: 3 * states
    try:
        inputs = routed(module, 2)
        with torch.no_grad():
            assert torch.equal(module(*inputs), 3 * inputs[0])
        assert of_few_tokens(experts_of(model_of("mixtral"))[0]) is None
    finally:
        del ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    assert not calls
    assert of_few_tokens(experts_of(model_of("mixtral"))[0]) is not None


def test_modules_that_have_but_a_name_of_the_interface() -> None:
    module = torch.nn.Module()
    module.is_concatenated = True  # type: ignore[assignment]
    assert of_few_tokens(module) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_and_an_attached_model_give_the_same_tokens(name: str, calls: list[int]) -> None:
    model = model_of(name).eval()
    experts = experts_of(model)
    want = model.generate(torch.tensor([PROMPT]), **OPTIONS)
    assert not calls
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    latents = family_of(name).caches_latents  # an engine takes such a model attached
    with (
        paged(model) if latents else nullcontext(),
        Generator(model, max_batch_size=1, max_seq_len=16) as engine,
    ):
        assert all(map(takes_few_tokens, experts))
        assert engine.generate([PROMPT], params)[0].token_ids == want[0, len(PROMPT) :].tolist()
        assert calls.count(1) >= 5 * len(experts)
    assert not any("forward" in vars(module) for module in experts)
    calls.clear()
    attach(model)
    cache = PagedCache(model.config, 1, 16)
    assert torch.equal(model.generate(torch.tensor([PROMPT]), **OPTIONS, past_key_values=cache), want)
    assert calls.count(1) >= 5 * len(experts)
    detach(model)
    assert not any("forward" in vars(module) for module in experts)


@pytest.mark.slow_cases(but=("mixtral",))
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "minimax"])
def test_a_compiled_engine_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, as it takes no other."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = model_of(name).eval()
    want = model.generate(torch.tensor([PROMPT]), **OPTIONS)
    with Generator(model, max_batch_size=1, max_seq_len=16, compile=True) as engine:
        assert all(map(takes_few_tokens, experts_of(model)))
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        assert engine.generate([PROMPT], params)[0].token_ids == want[0, len(PROMPT) :].tolist()


def test_copies_and_pickles() -> None:
    model = attach(model_of("mixtral").eval())
    twin = experts_of(copy.deepcopy(model))[0]
    assert twin.forward.__self__ is twin
    assert takes_few_tokens(twin)
    loaded = pickle.loads(pickle.dumps(model))
    assert all(own_forward(module) is None for module in experts_of(loaded))
    detach(loaded)
    assert not any("forward" in vars(module) for module in loaded.modules())
