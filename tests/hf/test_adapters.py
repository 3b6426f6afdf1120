"""Adapters and hooks inside a model: LoRA by hand and by peft, and accelerate's offloading."""

import contextlib
from typing import Any

import pytest
import torch
from models import padded_prompts, tiny
from torch import Tensor, nn

import torchpaged.hf
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache

SHAPE: dict[str, Any] = {"num_hidden_layers": 2}
CALL: dict[str, Any] = {**padded_prompts(), "max_new_tokens": 12, "do_sample": False}


class Lora(nn.Module):
    """A Linear with adapters, of which some are active: the attributes that peft's layers have."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.disable_adapters, self.merged_adapters = base, False, []
        self.active_adapters, self.scaling = ["a"], {"a": 1.0, "b": 1.0}
        generator = torch.Generator().manual_seed(base.out_features)
        self.deltas = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(base.weight.shape, generator=generator) * 0.1)
                for name in ("a", "b")
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            y = y + nn.functional.linear(x, self.deltas[name]) * self.scaling[name]
        return y


class PeftModel(nn.Module):
    """A wrapper as peft's is, around what it wraps."""

    def __init__(self, model: Any, learned_prompt: bool = False) -> None:
        super().__init__()
        self.base = model
        kind = type("Config", (), {"is_prompt_learning": learned_prompt})
        self.peft_config = {"a": kind}

    def get_base_model(self) -> Any:
        return self.base

    def set_adapter(self, name: str) -> None:
        for module in self.modules():
            if isinstance(module, Lora):
                module.active_adapters = [name]

    @contextlib.contextmanager
    def disable_adapter(self) -> Any:
        for on in (True, False):
            for module in self.modules():
                if isinstance(module, Lora):
                    module.disable_adapters = on
            if on:
                yield

    @property
    def config(self) -> Any:
        return self.base.config

    def generate(self, **call: Any) -> Any:
        return self.base.generate(**call)


def by_hand() -> Any:
    model = tiny("Llama", **SHAPE)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.up_proj = Lora(layer.mlp.up_proj)
    return PeftModel(model).eval()


def by_peft() -> Any:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    torch.manual_seed(5)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny("Llama", **SHAPE), peft.LoraConfig(**options), adapter_name="a")
    model.add_adapter("b", peft.LoraConfig(**options))
    return model.eval()


def runs(model: Any, **options: Any) -> list[Tensor]:
    """Tokens of each adapter in turn, and of none."""

    def one() -> Tensor:
        cache = {"past_key_values": PagedCache(model.config, 2, 64)} if options.get("paged") else {}
        return model.generate(**CALL, **cache)

    tokens = []
    for name in ("a", "b", "a"):
        model.set_adapter(name)
        tokens.append(one())
    with model.disable_adapter():
        tokens.append(one())
    return tokens


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("make", [by_hand, by_peft], ids=lambda f: f.__name__)
def test_adapters_switched_between_calls(make: Any) -> None:
    want = runs(make())
    assert len({tuple(tokens[0].tolist()) for tokens in want}) == 3
    model = make()
    with torchpaged.hf.paged(model):
        assert equal(runs(model, paged=True), want)
        report = torchpaged.hf.fuse(model)
        assert "qkv" not in report.replaced
        assert f"{make.__module__ if make is by_hand else 'peft'}." in str(report)
        assert equal(runs(model, paged=True), want)
        torchpaged.hf.unfuse(model)
    model.set_adapter("a")
    assert torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=64, graphs=False) is model
    assert equal(runs(model), want)
    torchpaged.hf.unaccelerate(model)


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_hand, by_peft], ids=lambda f: f.__name__)
def test_compiled_layers_follow_the_adapter(make: Any) -> None:
    want, model = runs(make()), make()
    with torchpaged.hf.paged(model):
        torch._dynamo.reset()
        torchpaged.hf.compile_layers(model, backend="eager")
        assert equal(runs(model, paged=True), want)
        torchpaged.hf.uncompile_layers(model)


@pytest.mark.parametrize("make", [by_hand, by_peft], ids=lambda f: f.__name__)
def test_graphs_of_another_adapter_are_not_replayed(make: Any) -> None:
    """A captured step goes on with the adapter that was active: refused, until it is that one again."""
    want, model = runs(make()), make()
    model.set_adapter("a")
    torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=64)
    assert torch.equal(model.generate(**CALL), want[0])
    model.set_adapter("b")
    with pytest.raises(
        ArgumentError, match=r"q_proj has active_adapters \['b'\], before \['a'\].*graphs=False"
    ):
        model.generate(**CALL)
    with model.disable_adapter(), pytest.raises(ArgumentError, match="adapters"):
        model.generate(**CALL)
    model.set_adapter("a")
    assert torch.equal(model.generate(**CALL), want[0])
    torchpaged.hf.unaccelerate(model)


