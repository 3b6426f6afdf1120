"""fuse(): the same tokens and numbers as the model unfused, few launches, nothing half done, everything
undone by unfuse()."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import COMMON, SUFFIX, padded_prompts
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel

from torchpaged import ArgumentError, NotCopyableError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.fusible import PASSES
from torchpaged.fuse.launch_count import count_launches
from torchpaged.fuse.rope_table import RopeTable
from torchpaged.hf import PagedCache, compile_layers, fuse, uncompile_layers, unfuse

MIXED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
    **MIXED,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"num_key_value_heads": 1}),
    "LlamaBiases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "SmolLM": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 32}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "Gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "Gemma3": ("Gemma3", GEMMA),
    "GptOss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    ),
}
#: Launches of a decoder layer; gpt-oss: five, and the mixture of experts as it is.
LAUNCHES = {"Gemma2": 8, "Gemma3": 8}
LLAMA_STEP = ["linear", "rope_write_kv", "paged_attention", "linear", "linear", "linear"]
GEMMA_STEP = [*LLAMA_STEP[:4], "rms_norm", "linear", "linear", "rms_norm"]
COUNT: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A compiler that counts graphs."""
    COUNT.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def build(name: str, **options: Any) -> PreTrainedModel:
    """A tiny model in which every norm, bias and sink matters: transformers starts them at 0 or 1."""
    family, extra = MODELS[name]
    config = getattr(transformers, SUFFIX.get(family, f"{family}Config"))(**{**COMMON, **extra, **options})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.1
            ) if parameter.dim() == 1 else parameter.mul_(4.0 if "embed" in key else 8.0)
    model.set_attn_implementation("torchpaged")
    return model


def generate(model: PreTrainedModel, paged: bool = True, **options: Any) -> Tensor:
    cache = {"past_key_values": PagedCache(model.config, 2, 64, block_size=4)} if paged else {}
    return model.generate(
        **padded_prompts(), max_new_tokens=10, do_sample=False, pad_token_id=0, **cache, **options
    )


def unfused_tokens(model: PreTrainedModel) -> Tensor:
    """HuggingFace's own: eager attention, its own cache."""
    model.set_attn_implementation("eager")
    tokens = generate(model, paged=False)
    model.set_attn_implementation("torchpaged")
    return tokens


