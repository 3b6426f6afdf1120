"""One model's keys in a cache: another of the same shape is refused, what runs the same weights is not."""

import copy
import gc
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import paged
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchpaged import ArgumentError
from torchpaged.hf import PagedCache, attach

CALL: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "disable_compile": True,
    "eos_token_id": None,
}


def with_other_weights(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    return other


def first_turn(model: PreTrainedModel, **options: Any) -> tuple[PagedCache, Tensor, Tensor]:
    """A cache after a turn, the tokens of the next one, and what the model says there."""
    ids = torch.randint(3, 99, (2, 9))
    cache = PagedCache(model.config, 2, 64, block_size=4, **options)
    further = torch.cat([model.generate(ids, **CALL, past_key_values=cache), ids], 1)
    return cache, further, model.generate(further, **CALL)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("llama", None),
        ("llama", True),
        ("bloom", None),
        ("deepseek_v3", None),
        ("lfm2", None),  # its first layer keeps a state
        ("jamba", True),
        ("mamba2", None),
    ],
)
def test_another_model_of_the_same_shape(name: str, dense: bool | None) -> None:
    model = attach(model_of(name))
    cache, further, want = first_turn(model, dense=dense)
    other = with_other_weights(model)
    with pytest.raises(ArgumentError, match="past_key_values: .*this model.*of its own, or call cache.reset"):
        other.generate(further, **CALL, past_key_values=cache)
    cache.reset()
    got = other.generate(further, **CALL, past_key_values=cache)
    assert torch.equal(got, other.generate(further, **CALL))
    cache.reset()
    assert torch.equal(model.generate(further, **CALL, past_key_values=cache), want)


def test_a_copy_goes_on() -> None:
    model = paged()
    cache, further, want = first_turn(model)
    assert torch.equal(copy.deepcopy(model).generate(further, **CALL, past_key_values=cache), want)


def test_a_copy_with_an_adapter_goes_on() -> None:
    """Its weights are one more, which come before the others."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.added, self.base = nn.Parameter(torch.zeros(1, 2)), base

        def forward(self, x: Tensor) -> Tensor:
            projected: Tensor = self.base(x)
            return projected + self.added.sum()

    model = paged()
    cache, further, want = first_turn(model)
    copied = copy.deepcopy(model)
    attention = copied.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    assert torch.equal(copied.generate(further, **CALL, past_key_values=cache), want)


def test_a_model_that_is_gone_is_not_known() -> None:
    """As where weights were loaded again: the cache holds none."""
    model = paged()
    cache, further, want = first_turn(model)
    state, config = model.state_dict(), model.config
    del model
    gc.collect()
    again = type(paged())(config)
    again.load_state_dict(state)
    again.set_attn_implementation("torchpaged")
    assert torch.equal(again.eval().generate(further, **CALL, past_key_values=cache), want)


def test_assisted_generation() -> None:
    """The assistant, of the same shape, has a cache of its own."""
    model = paged()
    ids = torch.randint(3, 99, (1, 9))
    cache = PagedCache(model.config, 1, 64, block_size=4)
    call = {**CALL, "max_new_tokens": 12, "assistant_model": with_other_weights(model)}
    want = model.generate(ids, **{**CALL, "max_new_tokens": 12})
    assert torch.equal(model.generate(ids, **call, past_key_values=cache), want)
