"""Products of few tokens on a CPU: what large linear modules of an attached model run."""

import copy
import pickle
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn import functional as F

from torchpaged.engine import Generator, SamplingParams
from torchpaged.few_tokens import MAX_TOKENS, of_few_tokens, own_forward, takes_few_tokens
from torchpaged.hf import PagedCache, attach, detach, fuse, unfuse

pytestmark = pytest.mark.usefixtures("large")
ROWS, COLUMNS = 24, 40


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of that size are large."""
    monkeypatch.setattr("torchpaged.few_tokens.MIN_NUMBERS", ROWS * COLUMNS)


def given(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Linear:
    module = nn.Linear(COLUMNS, ROWS, dtype=dtype, **options)
    made = of_few_tokens(module)
    assert made is not None
    module.forward = made[1].__get__(module)  # type: ignore[method-assign]
    return module


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 5), (0, 1), (MAX_TOKENS, 1)], ids=str)
def test_is_as_near_as_torchs(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    module, x = given(dtype, bias=bias), tokens(*shape, dtype=dtype)
    exact = F.linear(
        x.double(), module.weight.double(), None if module.bias is None else module.bias.double()
    )
    with torch.no_grad():
        got, torchs = module(x), F.linear(x, module.weight, module.bias)
    assert (got.shape, got.dtype) == (torchs.shape, dtype)
    budget = 2 * (torchs - exact).abs().amax() + 1e-6 if x.numel() else 0
    assert bool(((got - exact).abs() <= budget).all())


def test_a_slice_of_a_prompt_goes_in() -> None:
    module, x = given(), tokens(4, 9)[:, -1:]
    with torch.no_grad():
        torch.testing.assert_close(module(x), F.linear(x, module.weight, module.bias))


def test_what_else_is_torchs_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens, other dtypes, gradients, those in forward mode, vmap, autocast, traces, other biases."""
    module = given()
    monkeypatch.setattr("torchpaged.few_tokens.BACKEND_OPS", {})
    with torch.no_grad():
        many = tokens(MAX_TOKENS + 1)
        assert torch.equal(module(many), F.linear(many, module.weight, module.bias))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(tokens(2)).dtype == torch.bfloat16
        _, tangent = torch.func.jvp(module, (tokens(2),), (tokens(2),))
        torch.testing.assert_close(tangent, F.linear(tokens(2), module.weight))
        with dual_level():
            dual = make_dual(module.bias.detach(), torch.ones(ROWS))
            with_it = torch.func.functional_call(module, {"bias": dual}, tokens(2))
            assert torch.equal(unpack_dual(with_it).tangent, torch.ones(2, ROWS))
        each = torch.vmap(module)(tokens(3, 2))
        torch.testing.assert_close(each, F.linear(tokens(3, 2), module.weight, module.bias))
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(tokens(2)), F.linear(tokens(2), module.weight, module.bias))
        with pytest.raises(RuntimeError, match="dtype"):
            module(tokens(2).double())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(tokens(2)[:, 1:])
        for name in ("weight", "bias"):  # others, which no longer lie in the order of memory
            parameter = getattr(module, name)
            parameter.data = torch.stack((parameter.data, parameter.data), -1)[..., 0]
            assert torch.equal(module(tokens(2)), F.linear(tokens(2), module.weight, module.bias))
            parameter.data = parameter.data.contiguous()
        own, module.bias = module.bias, nn.Parameter(torch.ones(1), requires_grad=False)  # torch repeats it
        assert torch.equal(module(tokens(2)), F.linear(tokens(2), module.weight, module.bias))
        del module.bias
        module.bias = torch.ones(ROWS)  # no parameter
        assert torch.equal(module(tokens(2)), F.linear(tokens(2), module.weight, module.bias))
        del module.bias
        module.bias = own
        for name in ("weight", "bias"):  # in front of its parameter
            module.__dict__[name] = getattr(module, name) * 2
            assert torch.equal(module(tokens(2)), F.linear(tokens(2), module.weight, module.bias))
            del module.__dict__[name]
        dense, module.weight = module.weight, nn.Parameter(module.weight.to_sparse_csr(), requires_grad=False)
        torch.testing.assert_close(module(tokens(2)), F.linear(tokens(2), dense, module.bias))
        module.weight = dense
    module(tokens(2)).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        assert module.double()(tokens(2, dtype=torch.float64)).dtype == torch.float64