def test_a_generator_looks_at_its_model() -> None:
    model = by_hand()
    generator, sampling = Generator(model, max_batch_size=2, max_seq_len=64), SamplingParams(max_new_tokens=2)
    generator.generate([[5, 6, 7]], sampling)
    model.base.load_state_dict(model.base.state_dict())  # in place: the graphs see it
    generator.generate([[5, 6, 7]], sampling)
    model.base.load_state_dict({k: v.clone() for k, v in model.base.state_dict().items()}, assign=True)
    for call in (generator.submit, lambda ids, s: generator.generate([ids], s)):
        with pytest.raises(ArgumentError, match="lies elsewhere"):
            call([5, 6, 7], sampling)
    assert not generator.has_unfinished


def test_a_stream_looks_at_its_model() -> None:
    """What came between a request and its steps: the first step looks, and refuses before it computes."""
    model = by_hand()
    generator = Generator(model, max_batch_size=2, max_seq_len=64)
    layer = model.base.get_decoder().layers[0]
    for named in (False, True):
        request = generator.submit([5, 6, 7], SamplingParams(max_new_tokens=2))
        hook = layer.mlp.register_forward_hook(lambda module, args, out: -out)
        with pytest.raises(ArgumentError, match=r"layers\.0\.mlp has other forward hooks"):
            next(generator.stream([request] if named else None))
        hook.remove()
        assert "0 requests" in repr(generator)  # a call that breaks off takes its own along
    generator.submit([5, 6, 7], SamplingParams(max_new_tokens=2))
    assert len(list(generator.stream())) == 2


def test_merged_adapters_fuse() -> None:
    model = by_peft()
    model.set_adapter("b")
    want = model.generate(**CALL)
    merged = model.merge_and_unload()
    with torchpaged.hf.paged(merged):
        assert len(torchpaged.hf.fuse(merged).replaced["qkv"]) == 2
        assert torch.equal(merged.generate(**CALL, past_key_values=PagedCache(merged.config, 2, 64)), want)


def test_learned_prompts_are_refused() -> None:
    model = PeftModel(tiny("Llama", **SHAPE), learned_prompt=True)
    for door in (torchpaged.hf.attach, torchpaged.hf.fuse, torchpaged.hf.accelerate, Generator):
        with pytest.raises(UnsupportedModelError, match="learned prompt"):
            door(model)


def test_activated_loras_run_behind_a_cache_alone() -> None:
    """The wrapper tells each row's layers where the adapter begins."""
    model = PeftModel(tiny("Llama", **SHAPE))
    model.peft_config["a"].alora_invocation_tokens = [5]
    for door in (torchpaged.hf.accelerate, Generator, torchpaged.hf.PagedModel):
        with pytest.raises(UnsupportedModelError, match="'a' is an activated LoRA"):
            door(model)
    torchpaged.hf.detach(torchpaged.hf.attach(model))


@pytest.mark.parametrize("offloaded", [True, False], ids=["offloaded", "dispatched"])
def test_accelerates_hooks(offloaded: bool) -> None:
    """Weights that come and go with each forward, and hooks that only look."""
    library = pytest.importorskip("accelerate")
    model = tiny("Llama", **SHAPE)
    want = model.generate(**CALL)
    if offloaded:
        library.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        library.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with torchpaged.hf.paged(model):
        assert torch.equal(model.generate(**CALL, past_key_values=PagedCache(model.config, 2, 64)), want)
        with pytest.raises(UnsupportedModelError, match="hook of accelerate"):
            torchpaged.hf.compile_layers(model)
        report = torchpaged.hf.fuse(model)
        assert not any(report.replaced.values())
        assert "forward of its own" in str(report)
        assert torch.equal(model.generate(**CALL, past_key_values=PagedCache(model.config, 2, 64)), want)
        torchpaged.hf.unfuse(model)
    if offloaded:
        with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight is offloaded \(device_map\)"):
            torchpaged.hf.accelerate(model)
    else:
        torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=64)
        assert torch.equal(model.generate(**CALL), want)


def test_layers_on_several_devices_are_refused() -> None:
    model = tiny("Llama", **SHAPE)
    model.set_attn_implementation("torchpaged")
    cache, states = PagedCache(model.config, 2, 64), torch.randn(2, 2, 4, 16)
    cache.update(states, states, 0)
    with pytest.raises(UnsupportedModelError, match=r"lie on cpu and meta \(device_map\)"):
        cache.update(states.to("meta"), states.to("meta"), 1)


def test_assistants_of_other_sizes() -> None:
    """Small ones, paged or not, of which generate() makes caches of its own."""
    prompt = {"input_ids": CALL["input_ids"][1:], "max_new_tokens": 16, "do_sample": False}
    want = tiny("Llama", **SHAPE).generate(**prompt)
    model = tiny("Llama", **SHAPE)
    model.set_attn_implementation("torchpaged")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    assistant = tiny("Llama", **small)
    for implementation in ("eager", "torchpaged"):
        assistant.set_attn_implementation(implementation)
        cache = PagedCache(model.config, 1, 64)
        assert torch.equal(model.generate(**prompt, past_key_values=cache, assistant_model=assistant), want)
