"""Copies and pickles: of modules and unused caches they work, also in another process; where they can't, the
error says why."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import printed

from torchpaged import AttentionMetadata, PagedAttention, use_backend
from torchpaged.backends import Limits, open_session
from torchpaged.cache import PagedKVCache
from torchpaged.custom_ops.errors import NotCopyableError
from torchpaged.graphs import BucketedGraphs, DecodeGraphRunner


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved,
}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def attend(module: Any, cache: PagedKVCache) -> torch.Tensor:
    torch.manual_seed(3)
    metadata = AttentionMetadata.from_lists([3], [3], [[1]], block_size=4)
    return module(torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8), cache[0], metadata)


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = PagedAttention(
            4, 8, 2, sinks=[0.1, 0.2, 0.3, 0.4], alibi_slopes=[1.0, 0.5, 0.25, 0.1], block_size=4
        )

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.attention(*inputs)


def kv_cache(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache.uniform(2, 2, 8, block_size=4, num_blocks=5, dtype=dtype)


@way
def test_a_module_that_holds_paged_attention(way: Callable[[Any], Any]) -> None:
    with use_backend("reference"):
        module = Holder()
    again = way(module)
    assert again.attention.choice == module.attention.choice
    assert again.attention._ops == module.attention._ops
    assert torch.equal(attend(again, kv_cache()), attend(module, kv_cache()))


@way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_kv_cache_with_what_it_holds(way: Callable[[Any], Any], dtype: torch.dtype) -> None:
    cache = kv_cache(dtype)
    cache[1].k_cache.view(torch.uint8).copy_(
        torch.arange(cache[1].k_cache.view(torch.uint8).numel()).view(
            cache[1].k_cache.view(torch.uint8).shape
        )
    )
    again = way(cache)
    for ours, theirs in zip(cache, again, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert (x is None) == (y is None)
            assert x is None or (x.dtype == y.dtype and x.data_ptr() != y.data_ptr())
            assert x is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert again.describe() == cache.describe()


@way
def test_an_unused_paged_cache_serves_as_a_new_one(
    way: Callable[[Any], Any], make_llama: Callable[..., Any]
) -> None:
    from torchpaged.hf import PagedCache

    model = make_llama(vocab_size=99, hidden_size=32, intermediate_size=48)
    model.set_attn_implementation("torchpaged")
    ids, options = torch.tensor([[5, 6, 7], [8, 9, 10]]), {"max_new_tokens": 6, "do_sample": False}
    cache = PagedCache(model.config, max_batch_size=2, max_seq_len=32)
    again = way(cache)
    assert again._mask_token._torchpaged_cache is again
    assert all(layer.owner is again for layer in again.paged)
    want = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(model.generate(ids, past_key_values=again, **options), want)
    with pytest.raises(NotCopyableError, match="a PagedCache that was used can't be copied or pickled"):
        way(cache)
    cache.reset()
    with pytest.raises(NotCopyableError):
        way(cache)


def test_in_another_process(tmp_path: Path, make_llama: Callable[..., Any]) -> None:
    """What spawn does: nothing of this process but the bytes."""
    from torchpaged.hf import PagedCache

    config = make_llama(vocab_size=99, hidden_size=32, intermediate_size=48).config
    with use_backend("reference"):
        attention = torch.nn.Sequential(PagedAttention(4, 8, 2, block_size=4))
    (tmp_path / "things").write_bytes(pickle.dumps((attention, kv_cache(), PagedCache(config, 2, 32))))
    torch.save(attend(attention[0], kv_cache()), tmp_path / "want")
    code = f"""
import pickle, torch
from torchpaged import AttentionMetadata
attention, kv, cache = pickle.load(open({str(tmp_path / "things")!r}, "rb"))
torch.manual_seed(3)
metadata = AttentionMetadata.from_lists([3], [3], [[1]], block_size=4)
got = attention[0](torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8), kv[0], metadata)
assert torch.equal(got, torch.load({str(tmp_path / "want")!r}))
assert attention[0].choice.name == "reference" and cache.paged
"""
    printed("-c", code)


def bound_things(model: Any) -> dict[str, Any]:
    """What holds graphs, or what a backend keeps."""
    from torchpaged.engine import Generator
    from torchpaged.hf import PagedModel

    sizes: dict[str, Any] = {"max_blocks_per_req": 4, "block_size": 4, "compile": False}
    plain = DecodeGraphRunner(lambda ids, metadata: ids.float(), max_batch_size=2, **sizes)
    plain.capture()
    paged = PagedModel(model, num_blocks=9, block_size=4, limits=Limits(2, 16, 8))
    generator = Generator(paged, max_batch_size=2, max_seq_len=32, prefill_chunk_size=16, prefill_buckets=[4])
    assert generator.runner is not None
    assert generator.runner.prefix_graphs is not None
    return {
        "DecodeGraphRunner": plain,
        "BucketedGraphs": BucketedGraphs(plain.buffers, lambda bucket: abs, buckets=[2], device="cpu"),
        "PackedGraphRunner": generator.prefill_runners[-1],
        "WholeStepRunner": generator.runner,
        "PrefixGraphs": generator.runner.prefix_graphs,
        "DecodeLoop": generator.loop,
        "Generator": generator,
        "PagedModel": paged,
        type(paged.session).__name__: paged.session,
    }


@pytest.mark.parametrize("way", [copy.copy, *WAYS.values()], ids=["copy", *WAYS])
def test_what_holds_graphs_or_a_session_is_refused(
    way: Callable[[Any], Any], make_llama: Callable[..., Any]
) -> None:
    """A copied runner would replay its original's graphs, over its original's buffers."""
    for name, thing in bound_things(make_llama(vocab_size=99, hidden_size=32, intermediate_size=48)).items():
        with pytest.raises(NotCopyableError, match=f"^a {name} can't be copied or pickled: [^;]*; [^;]+$"):
            way(thing)
        with pytest.raises(NotCopyableError, match=name):
            way({"held": [thing]}) if way is not copy.copy else way(thing)


def test_a_session_opened_as_its_error_says() -> None:
    with use_backend("reference"):
        session = PagedAttention(4, 8, 2, block_size=4).session
    with pytest.raises(
        NotCopyableError, match=r"open_session\(session.specs, session.limits, session.name\)"
    ):
        copy.deepcopy(session)
    again = open_session(session.specs, session.limits, session.name)
    assert (again.name, again.specs, again.limits) == (session.name, session.specs, session.limits)
