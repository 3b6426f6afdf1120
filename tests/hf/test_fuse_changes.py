"""What comes after fuse(): saving, copying, moving and loading keep the model right, other changes are
refused until it is fused again; and which layers are left alone."""

import copy
import functools
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fused_models import build, dense_logits, eager_tokens, fused, generate, logits
from models import padded_prompts
from torch import Tensor, nn

from torchpaged import ArgumentError, NotCopyableError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, fuse, unfuse


def test_save_and_load(tmp_path: Path) -> None:
    model = fused("Qwen2")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    want = model.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[key]) for key, x in loaded.state_dict().items())


def test_a_cast_rounds_the_rotation_as_the_models_own() -> None:
    """``to(torch.bfloat16)`` rounds frequencies, which at far positions is another rotation."""
    model, other = build("Llama"), build("Llama")
    fuse(model)
    before: Any = model.get_decoder().layers[0]._torchpaged_plan.mixers[0].rope
    exact = before.cos_sin
    for one in (model, other):
        one.to(torch.bfloat16)
    fuse(other)
    cast, fused_later = (m.get_decoder().layers[0]._torchpaged_plan.mixers[0].rope for m in (model, other))
    assert torch.equal(cast.cos_sin, fused_later.cos_sin)
    assert not torch.equal(cast.cos_sin, exact)
    table = cast.cos_sin
    model.to("cpu")
    assert cast.cos_sin is table, "captured graphs read it there"


@pytest.mark.parametrize("passes", [None, ("norm",), ("lm_head",)])
def test_a_pickle_is_refused_where_it_is_made(passes: tuple[str, ...] | None) -> None:
    """It would name forwards that no class has, and fail where the file is all that is left."""
    model = fused("Llama", passes)
    with pytest.raises(NotCopyableError, match=r"unfuse\(model\)"):
        torch.save(model, io.BytesIO())
    unfuse(model)
    torch.save(model, io.BytesIO())


def test_a_pickle_is_refused_ahead_of_what_it_could_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation of another library's that is no module's function."""
    model = build("Llama")
    own = sys.modules[type(model).__module__].apply_rotary_pos_emb
    monkeypatch.setattr(f"{type(model).__module__}.apply_rotary_pos_emb", lambda *q_and_k: own(*q_and_k))
    fuse(model)
    with pytest.raises(NotCopyableError, match=r"unfuse\(model\)"):
        torch.save(model, io.BytesIO())


def test_a_copy_is_fused_and_independent() -> None:
    model = fused("Llama")
    other, want = copy.deepcopy(model), logits(model)
    assert torch.equal(logits(other), want)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(logits(other), want)
    assert not torch.equal(logits(model), want)
    for each in (model, other):
        plan: Any = each.get_decoder().layers[0]._torchpaged_plan  # type: ignore[union-attr, index]
        # torch's mark has no public reader
        for tensor in (plan.inputs.weight, plan.gate_up.weight, plan.mixers[0].rope.cos_sin):
            assert tensor._dynamo_static_input_type == "unguarded", (
                "compiled CUDA graphs would copy it in every replay"
            )
    unfuse(other)
    torch.testing.assert_close(logits(other), want, rtol=1e-4, atol=1e-4)


def test_columns_in_groups_follow_copies_and_moves() -> None:
    """Of Qwen3-Next's product, whose columns are collected by a constant of ours."""
    model = fused("qwen3_next_moe")
    want, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].linear_attn.in_proj_ba.weight.mul_(2)
    assert torch.equal(logits(model), want)
    assert not torch.equal(logits(twin), want)
    model.double().float()
    assert torch.equal(logits(model), want)


def test_moving_and_loading_keep_the_model_right() -> None:
    """to() and load_state_dict() after fuse(): weights, norms and tables follow; a to() that changes nothing
    moves nothing."""
    model, other = build("Gemma3"), build("Gemma3")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    want = logits(other)
    fuse(model)
    first: Any = model.get_decoder().layers[0]
    address = first.self_attn.q_proj.weight.data_ptr()
    model.to("cpu")
    assert first.self_attn.q_proj.weight.data_ptr() == address, "captured graphs read this memory"
    for assign in (False, True):
        model.load_state_dict(build("Gemma3").state_dict())
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    half, unfused = logits(model.to(torch.bfloat16)).float(), logits(other.to(torch.bfloat16)).float()
    assert float((half - want).abs().mean()) <= 1.5 * float((unfused - want).abs().mean())
    assert (
        first.self_attn.q_proj.weight.untyped_storage().data_ptr()
        == first.self_attn.k_proj.weight.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Llama", "mlp.up_proj"),
        ("Llama", "input_layernorm"),
        ("Llama", "post_attention_layernorm"),
        ("Qwen3", "self_attn.k_norm"),
    ],
)
def test_replaced_weights_are_refused_not_ignored(name: str, part: str) -> None:
    model = fused(name)
    module: Any = model.get_decoder().get_submodule(f"layers.1.{part}")
    module.weight = nn.Parameter(module.weight.detach() * 2)
    with pytest.raises(ArgumentError, match=f"{part}.weight lies elsewhere; call torchpaged.hf.unfuse"):
        logits(model)
    unfuse(model)
    logits(model)


