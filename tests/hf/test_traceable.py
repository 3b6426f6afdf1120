"""Modules whose own code breaks a trace: what `attach` gives them computes the same, in one graph, and is
needed still."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from model_coverage import encoder_decoders, examine
from model_coverage.architectures import model_of, model_types
from torch import Tensor, nn

from torchpaged.hf import PagedCache, attach, detach, paged
from torchpaged.hf.attached import put_in
from torchpaged.hf.families import FAMILIES, MODULES, family_of

OLD = transformers.__version__.startswith("5.17")


def named(model: nn.Module, name: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == name]


def compiled(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


EXPERTS = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts"}


def routed(module: Any, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """States and each token's experts, with their weights; of longcat some that have no weights, too."""
    generator = torch.Generator().manual_seed(tokens)
    count, top_k = getattr(module, "total_experts", None) or module.num_experts, 2
    states = torch.randn(tokens, module.hidden_size, generator=generator)
    index = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
    return states, index, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, tokens: int) -> None:
    """A few tokens with the weights of their own experts, many through all of them; the module's own loop is
    no graph."""
    [module, *_] = named(model_of(name, "eager"), EXPERTS[name])
    states, *routing = routed(module, tokens)
    shape = (1, tokens, -1) if name == "dbrx" else (tokens, -1)
    with torch.no_grad():
        want = module(states.view(shape), *routing)
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            compiled(module)(states.view(shape), *routing)
        put_in({module: MODULES[EXPERTS[name]](module)})
        assert torch.equal(module(states.view(shape), *routing), want)  # untraced: its own
        got = compiled(module)(states.view(shape), *routing)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases(but=("ctrl",))
@pytest.mark.parametrize(
    "name", ["xglm", "ctrl", "dbrx", "longcat_flash", "recurrent_gemma", "gemma3n_text", "rembert"]
)
def test_one_graph(name: str) -> None:
    row = examine(name)
    assert row.is_one_graph, row
    assert row.mode in ("paged", "latent"), row


@pytest.mark.slow
def test_one_graph_of_an_encoder_decoder() -> None:
    assert encoder_decoders.examine("m2m_100").is_one_graph


def test_ctrl_with_what_a_trace_of_ours_does_not_give() -> None:
    """Hidden states are collected by transformers' own forward."""
    model, ids = model_of("ctrl", "eager"), torch.randint(3, 99, (1, 4))
    with paged(model), torch.no_grad():
        out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.n_layer + 1


def test_recurrent_states_stay_where_they_are() -> None:
    """Where no cache has them: from one step to the next and from one prompt to the next; the first is in
    inference mode."""
    model, ids = model_of("recurrent_gemma", "eager"), torch.randint(3, 99, (2, 6))
    call = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    want = model.generate(ids, **call)
    with paged(model):
        [block, *_] = named(model, "RecurrentGemmaRecurrentBlock")
        places = []
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                got = model.generate(ids, **call, past_key_values=PagedCache(model.config, 2, 16, dense=True))
            assert torch.equal(got, want)
            places.append([state.data_ptr() for state in (block.conv1d_state, block.rg_lru.recurrent_states)])
        assert places[0] == places[1]
        assert block.conv1d_state.is_contiguous()
    assert "self.conv1d_state = conv_state[:, :, 1:]" in inspect.getsource(type(block).forward)


def test_they_come_and_go() -> None:
    model = model_of("dbrx", "eager")
    assert not any("forward" in vars(module) for module in model.modules())
    attach(model)
    assert all("forward" in vars(module) for module in named(model, "DbrxExperts"))
    detach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_each_is_needed() -> None:
    """By a name that is there, and by what is named as the reason; else it can go."""
    reasons = {"CTRLModel": "np.sqrt(", "DbrxExperts": ".nonzero()", "LongcatFlashExperts": ".nonzero("}
    moved = "key_states.to(query_states.device)"
    only_old = {
        "Gemma3nTextAttention": moved,
        "Gemma4TextAttention": moved,
        "Gemma4UnifiedTextAttention": moved,
        "M2M100SinusoidalPositionalEmbedding": "if max_pos > self.weights.size(0)",
        "RecurrentGemmaModel": "_get_mask_sizes.__get__",
    }
    own = {name for name, family in FAMILIES.items() if family.own_attention}
    with_own_attention = {name for model_type in own for name in family_of(model_type).modules}
    assert {*reasons, *only_old} == set(MODULES) - with_own_attention
    types = ["ctrl", "dbrx", "longcat_flash", "recurrent_gemma", "gemma3n_text", "gemma4_text"]
    types = [name for name in [*types, "gemma4_unified_text"] if name in model_types()]
    models = [*map(model_of, types), encoder_decoders.model_of("m2m_100")]
    found = {type(module).__name__: type(module) for model in models for module in model.modules()}
    for name, reason in {**reasons, **only_old}.items():
        there = reason in inspect.getsource(found[name].forward)
        assert there == (name in reasons or OLD), name


@pytest.mark.slow
def test_a_trace_that_lost_its_pools_gets_them_from_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unattached, or without what is handed on, compiled code refuses."""
    if not OLD:
        pytest.skip("this transformers does not move shared keys")
    monkeypatch.setitem(MODULES, "Gemma3nTextAttention", lambda module: None)
    row = examine("gemma3n_text")
    assert row.mode == "paged"
    assert "Observed exception" in row.reason


@pytest.mark.parametrize("name", ["dbrx", *(["recurrent_gemma"] if OLD else [])])
def test_a_compiled_engine_without_attach(name: str, no_codegen: None) -> None:
    """The engine gives these modules their functions, and takes them back; attached meanwhile, a model keeps
    those until it is detached."""
    from torchpaged.engine import Generator, SamplingParams

    model = model_of(name).eval()
    model.generation_config.eos_token_id = None
    prompt, options = [5, 9, 3, 7], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(torch.tensor([prompt]), **options)[0, 4:].tolist()
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 32, "compile": True}
    with Generator(model, **sizes) as generator:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        assert generator.generate([prompt], params)[0].token_ids == want
        attach(model)
    assert model.generate(torch.tensor([prompt]), **options)[0, 4:].tolist() == want
    detach(model)
    assert not any("forward" in vars(module) for module in model.modules())
