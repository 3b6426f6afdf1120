"""fuse() of models that attend over latents: the same tokens, rows and numbers as unfused, few launches, and
what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model_coverage.architectures import model_of, model_types
from models import padded_prompts
from test_fuse import COUNT, counting
from torch import Tensor, nn
from transformers import CompileConfig

from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.fusible import PASSES
from torchpaged.hf import PagedCache, attach, fuse, unfuse

#: Family -> launches of a dense layer and of the rest.
FAMILIES = {
    "deepseek_v2": (8, 2),
    "deepseek_v3": (8, 2),
    "glm4_moe_lite": (8, 2),
    "axk1": (8, 2),
    "youtu": (8, 2),
    "minicpm3": (10, 11),
}
STEP = ["linear", "linear", "rope_write_latent", "mla_attention", "linear", "linear", "linear"]


def build(family: str) -> Any:
    """Tiny, attached, and with norms that matter: transformers starts them at 1."""
    if family not in model_types():
        pytest.skip(f"not in transformers {transformers.__version__}")
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


def rows(cache: PagedCache) -> list[Tensor]:
    return [layer.keys for layer in cache.paged]  # type: ignore[misc]


@pytest.mark.slow_cases(but=("deepseek_v2", "youtu"))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_eagers(family: str) -> None:
    """generate() over latents, plain and in one graph, and the engine over packed batches."""
    torch._dynamo.reset()
    model, inputs = build(family), padded_prompts()
    model.set_attn_implementation("eager")
    want = generate(model, cache=False, disable_compile=True)
    model.set_attn_implementation("torchpaged")
    report = fuse(model)
    assert torch.equal(generate(model, disable_compile=True), want)
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
    assert report.replaced["rope"] == [f"layers.{i}" for i in range(report.num_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_rows_and_unfuse(family: str) -> None:
    """By op; the rows of the pools are the unfused model's, so that either reads what the other wrote; no
    memory is added, and unfuse() gives the same bits."""
    model = build(family)
    plain, fused = (PagedCache(model.config, 2, 32, block_size=4) for _ in range(2))
    want, state = steps(model, plain), {name: x.clone() for name, x in model.state_dict().items()}
    report = fuse(model)
    assert report.after
    of_dense, rest = FAMILIES[family]
    ours = [[name.split(".")[1] for name in layer if "torchpaged" in name] for layer in report.after.names]
    assert (report.after.layers[0], ours[0], report.after.rest) == (of_dense, STEP, rest)
    mixture = "mixture of experts" in str(report)
    assert mixture == (family not in ("youtu", "minicpm3"))
    assert ours[1] == (["rms_norm" if i == 5 else op for i, op in enumerate(STEP[:6])] if mixture else STEP)
    torch.testing.assert_close(steps(model, fused), want, rtol=1e-4, atol=1e-4)
    for x, y in zip(rows(fused), rows(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    unfuse(model)
    assert torch.equal(steps(model), want)


@pytest.mark.parametrize(
    "passes",
    [*((x,) for x in PASSES), *(tuple(y for y in PASSES if y != x) for x in PASSES), ()],
    ids="-".join,
)
@pytest.mark.parametrize("family", ["youtu", "deepseek_v2", "minicpm3"])
def test_every_pass_alone_and_left_out(family: str, passes: tuple[str, ...]) -> None:
    model = build(family)
    want = steps(model)
    assert fuse(model, passes, count=False).passes == passes
    torch.testing.assert_close(steps(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["youtu", "minicpm3"])
def test_bf16_errs_no_more_than_unfused(family: str) -> None:
    model = build(family).double()
    want = steps(model, transformers.DynamicCache(config=model.config))
    model.to(torch.bfloat16)
    unfused = (steps(model).double() - want).abs()
    fuse(model, count=False)
    fused = (steps(model).double() - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean())
    assert float(fused.amax()) <= 1.5 * float(unfused.amax())


def test_queries_without_a_rank_of_their_own() -> None:
    """As DeepSeek-V2-Lite's: one product for queries, latents and keys."""
    config = model_of("deepseek_v2", "eager").config
    config.q_lora_rank = None
    torch.manual_seed(0)
    model = attach(transformers.DeepseekV2ForCausalLM(config).eval())
    want = steps(model)
    report = fuse(model)
    assert report.after
    assert report.after.layers[0] == 7
    torch.testing.assert_close(steps(model), want, rtol=1e-4, atol=1e-4)


def test_fp8_latents() -> None:
    """The same rows of fp8, but for numbers that round to another neighbour."""
    model = build("youtu")
    plain, fused = (PagedCache(model.config, 2, 32, block_size=4, kv_dtype="fp8_e4m3") for _ in range(2))
    want = steps(model, plain)
    fuse(model)
    torch.testing.assert_close(steps(model, fused), want, rtol=0.05, atol=0.05)
    first = [x[0].view(torch.uint8) for x in (rows(fused), rows(plain))]
    assert float((first[0] != first[1]).float().mean()) < 0.01


def test_caches_that_gather_run_the_models_own_forward() -> None:
    model = build("youtu")
    caches = [lambda: PagedCache(model.config, 2, 32, dense=True), lambda: transformers.DynamicCache()]
    before = [steps(model, cache()) for cache in caches]
    fuse(model)
    assert all(torch.equal(steps(model, cache()), want) for cache, want in zip(caches, before, strict=True))


def _hook(layer: Any) -> None:
    layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)


def _bias(layer: Any) -> None:
    attn = layer.self_attn
    attn.q_a_proj.bias = nn.Parameter(torch.zeros(attn.q_a_proj.out_features))


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (_hook, "rope", "self_attn.kv_b_proj has forward hooks"),
        (_bias, "qkv", "only some of q_a_proj, kv_a_proj_with_mqa have a bias"),
    ],
)
def test_what_is_left_alone(change: Any, name: str, reason: str) -> None:
    model = build("youtu")
    change(model.get_decoder().layers[0])
    report = fuse(model, count=False)
    assert report.skipped[name]["layers.0"].startswith(reason)
    assert name in report.replaced  # the other layer
