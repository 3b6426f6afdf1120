"""No op has a derivative: whatever would drop one, backward or forward, is refused by name, eagerly and in
compiled code, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.compat import flash_attn_varlen_func
from torchpaged.layers import MLAAttention

TOKENS, HEADS, KV_HEADS, DIM = 3, 4, 2, 8
Call = Callable[..., Any]


def batch() -> AttentionMetadata:
    return AttentionMetadata.from_lists([TOKENS], [TOKENS], [[1]], block_size=4)


def pools() -> PagedKVCache:
    return PagedKVCache.uniform(1, KV_HEADS, DIM, block_size=4, num_blocks=4, dtype=torch.float32)


def heads(count: int) -> Tensor:
    return torch.randn(TOKENS, count, DIM)


def write() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    cache, metadata = pools(), batch()

    def call(k: Tensor, v: Tensor) -> None:
        torchpaged.write_kv(k, v, *cache[0][:2], metadata.slot_mapping)

    return call, {"k": heads(KV_HEADS), "v": heads(KV_HEADS)}, cache


def rope_write() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    cache, metadata = pools(), batch()
    cos_sin = torch.cat((torch.ones(8, DIM // 2), torch.zeros(8, DIM // 2)), dim=-1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torchpaged.rope_write_kv(
            q, k, v, metadata.positions, cos_sin, *cache[0][:2], metadata.slot_mapping
        )

    return call, {"q": heads(HEADS), "k": heads(KV_HEADS), "v": heads(KV_HEADS)}, cache


def attention() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    m, pool = batch(), torch.zeros(4, 4, KV_HEADS, DIM)

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor) -> Any:
        return torchpaged.paged_attention(
            q,
            k_cache,
            v_cache,
            m.block_table,
            m.seq_lens,
            m.query_start_loc,
            max_query_len=TOKENS,
            sinks=sinks,
        )

    given = {"q": heads(HEADS), "k_cache": pool, "v_cache": pool.clone(), "sinks": torch.zeros(HEADS)}
    return call, given, pools()


def merge() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    lse = torch.zeros(TOKENS, HEADS)
    given = {"out_a": heads(HEADS), "lse_a": lse, "out_b": heads(HEADS), "lse_b": lse.clone()}
    return torchpaged.merge_attn_states, given, pools()


def copy() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    def call(k_cache: Tensor, v_cache: Tensor) -> None:
        torchpaged.copy_blocks(k_cache, v_cache, torch.tensor([[1, 2]]))

    pool = torch.zeros(4, 4, KV_HEADS, DIM)
    return call, {"k_cache": pool, "v_cache": pool.clone()}, pools()


def module() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    layer, cache, metadata = PagedAttention(HEADS, DIM, KV_HEADS), pools(), batch()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return layer(query, key, value, cache[0], metadata)

    return call, {"query": heads(HEADS), "key": heads(KV_HEADS), "value": heads(KV_HEADS)}, cache


def latent_module() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    layer, metadata = MLAAttention(2, 6, 4, 5, 16).requires_grad_(False), batch()
    spec = torchpaged.cache.LatentLayerSpec(16, 4)
    cache = PagedKVCache([spec], block_size=4, num_blocks=4, dtype=torch.float32)

    def call(query: Tensor, kv_c: Tensor, k_pe: Tensor) -> Any:
        return layer(query, kv_c, k_pe, cache[0], metadata)

    states = {"query": torch.randn(TOKENS, 2, 10), "kv_c": torch.randn(TOKENS, 16)}
    return call, {**states, "k_pe": torch.randn(TOKENS, 4)}, cache


def dense() -> tuple[Call, dict[str, Tensor], PagedKVCache]:
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=TOKENS, max_seqlen_k=TOKENS
        )

    return call, {"q": heads(HEADS), "k": heads(KV_HEADS), "v": heads(KV_HEADS)}, pools()


DOORS = {
    "write_kv": write,
    "rope_write_kv": rope_write,
    "paged_attention": attention,
    "merge_attn_states": merge,
    "copy_blocks": copy,
    "PagedAttention": module,
    "MLAAttention": latent_module,
    "flash_attn_varlen_func": dense,
}


def unwritten(cache: PagedKVCache) -> bool:
    return not any(pool.any() for pool in cache[0] if isinstance(pool, Tensor))


door = pytest.mark.parametrize("door", DOORS)


@door
def test_grad_is_refused_eagerly_and_compiled(door: str) -> None:
    for name in DOORS[door]()[1]:
        call, given, cache = DOORS[door]()
        given[name].requires_grad_()
        torch._dynamo.reset()
        with pytest.raises(ArgumentError, match=f"^{name}: expected a tensor without grad"):
            call(**given)
        with pytest.raises(Exception, match=rf"ArgumentError\(.*'{name}'.*a tensor without grad"):
            torch.compile(call, fullgraph=True, backend="eager")(**given)
        assert unwritten(cache)


@door
def test_tangents_are_refused(door: str) -> None:
    """Under no_grad() too, which does not stop forward-mode AD."""
    for name in DOORS[door]()[1]:
        call, given, cache = DOORS[door]()
        said = pytest.raises(ArgumentError, match=f"^{name}: expected a tensor without a tangent")
        with forward_ad.dual_level(), torch.no_grad(), said:
            call(**{**given, name: forward_ad.make_dual(given[name], torch.ones_like(given[name]))})
        with torch.no_grad(), said:

            def of_one(x: Tensor, call: Call = call, given: Any = given, name: str = name) -> Any:
                return call(**{**given, name: x})

            torch.func.jvp(of_one, (given[name],), (torch.ones_like(given[name]),))
        assert unwritten(cache)


def test_a_dual_level_around_plain_tensors_is_no_obstacle() -> None:
    call, given, _ = module()
    with torch.no_grad():
        want = call(**given)
        with forward_ad.dual_level():
            assert torch.equal(call(**given), want)
