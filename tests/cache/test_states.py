"""The kind ``state``: sizes, slots, copies, and what is refused."""

import pickle
from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, PagedKVCache
from torchpaged.cache import KVLayerSpec, LayerStates, StateLayerSpec
from torchpaged.custom_ops import BACKEND_OPS

DELTA = StateLayerSpec(width=4, channels=24, num_heads=2, key_dim=8, value_dim=4)
CONV = StateLayerSpec(width=3, channels=16)


def made(**options: Any) -> PagedKVCache:
    layers = [DELTA, KVLayerSpec(2, 8), CONV]
    return PagedKVCache(layers, block_size=4, max_num_reqs=3, dtype=torch.bfloat16, **options)


def test_a_slot_per_request_and_the_void_one() -> None:
    delta, keys, conv = made(num_blocks=7)
    assert isinstance(delta, LayerStates)
    assert delta.conv_state.shape == (4, 3, 24)
    assert delta.conv_state.dtype == torch.bfloat16
    assert delta.state is not None
    assert delta.state.shape == (4, 2, 8, 4)
    assert delta.state.dtype == torch.float32
    assert keys.k_cache.shape[0] == 7
    assert conv.conv_state.shape == (4, 2, 16)
    assert conv.state is None
    assert not any(tensor.any() for tensor in (delta.conv_state, delta.state, conv.conv_state))


def test_bytes_are_those_of_the_tensors() -> None:
    cache = made(num_blocks=7)
    assert cache.num_bytes == sum(tensor.nbytes for tensor in cache.tensors().values())
    assert DELTA.bytes_per_block(4, torch.bfloat16) == 3 * 24 * 2 + 2 * 8 * 4 * 4


def test_a_budget_pays_for_the_states_first() -> None:
    cache = made(num_blocks=7)
    assert made(memory_budget=cache.num_bytes).num_blocks == 7


def test_requests_are_copied_whole() -> None:
    cache = made(num_blocks=7)
    for tensor in cache.tensors().values():
        tensor.normal_()
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    cache.copy_requests(torch.tensor([[1, 3]]), BACKEND_OPS["default"])
    for name, tensor in cache.tensors().items():
        want = before[name]
        if "state" in name:
            want[3] = want[1]
        assert torch.equal(tensor, want), name


def test_states_survive_a_pickle() -> None:
    cache = made(num_blocks=3)
    for tensor in cache.tensors().values():
        tensor.normal_()
    again = pickle.loads(pickle.dumps(cache))
    for name, tensor in cache.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("width", {"width": 1}),
        ("channels", {"channels": 0}),
        ("num_heads, key_dim, value_dim", {"num_heads": 2, "key_dim": 8}),
        ("state_dtype", {"state_dtype": "float32"}),
    ],
)
def test_sizes_that_can_not_be(name: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        StateLayerSpec(**{"width": 4, "channels": 8} | sizes)


def test_requests_must_be_counted() -> None:
    with pytest.raises(ArgumentError, match="^max_num_reqs: expected"):
        PagedKVCache([DELTA], num_blocks=3)
