"""fuse() of every family: the tokens and numbers of the model unfused, few launches, nothing half done,
everything undone by unfuse()."""

import inspect
from typing import Any

import pytest
import torch
from fused_models import FAMILIES, build, dense_logits, eager_tokens, generate, logits, pools
from models import padded_prompts
from torch import Tensor
from transformers import CompileConfig

from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.fusible import PASSES
from torchpaged.hf import PagedCache, fuse, unfuse

GRAPHS: list[Any] = []
#: Family -> passes that do not apply to any of its layers.
WITHOUT = {"minicpm3": {"lm_head", "embedding"}, "granite_rope": {"rope"}}
#: Family -> passes that do not apply to some of its layers.
KEPT = {
    "nemotron_dense": {"gate_up"},
    **{name: {"experts"} for name in ("GptOss", "granitemoehybrid", "nemotron_h")},
}


def counting(graph: Any, inputs: Any) -> Any:
    """A compiler that counts graphs."""
    GRAPHS.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.slow_cases(but=("Llama", "deepseek_v2", "lfm2", "qwen3_5_text", "falcon_h1"))
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_eagers(name: str) -> None:
    """generate() over left-padded rows, plain, in chunks and compiled by itself in one graph, and the engine
    over packed batches, with prompts in chunks."""
    torch._dynamo.reset()
    inputs, want = padded_prompts(), eager_tokens(build(name, attached=False))
    length = inputs["input_ids"].shape[1]
    assert len(set(want[:, length:].flatten().tolist())) > 8, "the tokens must tell models apart"
    model = build(name)
    report = fuse(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    assert torch.equal(generate(model, disable_compile=True, prefill_chunk_size=7), want)
    GRAPHS.clear()
    config = CompileConfig(backend=counting, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers' own switch for testing the path on a CPU
    assert torch.equal(generate(model, compile_config=config), want)
    assert len(GRAPHS) == 1
    prompts = [
        row[mask.bool()].tolist()
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    for graphs in (True, False):
        sizes = {"max_batch_size": 2, "block_size": 4, "graphs": graphs, "prefill_chunk_size": 9}
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        outputs = Generator(model, **sizes).generate(prompts, params)
        assert [each.token_ids for each in outputs] == want[:, length:].tolist()
    assert report.replaced["norm"] == [f"layers.{i}" for i in range(report.num_layers)]


@pytest.mark.parametrize("name", FAMILIES)
def test_launches_of_a_decode_step(name: str) -> None:
    """By op; the layer and the report say the same."""
    known, report = FAMILIES[name], fuse(build(name))
    assert report.before and report.after
    kept = report.skipped.get("experts", {}) | report.skipped.get("gate_up", {})
    mixtures = {*kept, *report.replaced.get("experts", ())}
    assert len(mixtures) == known.experts
    assert bool(kept) == (known.experts > 0 and not known.mixture)
    assert all("mixture of experts" in why or "has no gate" in why for why in kept.values())
    for i, names in enumerate(report.after.names):
        kind = i % len(known.mixers)
        mlp = [*known.mlp, *known.behind]
        if f"layers.{i}" in mixtures:
            mlp = [*(known.mixture or ["rms_norm"])]
        expected = [*known.mixers[kind], *known.behind, *mlp]
        assert [op.split(".")[1] for op in names if "torchpaged" in op] == expected, i
        if f"layers.{i}" not in kept:
            assert report.after.layers[i] == len(expected) + known.others[kind]
        assert report.after.layers[i] < report.before.layers[i] - 4
    assert report.after.rest == known.rest < report.before.rest
    assert f"-> {report.after.per_layer()}," in str(report)
    assert {*report.skipped} == {*WITHOUT.get(name, ()), *KEPT.get(name, ())}


@pytest.mark.parametrize("name", FAMILIES)
def test_pools_memory_and_unfuse(name: str) -> None:
    """The pools are the unfused model's, so that either reads what the other wrote; names and values stay, no
    memory is added, and unfuse gives every parameter memory of its own and the same bits."""
    model = build(name)
    plain, fused = (PagedCache(model.config, 2, 32, block_size=4) for _ in range(2))
    before, state = logits(model, plain), {key: x.clone() for key, x in model.state_dict().items()}
    signature, parameters = inspect.signature(model.forward), dict(model.named_parameters())

    def stored() -> int:
        memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(memory.values())

    def given() -> set[tuple[str, str]]:
        names = {(path, key) for path, m in model.named_modules() for key in vars(m)}
        return {(path, key) for path, key in names if key in ("forward", "_apply") or "torchpaged" in key}

    bytes_before, given_before = stored(), given()
    fuse(model, count=False)
    assert stored() == bytes_before
    assert inspect.signature(model.forward) == signature
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert all(p is parameters[key] for key, p in model.named_parameters())
    plan = model.get_decoder().layers[0]._torchpaged_plan
    assert len({x.weight.untyped_storage().data_ptr() for x in plan.projections}) == 1
    largest = float(before.abs().max())  # in one model products in float64 change half of what is allowed
    torch.testing.assert_close(logits(model, fused), before, rtol=1e-4, atol=2e-4 * largest)
    for x, y in zip(pools(fused), pools(plain), strict=True):
        largest = max(1.0, float(y.nan_to_num().abs().max()))
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4 * largest, equal_nan=True)
    unfuse(model)
    assert torch.equal(logits(model), before)
    assert stored() == bytes_before
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert given() == given_before
    fuse(model, count=False)
    unfuse(model)


@pytest.mark.parametrize("name", [name for name, known in FAMILIES.items() if not known.experts] + ["GptOss"])
def test_bf16_errs_no_more_than_unfused(name: str) -> None:
    """Against float64, over a prefill and decode steps: mean and largest error at most 1.5 times the
    unfused model's."""
    exact = build(name, attached=False).double()
    if name == "GptOss":
        exact.set_experts_implementation("eager")  # torch's grouped products know no float64
    want = dense_logits(exact)
    model = build(name).to(torch.bfloat16)
    unfused = (logits(model).double() - want).abs()
    fuse(model, count=False)
    fused = (logits(model).double() - want).abs()
    assert float(unfused.mean()) > 1e-3, "bf16 must show"
    assert float(fused.mean()) <= 1.5 * float(unfused.mean()), (float(fused.mean()), float(unfused.mean()))
    assert float(fused.amax()) <= 1.5 * float(unfused.amax()), (float(fused.amax()), float(unfused.amax()))


_ONE_BY_ONE = ("LlamaBiases", "Qwen3", "SmolLM3", "Gemma3", "GptOss")
_ONE_BY_ONE += ("youtu", "deepseek_v2", "minicpm3", "lfm2", "qwen3_5_text", "bamba", "granite_dense")


@pytest.mark.slow_cases(but_every=3)
@pytest.mark.parametrize(
    "passes",
    [*((x,) for x in PASSES), *(tuple(y for y in PASSES if y != x) for x in PASSES), ()],
    ids="-".join,
)
@pytest.mark.parametrize("name", _ONE_BY_ONE)
def test_every_pass_alone_and_left_out(name: str, passes: tuple[str, ...]) -> None:
    model = build(name)
    want = logits(model)
    # Qwen3.5's rounding passes 1e-4. Some experts' products take no float64.
    exact = dense_logits(model if name in ("GptOss", "deepseek_v2") else build(name).double())
    error = (exact - want).abs().max().item()
    report = fuse(model, passes)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=max(1e-4, 3 * error))
    without = WITHOUT.get(name, set()) | (set() if FAMILIES[name].mixture else {"experts"})
    without |= {"gate_up"} if name == "GptOss" else set()
    assert error < 1e-3
    assert set(report.replaced) == set(passes) - without
    assert report.passes == passes
    assert report.before and report.after
    before, after = (sum(x.layers) + x.rest for x in (report.before, report.after))
    if report.replaced.keys() - {"embedding"}:  # which replaces one launch by one, or two where it scales
        assert after < before
    else:
        assert after == before - (bool(report.replaced) and name == "Gemma3")


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "SmolLM3", "youtu", "lfm2"])
def test_other_caches_and_training_run_as_before(name: str) -> None:
    """Bit for bit: no cache, HuggingFace's cache, a dense PagedCache, gradients."""
    model, ids = build(name), padded_prompts()["input_ids"]

    def results() -> list[Tensor]:
        with torch.no_grad():
            outputs = [
                model(ids, use_cache=False).logits,
                model(ids).logits,
                dense_logits(model),
                logits(model, PagedCache(model.config, 2, 32, dense=True)),
            ]
        if not FAMILIES[name].family:  # attached
            return outputs
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


@pytest.mark.slow
def test_compiled_by_hand() -> None:
    """torch.compile(model, fullgraph=True): the decode step is one graph of op calls."""
    torch._dynamo.reset()
    model = build("Qwen3")
    fuse(model)
    GRAPHS.clear()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    ids = torch.randint(3, 99, (2, 9))
    caches = [PagedCache(model.config, 2, 32, block_size=4) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :4], past_key_values=cache)
        for step in range(4, 9):
            inputs = {"input_ids": ids[:, step : step + 1], "position_ids": torch.full((2, 1), step)}
            got = compiled(**inputs, past_key_values=caches[0]).logits
            want = model(**inputs, past_key_values=caches[1]).logits
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(GRAPHS) == 1
    calls = [str(node.target) for node in GRAPHS[0].graph.nodes if node.op == "call_function"]
    assert len([call for call in calls if "torchpaged." in call]) == 3 * 6 + 2, calls
