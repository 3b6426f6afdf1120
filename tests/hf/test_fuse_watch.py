"""What a fused or attached model must not skip in silence: flags that forwards read, hooks and forwards of
others around the fused parts, parts that are called by themselves, and wrappers over what was attached."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_models import build, dense_logits, fused, fused_again, logits
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.module_tracker import ModuleTracker
from transformers.models.llama import modeling_llama

from torchpaged import ArgumentError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, detach, fuse, unfuse

IDS = torch.randint(3, 99, (1, 20), generator=torch.Generator().manual_seed(2))


def run(model: Any, **options: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(
            input_ids=IDS, past_key_values=PagedCache(model.config, 1, 64), **options
        ).logits
    return found


# ------------------------------------------------------------------------------------------------------ flags
@pytest.mark.parametrize(
    ("name", "part", "flag", "value"),
    [
        ("deepseek_v3", "config", "rope_interleave", False),
        ("Mistral", "config", "sliding_window", 4),
        ("Llama", "config", "rope_parameters", {"rope_theta": 7.0, "rope_type": "default"}),
        ("qwen3_next", "layers.0.linear_attn", "activation", "relu"),
        ("lfm2_moe", "layers.1.feed_forward.experts", "act_fn", nn.functional.gelu),
        ("bamba", "layers.0.mamba", "time_step_limit", (0.5, 1.0)),
        ("Gemma3", "layers.0.self_attn", "sliding_window", None),
        ("Llama", "layers.1.self_attn", "scaling", torch.tensor(0.5)),
        ("Llama", "layers.1.self_attn", "scaling", torch.ones(2)),  # is equal to no number, nor unequal
        ("Llama", "layers.1.self_attn.q_proj", "bias", nn.Parameter(torch.ones(64))),
        (
            "Llama",
            "layers.1",
            "__class__",
            type("LlamaDecoderLayer", (modeling_llama.LlamaDecoderLayer,), {}),
        ),
    ],
)
def test_changed_flags_are_refused_not_ignored(name: str, part: str, flag: str, value: Any) -> None:
    """Whatever kind of attribute it is, of a module or of the config; of a copy, too."""
    model = fused(name)
    logits(model)
    for one in (model, copy.deepcopy(model)):
        base: Any = one.get_decoder()
        setattr(base.config if part == "config" else base.get_submodule(part), flag, value)
        with pytest.raises(ArgumentError, match=rf"{part}(\.| has | is )({flag}|a )"):
            logits(one)
    unfuse(model)


def test_a_list_that_is_changed_in_place_is_seen() -> None:
    model = fused("Llama")
    model.config.rope_parameters["rope_theta"] *= 2
    with pytest.raises(ArgumentError, match="config has rope_parameters"):
        logits(model)


def test_multipliers_that_are_written_are_seen() -> None:
    """Of Falcon-H1's states, in a buffer that is not saved: fused layers have vectors made of it."""
    model: Any = fused("falcon_h1")
    with torch.no_grad():
        model.model.layers[0].mamba.mup_vector.mul_(2)
    with pytest.raises(ArgumentError, match="layers.0.mamba.mup_vector was written"):
        logits(model)


def test_a_flag_that_shadows_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "scaled", False, raising=False)
    model: Any = fused("Llama")
    model.model.layers[0].mlp.note = "of no class"
    logits(model)
    model.model.layers[0].mlp.scaled = True
    with pytest.raises(ArgumentError, match="layers.0.mlp has scaled True, before False"):
        logits(model)


def test_what_no_numbers_depend_on_may_change() -> None:
    model: Any = fused("Llama")
    want = logits(model)
    model.config.pad_token_id, model.config.use_cache = 7, False
    model.config.output_hidden_states = True
    model.name_or_path = "elsewhere"
    model.add_model_tags(["trl"])
    model.gradient_checkpointing_enable()  # and a hook at the embedding, which stays
    model.gradient_checkpointing_disable()
    model.train().eval()
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_graphs_are_refused_over_a_changed_flag() -> None:
    generator = Generator(model := build("deepseek_v3"), max_batch_size=1, max_seq_len=32)
    generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    model.config.rope_interleave = False
    with pytest.raises(ArgumentError, match="config has rope_interleave False, before True"):
        generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))


# --------------------------------------------------------------------------------- parts called by themselves
@pytest.mark.parametrize("part", ["decoder", "decoder over another cache", "norm", "lm_head"])
def test_a_part_inside_a_paged_forward_is_refused(part: str) -> None:
    """The norm is lm_head's there: the states would not be normed, or the wanted tokens given to the hook."""
    model: Any = fused("Llama")
    want = run(model)
    calls: dict[str, Callable[..., Any]] = {
        "decoder": lambda out: model.model(IDS),
        "decoder over another cache": lambda out: model.model(
            IDS, past_key_values=PagedCache(model.config, 1, 64)
        ),
        "norm": model.model.norm,
        "lm_head": model.lm_head,
    }
    inside: list[str] = []

    def hook(module: Any, args: Any, out: Tensor) -> None:
        if not inside:
            inside.append(part)
            calls[part](out)

    handle = model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(TorchpagedError, match="called by itself inside a paged forward"):
        run(model, logits_to_keep=torch.tensor([3, 7]))
    handle.remove()
    assert torch.equal(run(model), want)
    unfuse(model)
    fuse(model, ("qkv", "rope", "norm", "gate_up"), count=False)
    inside.clear()
    model.model.layers[0].register_forward_hook(hook)
    torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-4)
    assert inside


