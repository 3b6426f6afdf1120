"""Models whose indexer selects keys: what their caches keep through beams, other batches and tokens taken
back, gathered and as latents; every family; and what a cache says that can do neither."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_coverage import examine
from model_coverage.architectures import config_of, model_of, with_random_weights
from model_coverage.checks import difference
from models import padded_prompts
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from torchpaged import UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, paged
from torchpaged.hf.call import LayerCall
from torchpaged.hf.dense import attend_by_formula, select
from torchpaged.hf.models.indexed import TYPES, IndexedLayer, SparseLatentLayer
from torchpaged.hf.models.latent import LatentLayer

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


@pytest.mark.parametrize("dense", [True, None], ids=["gathered", "latent"])
@pytest.mark.parametrize("call", CALLS)
def test_generate(model: Any, call: str, dense: bool | None) -> None:
    """A conversation of another batch size before it leaves nothing."""
    inputs, options = CALLS[call]
    want = model.generate(**inputs, **GREEDY, **options)
    with paged(model):
        cache = PagedCache(model.config, 6, 40, block_size=4, dense=dense)
        model.generate(**padded_prompts(rows=3, length=14, padding=3), **GREEDY, past_key_values=cache)
        cache.reset()
        got = model.generate(**inputs, **GREEDY, **options, past_key_values=cache)
    assert torch.equal(got, want)
    layer = cache.paged[0]
    assert cache.dense == bool(dense)
    assert isinstance(layer, IndexedLayer if dense else SparseLatentLayer)
    assert layer.index_pool is not None
    values = layer.values.nbytes if dense else 0  # latents are both
    assert layer.num_bytes == layer.keys.nbytes + values + layer.index_pool.nbytes


def small(model_type: str) -> Any:
    """A model of two layers, the second with the selection of the first, where there are such ones."""
    config = config_of(model_type)
    if getattr(config, "indexer_types", None):
        config.indexer_types = ["full", "shared"]
    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    return with_random_weights(made)


def selecting(model: Any, counts: tuple[int, ...]) -> Iterator[None]:
    """Let the indexers select so many keys, one after the other."""
    for count in counts:
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = count
        yield


@pytest.mark.parametrize("model_type", [name for name in TYPES if "_vl" not in name])  # test_coverage.py
def test_every_family(model_type: str) -> None:
    """Logits and tokens of a left-padded batch whose texts have more keys than are selected; the model's own
    once it is detached, and with transformers' cache while it is attached."""
    model = small(model_type)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    inputs = padded_prompts()
    want = model.generate(**inputs, **options)
    with torch.no_grad():
        few, all_keys = (model.model(**inputs).last_hidden_state for _ in selecting(model, (8, 99)))
        assert not torch.allclose(few, all_keys, atol=1e-3)
    next(selecting(model, (8,)))
    with paged(model):
        cache = PagedCache(model.config, 2, 40, block_size=4)
        got = model.generate(**inputs, **options, past_key_values=cache)
        assert not cache.dense
        assert difference(torch.stack(got.logits), torch.stack(want.logits)) == "right"
        own = model.generate(**inputs, **options)
        assert difference(torch.stack(own.logits), torch.stack(want.logits)) == "right"
    kinds = [type(layer) for layer in cache.paged]
    shared = getattr(model.config, "indexer_types", None) or []
    assert kinds == [
        LatentLayer if i < len(shared) and shared[i] == "shared" else SparseLatentLayer for i in range(2)
    ]
    assert torch.equal(model.generate(**inputs, **options).sequences, want.sequences)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_the_engine_selects_too(model_type: str) -> None:
    """Prompts in chunks, requests of unlike lengths that come and go."""
    model = small(model_type)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 100, (n,), generator=generator).tolist() for n in (5, 17, 23, 2)]
    want = [model.generate(torch.tensor([text]), **GREEDY)[0, len(text) :].tolist() for text in texts]
    attach(model)
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 48, "prefill_chunk_size": 8}
    engine = Generator(model, **sizes, block_size=4)
    results = engine.generate(texts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [result.token_ids for result in results] == want


def test_one_graph_for_decode_steps(model: Any) -> None:
    """Compiled whole, and not again as the text grows."""
    want = model.generate(**padded_prompts(), **GREEDY)
    with paged(model), torch.no_grad():
        cache = PagedCache(model.config, 2, 40, block_size=4)
        torch._dynamo.reset()  # another test's model may have made sizes dynamic
        counter = CompileCounterWithBackend("aot_eager")
        inputs = padded_prompts()
        tokens = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        step = torch.compile(model, backend=counter, fullgraph=True)
        found = [tokens]
        for _ in range(7):
            found.append(step(found[-1], past_key_values=cache).logits.argmax(-1))
    assert torch.equal(torch.cat(found, 1), want[:, inputs["input_ids"].shape[1] :])
    assert counter.frame_count == 1


def test_a_projection_that_is_not_plain_gathers(model: Any) -> None:
    adapted = copy.deepcopy(model)
    want = model.generate(**padded_prompts(), **GREEDY)
    hook = lambda _, args, out: out.clone()  # noqa: E731
    for module in adapted.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj.register_forward_hook(hook)
    with paged(adapted):
        cache = PagedCache(adapted.config, 2, 40, block_size=4)
        assert cache.dense
        assert torch.equal(adapted.generate(**padded_prompts(), **GREEDY, past_key_values=cache), want)


def test_without_gathering(model: Any) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"caches an indexer.*attach\(model\), or use PagedCache\(\.\.\., dense=True\)",
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
    assert row.mode == "latent", row
