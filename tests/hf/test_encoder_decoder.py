"""Encoder-decoder models: which halves may be paged, and what is refused instead of attending to the
wrong keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import GEMMA, IDS, build, logits_of, same
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.hf import PagedCache, PagedEncoderDecoderCache
from torchpaged.hf import paged as attached

HEAD = "ForConditionalGeneration"


def inputs(padded: bool = False) -> dict[str, torch.Tensor]:
    """Two sources of 12 tokens, the first one's last 5 padding if ``padded``, and a prompt of 9 tokens for
    the decoder."""
    generator = torch.Generator().manual_seed(1)
    ids, prompt = (torch.randint(3, 99, (2, length), generator=generator) for length in (12, 9))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, -5:], mask[0, -5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": prompt}


def paged(model: PreTrainedModel, **options: Any) -> PagedCache:
    return PagedCache(model.config, 2, 32, block_size=4, **options)


CACHES: dict[str, Callable[[PreTrainedModel], EncoderDecoderCache]] = {
    "paged": lambda m: EncoderDecoderCache(paged(m), DynamicCache(config=m.config)),
    "dense": lambda m: EncoderDecoderCache(paged(m, dense=True), DynamicCache(config=m.config)),
    "paged, cross too": lambda m: EncoderDecoderCache(paged(m), paged(m)),
    "one": lambda m: PagedEncoderDecoderCache(m.config, 2, 32, block_size=4),
}


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("stem", ["Bart", "BigBirdPegasus"])
def test_logits_equal_eager(stem: str, caches: str) -> None:
    model = build(stem, HEAD)
    same(model, inputs(), lambda: CACHES[caches](model))


@pytest.mark.parametrize("stem", ["T5", "UMT5"])
def test_position_bias_needs_dense(stem: str) -> None:
    """Their layers ask for their own length between the first layer's write and their own. The cache knows
    that of their type, and must be told to page all the same."""
    model = build(stem, HEAD)
    prompt = {**inputs(padded=True), "decoder_attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    for caches in ("dense", "paged"):
        same(model, prompt, lambda caches=caches: CACHES[caches](model))  # type: ignore[misc]
    with pytest.raises(
        UnsupportedModelError, match="(position bias|computes with its cached keys).*dense=True"
    ):
        logits_of(
            model, inputs(), EncoderDecoderCache(paged(model, dense=False), DynamicCache(config=model.config))
        )


def test_a_padded_source() -> None:
    model = build("Bart", HEAD)
    for caches in ("paged", "paged, cross too", "one"):
        same(model, inputs(padded=True), lambda caches=caches: CACHES[caches](model))  # type: ignore[misc]


@pytest.mark.parametrize("stem", ["Bart", "T5"])
def test_dense_cross_attention(stem: str) -> None:
    """Keys gathered to max_seq_len, behind a mask that ends with the source: refused before anything
    is written."""
    model = build(stem, HEAD, "torchpaged")
    cross = paged(model, dense=True)
    with pytest.raises(UnsupportedModelError, match="cross attention pass EncoderDecoderCache"):
        logits_of(model, inputs(), EncoderDecoderCache(paged(model, dense=True), cross))
    assert not any(layer.keys.any() for layer in cross.paged if layer.is_initialized)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("same_length", [False, True])
def test_a_plain_cache(layers: int, dense: bool, same_length: bool) -> None:
    """Both attentions would write to the same layers; with as many source tokens as target tokens no
    shape tells."""
    model = build("Bart", HEAD, "torchpaged", decoder_layers=layers, encoder_layers=layers)
    given = inputs()
    if same_length:
        given["input_ids"], given["attention_mask"] = (
            given["input_ids"][:, :9],
            given["attention_mask"][:, :9],
        )
    with pytest.raises(UnsupportedModelError, match="writes twice.*EncoderDecoderCache"), torch.no_grad():
        model(**given, past_key_values=paged(model, dense=dense), use_cache=True)


def test_a_plain_cache_that_is_asked_for_is_updated() -> None:
    with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
        _ = paged(build("Bart", HEAD)).is_updated


def t5gemma(implementation: str) -> PreTrainedModel:
    half = {**GEMMA, "attn_logit_softcapping": None}
    config = transformers.T5GemmaConfig(
        encoder=dict(half), decoder=dict(half), decoder_start_token_id=1, **IDS
    )
    torch.manual_seed(0)
    return transformers.T5GemmaForConditionalGeneration._from_config(
        config, attn_implementation=implementation
    ).eval()


def test_t5gemma_makes_its_cross_cache_itself() -> None:
    """Of the class that it finds, and without sizes: the half that may be paged is the decoder's."""
    given, model = inputs(padded=True), t5gemma("torchpaged")
    want = logits_of(t5gemma("eager"), given)
    for caches in ("paged", "dense"):
        torch.testing.assert_close(
            logits_of(model, given, CACHES[caches](model)),
            want,
            rtol=1e-4,
            atol=1e-4 * float(want.abs().max()),
        )
    with pytest.raises(
        UnsupportedModelError, match=r"t5_?gemma.*EncoderDecoderCache\(PagedCache\(\.\.\.\), DynamicCache"
    ):
        logits_of(model, inputs(), CACHES["paged, cross too"](model))
    with pytest.raises(TypeError, match="offloadings"):
        PagedCache(model.config, 1, 8, offloadings=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("stem", ["LED", "FSMT"])
def test_attention_of_its_own(stem: str) -> None:
    """Refused with a PagedCache; without one, and loaded under the implementation's name, their logits are
    their own."""
    head = {"FSMT": HEAD}.get(stem, HEAD)
    model = build(stem, head)
    with pytest.raises(UnsupportedModelError, match=f"{stem}.*attention interface"):
        paged(model)
    want = logits_of(model, inputs(padded=True))
    got = logits_of(build(stem, head, "torchpaged"), inputs(padded=True))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_attention_of_its_own_that_is_known() -> None:
    """The decoder's own keys paged, behind a padded source, and everything but them as it was."""
    given, model = inputs(padded=True), build("Mvp", HEAD)
    want = logits_of(model, given)
    with pytest.raises(ArgumentError, match=r"torchpaged.hf.attach\(model\)"):
        logits_of(model, given, CACHES["paged"](model))
    with attached(model):
        for cache in (CACHES["paged"](model), None):
            got = logits_of(model, given, cache)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
