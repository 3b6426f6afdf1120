"""fp8 pools behind a Generator: the tokens of generate() over such a cache, by scales found or given."""

from typing import Any

import pytest
import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, PagedModel, fuse, unfuse

PROMPTS = [[5, 9, 33, 71, 8, 15, 60, 2, 44], [17, 3], [90, 4, 6, 8, 10, 12, 14]]
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True)


def tokens(generator: Generator) -> list[list[int]]:
    return [output.token_ids for output in generator.generate(PROMPTS, PARAMS)]


def expected(model: Any, kv_dtype: str, scales: Any) -> list[list[int]]:
    """generate(), prompt by prompt, over a cache of these scales."""
    model.set_attn_implementation("torchpaged")
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        cache = PagedCache(model.config, 1, 64, block_size=4, kv_dtype=kv_dtype, kv_scales=scales)
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "past_key_values": cache}
        found.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_scales_are_found_in_the_first_prompt(model: Any, kv_dtype: str, scales: str) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "block_size": 4, "kv_dtype": kv_dtype, "kv_scales": scales}
    generator = Generator(model, **options)
    assert generator.model.kv_scales == []
    assert generator.model.needs_scales
    got = tokens(generator)
    cache = PagedCache(model.config, 1, 64, block_size=4, kv_dtype=kv_dtype, kv_scales=scales)
    with torch.no_grad():
        model(torch.tensor(PROMPTS[:1]), past_key_values=cache)
    # the cache's second layer reads what its first one has rounded
    for ours, theirs, tolerance in zip(generator.model.kv_scales, cache.kv_scales, (1e-5, 0.1), strict=True):
        for scale, want in zip(ours, theirs, strict=True):
            assert scale.shape == (2 if scales == "head" else 1,)
            torch.testing.assert_close(scale, want, rtol=tolerance, atol=0)
    assert got == expected(model, kv_dtype, generator.model.kv_scales)
    plain = Generator(model, max_seq_len=64, block_size=4)
    of_plain = plain.model.kv_cache.bytes_per_block
    assert generator.model.kv_cache.bytes_per_block * 4 == of_plain


def test_a_prompt_of_nans_finds_no_scales(model: Any) -> None:
    """It fails alone; the next prompt's scales are what they are without it."""
    options: dict[str, Any] = {"max_seq_len": 64, "block_size": 4, "kv_dtype": "fp8_e4m3"}
    clean = Generator(model, **options)
    want = clean.generate(PROMPTS[:1], PARAMS)[0].token_ids
    weight = model.get_input_embeddings().weight.data
    kept = weight[1].clone()
    weight[1] = float("nan")
    try:
        generator = Generator(model, **options)
        bad, good = generator.generate([[1, 2, 3], PROMPTS[0]], PARAMS)
    finally:
        weight[1] = kept
    assert bad.finish_reason == "error"
    assert good.token_ids == want
    assert not generator.model.needs_scales
    for ours, theirs in zip(generator.model.kv_scales, clean.model.kv_scales, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_made_in_inference_mode(model: Any) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "block_size": 4, "kv_dtype": "fp8_e4m3"}
    with torch.inference_mode():
        generator = Generator(model, **options)
    assert tokens(generator) == tokens(Generator(model, **options))


def test_given_scales_stay(model: Any) -> None:
    scales = [(0.02, torch.tensor([0.01, 0.03])), (0.05, 0.04)]
    generator = Generator(model, max_seq_len=64, block_size=4, kv_dtype="fp8_e4m3", kv_scales=scales)
    assert not generator.model.needs_scales
    assert tokens(generator) == expected(model, "fp8_e4m3", scales)
    assert [k.tolist() for k, _ in generator.model.kv_scales] == [
        pytest.approx([0.02]),
        pytest.approx([0.05]),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_launch": 3},
        {"prefill_chunk_size": 4},
        {"graphs": False},
        {"num_blocks": 9},
        {"fuse": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_step(model: Any, options: dict[str, Any]) -> None:
    scales = [(0.02, 0.02)] * 2
    want = expected(model, "fp8_e4m3", scales)
    try:
        generator = Generator(
            model, max_seq_len=32, block_size=4, kv_dtype="fp8_e4m3", kv_scales=scales, **options
        )
        assert tokens(generator) == want
        if "num_blocks" in options:
            assert generator.stats.preemptions > 0
    finally:
        if "fuse" in options:
            unfuse(model)


def test_a_fused_model_finds_its_scales(model: Any) -> None:
    plain = Generator(model, max_seq_len=32, block_size=4, kv_dtype="fp8_e4m3")
    want = tokens(plain)
    fuse(model, count=False)
    try:
        generator = Generator(model, max_seq_len=32, block_size=4, kv_dtype="fp8_e4m3")
        assert tokens(generator) == want
    finally:
        unfuse(model)
    for ours, theirs in zip(generator.model.kv_scales, plain.model.kv_scales, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_refusals(model: Any) -> None:
    for options, name in (
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"kv_scales": [(1.0, 1.0)] * 2}, "kv_scales"),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0, 1.0)]}, "kv_scales"),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0, -1.0)] * 2}, "kv_scales"),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": [(1.0, [1.0] * 3)] * 2}, "kv_scales"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            Generator(model, max_seq_len=32, block_size=4, **options)
    paged = PagedModel(model, num_blocks=9, block_size=4)
    with pytest.raises(ArgumentError, match="^kv_dtype: expected nothing with a PagedModel"):
        Generator(paged, max_seq_len=32, kv_dtype="fp8_e4m3")
    with pytest.raises(ArgumentError, match="token_ids"):
        PagedModel(model, num_blocks=9, block_size=4, kv_dtype="fp8_e4m3").find_scales([])
