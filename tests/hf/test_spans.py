"""Tokens that see each other in both directions: spans are found in mask functions, beside windows, and
refused where two calls of attention would not say the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import padded_prompts, tiny
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from torchpaged import UnsupportedModelError
from torchpaged.hf import PagedCache
from torchpaged.hf.call_mask import MaskRequest, describe, held_by
from torchpaged.hf.mask_functions import find_spans, kinds_of
from torchpaged.hf.mask_kinds import MaskKind, Prompt, Spans

GROUPS = torch.tensor(
    [
        [-1, -1, -1, 0, 0, 0, -1, 1, 1, 2, 2, -1],  # two pictures side by side
        [-1] * 12,
        [-1, 0, -1, 1, 1, 1, 1, 1, 1, 1, 1, -1],  # one of one token
    ]
)
ROWS = (((3, 6), (7, 9), (9, 11)), (), ((3, 11),))
FULL, NEAR = MaskKind(True), MaskKind(True, 4)


def pictures(groups: Tensor = GROUPS) -> Callable[..., Any]:
    return or_masks(causal_mask_function, blockwise_overlay(groups))


def test_they_are_found() -> None:
    assert find_spans(pictures(), Prompt(3, 0, 12)) == ROWS
    padded = find_spans(pictures(), Prompt(3, 0, 12, [4, 0, 8]))
    assert padded == (((4, 6), (7, 9), (9, 11)), (), ((8, 11),))


@pytest.mark.parametrize("exact", [False, True])
def test_kinds(exact: bool) -> None:
    """Beside no window, within a window, and over one that does not hide what is in the own span."""
    prompt, sizes = Prompt(3, 0, 12), [(None, None), (4, None)]
    assert kinds_of(pictures(), None, prompt, sizes, exact) == {FULL: Spans(ROWS)}
    within = and_masks(pictures(), sliding_window_overlay(4))
    assert kinds_of(within, None, prompt, sizes, exact) == {NEAR: Spans(ROWS)}
    prefix = torch.tensor([[0] * 9 + [-1] * 3] * 2)
    over = or_masks(sliding_window_causal_mask_function(4), blockwise_overlay(prefix))
    found = kinds_of(over, 4, Prompt(2, 0, 12), sizes, exact)
    assert found == {NEAR: Spans((((0, 9),),) * 2, windowed=False)}


def test_a_short_prompt_may_be_of_several_kinds() -> None:
    found = kinds_of(pictures(), None, Prompt(3, 0, 12), [(None, None), (64, None)], True)
    assert found == {FULL: Spans(ROWS), MaskKind(True, 64): Spans(ROWS)}


@pytest.mark.parametrize("exact", [False, True])
def test_a_small_span_in_a_long_prompt(exact: bool) -> None:
    """Between the positions that a grid looks at, in a row that is not the first one."""
    groups = torch.full((2, 1500), -1)
    groups[1, 703:706] = 0
    found = kinds_of(pictures(groups), None, Prompt(2, 0, 1500), [(None, None)], exact)
    assert found == {FULL: Spans(((), ((703, 706),)))}


def test_what_is_refused() -> None:
    apart = torch.tensor([[-1, 0, 0, -1, 0, 0, -1]])  # one group in two places
    far = or_masks(sliding_window_causal_mask_function(2), blockwise_overlay(GROUPS))
    for function, prompt in ((pictures(apart), Prompt(1, 0, 7)), (far, Prompt(3, 0, 12))):
        with pytest.raises(UnsupportedModelError, match="combines"):
            kinds_of(function, 2, prompt, [(None, None), (2, None)], True)
    chunked = and_masks(pictures(), lambda b, h, q, k: q // 4 == k // 4)
    with pytest.raises(UnsupportedModelError, match="combines"):
        kinds_of(chunked, None, Prompt(3, 0, 12), [(None, 4)], True)


def test_a_group_of_single_tokens() -> None:
    """No token sees the one behind it: found by looking everywhere alone, and not on a grid."""
    groups = torch.full((1, 1500), -1)
    groups[0, [701, 707]] = 0
    assert kinds_of(
        pictures(groups), None, Prompt(1, 0, 1500), [(None, None)]
    )  # a text model has no pictures
    with pytest.raises(UnsupportedModelError, match="combines"):
        kinds_of(pictures(groups), None, Prompt(1, 0, 1500), [(None, None)], True)


def test_a_span_is_not_cut() -> None:
    padded = torch.nn.functional.pad(GROUPS, (0, 4), value=-1)
    assert kinds_of(pictures(padded), None, Prompt(3, 0, 12), [(None, None)], True)
    for length in (5, 8, 10):
        with pytest.raises(UnsupportedModelError, match=rf"ends at position {length}, inside an image"):
            kinds_of(pictures(padded), None, Prompt(3, 0, length), [(None, None)], True)


def test_a_later_forward_has_no_spans() -> None:
    """Types of its own tokens would be read at the positions of the first ones, as 5.17 does."""
    text = torch.full_like(GROUPS, -1)
    assert kinds_of(pictures(text), None, Prompt(3, 8, 4), [(None, None)], True) == {FULL: Spans()}
    for groups in (GROUPS, GROUPS[:, :6]):
        longer = torch.nn.functional.pad(groups, (0, 12), value=-1)
        with pytest.raises(UnsupportedModelError, match="behind others in the cache"):
            kinds_of(pictures(longer), None, Prompt(3, 12, 4), [(None, None)], True)


def test_without_a_cache_they_are_no_window() -> None:
    """Attention without a cache takes a mask for a window only if every row of it is one, everywhere."""
    window = sliding_window_causal_mask_function(200)
    groups = torch.full((2, 300), -1)
    groups[1, 142:144] = 0  # where none of the queries stands that are looked at
    for function, is_one in ((window, True), (or_masks(window, blockwise_overlay(groups)), False)):
        mask = torch.zeros(2, 1, 300, 300, dtype=torch.bool)
        describe(mask, MaskRequest(2, 300, 300, None, function, 200), "gemma2")
        assert (held_by(mask) is not None) == is_one


def test_decoders_that_see_ahead() -> None:
    """EmbeddingGemma's attention: generate() leaves the masks to the model."""
    model = tiny("Gemma3", use_bidirectional_attention=True)
    call = {**padded_prompts(), "max_new_tokens": 6, "do_sample": False}
    want = model.generate(**call, past_key_values=DynamicCache())
    model.set_attn_implementation("torchpaged")
    got = model.generate(**call, past_key_values=PagedCache(model.config, 8, 64, dense=True))
    assert torch.equal(got, want)
    with pytest.raises(UnsupportedModelError, match="combines its causal mask with another one"):
        model.generate(**call, past_key_values=PagedCache(model.config, 8, 64))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_gathered_keys_behind_the_tokens_are_hidden(name: str) -> None:
    """By a causal mask, or where there is none, by one of the tokens that there are."""
    model = tiny(name, is_causal=False)
    tokens = torch.randint(3, 97, (2, 15))

    def logits(cache: Any) -> Tensor:
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([11, 1, 3], 1)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        want = logits(DynamicCache())
        model.set_attn_implementation("torchpaged")
        got = logits(PagedCache(model.config, 2, 64, dense=True))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
