"""Recurrent states in a paged cache, transformers' own and, of attached models that are known, in pools: they
follow its rows, and survive a `reset` that changes the batch."""

from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator
from torchpaged.hf import PagedCache, attach
from torchpaged.hf.state_layer import StateLayer

#: States apart from attention, convolutions alone, both in one layer, several states in one.
FAMILIES = ["qwen3_next", "lfm2", "falcon_h1", "inkling_text", "zaya"]


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(sum(shape)))


def cached(model: PreTrainedModel) -> PagedCache:
    return PagedCache(model.config, 4, 32, block_size=4)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "bamba"])
def test_states_follow_the_rows(family: str, attached: bool) -> None:
    """Selected, repeated and reordered, against rows that were so from the start in transformers' cache."""
    eager = model_of(family, "eager")
    model = attach(model_of(family, "eager")) if attached else model_of(family, "torchpaged")
    prompts, step = tokens(3, 7), tokens(4, 1)
    changes = {
        "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
        "reorder_cache": (torch.tensor([1, 1, 0]), [1, 1, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1]),
    }
    for method, (argument, rows) in changes.items():
        ids = prompts[: 2 if method == "batch_repeat_interleave" else 3]
        with torch.no_grad():
            theirs, cache = DynamicCache(config=model.config), cached(model)
            eager(ids[rows], past_key_values=theirs)
            want = eager(step[: len(rows)], past_key_values=theirs).logits
            model(ids, past_key_values=cache)
            getattr(cache, method)(argument)
            got = model(step[: len(rows)], past_key_values=cache).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()), msg=method)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_batch_size_behind_reset(family: str) -> None:
    """Also behind a first forward under inference mode, whose tensors can't be written outside of it."""
    model, few, many = model_of(family, "eager"), tokens(2, 7), tokens(3, 9)
    with torch.no_grad():
        wants = [model(ids, use_cache=False).logits for ids in (few, many)]
    cache = cached(attach(model))
    with torch.inference_mode():
        got = [model(few, past_key_values=cache).logits]
    cache.reset()
    with torch.no_grad():
        got.append(model(many, past_key_values=cache).logits)
    for logits, want in zip(got, wants, strict=True):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_states_stay_where_compiled_code_knows_them() -> None:
    """A batch of the same size, and rows in another order."""
    model = model_of("qwen3_next", "torchpaged")
    cache, ids = cached(model), tokens(2, 7)
    states = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        places = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in states]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reset()
        model(ids, past_key_values=cache)
    for layer, (conv, recurrent) in zip(states, places, strict=True):
        assert layer.conv_states[0] is conv
        assert layer.recurrent_states[0] is recurrent


@pytest.mark.parametrize("rows", [1, 3])
def test_other_rows_without_a_reset_change_no_state(rows: int) -> None:
    """One row would be copied into both, before the first layer of attention refuses it."""
    model = model_of("qwen3_next", "torchpaged")
    cache = cached(model)
    with torch.no_grad():
        model(tokens(2, 7), past_key_values=cache)
        before = [layer.recurrent_states[0].clone() for layer in cache.layers[:3]]
        with pytest.raises(ArgumentError, match=rf"input_ids: expected 2 rows.*got {rows} row.*reset\(\)"):
            model(tokens(rows, 1), past_key_values=cache)
    for layer, kept in zip(cache.layers[:3], before, strict=True):
        assert torch.equal(layer.recurrent_states[0], kept)


def test_the_length_of_a_layer_with_both() -> None:
    """A state has none (-1), the keys beside it have."""
    cache = cached(model_of("falcon_h1"))
    assert cache.get_max_length() == cache.layers[0].get_max_length() == 32


def test_the_engine_refuses_states_that_it_does_not_know() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^zaya: layer \d keeps a recurrent state"):
        Generator(model_of("zaya"), max_batch_size=2, max_seq_len=32)


class Writes(TorchDispatchMode):
    """Which of ``tensors`` the ops write, by name, in order; those of torchpaged by their own."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {each.untyped_storage().data_ptr(): name for name, each in tensors.items()}
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torchpaged":
            self.seen.append(func.name().split("::")[1].split(".")[0])
        else:
            written = [
                given.untyped_storage().data_ptr()
                for given, argument in zip(args, func._schema.arguments, strict=False)
                if isinstance(given, Tensor)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ]
            self.seen += [self._names[at] for at in written if at in self._names]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("query_len", [1, 3, 12])
def test_a_kernel_lies_between_lengths_and_the_first_state(query_len: int) -> None:
    """docs/stream_order.md: an op of states reads lengths and query starts early."""
    model = attach(model_of("qwen3_next", "eager"))
    cache = cached(model)
    with torch.no_grad():
        model(tokens(2, 7), past_key_values=cache)
        rows = cache.rows
        with Writes({"lengths": rows.seq_lens, "total": rows.total}) as writes:
            model(tokens(2, query_len), past_key_values=cache)
    ahead = writes.seen[: writes.seen.index("causal_conv")]
    assert ahead[0] == "lengths" and ahead[-1] == "total", ahead
    assert ("_fill_query_starts" in ahead) == (query_len == 12)
