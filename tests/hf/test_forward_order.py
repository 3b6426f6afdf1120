"""What a paged cache sees of a model rather than assumes: causality, the layers' masks, which layer writes
first and which not yet."""

import pytest
import torch
from families import build, same
from models import padded_prompts, tiny
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.hf import PagedCache
from torchpaged.hf.call_mask import MaskRequest
from torchpaged.hf.mask_functions import kinds_of
from torchpaged.hf.mask_kinds import MaskKind, Prompt


def test_causality_comes_from_the_mask() -> None:
    """A module may say that it is not causal and leave causality to the mask."""
    model = build("Bart")
    for layer in model.model.decoder.layers:
        layer.self_attn.is_causal = False
    same(model, padded_prompts(), lambda: PagedCache(model.config, 2, 32, block_size=4))


def test_a_bidirectional_decoder() -> None:
    """config.is_causal = False: the prompt sees itself both ways, and a new token all of it."""
    model = tiny("Llama")
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    same(model, padded_prompts(), lambda: PagedCache(model.config, 2, 32, block_size=4))


def test_a_model_that_asks_for_both() -> None:
    cache = PagedCache(tiny("Llama").config, 1, 32)
    asked = MaskRequest(1, 4, 32, None, causal_mask_function)
    cache.masks.observe(asked)
    with pytest.raises(UnsupportedModelError, match="causal and .*bidirectional"):
        cache.masks.observe(asked._replace(mask_function=bidirectional_mask_function))


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize("dense", [False, True])
def test_the_first_layer_never_writes(dense: bool) -> None:
    model, ids = tiny("Llama"), padded_prompts()["input_ids"]
    model.model.layers[0].self_attn = _NoAttention()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("torchpaged")
        cache = PagedCache(model.config, 2, 32, block_size=4, dense=dense)
        got = []
        for piece in ids.split([11, 8, 1], dim=1):
            start = int(cache.get_seq_length())
            positions = torch.arange(start, start + piece.shape[1])[None]
            got.append(model(piece, position_ids=positions, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
    assert int(cache.get_seq_length()) == 20


def test_lengths_of_layers_within_a_forward() -> None:
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 2, 16, block_size=4)
    seen = []
    for length in (5, 1):
        for index in range(3):
            seen.append([int(cache.get_seq_length(i)) for i in range(3)])
            keys = torch.ones(2, 2, length, 16)
            cache.update(keys, keys, index)
    assert seen == [[0, 0, 0], [5, 0, 0], [5, 5, 0], [5, 5, 5], [6, 5, 5], [6, 6, 5]]
    before = cache.get_seq_length()
    cache.update(torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16), 0)
    assert int(before) == 6
    assert int(cache.get_seq_length()) == 7
    cache.reset()
    assert cache.get_seq_length(2) == 0


def test_layers_that_disagree_with_the_masks() -> None:
    """A mask without a window, and a layer of the cache that applies one: the model would have seen more."""
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 32)
    for layer in cache.paged:
        layer.window = 4
    with pytest.raises(UnsupportedModelError, match="layer 0 attends with window 4"), torch.no_grad():
        model(torch.randint(3, 99, (1, 12)), past_key_values=cache)


@pytest.mark.parametrize("length", [2, 6, 40, 300])
def test_kinds(length: int) -> None:
    """A window or chunk longer than the prompt is told apart all the same."""
    layers = [(None, None), (64, None)]
    window, chunk = (
        sliding_window_causal_mask_function(8),
        chunked_causal_mask_function(8, torch.tensor([0, 0])),
    )
    two, one = Prompt(2, 0, length, [0, 1]), Prompt(1, 0, length)
    assert set(kinds_of(causal_mask_function, None, two, layers)) == {MaskKind()}
    assert set(kinds_of(window, 8, two, layers)) == {MaskKind(True, 8)}
    assert set(kinds_of(chunk, 8, two._replace(padding=[0, 0]), layers)) == {MaskKind(True, None, 8)}
    assert set(kinds_of(bidirectional_mask_function, None, one, layers)) == {MaskKind(False)}
    assert set(kinds_of(sliding_window_causal_mask_function(64), 64, one, layers)) == {MaskKind(True, 64)}