def logits(model: PreTrainedModel, paged: bool = True) -> Tensor:
    """A prefill of 20 tokens and three decode steps, teacher forced: ``[2, 23, vocab]``."""
    ids = torch.randint(3, 99, (2, 23), generator=torch.Generator().manual_seed(2))
    cache = (
        PagedCache(model.config, 2, 32, block_size=4)
        if paged
        else transformers.DynamicCache(config=model.config)
    )
    with torch.inference_mode():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 1], dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.slow_cases(but=("Llama",))
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_unfused_model(name: str) -> None:
    """generate() with a PagedCache, plain and compiled by itself in one graph, and the engine over
    packed batches."""
    torch._dynamo.reset()
    model, inputs = build(name), padded_prompts()
    want = unfused_tokens(model)
    assert len(set(want[:, 20:].flatten().tolist())) > 8, "the tokens must tell models apart"
    report = fuse(model)
    assert torch.equal(generate(model), want)
    COUNT.clear()
    config = CompileConfig(backend=counting, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers' own switch for testing the path on a CPU
    assert torch.equal(generate(model, compile_config=config), want)
    assert len(COUNT) == 1
    prompts = [
        row[mask.bool()].tolist()
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    for graphs in (True, False):
        outputs = Generator(
            model, max_batch_size=2, block_size=4, graphs=graphs, prefill_chunk_size=9
        ).generate(prompts, SamplingParams(max_new_tokens=10))
        assert [o.token_ids for o in outputs] == want[:, 20:].tolist()
    assert report.replaced["qkv"] == [f"layers.{i}" for i in range(report.num_layers)]


@pytest.mark.parametrize("name", MODELS)
def test_launches_per_layer(name: str) -> None:
    """Counted in a decode step, by op; the layer and the report say the same."""
    model = build(name)
    report = fuse(model)
    assert report.before
    assert report.after
    steps = [[call.split(".")[1] for call in layer if "torchpaged" in call] for layer in report.after.names]
    if name == "GptOss":
        assert all(step == [*LLAMA_STEP[:4], "rms_norm"] for step in steps)
        assert "mixture of experts" in str(report)
        assert report.after.layers[0] < report.before.layers[0] - 20
        return
    expected = GEMMA_STEP if name in LAUNCHES else LLAMA_STEP
    no_rope = ["write_kv" if x == "rope_write_kv" else x for x in expected]
    kinds = [no_rope if name == "SmolLM3" and i % 2 else expected for i in range(report.num_layers)]
    assert steps == kinds
    assert set(report.after.layers) == {LAUNCHES.get(name, 6)}
    assert min(report.before.layers) > 20
    assert report.after.rest == 2 + 3 * (name == "Gemma2"), (
        "embedding with its scale, lm_head with the norm, the cap"
    )
    assert f"-> {LAUNCHES.get(name, 6)}," in str(report)


@pytest.mark.parametrize("name", MODELS)
def test_state_memory_and_unfuse(name: str) -> None:
    """Names and values stay, no memory is added, and unfuse gives every parameter memory of its own and the
    same bits."""
    model = build(name)
    before, state = logits(model), {key: x.clone() for key, x in model.state_dict().items()}
    signature = inspect.signature(model.forward)

    def stored() -> int:
        return sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        )

    bytes_before, parameters = stored(), dict(model.named_parameters())
    fuse(model, count=False)
    assert stored() == bytes_before
    assert inspect.signature(model.forward) == signature
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert all(p is parameters[key] for key, p in model.named_parameters())
    attn: Any = model.get_decoder().layers[0].self_attn
    assert attn.q_proj.weight.untyped_storage().data_ptr() == attn.v_proj.weight.untyped_storage().data_ptr()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    unfuse(model)
    assert torch.equal(logits(model), before)
    assert stored() == bytes_before
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert not any(
        "forward" in vars(m) or "_apply" in vars(m) or any("torchpaged" in key for key in vars(m))
        for m in model.modules()
    )
    fuse(model, count=False)
    unfuse(model)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_errs_no_more_than_unfused(name: str) -> None:
    """Against float64, over a prefill and decode steps: mean and largest error at most 1.5 times the
    unfused model's."""
    exact = build(name).double()
    exact.set_attn_implementation("eager")
    if name == "GptOss":
        exact.set_experts_implementation("eager")  # torch's grouped products know no float64
    want = logits(exact, paged=False)
    model = build(name).to(torch.bfloat16)
    model.set_attn_implementation("eager")
    unfused = (logits(model, paged=False).double() - want).abs()
    model.set_attn_implementation("torchpaged")
    fuse(model, count=False)
    fused = (logits(model).double() - want).abs()
    assert float(unfused.mean()) > 1e-3, "bf16 must show"
    assert float(fused.mean()) <= 1.5 * float(unfused.mean()), (float(fused.mean()), float(unfused.mean()))
    assert float(fused.amax()) <= 1.5 * float(unfused.amax()), (float(fused.amax()), float(unfused.amax()))


@pytest.mark.parametrize(
    "passes",
    [*((x,) for x in PASSES), *(tuple(y for y in PASSES if y != x) for x in PASSES), ()],
    ids="-".join,
)
@pytest.mark.parametrize("name", ["LlamaBiases", "Qwen3", "SmolLM3", "Gemma3", "GptOss"])
def test_every_pass_alone_and_left_out(name: str, passes: tuple[str, ...]) -> None:
    model = build(name)
    want = logits(model)
    report = fuse(model, passes)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert set(report.replaced) == set(passes) - ({"gate_up"} if name == "GptOss" else set())
    assert report.passes == passes
    assert report.before
    assert report.after
    if report.replaced.keys() - {"embedding"}:  # which replaces one launch by one, or two where it scales
        assert sum(report.after.layers) + report.after.rest < sum(report.before.layers) + report.before.rest
    else:
        scaled = bool(report.replaced) and name == "Gemma3"
        assert (report.after.layers, report.after.rest) == (report.before.layers, report.before.rest - scaled)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "SmolLM3"])
def test_other_caches_and_training_run_as_before(name: str) -> None:
    """Bit for bit: no cache, HuggingFace's cache, a dense PagedCache, gradients."""
    model, ids = build(name), padded_prompts()["input_ids"]

    def results() -> list[Tensor]:
        with torch.no_grad():
            dense = PagedCache(model.config, 2, 32, dense=True)
            outputs = [
                model(ids, use_cache=False).logits,
                model(ids).logits,
                model(ids, past_key_values=dense).logits,
            ]
        model.set_attn_implementation("eager")
        model.train()
        model(ids, labels=ids).loss.backward()
        model.eval().set_attn_implementation("torchpaged")
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return outputs + gradients

    before = results()
    fuse(model)
    assert all(torch.equal(x, y) for x, y in zip(results(), before, strict=True))


