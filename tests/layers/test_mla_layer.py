"""MLAAttention: what expanded keys and values give, over a cache of latents."""

import copy
import math
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from torchpaged import ArgumentError, AttentionMetadata, BackendUnavailableError, PagedKVCache
from torchpaged.cache import LatentLayerSpec
from torchpaged.custom_ops.mla.fp8_rows import pack, row_bytes, unpack
from torchpaged.layers import MLAAttention

HEADS, NOPE, ROPE, VALUE, RANK = 3, 6, 4, 5, 16


def layer(**options: Any) -> MLAAttention:
    torch.manual_seed(0)
    return MLAAttention(HEADS, NOPE, ROPE, VALUE, RANK, **options).requires_grad_(False)


def cache() -> PagedKVCache:
    return PagedKVCache([LatentLayerSpec(RANK, ROPE)], block_size=4, num_blocks=9, dtype=torch.float32)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, HEADS, NOPE + ROPE), torch.randn(count, RANK), torch.randn(count, ROPE)


def expanded(module: MLAAttention, query: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The last queries over all tokens of one request, ``[queries, HEADS, VALUE]``, keys and values of all
    heads."""
    both = module.kv_b_proj(kv_c).view(-1, HEADS, NOPE + VALUE)
    keys = torch.cat((both[..., :NOPE], k_pe[:, None].expand(-1, HEADS, -1)), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * module.scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(kv_c) - len(query))
    weights = scores.masked_fill(~seen, -float("inf")).softmax(-1)
    return torch.einsum("hqk,khv->qhv", weights, both[..., NOPE:])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_prompt_and_then_steps(backend: str) -> None:
    """Of two requests, the shorter of which decodes while the longer one's prompt goes on."""
    module, pools = layer(backend=backend), cache()
    query, kv_c, k_pe = tokens(16)
    first, second = range(10), range(10, 16)
    table = [[1, 2, 3], [5, 4]]
    got: dict[int, Tensor] = {}
    for steps in ((first[:7], second[:5]), (first[7:9], second[5:]), (first[9:], ())):
        rows = [*steps[0], *steps[1]]
        metadata = AttentionMetadata.from_lists(
            [len(step) for step in steps],
            [steps[0][-1] + 1, steps[1][-1] - 9 if steps[1] else 6],
            table,
            block_size=4,
        )
        out = module(query[rows], kv_c[rows], k_pe[rows], pools[0], metadata)
        got |= dict(zip(rows, out, strict=True))
    for request in (first, second):
        want = expanded(module, query[request], kv_c[request], k_pe[request])
        torch.testing.assert_close(torch.stack([got[i] for i in request]), want, rtol=1e-4, atol=1e-5)
    assert module.choice is not None
    assert module.choice.name == backend


def test_selected_keys_alone() -> None:
    """What attention over nothing but those tokens gives; refused before anything is written."""
    module, pools = layer(), cache()
    query, kv_c, k_pe = tokens(10)
    metadata = AttentionMetadata.from_lists([10], [10], [[1, 2, 3]], block_size=4)
    with pytest.raises(ArgumentError, match="^indices: expected"):
        module(query, kv_c, k_pe, pools[0], metadata, indices=torch.zeros(9, 3, dtype=torch.int32))
    assert not pools[0].kv_cache.any()
    indices = torch.tensor([[0, 4, 7, -1]] * 9 + [[9, 2, 4, -1]], dtype=torch.int32)
    out = module(query, kv_c, k_pe, pools[0], metadata, indices=indices)
    keys = [2, 4, 9]
    torch.testing.assert_close(out[9:], expanded(module, query[9:], kv_c[keys], k_pe[keys]))
    torch.testing.assert_close(out[5:6], expanded(module, query[5:6], kv_c[[0, 4]], k_pe[[0, 4]]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_pool_of_fp8(backend: str) -> None:
    """What the module gives over latents that are rounded as the pool rounds them."""
    fp8 = torch.float8_e4m3fn
    module = layer(backend=backend, kv_dtype=fp8)
    pools = PagedKVCache([LatentLayerSpec(RANK, ROPE)], block_size=4, num_blocks=9, dtype=fp8)
    assert pools.num_bytes == 9 * 4 * row_bytes(RANK, ROPE) == pools[0].kv_cache.nbytes
    query, kv_c, k_pe = tokens(10)
    metadata = AttentionMetadata.from_lists([10], [10], [[1, 2, 3]], block_size=4)
    out = module(query, kv_c, k_pe, pools[0], metadata)
    latents, keys = unpack(pack(kv_c, k_pe), RANK, torch.float32).split((RANK, ROPE), dim=1)
    torch.testing.assert_close(out, expanded(module, query, latents, keys), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, expanded(module, query, kv_c, k_pe), rtol=1e-4, atol=1e-5)
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(query, None, None, pickle.loads(pickle.dumps(pools))[0], metadata), out)


def test_fp8_is_e4m3_of_columns_that_align() -> None:
    for sizes, dtype in (((16, 8), torch.float8_e5m2), ((18, 8), torch.float8_e4m3fn)):
        with pytest.raises(ArgumentError, match="^dtype: expected"):
            PagedKVCache([LatentLayerSpec(*sizes)], num_blocks=4, dtype=dtype)
    for kv_dtype in (torch.float8_e5m2, torch.bfloat16):
        with pytest.raises(BackendUnavailableError, match="a latent cache of .* is not supported"):
            layer(kv_dtype=kv_dtype)
    with pytest.raises(ArgumentError, match="^kv_dtype: expected a torch.dtype"):
        layer(kv_dtype="fp8")


def step() -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    torch.manual_seed(1)
    metadata = AttentionMetadata.from_lists([1, 1], [1, 1], [[1], [2]], block_size=4)
    return *tokens(2), metadata


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_copies(again: Any) -> None:
    module = layer()
    query, kv_c, k_pe, metadata = step()
    want = module(query, kv_c, k_pe, cache()[0], metadata)
    assert torch.equal(again(module)(query, kv_c, k_pe, cache()[0], metadata), want)


def test_from_the_meta_device() -> None:
    query, kv_c, k_pe, metadata = step()
    module = layer(device="meta")
    assert module.choice is None
    assert "none yet" in repr(module)
    module.load_state_dict(layer().state_dict(), assign=True)
    out = module(query, kv_c, k_pe, cache()[0], metadata)
    assert module.choice is not None
    assert torch.equal(out, layer()(query, kv_c, k_pe, cache()[0], metadata))


def test_moved_to_a_dtype_that_needs_another_backend() -> None:
    assert layer().choice.name == "cpu" and layer().double().choice.name == "reference"  # type: ignore[union-attr]
    with pytest.raises(BackendUnavailableError, match="latent is not supported"):
        layer(backend="torch_sdpa")


def test_what_is_refused() -> None:
    module, pools = layer(), cache()
    query, kv_c, k_pe, metadata = step()
    for sizes in ((0, 6, 4, 5, 16), (3, 6, True, 5, 16)):
        with pytest.raises(ArgumentError, match="expected an int of at least 1"):
            MLAAttention(*sizes)
    with pytest.raises(ArgumentError, match="^scale: expected"):
        layer(scale=0.0)
    for given, name in (
        ((query[:, :2], kv_c, k_pe), "query"),
        ((query, kv_c, None), "kv_c, k_pe"),
        ((query, kv_c[:1], k_pe), "kv_c"),
        ((query, kv_c.half(), k_pe), "kv_c"),
        ((query.transpose(0, 1), kv_c, k_pe), "query"),
        ((query.flatten(1), kv_c, k_pe), "query"),
        ((query, kv_c.T, k_pe), "kv_c"),
        ((query, kv_c, k_pe.T), "k_pe"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            module(*given, pools[0], metadata)
    with pytest.raises(ArgumentError, match=r"^kv_cache: expected one layer's pool.*cache\[layer\]"):
        module(query, kv_c, k_pe, pools, metadata)
    with pytest.raises(ArgumentError, match="^metadata: expected AttentionMetadata, got NoneType"):
        module(query, kv_c, k_pe, pools[0], None)
    with pytest.raises(ArgumentError, match="^causal: expected True or False"):
        layer(causal=1)
    with pytest.raises(ArgumentError, match="^kv_cache: expected shape"):
        module(query, kv_c, k_pe, pools[0].kv_cache[:, :, 0], metadata)
    assert not pools[0].kv_cache.any()


def test_blocks_of_another_size_are_refused() -> None:
    pools = cache()
    query, kv_c, k_pe, metadata = step()
    size = pools.block_size
    other = replace(metadata, block_size=2 * size)
    for module, batch in ((layer(), other), (layer(block_size=2 * size), metadata)):
        with pytest.raises(ArgumentError, match=f"^kv_cache: expected blocks of {2 * size} tokens"):
            module(query, kv_c, k_pe, pools[0], batch)
    assert not pools[0].kv_cache.any()


def test_half_a_gradient_is_refused() -> None:
    module, pools = layer(), cache()
    query, kv_c, k_pe, metadata = step()
    module.requires_grad_(True)
    with (
        torch.enable_grad(),
        pytest.raises(ArgumentError, match=r"^kv_b_proj.weight: expected .* without grad"),
    ):
        module(query, kv_c, k_pe, pools[0], metadata)
    assert not pools[0].kv_cache.any()


@pytest.mark.slow
def test_compiled_code_writes_nothing_either_where_attention_refuses() -> None:
    """Positions of int64 fit the write ahead of it, which Inductor's code makes in place."""
    module, pools = layer(), cache()
    query, kv_c, k_pe = tokens(5)
    metadata = AttentionMetadata.from_lists([5], [5], [[1, 2]], block_size=4)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    indices = torch.zeros(5, 2, dtype=torch.int64)
    with torch.no_grad(), pytest.raises(Exception, match=r"indices: expected torch\.int32"):
        compiled(query, kv_c, k_pe, pools[0], metadata, indices=indices)
    assert not pools[0].kv_cache.any()


def test_one_graph() -> None:
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    module, counter = layer(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    query, kv_c, k_pe, metadata = step()
    pools, others = cache(), cache()
    for _ in range(2):
        got = compiled(query, kv_c, k_pe, pools[0], metadata)
        assert torch.equal(got, module(query, kv_c, k_pe, others[0], metadata))
    assert torch.equal(pools[0].kv_cache, others[0].kv_cache)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_no_copy_of_the_pool() -> None:
    """The ops of Inductor's code take the pool that was given, and nothing of its size is made."""
    module, pools = layer(), cache()
    query, kv_c, k_pe, metadata = step()
    compiled = torch.compile(module, fullgraph=True)
    out, sources = run_and_get_code(compiled, query, kv_c, k_pe, pools[0], metadata)
    assert torch.equal(out, module(query, kv_c, k_pe, cache()[0], metadata))
    assert pools[0].kv_cache.any()
    calls = re.findall(r"torch\.ops\.torchpaged\.(\w+)\.cpu\((.*)\)", "\n".join(sources))
    (write, written), (attend, read) = calls
    assert (write, attend) == ("write_latent", "mla_attention")
    assert written.split(", ")[2] == read.split(", ")[1] != ""
    assert written.split(", ")[2].startswith("arg")
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", "\n".join(sources))
    assert made
    assert all(math.prod(map(int, re.findall(r"\d+", shape))) < 9 * 4 * 20 for shape in made)