def test_chunks_begin_behind_the_padding() -> None:
    padding = [5, 0, 3]
    chunk = chunked_causal_mask_function(8, torch.tensor(padding))
    assert set(kinds_of(chunk, 8, Prompt(3, 0, 30, padding), [(None, 8)])) == {MaskKind(True, None, 8)}
    with pytest.raises(UnsupportedModelError, match="combines"):
        kinds_of(chunk, 8, Prompt(3, 0, 30, [5, 0, 4]), [(None, 8)])


def test_overlays_are_refused() -> None:
    """A hole, and tokens of a group that do not stand side by side."""
    group = torch.tensor([[0, 1, 1, 0, 1, 0]])
    blocks = or_masks(causal_mask_function, lambda b, h, q, k: (group[b, q] == 1) & (group[b, k] == 1))
    hole = and_masks(causal_mask_function, lambda b, h, q, k: k != 2)
    for function in (blocks, hole):
        with pytest.raises(UnsupportedModelError, match="combines"):
            kinds_of(function, None, Prompt(1, 0, 6), [(None, None)])


@pytest.mark.slow_cases("True-True", "False-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_pools_made_ahead_of_a_layer_that_never_writes(dense: bool, compiled: bool) -> None:
    """The last layer of the config is not the last one that writes, which no `early_initialization`
    can know."""
    torch._dynamo.reset()
    model, ids = tiny("Llama"), padded_prompts()["input_ids"]
    model.model.layers[2].self_attn = _NoAttention()
    pieces, got, start = ids.split([19, 1], dim=1), [], 0
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("torchpaged")
        cache = PagedCache(model.config, 2, 32, block_size=4, dense=dense)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for piece in pieces:
            positions = torch.arange(start, start + piece.shape[1])[None]
            got.append(run(piece, position_ids=positions, past_key_values=cache).logits)
            start += piece.shape[1]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)


def test_pools_made_ahead_and_a_forward_that_raised() -> None:
    """What never wrote and what was not reached look alike until it writes: then the cache refuses."""
    cache = PagedCache(tiny("Llama").config, 1, 32)
    cache._text_config._attn_implementation = "torchpaged"
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    states = torch.ones(1, 2, 3, 16)
    for index in (0, 1, 0, 1):  # of three
        cache.update(states, states, index)
    with pytest.raises(ArgumentError, match="forwards all completed"):
        cache.update(states, states, 2)
    cache.reset()
    for index in (0, 1, 2, 0, 1):
        cache.update(states, states, index)
    with pytest.raises(ArgumentError, match="forwards all completed"):
        cache.update(states, states, 0)


@pytest.mark.parametrize(
    "other", ["more layers", "fewer layers", "other heads", "other width", "other dtype"]
)
@torch.no_grad()
def test_a_cache_that_is_another_models(other: str) -> None:
    """Refused by a typed error that says what to do; the cache goes on with its own model as if nothing
    had come."""
    model, ids = tiny("Llama"), padded_prompts()["input_ids"]
    config = type(model.config)(
        **{
            **model.config.to_dict(),
            **{
                "more layers": {"num_hidden_layers": model.config.num_hidden_layers + 1},
                "fewer layers": {"num_hidden_layers": model.config.num_hidden_layers - 1},
                "other heads": {"num_key_value_heads": 1},
                "other width": {"head_dim": 2 * model.config.head_dim},
                "other dtype": {},
            }[other],
        }
    )
    stranger = type(model)(config).eval().to(torch.bfloat16 if other == "other dtype" else torch.float32)
    for each in (model, stranger):
        each.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 2, 32, block_size=4)
    want = model(ids, past_key_values=PagedCache(model.config, 2, 32, block_size=4)).logits
    model(ids, past_key_values=cache)
    with pytest.raises(ArgumentError, match="make a new PagedCache of the model's config"):
        stranger(ids[:, :1], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, want)