def test_which_modules() -> None:
    class Other(nn.Linear):
        """As adapter libraries have it."""

    assert of_few_tokens(nn.Linear(COLUMNS, ROWS)) is not None
    assert of_few_tokens(nn.Linear(COLUMNS, ROWS - 1)) is None
    assert of_few_tokens(nn.Linear(COLUMNS, ROWS, dtype=torch.float64)) is None
    assert of_few_tokens(nn.Linear(COLUMNS, ROWS, device="meta")) is None
    assert of_few_tokens(Other(COLUMNS, ROWS)) is None
    sparse = nn.Linear(COLUMNS, ROWS)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse_csr())
    assert of_few_tokens(sparse) is None
    module = given()
    assert of_few_tokens(module) is not None, "an engine gave it, and attach keeps it"
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert of_few_tokens(module) is None


def test_they_come_and_go() -> None:
    model = model_of("llama").eval()
    call: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([[5, 9, 3, 7]])
    want = model.generate(ids, **call)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    attach(model)
    assert all(map(takes_few_tokens, linears))
    assert torch.equal(model.generate(ids, **call, past_key_values=PagedCache(model.config, 1, 16)), want)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded.generate(ids, **call, past_key_values=PagedCache(loaded.config, 1, 16)), want)
    detach(loaded)
    assert not any("forward" in vars(module) for module in loaded.modules())
    twin = copy.deepcopy(model)
    assert twin.lm_head.forward.__self__ is twin.lm_head
    fuse(model)
    assert torch.equal(model.generate(ids, **call, past_key_values=PagedCache(model.config, 1, 16)), want)
    unfuse(model)
    assert takes_few_tokens(model.lm_head)
    assert "forward" in vars(model.lm_head)
    detach(model)
    assert not any("forward" in vars(module) for module in linears)
    attach(model)
    assert fuse(model).replaced["lm_head"] == ["lm_head"]
    detach(model)
    assert torch.equal(model.generate(ids, **call), want)
    unfuse(model)
    assert not any("forward" in vars(module) for module in linears)
    with Generator(model, max_batch_size=1, max_seq_len=16) as engine:
        loaded = pickle.loads(pickle.dumps(model))
        assert fuse(loaded).replaced["lm_head"] == ["lm_head"]
        unfuse(loaded)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        params = SamplingParams(max_new_tokens=5, ignore_eos=True)
        assert all(map(takes_few_tokens, linears))
        assert engine.generate(ids.tolist(), params)[0].token_ids == want[0, 4:].tolist()
    assert not any("forward" in vars(module) for module in linears)


@pytest.mark.parametrize("first", ["engine", "model"])
def test_an_engine_and_an_attached_model_take_them_away_in_any_order(first: str) -> None:
    model = model_of("llama").eval()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    engine = Generator(model, max_batch_size=1, max_seq_len=16)
    attach(model)
    ends = [engine.close, lambda: detach(model)]
    for end in ends if first == "engine" else reversed(ends):
        assert all(map(takes_few_tokens, linears))
        end()
    assert not any("forward" in vars(module) for module in linears)


def test_latents_are_attended_by_the_weight_of_a_projection_that_runs_it() -> None:
    model = model_of("deepseek_v3").eval()
    call: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([[5, 9, 3, 7]])
    want = model.generate(ids, **call)
    attach(model)
    assert takes_few_tokens(model.model.layers[0].self_attn.kv_b_proj)
    assert torch.equal(model.generate(ids, **call, past_key_values=PagedCache(model.config, 1, 16)), want)


def test_another_class_has_its_forward() -> None:
    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    module, x = given(), tokens(2)
    module.__class__ = Other
    with torch.no_grad():
        assert module(x) is x


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_has_a_forward_of_its_own() -> None:
    scripted: Any = torch.jit.script(Plain())
    assert own_forward(scripted) is vars(scripted)["forward"]