def test_hidden_states_are_those_of_the_unfused_model() -> None:
    model, ids = build("Llama"), padded_prompts()["input_ids"]

    def states() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return model(
                ids, past_key_values=PagedCache(model.config, 2, 32), output_hidden_states=True
            ).hidden_states

    fuse(model)
    got = states()
    unfuse(model)
    assert len(got) == 4
    for x, y in zip(got, states(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_save_and_load(tmp_path: Path) -> None:
    model = build("Qwen2")
    fuse(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    want = model.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[key]) for key, x in loaded.state_dict().items())


@pytest.mark.parametrize("passes", [None, ("norm",), ("lm_head",)])
def test_a_pickle_is_refused_where_it_is_made(passes: tuple[str, ...] | None) -> None:
    """It would name forwards that no class has, and fail where the file is all that is left."""
    model = build("Llama")
    fuse(model, passes)
    with pytest.raises(NotCopyableError, match=r"unfuse\(model\)"):
        torch.save(model, io.BytesIO())
    unfuse(model)
    torch.save(model, io.BytesIO())


def test_a_copy_is_fused_and_independent() -> None:
    model = build("Llama")
    fuse(model)
    other, want = copy.deepcopy(model), logits(model)
    assert torch.equal(logits(other), want)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(logits(other), want)
    assert not torch.equal(logits(model), want)
    for each in (model, other):
        plan: Any = each.get_decoder().layers[0]._torchpaged_plan  # type: ignore[union-attr, index]
        # torch's mark has no public reader
        for tensor in (plan.inputs.weight, plan.gate_up.weight, plan.rope.cos_sin):
            assert tensor._dynamo_static_input_type == "unguarded", (
                "compiled CUDA graphs would copy it in every replay"
            )
    unfuse(other)
    torch.testing.assert_close(logits(other), want, rtol=1e-4, atol=1e-4)


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
    model = build(name)
    fuse(model)
    module: Any = model.get_decoder().get_submodule(f"layers.1.{part}")
    module.weight = nn.Parameter(module.weight.detach() * 2)
    with pytest.raises(ArgumentError, match=f"{part}.weight lies elsewhere; call torchpaged.hf.unfuse"):
        logits(model)
    unfuse(model)
    logits(model)


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


def _torchao(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def _torchao_head(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantization.quantize_(model.lm_head, quantization.Int8WeightOnlyConfig())


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
    "torchao head": _torchao_head,
}


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
        want = logits(model, paged=False)
        assert float((want - before).abs().max()) > 0.01
        fuse(model, count=False)
        torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-3)


def test_another_decoder_runs_as_it_is() -> None:
    """The ends of the old one have nothing to do with it."""
    model, other = build("Llama"), build("Llama", hidden_act="gelu")
    want = unfused_tokens(other)
    fuse(model)
    model.model, model.lm_head.weight = other.model, other.lm_head.weight
    assert torch.equal(generate(model), want)
    fuse(model)
    assert torch.equal(generate(model), want)
    unfuse(model)
    assert torch.equal(generate(model), want)


@pytest.mark.parametrize("asked", [None, "before", "after"])
def test_hooks_by_which_transformers_collects_outputs(asked: str | None) -> None:
    """They stay for ever where hidden states were asked for once, on attention modules, too."""
    model, ids = build("Llama"), padded_prompts()["input_ids"]

    def ask() -> None:
        with torch.no_grad():
            model(ids, output_hidden_states=True)
        assert any(m._forward_hooks for m in model.get_decoder().layers[0].self_attn.modules())

    if asked == "before":
        ask()
    report = fuse(model, count=False)
    want = logits(model)
    if asked == "after":
        ask()
    assert len(report.replaced["qkv"]) == 3
    assert torch.equal(logits(model), want)


def test_positions_beyond_the_table_and_gradients() -> None:
    model = build("Llama", max_position_embeddings=16)
    want = logits(model)
    fuse(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="no_grad"):
        model(torch.tensor([[5]]), past_key_values=PagedCache(model.config, 1, 8))
    cache = PagedCache(model.config, 1, 8)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    # in a second forward, whose embedding could be the op
    with pytest.raises(ArgumentError, match="no_grad"):
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)


def test_int32_ids_are_taken_as_before() -> None:
    model = build("Llama")
    fuse(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        want, got = (
            torch.cat(
                [
                    model(input_ids=part.to(dtype), past_key_values=cache).logits
                    for part in ids.split(1, dim=1)
                ],
                dim=1,
            )
            for dtype, cache in (
                (torch.int64, PagedCache(model.config, 1, 16)),
                (torch.int32, PagedCache(model.config, 1, 16)),
            )
        )
    assert torch.equal(want, got)


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_the_table_is_what_the_model_computes(kind: str) -> None:
    model = build("Llama", rope_parameters=ROPE[kind])
    rotary: Any = model.get_decoder().rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    table = RopeTable(rotary, None, 16, False, 256).cos_sin
    assert torch.equal(table, torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=-1))
    assert table.dtype == torch.float32
    want = unfused_tokens(model)
    fuse(model)
    assert torch.equal(generate(model), want)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_stay_the_models(kind: str) -> None:
    options: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    if kind == "longrope":
        options |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = build("Llama", rope_parameters=options, max_position_embeddings=16 if kind == "dynamic" else 64)
    want = unfused_tokens(model)
    report = fuse(model)
    assert "rope" not in report.replaced
    assert "depends on the length" in str(report)
    assert len(report.replaced["qkv"]) == 3
    assert torch.equal(generate(model), want)