def test_a_hook_of_the_last_layer_sees_all_tokens() -> None:
    model: Any = build("Llama")
    want = run(model)
    fuse(model, count=False)
    seen: list[Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(run(model, logits_to_keep=torch.tensor([3, 7])), want[:, [3, 7]])
    assert seen[0].shape == (1, 20, 64)


# ------------------------------------------------------------------------------- hooks and forwards of others
def _hook_of_decoder(model: Any) -> None:
    def scaled(module: Any, args: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state * torch.linspace(0.5, 2.0, 64)
        return out

    model.model.register_forward_hook(scaled)


def _forward_of_decoder(model: Any) -> None:
    plain = model.model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        out = plain(*args, **options)
        out.last_hidden_state = out.last_hidden_state * torch.linspace(0.5, 2.0, 64)
        return out

    model.model.forward = forward


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("change", [_hook_of_decoder, _forward_of_decoder])
def test_what_comes_between_norm_and_head_is_given_normed_states(change: Any, before: bool) -> None:
    model, plain = build("Llama"), build("Llama")
    change(plain)
    want = run(plain)
    if before:
        change(model)
    fuse(model, count=False)
    if not before:
        run(model)
        change(model)
    torch.testing.assert_close(run(model), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        run(model, logits_to_keep=torch.tensor([3])), want[:, [3]], rtol=1e-3, atol=1e-3
    )


def _hook_of_rotation(rotary: Any) -> None:
    rotary.register_forward_hook(lambda module, args, out: (out[0] * 0.9, out[1] * 0.9))


def _forward_of_rotation(rotary: Any) -> None:
    plain = rotary.forward
    rotary.forward = lambda *args, **options: tuple(0.9 * x for x in plain(*args, **options))


@pytest.mark.parametrize("change", [_hook_of_rotation, _forward_of_rotation])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "deepseek_v3", "qwen3_next"])
def test_a_changed_rotation_is_not_put_into_a_table(name: str, change: Any) -> None:
    model = build(name)
    change(model.get_decoder().rotary_emb)
    want = logits(model)
    report = fuse(model, count=False)
    torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-3)
    assert any("own or forward hooks" in why for why in report.skipped["rope"].values())


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
def test_a_rotation_that_a_library_replaced_is_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes behind `fuse` is refused."""
    fused, plain = build("Llama"), getattr(modeling_llama, name)
    fuse(fused, count=False)

    def rotate(*args: Any) -> Any:
        out = plain(*args)
        return out * 0.9 if isinstance(out, Tensor) else tuple(0.9 * each for each in out)

    monkeypatch.setattr(modeling_llama, name, rotate)
    model = build("Llama")
    want = dense_logits(model)
    report = fuse(model, count=False)
    torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-3)
    assert set(report.skipped["rope"].values()) == {f"its {name} is another library's"}
    with pytest.raises(ArgumentError, match=f"modeling_llama has another {name}"):
        logits(fused)


def test_rotations_of_copies_and_of_files_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation may be any callable: a copy of the model still runs the one of its class's file."""
    monkeypatch.setattr(modeling_llama, "rotate_half", Rotation(modeling_llama.rotate_half))
    model = fused("Llama")
    want = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), want)
    monkeypatch.delitem(sys.modules, modeling_llama.__name__)
    assert torch.equal(logits(model), want)


class Rotation(nn.Module):
    """A function as a module, as libraries of kernels make them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def hook_of_all() -> Iterator[Callable[[], None]]:
    handles: list[Any] = []

    def put() -> None:
        handles.append(
            register_module_forward_hook(
                lambda module, args, out: out * 1.1 if type(module) is nn.Linear else None
            )
        )

    yield put
    for handle in handles:
        handle.remove()


def test_hooks_of_all_modules_are_called_or_refused(hook_of_all: Any) -> None:
    model = fused("Llama")
    with ModuleTracker():
        logits(model)
    twin = copy.deepcopy(model)
    logits(twin)
    hook_of_all()
    with pytest.raises(ArgumentError, match="has other forward hooks"):
        logits(model)
    with pytest.raises(ArgumentError, match="has other forward hooks"):
        logits(twin)
    fused_again(model, dense_logits, 1e-3)


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("kind", ["LlamaMLP", "LlamaAttention", "LlamaRMSNorm", "LlamaDecoderLayer"])
def test_a_forward_that_a_library_gave_a_class_is_run(
    kind: str, wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernels of others come in: behind fuse() it is refused, ahead of it the layers keep it."""
    model, of_class = build("Llama"), getattr(modeling_llama, kind)
    fuse(model, count=False)
    plain = of_class.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        out = plain(self, *args, **options)
        return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5

    monkeypatch.setattr(of_class, "forward", functools.wraps(plain)(forward) if wraps else forward)
    with pytest.raises(ArgumentError, match=f"the class {kind} has another forward"):
        logits(model)
    report, _ = fused_again(model, dense_logits, 1e-3)
    assert len(report.skipped["norm"]) == 3


# -------------------------------------------------------------------------------------- over what attach gave
def test_a_wrapper_over_an_attached_function_is_not_dropped() -> None:
    model: Any = build("lfm2", attached=False)
    attach(model)
    mixer = next(layer.conv for layer in model.model.layers if hasattr(layer, "conv"))
    ours, calls = mixer.forward, list[int]()

    def wrapper(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return ours(*args, **options)

    mixer.forward = wrapper
    want = logits(model)
    with pytest.raises(
        ArgumentError, match=r"model.layers.0.conv.forward set to another since; take that off"
    ):
        detach(model)
    assert mixer.forward is wrapper and model.config._attn_implementation == "torchpaged"
    torch.testing.assert_close(logits(model), want)
    mixer.forward = ours
    detach(model)
    assert "forward" not in vars(mixer) and model.config._attn_implementation == "eager"
