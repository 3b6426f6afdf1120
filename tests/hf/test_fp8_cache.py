"""fp8 pools behind generate(): the logits of a cache that rounds each key and value, exactly, by scales found
or given."""

from typing import Any

import pytest
import torch
from families import build, logits_of
from models import padded_prompts, tiny
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, DynamicCache, PreTrainedModel

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.hf import PagedCache, fuse
from torchpaged.hf.kv_scales import HEADROOM, KV_DTYPES


def paged(name: str = "Llama") -> PreTrainedModel:
    model = tiny(name)
    model.set_attn_implementation("torchpaged")
    return model


def fp8(model: PreTrainedModel, kv_dtype: str = "fp8_e4m3", **options: Any) -> PagedCache:
    return PagedCache(model.config, 2, 32, block_size=4, kv_dtype=kv_dtype, **options)


class Rounded(DynamicCache):
    """Keys and values as fp8 pools of these scales hold them."""

    def __init__(self, dtype: torch.dtype, scales: list[tuple[Tensor, Tensor]], config: Any) -> None:
        super().__init__(config=config)
        self.fp8, self.fp8_scales = dtype, scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        rounded = []
        for states, scale in zip((key_states, value_states), self.fp8_scales[layer_idx], strict=True):
            scale, most = scale[:, None, None], torch.finfo(self.fp8).max
            rounded.append((states / scale).clamp(-most, most).to(self.fp8).to(states.dtype) * scale)
        return super().update(*rounded, layer_idx, *args, **kwargs)


def expected(cache: PagedCache, kv_dtype: str = "fp8_e4m3", name: str = "Llama") -> Tensor:
    model = tiny(name)
    return logits_of(model, padded_prompts(), Rounded(KV_DTYPES[kv_dtype], cache.kv_scales, model.config))


