"""Latents in rows of fp8 behind generate() and the engine: the logits of a cache that rounds each latent."""

from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from model_coverage.checks import prompts
from models import padded_prompts
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.mla.fp8_rows import pack, row_bytes, unpack
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, paged
from torchpaged.hf.models.latent import LatentLayer

GREEDY: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "disable_compile": True,
}
TYPES = ("youtu", "deepseek_v3", "minicpm3", "deepseek_v32")


def logits(model: Any, cache: PagedCache) -> Tensor:
    options = {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**prompts(), **GREEDY, **options, past_key_values=cache).logits)


def fp8(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, 2, 32, block_size=4, kv_dtype="fp8_e4m3", **options)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of float32 that hold what rows of fp8 would."""
    store = LatentLayer.store

    def rounding(self: Any, key_states: Tensor, value_states: Tensor, *rest: Any) -> None:
        rank, rope = key_states.shape[-1], value_states.shape[-1]
        rows = pack(key_states.reshape(-1, rank), value_states.reshape(-1, rope))
        latents, keys = unpack(rows, rank, key_states.dtype).split((rank, rope), dim=-1)
        store(self, latents.view(key_states.shape), keys.reshape(value_states.shape), *rest)

    monkeypatch.setattr(LatentLayer, "store", rounding)


@pytest.mark.slow_cases(but=("youtu", "deepseek_v32"))
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_those_of_rounded_latents(model_type: str, request: pytest.FixtureRequest) -> None:
    model = model_of(model_type, "eager")
    config = model.config.get_text_config(decoder=True)
    with paged(model):
        cache = fp8(model)
        got = logits(model, cache)
        exact = logits(model, PagedCache(model.config, 2, 32, block_size=4))
        assert cache.kv_scales == []
        width = row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
        for layer in cache.paged:
            assert layer.keys.dtype == torch.float8_e4m3fn
            assert layer.keys.shape == (cache.num_blocks, 4, 1, width)
        index = 0 if model_type != "deepseek_v32" else config.index_head_dim + 4
        assert f"({(width + index) * len(cache.paged)} bytes per token)" in cache.describe()
        if model_type == "deepseek_v32":
            assert cache.paged[0].index_pool.dtype == torch.float8_e4m3fn
            scales = cache.paged[0].index_scale
            assert bool(scales.any())
        request.getfixturevalue("rounded")
        want = logits(model, PagedCache(model.config, 2, 32, block_size=4))
    rounding = float((got - exact).abs().max())
    assert rounding > 0
    if model_type != "deepseek_v32":  # whose indexer's keys are rounded, too
        assert float((got - want).abs().max()) < 0.05 * rounding


@pytest.fixture(scope="module")
def youtu() -> Any:
    return attach(model_of("youtu", "eager"))


def test_beams_share_and_copy_blocks(youtu: Any) -> None:
    inputs, options = padded_prompts(), {**GREEDY, "num_beams": 3}
    one, other = (
        PagedCache.for_inputs(youtu, **inputs, **options, block_size=size, kv_dtype="fp8_e4m3")
        for size in (4, 16)
    )
    got = youtu.generate(**inputs, **options, past_key_values=one)
    assert torch.equal(got, youtu.generate(**inputs, **options, past_key_values=other))


def test_a_compiled_decode_is_one_graph(youtu: Any) -> None:
    torch._dynamo.reset()
    counter, cache, other = CompileCounterWithBackend("aot_eager"), fp8(youtu), fp8(youtu)
    compiled = torch.compile(youtu, backend=counter, fullgraph=True)
    tokens = torch.randint(3, 99, (2, 6))
    with torch.no_grad():
        for each in (cache, other):
            youtu(tokens[:, :3], past_key_values=each)
        for place in (3, 4, 5):
            got = compiled(tokens[:, place : place + 1], past_key_values=cache).logits
            want = youtu(tokens[:, place : place + 1], past_key_values=other).logits
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_the_engines_tokens() -> None:
    """Of two requests of unlike lengths, in blocks and steps of their own."""
    model = model_of("youtu", "eager")
    texts = [list(range(5, 16)), [7, 9, 8]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    wanted = []
    with paged(model):
        for text in texts:
            cache = PagedCache(model.config, 1, 32, block_size=4, kv_dtype="fp8_e4m3")
            ids = model.generate(torch.tensor([text]), **GREEDY, past_key_values=cache)
            wanted.append(ids[0, len(text) :].tolist())
    attach(model)
    with Generator(model, num_blocks=24, block_size=4, kv_dtype="fp8_e4m3", graphs=False) as generator:
        got = [list(output.token_ids) for output in generator.generate(texts, params)]
        assert not generator.model.needs_scales
        assert generator.model.kv_cache.dtype == torch.float8_e4m3fn
    assert got == wanted


def test_what_is_refused(youtu: Any) -> None:
    for options, words in (
        ({"kv_dtype": "fp8_e5m2"}, "layer 0 keeps latents, which torch.float8_e5m2 has no rows of"),
        ({"kv_dtype": "fp8_e4m3", "dense": True}, "its keys are gathered"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            PagedCache(youtu.config, 2, 32, **options)
    with pytest.raises(ArgumentError, match="^kv_scales: expected a pair for each of 0 layers"):
        fp8(youtu, kv_scales=[(1.0, 1.0)] * len(fp8(youtu).paged))
    with pytest.raises(UnsupportedModelError, match="float8_e5m2 has no rows of"):
        Generator(youtu, num_blocks=8, kv_dtype="fp8_e5m2")