class Adapter(nn.Linear):
    """What an adapter library puts in a Linear's place."""


def _hooked(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda *_: None)


def _adapted(layer: Any) -> None:
    layer.self_attn.o_proj = Adapter(64, 64, bias=False)


def _mixed_dtypes(layer: Any) -> None:
    layer.mlp.up_proj.to(torch.bfloat16)


def _patched(layer: Any) -> None:
    layer.self_attn.forward = layer.self_attn.forward


def _extended(layer: Any) -> None:
    layer.extra = nn.Identity()


@pytest.mark.parametrize(
    "change", [_hooked, _adapted, _mixed_dtypes, _patched, _extended], ids=lambda f: f.__name__
)
def test_an_unexpected_layer_is_left_alone_as_a_whole(change: Any) -> None:
    model = build("Llama")
    change(model.get_decoder().layers[1])  # type: ignore[index]
    report = fuse(model, count=False)
    for name in ("qkv", "rope", "norm", "gate_up"):
        assert report.replaced[name] == ["layers.0", "layers.2"]
        assert list(report.skipped[name]) == ["layers.1"]
    layer: Any = model.get_decoder().layers[1]
    assert "forward" not in vars(layer)
    assert layer.mlp.gate_proj.weight.untyped_storage().nbytes() == 96 * 64 * 4
    assert "forward" not in vars(model.get_decoder().rotary_emb), "a layer still needs the cosines"
    if change is not _mixed_dtypes:
        want = unfused_tokens(model)
        assert torch.equal(generate(model), want)


def test_unknown_models_are_reported() -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, num_local_experts=4)).eval()
    report = fuse(model)
    assert not report.replaced
    assert "MixtralDecoderLayer is none of the known layers" in str(report)
    assert report.before == report.after
    unfuse(model)


def test_an_activation_without_a_kernel_leaves_the_mlp() -> None:
    model = build("Llama", hidden_act="relu2")
    want = unfused_tokens(model)
    report = fuse(model)
    assert "gate_up" not in report.replaced
    assert "ReLUSquaredActivation" in str(report)
    assert len(report.replaced["norm"]) == 3
    assert torch.equal(generate(model), want)


def test_wrong_calls_are_refused() -> None:
    model = build("Llama")
    for passes in (("qkv", "swiglu"), "qkv"):
        with pytest.raises(
            ArgumentError, match="passes: expected a sequence of qkv, rope, norm, gate_up, lm_head, embedding"
        ):
            fuse(model, passes)
    with pytest.raises(ArgumentError, match="not fused"):
        unfuse(model)
    fuse(model, count=False)
    with pytest.raises(ArgumentError, match="unfuse"):
        fuse(model)
    assert count_launches(model).per_layer() == "6"  # type: ignore[union-attr]
    compile_layers(model, backend="eager")
    with pytest.raises(ArgumentError, match="uncompile_layers"):
        unfuse(model)
    uncompile_layers(model)
    unfuse(model)


def test_a_base_model_has_no_head_to_fuse() -> None:
    model = build("Llama").get_decoder()
    model.set_attn_implementation("torchpaged")
    ids = padded_prompts()["input_ids"]

    def last() -> Tensor:
        with torch.no_grad():
            return model(ids, past_key_values=PagedCache(model.config, 2, 32)).last_hidden_state

    want = last()
    report = fuse(model)
    assert "no causal LM" in report.skipped["lm_head"]["lm_head"]
    assert len(report.replaced["qkv"]) == 3
    torch.testing.assert_close(last(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_by_hand() -> None:
    """torch.compile(model, fullgraph=True): the decode step is one graph of op calls."""
    torch._dynamo.reset()
    model = build("Qwen3")
    fuse(model)
    COUNT.clear()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    ids = torch.randint(3, 99, (2, 9))
    caches = [PagedCache(model.config, 2, 32, block_size=4) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :4], past_key_values=cache)
        for step in range(4, 9):
            inputs = {"input_ids": ids[:, step : step + 1], "position_ids": torch.full((2, 1), step)}
            got = compiled(**inputs, past_key_values=caches[0]).logits
            torch.testing.assert_close(
                got, model(**inputs, past_key_values=caches[1]).logits, rtol=1e-5, atol=1e-5
            )
    assert len(COUNT) == 1
    calls = [
        str(node.target)
        for node in COUNT[0].graph.nodes
        if node.op == "call_function" and "torchpaged." in str(node.target)
    ]
    assert len(calls) == 3 * 6 + 2, calls
