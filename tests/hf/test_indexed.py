"""Models whose indexer selects keys: what their caches keep through beams, other batches and tokens taken
back, and what a cache that does not gather says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_coverage import examine
from model_coverage.architectures import model_of
from models import padded_prompts
from torch import Tensor, nn

from torchpaged import UnsupportedModelError
from torchpaged.hf import PagedCache, paged
from torchpaged.hf.call import LayerCall
from torchpaged.hf.dense import attend_by_formula, select
from torchpaged.hf.models.indexed import IndexedLayer

GREEDY: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "disable_compile": True,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("deepseek_v32", "eager")


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beams": (padded_prompts(), {"num_beams": 3}),
    "in chunks": (padded_prompts(padding=0), {"prefill_chunk_size": 6}),
    "looked up": (padded_prompts(rows=1, padding=0), {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.parametrize("call", CALLS)
def test_generate(model: Any, call: str) -> None:
    """A conversation of another batch size before it leaves nothing."""
    inputs, options = CALLS[call]
    want = model.generate(**inputs, **GREEDY, **options)
    with paged(model):
        cache = PagedCache(model.config, 6, 40, block_size=4)
        model.generate(**padded_prompts(rows=3, length=14, padding=3), **GREEDY, past_key_values=cache)
        cache.reset()
        got = model.generate(**inputs, **GREEDY, **options, past_key_values=cache)
    assert torch.equal(got, want)
    layer = cache.paged[0]
    assert cache.dense
    assert isinstance(layer, IndexedLayer)
    assert layer.index_pool is not None
    assert layer.num_bytes == layer.keys.nbytes + layer.values.nbytes + layer.index_pool.nbytes


def test_without_gathering(model: Any) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"caches an indexer.*use PagedCache\(\.\.\., dense=True\)"
    ):
        PagedCache(model.config, 2, 32, dense=False)
    unknown = copy.deepcopy(model.config)
    unknown.model_type = "deepseek_v99"
    with pytest.raises(UnsupportedModelError, match="caches an indexer.*not supported yet"):
        PagedCache(unknown, 2, 32, dense=True)


@pytest.mark.parametrize("additive", [False, True])
def test_selected_keys_alone(additive: bool) -> None:
    """Under a mask of either form, with sinks; a selection without a mask is refused."""
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    seen = torch.ones(1, 1, 2, 6, dtype=torch.bool).tril(4)
    low = torch.finfo(torch.float32).min
    mask: Tensor = torch.zeros(seen.shape).masked_fill(~seen, low) if additive else seen
    indices = torch.tensor([[[0, 3, 5], [1, 5, 5]]], dtype=torch.int32)
    call = LayerCall(nn.Identity(), q, k, v, scaling=0.3, sinks=(sinks := torch.randn(4)))
    got = attend_by_formula(call, select(mask, indices, q.dtype, "it"))
    for row, keys in enumerate(([0, 3], [1, 5])):
        for head in range(4):
            weights = (q[0, head, row] @ k[0, head // 2, keys].T * 0.3).exp()
            want = weights @ v[0, head // 2, keys] / (weights.sum() + sinks[head].exp())
            torch.testing.assert_close(got[0, row, head], want)
    with pytest.raises(UnsupportedModelError, match="selects keys.*without a 4-D mask"):
        select(None, indices, q.dtype, "it")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4"])
def test_one_graph(name: str) -> None:
    row = examine(name)
    assert row.is_one_graph, row
    assert row.mode == "dense", row
