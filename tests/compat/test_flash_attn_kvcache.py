"""flash_attn_with_kvcache against its documented behaviour, on the CPU: eager and compiled."""

import functools
import re
from typing import Any

import pytest
import torch
from documented import Pools, documented_attention, starts_of
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torchpaged
from torchpaged.compat import flash_attn_with_kvcache
from torchpaged.compat.kvcache_check import slots_of, tokens_of

LENS = [11, 0, 8]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (3, -1)},
    "window_both": {"window_size": (4, 1)},
    "chunk": {"causal": True, "attention_chunk": 5},
    "softcap_sinks": {"causal": True, "softcap": 3.0, "sinks": torch.tensor([0.1, 1.0, -2.0, 0.4])},
}


def expected(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``[B, S, H, D]`` and ``[B, H, S]``."""
    known = {
        "causal": options.get("causal", False),
        "window": options.get("window_size", (-1, -1)),
        "softcap": options.get("softcap", 0.0),
        "sinks": options.get("sinks"),
        "chunk": options.get("attention_chunk", 0),
    }
    pairs = [documented_attention(q, k, v, **known) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


def turned(x: Tensor, positions: list[int], cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x [S, H, D]`` turned pair by pair, as complex numbers."""
    half = cos.shape[1]
    first = torch.arange(half) * 2 if interleaved else torch.arange(half)
    second = first + (1 if interleaved else half)
    out = x.clone()
    for i, position in enumerate(positions):
        pair = torch.complex(x[i][:, first], x[i][:, second]) * torch.complex(cos[position], sin[position])
        out[i][:, first], out[i][:, second] = pair.real, pair.imag
    return out


def in_pages(pools: Pools) -> dict[str, Any]:
    return {"k_cache": pools.k_cache, "v_cache": pools.v_cache, "page_table": pools.table}


def in_rows(pools: Pools, rows: list[int]) -> dict[str, Any]:
    """The same, a row of 32 tokens per request."""
    where = {name: torch.full((4, 32, 2, 16), float("nan")) for name in ("k_cache", "v_cache")}
    for row, k, v in zip(rows, pools.k, pools.v, strict=True):
        where["k_cache"][row, : len(k)], where["v_cache"][row, : len(v)] = k, v
    return where | {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("paged", [True, False])
def test_cache_alone(variant: str, paged: bool) -> None:
    """The cache as it is: paged, or a row per request in an order of one's own."""
    options = VARIANTS[variant]
    pools = Pools(LENS)
    queries = [torch.randn(3, 4, 16) for _ in LENS]
    where = in_pages(pools) if paged else in_rows(pools, [3, 0, 1])
    out, lse = flash_attn_with_kvcache(
        torch.stack(queries), **where, cache_seqlens=pools.lens, return_softmax_lse=True, **options
    )
    want, want_lse = expected(queries, pools.k, pools.v, options)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seqlen_cache", [13, 48, 100])
def test_rows_of_any_length(seqlen_cache: int) -> None:
    """A row is cut into blocks where its length has a good divisor, else it is one block; no
    ``cache_seqlens``: all of it counts."""
    k, v, q = (
        torch.randn(2, seqlen_cache, 2, 16),
        torch.randn(2, seqlen_cache, 2, 16),
        torch.randn(2, 2, 4, 16),
    )
    want, _ = expected(list(q), list(k), list(v), {"causal": True})
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, causal=True), want, rtol=2e-5, atol=2e-5)
    apart = torch.randn(2, 2 * seqlen_cache, 2, 16)  # rows farther from each other than their tokens are
    apart[:, :seqlen_cache] = k
    torch.testing.assert_close(
        flash_attn_with_kvcache(q, apart[:, :seqlen_cache], v, causal=True), want, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("variant", ["causal", "window", "full"])
def test_new_keys(variant: str, interleaved: bool | None, paged: bool) -> None:
    """New keys are stored behind the cached ones, turned by their positions; queries by the same, or all by
    the first if they see all."""
    options = VARIANTS[variant]
    num_new, num_queries = 3, 3
    pools = Pools(LENS, room=num_new)
    queries = [torch.randn(num_queries, 4, 16) for _ in LENS]
    new_k, new_v = [torch.randn(num_new, 2, 16) for _ in LENS], [torch.randn(num_new, 2, 16) for _ in LENS]
    rotary: dict[str, Any] = {}
    turned_q, turned_k = queries, new_k
    if interleaved is not None:
        angles = torch.rand(32, 6) * 6
        cos, sin = angles.cos(), angles.sin()
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        at = [[n + i for i in range(num_new)] for n in LENS]
        turned_k = [turned(k, p, cos, sin, interleaved) for k, p in zip(new_k, at, strict=True)]
        turned_q = [
            turned(q, p if variant != "full" else p[:1] * 3, cos, sin, interleaved)
            for q, p in zip(queries, at, strict=True)
        ]
    where = in_pages(pools) if paged else in_rows(pools, [0, 1, 2])
    if not paged:
        del where["cache_batch_idx"]  # the first rows, in order
    out, lse = flash_attn_with_kvcache(
        torch.stack(queries),
        **where,
        k=torch.stack(new_k),
        v=torch.stack(new_v),
        cache_seqlens=pools.lens,
        return_softmax_lse=True,
        **rotary,
        **options,
    )
    keys = [torch.cat(pair) for pair in zip(pools.k, turned_k, strict=True)]
    values = [torch.cat(pair) for pair in zip(pools.v, new_v, strict=True)]
    want, want_lse = expected(turned_q, keys, values, options)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)
    for row, n in enumerate(LENS):
        k, v = (
            pools.stored(row, n + num_new)
            if paged
            else (where["k_cache"][row, : n + num_new], where["v_cache"][row, : n + num_new])
        )
        torch.testing.assert_close(k, keys[row])
        torch.testing.assert_close(v, values[row])