def same(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_logits_are_those_of_rounded_keys(kv_dtype: str, scales: str) -> None:
    model = paged()
    cache = fp8(model, kv_dtype, kv_scales=scales)
    assert cache.kv_scales == []
    got = logits_of(model, padded_prompts(), cache)
    assert [k.numel() for k, _ in cache.kv_scales] == [2 if scales == "head" else 1] * 3
    same(got, expected(cache, kv_dtype))
    exact = logits_of(tiny("Llama"), padded_prompts())
    assert not torch.allclose(got, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_windows_soft_caps_and_sinks(name: str) -> None:
    model = paged(name)
    cache = fp8(model)
    got = logits_of(model, padded_prompts(), cache)
    same(got, expected(cache, name=name), 2e-3)  # noise of 1e-6 may round a key to the next fp8 number
    exact = logits_of(tiny(name), padded_prompts())
    assert float((got - exact).abs().max() / exact.abs().max()) > 4e-3


def test_scales_cover_the_first_forward() -> None:
    model, inputs = paged(), padded_prompts()
    cache, plain = fp8(model), PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        for each in (cache, plain):
            model(**inputs, past_key_values=each)
    for (k_scale, v_scale), layer in zip(cache.kv_scales, plain.paged, strict=True):
        for scale, pool in ((k_scale, layer.keys), (v_scale, layer.values)):
            most = pool.abs().amax((0, 1, 3)) * HEADROOM / 448
            # padding was looked at, too
            assert (scale >= 0.9 * most).all()
            assert torch.allclose(scale, most, rtol=0.3)
    assert cache.paged[0].num_bytes * 4 == plain.paged[0].num_bytes


def test_saved_scales_give_the_same() -> None:
    model = paged()
    cache = fp8(model)
    want = logits_of(model, padded_prompts(), cache)
    again = fp8(model, kv_scales=cache.kv_scales)
    with torch.no_grad():  # other tokens come first, and change nothing
        model(torch.randint(3, 99, (2, 5)), past_key_values=again)
    again.reset()
    assert torch.equal(logits_of(model, padded_prompts(), again), want)
    cache.reset()
    assert torch.equal(logits_of(model, padded_prompts(), cache), want)


def test_beams_share_and_copy_blocks() -> None:
    model, inputs = paged(), padded_prompts()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    cache = PagedCache.for_inputs(model, **inputs, **options, block_size=4, kv_dtype="fp8_e4m3")
    got = model.generate(**inputs, **options, past_key_values=cache)
    rounded = Rounded(torch.float8_e4m3fn, cache.kv_scales, model.config)
    assert torch.equal(got, tiny("Llama").generate(**inputs, **options, past_key_values=rounded))


def test_a_compiled_decode_is_one_graph() -> None:
    torch._dynamo.reset()
    model, counter = paged(), CompileCounterWithBackend("aot_eager")
    config = CompileConfig(backend=lambda graph, inputs: counter(graph, inputs), mode=None, fullgraph=True)
    config._compile_all_devices = True
    found = []
    for _ in range(2):  # another cache recompiles nothing
        cache = fp8(model)
        out = model.generate(
            **padded_prompts(),
            max_new_tokens=5,
            do_sample=False,
            past_key_values=cache,
            compile_config=config,
        )
        found.append(out)
    assert counter.frame_count == 1
    assert torch.equal(*found)
    assert torch.equal(found[0][:, 20:].T, expected(cache).argmax(-1))


def test_a_fused_model() -> None:
    model = paged()
    first = fp8(model)
    logits_of(model, padded_prompts(), first)
    fuse(model)
    with pytest.raises(
        UnsupportedModelError, match="compiled or fused code.*unfused before, or give kv_scales"
    ):
        logits_of(model, padded_prompts(), fp8(model))
    cache = fp8(model, kv_scales=first.kv_scales)
    same(logits_of(model, padded_prompts(), cache), expected(cache))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype": ({"kv_dtype": "int8"}, "kv_dtype: expected None or one of fp8_e4m3, fp8_e5m2, got 'int8'"),
    "torch's dtype": ({"kv_dtype": torch.float16}, "kv_dtype: expected None or one of.*torch.float16"),
    "a word": (
        {"kv_dtype": "fp8_e4m3", "kv_scales": "row"},
        "kv_scales: expected 'head', 'tensor' or scales",
    ),
    "nothing": (
        {"kv_dtype": "fp8_e4m3", "kv_scales": None},
        "kv_scales: expected 'head', 'tensor' or .k_scale",
    ),
    "one number": (
        {"kv_dtype": "fp8_e4m3", "kv_scales": 0.5},
        "kv_scales: expected 'head', 'tensor' or .k_scale",
    ),
    "no pairs": ({"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0,)] * 3}, "kv_scales: .* for each paged layer"),
    "words": ({"kv_dtype": "fp8_e4m3", "kv_scales": [("a", 1.0)] * 3}, "kv_scales: expected numbers"),
    "no dtype": ({"kv_scales": [(1.0, 1.0)] * 3}, "kv_scales: expected None without a kv_dtype"),
    "layers": (
        {"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0, 1.0)]},
        "a pair for each of 3 layers, got 1 pairs",
    ),
    "numbers": ({"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0, 0.0)] * 3}, "expected positive finite numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        PagedCache(tiny("Llama").config, 2, 32, **options)


def test_scales_of_other_heads() -> None:
    model = paged()
    cache = fp8(model, kv_scales=[(torch.ones(3), 1.0)] * 3)
    with pytest.raises(ArgumentError, match="kv_scales: expected 1 or 2 numbers for layer 0, got 3"):
        logits_of(model, padded_prompts(), cache)


@pytest.mark.parametrize("options", [{"dense": True}, {}])
def test_gathered_keys(options: dict[str, Any]) -> None:
    model = tiny("Llama") if options else build("DiffLlama")
    with pytest.raises(UnsupportedModelError, match="cannot have fp8 pools: its keys are gathered"):
        fp8(model, **options)


@pytest.mark.slow
def test_no_scales_in_a_first_forward_that_is_compiled() -> None:
    """Given ones are known there; others would be found in numbers that a trace does not have."""
    torch._dynamo.reset()
    model, ids = paged(), torch.randint(3, 99, (1, 1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    given = PagedCache(model.config, 1, 8, kv_dtype="fp8_e4m3", kv_scales=[(0.1, 0.1)] * 3)
    found = PagedCache(model.config, 1, 8, kv_dtype="fp8_e4m3")
    for cache in (found, given):
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        with pytest.raises(Unsupported, match="compiled or fused code, where no scales can be found"):
            compiled(ids, position_ids=torch.zeros_like(ids), past_key_values=found)
        torch._dynamo.reset()
        compiled(ids, position_ids=torch.zeros_like(ids), past_key_values=given)
    assert given.kv_scales
    assert given.paged[0].keys.float().any()