@pytest.mark.parametrize(
    ("name", "part", "number"),
    [
        ("Llama", "layers.1.self_attn", "scaling"),
        ("Llama", "layers.0.input_layernorm", "variance_epsilon"),
        ("Llama", "norm", "variance_epsilon"),
        ("Gemma3", "layers.0.self_attn.q_norm", "eps"),
        ("Llama", "rotary_emb", "attention_scaling"),
        ("Gemma2", "layers.0.self_attn", "attn_logit_softcapping"),
        ("granite_dense", "layers.1", "residual_multiplier"),
        ("falcon_multiplied", "layers.0.self_attn", "key_multiplier"),
        ("Gemma3", "rotary_emb", "full_attention_attention_scaling"),
    ],
)
def test_changed_numbers_are_refused_not_ignored(name: str, part: str, number: str) -> None:
    """Fused layers took them when they were made."""
    model = fused(name)
    logits(model)
    twin = copy.deepcopy(model)
    module: Any = model.get_decoder().get_submodule(part)
    before = getattr(module, number)
    setattr(module, number, 2 * before)
    with pytest.raises(ArgumentError, match=f"{part} has {number} {2 * before}, before {before}; call"):
        logits(model)
    unfuse(model)
    logits(model)
    copied: Any = twin.get_decoder().get_submodule(part)
    setattr(copied, number, 3 * before)
    with pytest.raises(ArgumentError, match=f"{part} has {number} {3 * before}"):
        logits(twin)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("passes", [None, ("rope",)])
def test_changed_frequencies_are_refused_not_ignored(passes: Any, in_place: bool) -> None:
    """The table holds what they gave; a copy has a table of its own."""
    model = fused("Llama", passes)
    logits(model)
    twin = copy.deepcopy(model)
    want = logits(twin)
    rotary: Any = model.get_decoder().rotary_emb
    if in_place:
        rotary.inv_freq.mul_(0.5)
    else:
        rotary.inv_freq = rotary.inv_freq * 0.5
    with pytest.raises(ArgumentError, match=r"rotary_emb.inv_freq (was written|lies elsewhere); call"):
        logits(model)
    assert torch.equal(logits(twin), want)
    unfuse(model)
    changed = logits(model)
    fuse(model, passes)
    torch.testing.assert_close(logits(model), changed, rtol=1e-4, atol=1e-4)