def test_packed_queries_and_new_keys() -> None:
    """With ``cu_seqlens_q`` and ``cu_seqlens_k_new`` requests differ in both; an int for the cache's lengths;
    LSE ``[H, total_q]``."""
    query_lens, new_lens = [1, 3, 2], [1, 4, 0]
    pools = Pools([5, 5, 5], room=4)
    queries = [torch.randn(n, 4, 16) for n in query_lens]
    new_k, new_v = [torch.randn(n, 2, 16) for n in new_lens], [torch.randn(n, 2, 16) for n in new_lens]
    starts = {"cu_seqlens_q": starts_of(query_lens), "cu_seqlens_k_new": starts_of(new_lens)}
    new = {"k": torch.cat(new_k), "v": torch.cat(new_v), "cache_seqlens": 5, **starts, "max_seqlen_q": 3}
    out, lse = flash_attn_with_kvcache(
        torch.cat(queries), **in_pages(pools), **new, causal=True, return_softmax_lse=True
    )
    pairs = [
        documented_attention(q, torch.cat([k, n]), torch.cat([v, m]), causal=True)
        for q, k, n, v, m in zip(queries, pools.k, new_k, pools.v, new_v, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([o for o, _ in pairs]), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, torch.cat([x for _, x in pairs], 1), rtol=2e-5, atol=2e-5)


def test_fp8_cache_with_new_keys() -> None:
    """What is stored is divided by the descale of its head, which attention multiplies by."""
    pools = Pools([6, 3], room=1, dtype=torch.float8_e4m3fn)
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    descale = torch.tensor([0.5, 2.0]).expand(2, 2)
    new = {"k": k, "v": v, "cache_seqlens": pools.lens, "k_descale": descale, "v_descale": descale}
    got = flash_attn_with_kvcache(q, **in_pages(pools), **new, causal=True)
    scale = descale[0][:, None]
    stored = [((x / scale).to(torch.float8_e4m3fn)) for x in (k, v)]
    keys, values = (
        [torch.cat([a.float(), b.float()]) * scale for a, b in zip(old, new, strict=True)]
        for old, new in zip((pools.k, pools.v), stored, strict=True)
    )
    want, _ = expected(list(q), keys, values, {"causal": True})
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("paged", [True, False])
def test_compiled_once_for_all_lengths(paged: bool) -> None:
    """fullgraph with new keys and rotary embedding, and no copy of a pool: the graph's only calls with a
    pool's shape are ours."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    angles = torch.rand(64, 8)

    def call(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, table: Tensor | None
    ) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, None, cos, sin, lens, page_table=table, causal=True
        )

    torch.compiler.reset()
    compiled = torch.compile(call, backend=keep, fullgraph=True)
    for lens in ([30, 1, 12], [3, 31, 0]):
        pools = Pools(lens, room=1)
        lengths = torch.tensor(lens, dtype=torch.int32)
        if paged:
            table = torch.nn.functional.pad(pools.table, (0, 8 - pools.table.shape[1]), value=-1)
            held = [
                torch.nn.functional.pad(pool, (0, 0, 0, 0, 0, 0, 0, 16 - pool.shape[0]))
                for pool in (pools.k_cache, pools.v_cache)
            ]
        else:
            table, held = None, [torch.randn(3, 48, 2, 16) for _ in range(2)]
        again = [pool.clone() for pool in held]
        new = [torch.randn(3, 1, 4, 16), torch.randn(3, 1, 2, 16), torch.randn(3, 1, 2, 16)]
        torch.testing.assert_close(
            compiled(*new, *held, lengths, table), call(*new, *again, lengths, table), rtol=2e-5, atol=2e-5
        )
        torch.testing.assert_close(held, again, equal_nan=True)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seqlen_cache", [48, 13])
def test_compiled_code_copies_no_cache(seqlen_cache: int) -> None:
    """Rows cut into blocks by a view, and stored into without it: Inductor allocates nothing of their
    size."""
    torch.compiler.reset()
    caches = [torch.randn(37, seqlen_cache, 2, 16) for _ in range(2)]
    again = [cache.clone() for cache in caches]
    q, k, v = (torch.randn(3, 1, heads, 16) for heads in (4, 2, 2))
    lens = torch.tensor([3, 9, 5], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True)

    got, codes = run_and_get_code(torch.compile(call, fullgraph=True), q, k, v, *caches, lens)
    torch.testing.assert_close(got, call(q, k, v, *again, lens), rtol=2e-5, atol=2e-5)
    assert all(map(torch.equal, caches, again))
    own = [
        line
        for line in codes[0].splitlines()
        if "assert_size_stride" not in line and "rand_strided" not in line
    ]
    assert not [line for line in own if re.search(r"\(\(37, |clone|copy_\b", line)]
    assert len(re.findall(r"torchpaged\.(?:write_kv|paged_attention)\.", codes[0])) == 2


INT = functools.partial(torch.tensor, dtype=torch.int32)
ROTARY = {"rotary_cos": torch.ones(40, 4), "rotary_sin": torch.ones(40, 4)}
#: Of three new tokens: falling, too many, not from 0, and a difference that int32 can't hold.
BAD_STARTS = [(0, 3, 1), (0, 3, 9), (1, 2, 3), (0, 2**31 - 1, -5)]


def packed_keys(*starts: int) -> dict[str, Any]:
    return {"k": torch.ones(3, 2, 16), "v": torch.ones(3, 2, 16), "cu_seqlens_k_new": INT(starts)}


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("qv", {"qv": torch.zeros(1)}),
        ("cache_leftpad", {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}),
        ("num_splits", {"num_splits": 1}),
        ("attention_chunk", {"attention_chunk": 4, "causal": False}),
        ("block_table", {"block_table": torch.zeros(2, 3, dtype=torch.int32)}),
        ("s_aux", {"sinks": torch.zeros(4), "s_aux": torch.zeros(4)}),
        ("cache_batch_idx", {"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}),
        ("cache_batch_idx", {"page_table": None, "cache_batch_idx": [0, 1]}),
        ("cache_seqlens", {"cache_seqlens": None}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([4, 40], dtype=torch.int32)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([4, 3])}),
        ("cache_seqlens", {"cache_seqlens": INT([-3, 1])}),
        ("cache_seqlens", {"cache_seqlens": INT([2**31 - 1, 1])}),
        ("cache_seqlens", {"cache_seqlens": 2**40, "k": None, "v": None}),
        ("cache_seqlens", {"cache_seqlens": [9, 2]}),
        ("cache_seqlens", {"cache_seqlens": INT([9, 2]).to("meta")}),
        *(("cu_seqlens_k_new", packed_keys(*starts)) for starts in BAD_STARTS),
        ("cu_seqlens_k_new", {**packed_keys(), "cu_seqlens_k_new": [0, 1, 3]}),
        ("rotary_seqlens", {**ROTARY, "rotary_seqlens": INT([-3, 1])}),
        ("rotary_cos", {**ROTARY, "rotary_seqlens": INT([2**31 - 1, 1])}),
        ("rotary_cos", {name: table.to("meta") for name, table in ROTARY.items()}),
        ("page_table", {"page_table": [[1], [2]]}),
        ("k", {"k": [1.0]}),
        ("q", {"q": torch.randn(2, 1, 4, 16, requires_grad=True)}),
        ("sinks", {"sinks": torch.randn(4, requires_grad=True)}),
        ("max_seqlen_q", {"cu_seqlens_q": INT([0, 1, 2]), "max_seqlen_q": -1}),
        (
            "cu_seqlens_k_new",
            {"k": None, "v": None, "cu_seqlens_k_new": torch.tensor([0, 1, 2], dtype=torch.int32)},
        ),
        ("k, v", {"v": None}),
        ("k", {"k": torch.zeros(2, 1, 2, 8)}),
        ("rotary_cos, rotary_sin", {"rotary_cos": torch.zeros(9, 4)}),
        ("rotary_cos", {"rotary_cos": torch.zeros(3, 4), "rotary_sin": torch.zeros(3, 4)}),
        ("rotary_seqlens", {"rotary_seqlens": torch.zeros(2, dtype=torch.int32)}),
        ("max_seqlen_q", {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        ("softcap", {"softcap": -1.0}),
        ("softmax_scale", {"softmax_scale": 0.0}),
        ("softmax_scale", {"softmax_scale": "1"}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("alibi_slopes", {"alibi_slopes": [0.5] * 4}),
        ("num_heads", {"q": torch.zeros(2, 1, 0, 16)}),
        ("page_table", {"page_table": torch.tensor([[1, 99, 0], [2, 0, 0]], dtype=torch.int32)}),
        ("out", {"out": torch.zeros(2, 1, 4, 8)}),
    ],
)
def test_refused_by_its_name_and_nothing_is_written(argument: str, options: dict[str, Any]) -> None:
    pools = Pools([10, 3], room=1)
    given: dict[str, Any] = {
        "q": torch.randn(2, 1, 4, 16),
        "k": torch.ones(2, 1, 2, 16),
        "v": torch.ones(2, 1, 2, 16),
        "cache_seqlens": pools.lens,
        "page_table": pools.table,
        "causal": True,
    }
    if "cu_seqlens_q" in options:
        given["q"] = given["q"][:, 0]
    before = pools.k_cache.clone(), pools.v_cache.clone()
    with pytest.raises(torchpaged.ArgumentError) as error:
        flash_attn_with_kvcache(k_cache=pools.k_cache, v_cache=pools.v_cache, **{**given, **options})
    assert error.value.argument == argument, error.value
    torch.testing.assert_close((pools.k_cache, pools.v_cache), before, equal_nan=True)


def test_a_backend_that_was_asked_for_is_refused_before_anything_is_written() -> None:
    pools = Pools([10, 3], room=1)
    before = pools.k_cache.clone(), pools.v_cache.clone()
    new = dict.fromkeys(("k", "v"), torch.ones(2, 1, 2, 16)) | {"cache_seqlens": pools.lens}
    with torchpaged.use_backend("flex"), pytest.raises(torchpaged.BackendUnavailableError, match="sinks"):
        flash_attn_with_kvcache(
            torch.randn(2, 1, 4, 16), **in_pages(pools), **new, causal=True, sinks=torch.zeros(4)
        )
    torch.testing.assert_close((pools.k_cache, pools.v_cache), before, equal_nan=True)


def test_tokens_without_a_place_are_not_stored() -> None:
    """Where values are not read, as on a GPU."""
    k = torch.ones(2, 2, 2, 16)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    for first, want in ((-3, [-1, -1]), (2**31 - 1, [-1, -1]), (-1, [-1, 8]), (15, [23, -1])):
        lens = torch.tensor([first, 3], dtype=torch.int32)
        assert slots_of(tokens_of(k, None), lens, table, 8).tolist() == [*want, 27, 28]
