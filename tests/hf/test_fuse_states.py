"""fuse() of hybrids: the tokens of the unfused model every way, few launches, nothing half done, everything
undone by unfuse()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from model_coverage.architectures import config_of, model_of, model_types, with_random_weights
from models import padded_prompts
from test_fuse import COUNT, counting
from torch import Tensor, nn
from transformers import CompileConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torchpaged import ArgumentError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.fusible import PASSES
from torchpaged.hf import PagedCache, attach, detach, fuse, unfuse
from torchpaged.hf.packed_mixers import is_packed, mixers_of

#: Model type -> launches of a layer with a state and of one with attention, their MLPs left out.
FAMILIES = {
    "lfm2": (3, 4),
    "lfm2_moe": (3, 4),
    "qwen3_next": (7, 6),
    "qwen3_5_text": (6, 6),
    "qwen3_5_moe_text": (6, 6),
}
STEPS = {
    "lfm2": ["linear", "causal_conv", "linear"],
    "qwen3": ["linear", "causal_conv", "delta_gates", "linear_attention", "gated_rms_norm", "linear"],
}
ATTENTION = ["linear", "rope_write_kv", "paged_attention", "linear"]
MLP = ["linear", "linear"]


def build(family: str, dense: bool = False) -> Any:
    """Tiny, attached, and with norms that matter: transformers starts them at 0 or 1. ``dense``: without
    mixtures of experts."""
    if family not in model_types():
        pytest.skip(f"not in transformers {transformers.__version__}")
    if dense and family == "qwen3_next":
        config = config_of(family)
        config.num_experts = 0
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = with_random_weights(kind._from_config(config, attn_implementation="eager")).eval()
    else:
        model = model_of(family, "eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5)
    return attach(model)


def generate(model: Any, cache: bool = True, **options: Any) -> Tensor:
    given = {"past_key_values": PagedCache(model.config, 2, 64, block_size=4)} if cache else {}
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options, **given}
    return model.generate(**padded_prompts(), max_new_tokens=8, **options)


def steps(model: Any, cache: Any = None) -> Tensor:
    """Logits of a prompt of 20 tokens and three decode steps."""
    ids = torch.randint(3, 99, (2, 23), generator=torch.Generator().manual_seed(2))
    cache = PagedCache(model.config, 2, 32, block_size=4) if cache is None else cache
    with torch.inference_mode():
        return torch.cat(
            [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 1], 1)], 1
        )


def pools(cache: PagedCache) -> list[Tensor]:
    """Of every layer: its states, keys and values."""
    found: list[Tensor] = []
    for layer in cache.layers:
        found += layer.stored.block_tensors(layer.pools).values()  # type: ignore[attr-defined]
    return found


@pytest.mark.slow_cases(but=("lfm2", "qwen3_5_text"))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_eagers(family: str) -> None:
    """generate() over left-padded rows, plain, in chunks and in one graph, and the engine over packed
    batches, with prompts in chunks."""
    torch._dynamo.reset()
    model, inputs = build(family), padded_prompts()
    model.set_attn_implementation("eager")
    detach(model)
    want = generate(model, cache=False, disable_compile=True)
    attach(model)
    report = fuse(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    assert torch.equal(generate(model, disable_compile=True, prefill_chunk_size=7), want)
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
        sizes = {"max_batch_size": 2, "block_size": 4, "graphs": graphs, "prefill_chunk_size": 9}
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        outputs = Generator(model, **sizes).generate(prompts, params)
        assert [each.token_ids for each in outputs] == want[:, inputs["input_ids"].shape[1] :].tolist()
    assert report.replaced["norm"] == [f"layers.{i}" for i in range(report.num_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_pools_and_unfuse(family: str) -> None:
    """By op; the pools are the unfused model's, so that either reads what the other wrote; no memory is
    added, and unfuse() gives the same bits."""
    model = build(family, dense=True)
    plain, fused = (PagedCache(model.config, 2, 32, block_size=4) for _ in range(2))
    want, state = steps(model, plain), {name: x.clone() for name, x in model.state_dict().items()}
    report = fuse(model)
    assert report.after and report.before
    of_state, of_attention = FAMILIES[family]
    mixing = STEPS["lfm2" if family.startswith("lfm2") else "qwen3"]
    for layer, names in zip(model.model.layers, report.after.names, strict=True):
        ops = [name.split(".")[1] for name in names if "torchpaged" in name]
        begin = ATTENTION if hasattr(layer, "self_attn") else mixing
        size = of_attention if hasattr(layer, "self_attn") else of_state
        mixture = type(getattr(layer, "feed_forward", getattr(layer, "mlp", None))).__name__.endswith("Block")
        assert ops == [*begin, *(["rms_norm"] if mixture else MLP)]
        assert mixture or len(names) == size + 2
    assert report.after.rest <= report.before.rest - 6
    attending = [f"layers.{i}" for i, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn")]
    assert report.replaced["rope"] == attending
    assert not {*report.skipped} - {"gate_up"}
    torch.testing.assert_close(steps(model, fused), want, rtol=1e-4, atol=1e-4)
    for x, y in zip(pools(fused), pools(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    unfuse(model)
    assert torch.equal(steps(model), want)
    assert all(map(is_packed, mixers_of(model))), "an attached model stays so"


@pytest.mark.parametrize(
    "passes",
    [*((x,) for x in PASSES), *(tuple(y for y in PASSES if y != x) for x in PASSES), ()],
    ids="-".join,
)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_every_pass_alone_and_left_out(family: str, passes: tuple[str, ...]) -> None:
    model = build(family)
    want = steps(model)
    assert fuse(model, passes, count=False).passes == passes
    torch.testing.assert_close(steps(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5_text"])
def test_bf16_errs_no_more_than_unfused(family: str) -> None:
    model = build(family, dense=True).double()
    want = steps(model, transformers.DynamicCache(config=model.config))
    model.to(torch.bfloat16)
    unfused = (steps(model).double() - want).abs()
    fuse(model, count=False)
    fused = (steps(model).double() - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean())
    assert float(fused.amax()) <= 1.5 * float(unfused.amax())


def test_caches_that_gather_run_the_models_own_forward() -> None:
    model = build("lfm2")
    caches = [
        lambda: PagedCache(model.config, 2, 32, dense=True),
        lambda: transformers.DynamicCache(config=model.config),
    ]
    before = [steps(model, cache()) for cache in caches]
    fuse(model)
    assert all(torch.equal(steps(model, cache()), want) for cache, want in zip(caches, before, strict=True))


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("count", [True, False])
def test_engines_come_and_go(attached: bool, count: bool) -> None:
    """What an engine sets and gives back is no change that the next step would refuse."""
    model = build("lfm2")
    want = generate(model, disable_compile=True)
    if not attached:
        detach(model)
    fuse(model, count=count)
    for _ in range(2):
        generator = Generator(model, max_batch_size=2, block_size=4)
        generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        generator.close()
    if not attached:
        attach(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    unfuse(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    detach(model)
    assert not any(map(is_packed, mixers_of(model)))
    model = build("lfm2")
    detach(model)
    with_fusion = Generator(model, fuse=True, max_batch_size=2, block_size=4)
    assert with_fusion.fusion_report.complete
    with_fusion.close()
    assert not any(map(is_packed, mixers_of(model)))


def test_tokens_taken_back() -> None:
    """crop() runs the gated convolution once more, over the tokens that stay."""
    model = build("lfm2")
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(2))
    fuse(model)
    with torch.inference_mode():
        cache = PagedCache(model.config, 2, 32, block_size=4)
        want = [model(part, past_key_values=cache).logits for part in ids.split([8, 1, 3], 1)][2]
        cache = PagedCache(model.config, 2, 32, block_size=4)
        model(ids[:, :8], past_key_values=cache)
        cache.activate_past_recording()
        model(torch.cat((ids[:, 8:9], ids[:, :3]), 1), past_key_values=cache)
        cache.crop(-3)
        torch.testing.assert_close(model(ids[:, 9:], past_key_values=cache).logits, want)


def test_copies_and_moves() -> None:
    """A copy runs on its own weights; another dtype stacks anew."""
    model = build("qwen3_next")
    fuse(model)
    want, twin = steps(model), copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].linear_attn.in_proj_ba.weight.mul_(2)
    assert torch.equal(steps(model), want)
    assert not torch.equal(steps(twin), want)
    model.double().float()
    assert torch.equal(steps(model), want)


def _hook(layer: Any) -> None:
    layer.conv.in_proj.register_forward_hook(lambda *_: None)


def _other_conv(layer: Any) -> None:
    layer.conv.conv = nn.Sequential()


def _forward(layer: Any) -> None:
    layer.conv.in_proj.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "conv.in_proj has forward hooks"),
        (_other_conv, "conv.conv is a Sequential, expected Conv1d"),
        (_forward, "conv.in_proj has a forward of its own"),
    ],
)
def test_what_is_left_alone(change: Any, reason: str) -> None:
    model = build("lfm2")
    change(model.get_decoder().layers[0])
    report = fuse(model, count=False)
    assert report.skipped["norm"]["layers.0"].startswith(reason)
    assert "layers.2" in report.replaced["norm"]


def test_changes_are_refused_until_fused_again() -> None:
    model = build("lfm2")
    fuse(model)
    steps(model)
    _hook(model.model.layers[2])
    with pytest.raises(ArgumentError, match="layers.2.conv.in_proj has other forward hooks"):
        steps(model)
    unfuse(model)
    assert "layers.2" in fuse(model).skipped["norm"]
    steps(model)


def test_rotations_of_images_stay_the_models() -> None:
    """Of a model that sees images, whose places in it are rotated by, too."""
    text = model_of("qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": text.config.hidden_size, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config).eval()
    report = fuse(model, count=False)
    assert "places in images" in next(iter(report.skipped["rope"].values()))
    assert report.replaced["qkv"]