class Negated(nn.Module):
    """What takes a module's place: gives minus what it gave."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.weight = inner, getattr(inner, "weight", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return tuple(x if x is None else -x for x in out) if isinstance(out, tuple) else -out


def _replaced(path: str) -> Any:
    def change(model: Any) -> None:
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        parent._modules[name] = Negated(parent._modules[name])

    return change


def _own_forward(path: str) -> Any:
    def change(model: Any) -> None:
        part = model.get_submodule(path)
        part.forward = Negated(part).forward if "forward" in vars(part) else Negated(copy.copy(part)).forward

    return change


def _with_hook(path: str) -> Any:
    def hook(module: Any, args: Any, out: Any) -> Any:
        return tuple(-x for x in out[:1]) + out[1:] if isinstance(out, tuple) else -out

    return lambda model: model.get_submodule(path).register_forward_hook(hook)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _of_class(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.__class__ = Doubled


def _lora(model: Any) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def _torchao(part: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantization.quantize_(part, quantization.Int8WeightOnlyConfig())


CHANGES = {
    **{f"replaced {x}": _replaced(f"model.layers.1.{x}") for x in ("self_attn", "mlp", "input_layernorm")},
    **{f"replaced {x}": _replaced(f"model.layers.1.self_attn.{x}_proj") for x in "qo"},
    **{f"replaced {x}": _replaced(f"model.layers.1.mlp.{x}") for x in ("gate_proj", "up_proj", "act_fn")},
    **{
        f"replaced {x}": _replaced(x)
        for x in ("lm_head", "model.norm", "model.embed_tokens", "model.layers.1")
    },
    **{f"forward of {x}": _own_forward(f"model.layers.1.{x}") for x in ("self_attn", "mlp.up_proj")},
    **{f"forward of {x}": _own_forward(x) for x in ("lm_head", "model.norm")},
    **{f"hook on {x}": _with_hook(f"model.layers.1.{x}") for x in ("self_attn", "mlp", "mlp.down_proj")},
    **{f"hook on {x}": _with_hook(x) for x in ("lm_head", "model.norm")},
    "class": _of_class,
    "lora": _lora,
    "torchao": _torchao,
    "torchao head": lambda model: _torchao(model.lm_head),
}


def test_changes_of_a_mixer_are_refused_until_fused_again() -> None:
    model = fused("lfm2")
    logits(model)
    _hook("conv.in_proj")(model.model.layers[2])
    with pytest.raises(ArgumentError, match="layers.2.conv.in_proj has other forward hooks"):
        logits(model)
    unfuse(model)
    assert "layers.2" in fuse(model).skipped["norm"]
    logits(model)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_comes_after_fuse_is_refused_until_it_is_fused_again(kind: str) -> None:
    """By every door over a paged cache; steps that are not fused follow, and so does fuse() again."""
    model, ids = build("Llama"), padded_prompts()["input_ids"]
    fuse(model, count=False)
    generator = Generator(model, max_batch_size=1, max_seq_len=32, graphs=False)
    graphs = Generator(model, max_batch_size=1, max_seq_len=32)
    before = logits(model)
    CHANGES[kind](model)
    model.to("cpu")  # looks at the weights anew
    words = "^model: expected the modules, forwards, .* that fuse.. found, got .*; call torchpaged.hf.unfuse"
    with pytest.raises(ArgumentError, match=words):
        generate(model)
    with pytest.raises(ArgumentError, match=words):
        generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    with pytest.raises(ArgumentError, match="its graphs were made with"):
        graphs.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    with pytest.raises(ArgumentError, match=words), torch.no_grad():
        model.get_decoder()(ids, past_key_values=PagedCache(model.config, 2, 32))
    if not kind.startswith("forward of"):
        unfuse(model)
        want = dense_logits(model)
        assert float((want - before).abs().max()) > 0.01
        fuse(model, count=False)
        torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-3)


def test_another_decoder_runs_as_it_is() -> None:
    """The ends of the old one have nothing to do with it."""
    model, other = build("Llama"), build("Llama", hidden_act="gelu")
    want = eager_tokens(other)
    fuse(model)
    model.model, model.lm_head.weight = other.model, other.lm_head.weight
    assert torch.equal(generate(model), want)
    fuse(model)
    assert torch.equal(generate(model), want)
    unfuse(model)
    assert torch.equal(generate(model), want)


def _hook(path: str) -> Any:
    return lambda layer: layer.get_submodule(path).register_forward_hook(lambda *_: None)


def _adapted(layer: Any) -> None:
    layer.self_attn.o_proj = type("Adapter", (nn.Linear,), {})(64, 64, bias=False)


def _mixed_dtypes(layer: Any) -> None:
    layer.mlp.up_proj.to(torch.bfloat16)


def _forward(path: str) -> Any:
    def change(layer: Any) -> None:
        part = layer.get_submodule(path)
        part.forward = functools.partial(type(part).forward, part)

    return change


def _extended(layer: Any) -> None:
    layer.extra = nn.Identity()


def _other_conv(layer: Any) -> None:
    layer.conv.conv = nn.Sequential()


def _bias(layer: Any) -> None:
    attn = layer.self_attn
    attn.q_a_proj.bias = nn.Parameter(torch.zeros(attn.q_a_proj.out_features))


def _conv_dtype(layer: Any) -> None:
    layer.conv.conv.double()


LEFT_ALONE = {
    "hook": ("Llama", _hook("mlp.down_proj"), "mlp.down_proj has forward hooks"),
    "adapter": ("Llama", _adapted, "self_attn.o_proj is a "),
    "dtypes": ("Llama", _mixed_dtypes, "its weights differ in dtype or device"),
    "forward": ("Llama", _forward("self_attn"), "self_attn has a forward of its own"),
    "part": ("Llama", _extended, "its parts are"),
    "hook on latents": ("youtu", _hook("self_attn.kv_b_proj"), "self_attn.kv_b_proj has forward hooks"),
    "hook on a state": ("lfm2", _hook("conv.in_proj"), "conv.in_proj has forward hooks"),
    "convolution": ("lfm2", _other_conv, "conv.conv is a Sequential, expected Conv1d"),
    "dtype of a convolution": ("lfm2", _conv_dtype, "its weights differ in dtype or device"),
    "forward of a state": ("lfm2", _forward("conv.in_proj"), "conv.in_proj has a forward of its own"),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_an_unexpected_layer_is_left_alone_as_a_whole(kind: str) -> None:
    name, change, reason = LEFT_ALONE[kind]
    model = build(name)
    layer: Any = model.get_decoder().layers[0]
    change(layer)
    report = fuse(model, count=False)
    for each in ("qkv", "norm", "gate_up"):
        assert report.replaced[each] == [f"layers.{i}" for i in range(1, report.num_layers)]
        assert report.skipped[each]["layers.0"].startswith(reason)
    assert "forward" not in vars(layer)
    weights = list(layer.parameters())
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in weights), "each has memory of its own"
    if name == "Llama":
        assert "forward" not in vars(model.get_decoder().rotary_emb), "a layer still needs the cosines"
        if kind != "dtypes":
            assert torch.equal(generate(model), eager_tokens(model))


def test_a_pass_that_does_not_apply_is_left_out() -> None:
    model = build("youtu")
    _bias(model.get_decoder().layers[0])
    report = fuse(model, count=False)
    assert report.skipped["qkv"] == {"layers.0": "only some of q_a_proj, kv_a_proj_with_mqa have a bias"}
    assert "layers.0" in report.replaced["rope"] and "layers.1" in report.replaced["qkv"]
