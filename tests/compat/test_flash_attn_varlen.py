"""flash_attn_varlen_func against its documented behaviour, on the CPU: eager and compiled."""

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from documented import Pools, documented_attention, starts_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torchpaged
from torchpaged.compat import flash_attn_varlen_func, varlen_attn

#: name -> options of the call; what of them the oracle knows by other names is translated below
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window_left": {"causal": True, "window_size": [3, 0]},
    "causal_beats_right": {"causal": True, "window_size": (5, 4)},
    "right_zero": {"window_size": (-1, 0)},
    "window_both": {"window_size": (4, 2)},
    "window_right": {"window_size": (-1, 3)},
    "softcap": {"causal": True, "softcap": 2.0},
    "scale": {"causal": True, "softmax_scale": 0.7},
    "slopes": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "slopes_expanded": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]).expand(5, 4)},
    "sinks": {"causal": True, "s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "full_sinks": {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}
#: queries and keys of each request: decode, chunked prefill, prefill, more queries than keys, no query, no
# key
QUERY_LENS, KEY_LENS = [1, 3, 9, 0, 6], [11, 8, 9, 5, 2]
NO_KEYS = ([2, 1, 1], [0, 3, 0])


def expected(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    slopes = options.get("alibi_slopes")
    outs, lses = [], []
    for q, k, v in zip(queries, keys, values, strict=True):
        out, lse = documented_attention(
            q,
            k,
            v,
            scale=options.get("softmax_scale"),
            causal=options.get("causal", False),
            window=tuple(options.get("window_size") or (-1, -1)),
            softcap=options.get("softcap", 0.0),
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[0],
            sinks=options.get("s_aux"),
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def batch(query_lens: list[int], key_lens: list[int], **pool: Any) -> tuple[Pools, Tensor, list[Tensor]]:
    pools = Pools(key_lens, **pool)
    queries = [torch.randn(n, 4, pools.k_cache.shape[-1]).to(pools.k_cache.dtype) for n in query_lens]
    return pools, torch.cat(queries), queries


@pytest.mark.parametrize(
    ("variant", "paged"),
    [
        *((name, True) for name in VARIANTS),
        *((name, False) for name in ("full", "causal", "window_both", "full_sinks")),
    ],
)
def test_as_documented(variant: str, paged: bool) -> None:
    """Without a block table: keys one request behind the other, seen as blocks of one token."""
    options = VARIANTS[variant]
    pools, q, queries = batch(QUERY_LENS, KEY_LENS)
    table = {"block_table": pools.table} if paged else {}
    keys = (pools.k_cache, pools.v_cache) if paged else (torch.cat(pools.k), torch.cat(pools.v))
    lens = {"seqused_k": pools.lens} if paged else {"cu_seqlens_k": starts_of(KEY_LENS)}
    longest = max(QUERY_LENS), max(KEY_LENS)
    sizes: dict[str, Any] = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
    sizes |= {"cu_seqlens_q": starts_of(QUERY_LENS), **lens, **table}
    out, lse = flash_attn_varlen_func(q, *keys, **sizes, return_softmax_lse=True, **options)
    want, want_lse = expected(queries, pools.k, pools.v, options)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)
    assert lse.shape == (4, sum(QUERY_LENS))
    assert lse.is_contiguous()
    starts = starts_of(QUERY_LENS), starts_of(KEY_LENS)
    as_upstream_says_it = longest[0], starts[0], longest[1], starts[1]
    assert torch.equal(flash_attn_varlen_func(q, *keys, *as_upstream_says_it, **table, **options), out)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_keys(causal: bool) -> None:
    pools, q, queries = batch(*NO_KEYS)
    out, lse = flash_attn_varlen_func(
        q,
        pools.k_cache,
        pools.v_cache,
        max_seqlen_q=2,
        cu_seqlens_q=starts_of(NO_KEYS[0]),
        max_seqlen_k=3,
        seqused_k=pools.lens,
        block_table=pools.table,
        causal=causal,
        return_softmax_lse=True,
    )
    want, want_lse = expected(queries, pools.k, pools.v, {"causal": causal})
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert bool((out[[0, 1, 3]] == 0).all())
    assert bool((lse[:, [0, 1, 3]] == float("-inf")).all())


def test_out_and_padding() -> None:
    """``out`` is written and returned; tokens behind the last request are zeros there, whatever was in it."""
    pools, q, queries = batch([2, 3], [4, 3], head_dim_v=24)
    q = torch.cat([q, torch.full((3, 4, 16), float("nan"))])
    out = torch.full((8, 4, 24), float("nan"))
    got = flash_attn_varlen_func(
        q,
        pools.k_cache,
        pools.v_cache,
        3,
        starts_of([2, 3]),
        4,
        seqused_k=pools.lens,
        block_table=pools.table,
        causal=True,
        out=out,
    )
    assert got is out
    torch.testing.assert_close(
        out[:5], expected(queries, pools.k, pools.v, {"causal": True})[0], rtol=2e-5, atol=2e-5
    )
    assert bool((out[5:] == 0).all())


def test_fp8_descales() -> None:
    """Of one number, expanded over requests as vLLM does it, per head, and different for each request; and
    fp8 queries."""
    query_lens, key_lens = [1, 4, 2], [9, 4, 7]
    pools, q, queries = batch(query_lens, key_lens, dtype=torch.float8_e4m3fn)
    common = {
        "max_seqlen_q": 4,
        "cu_seqlens_q": starts_of(query_lens),
        "max_seqlen_k": 9,
        "seqused_k": pools.lens,
        "block_table": pools.table,
        "causal": True,
    }
    one, per_head = torch.tensor([0.5]), torch.tensor([0.5, 2.0])
    each = torch.tensor([[0.5, 2.0], [1.5, 0.25], [1.0, 0.75]])
    for k_descale, full in (
        (one, one.expand(3, 2)),
        (one.expand(3, 2), one.expand(3, 2)),
        (per_head.expand(3, 2), per_head.expand(3, 2)),
        (each, each),
    ):
        wide = [
            (x.float(), k.float() * s[:, None], v.float() * s[:, None])
            for x, k, v, s in zip(queries, pools.k, pools.v, full, strict=True)
        ]
        want, _ = expected(*map(list, zip(*wide, strict=True)), {"causal": True})
        got = flash_attn_varlen_func(
            q.float(), pools.k_cache, pools.v_cache, k_descale=k_descale, v_descale=k_descale, **common
        )
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    for name, bad in itertools.product(("q_descale", "k_descale", "v_descale"), (0.0, math.nan, -1.0)):
        descales = torch.where(torch.arange(6).view(3, 2) == 3, bad, each)  # of one head of one request
        with pytest.raises(torchpaged.ArgumentError, match=f"^{name}: expected positive finite numbers"):
            flash_attn_varlen_func(q, pools.k_cache, pools.v_cache, **{name: descales}, **common)
    fp8 = flash_attn_varlen_func(q, pools.k_cache, pools.v_cache, q_descale=each, **common)
    assert fp8.dtype == torch.bfloat16
    scaled = [x.float() * s.repeat_interleave(2)[:, None] for x, s in zip(queries, each, strict=True)]
    want, _ = expected(scaled, [k.float() for k in pools.k], [v.float() for v in pools.v], {"causal": True})
    torch.testing.assert_close(fp8.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", ["causal", "window_both"])
def test_compiled_once_for_all_lengths(variant: str) -> None:
    """fullgraph, and one graph for other lengths of the same shapes; the second with more queries than keys,
    that the first has nowhere."""
    options = {**VARIANTS[variant], "return_softmax_lse": True}
    graphs = CompileCounter()

    def call(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=9,
            cu_seqlens_q=starts,
            max_seqlen_k=32,
            seqused_k=lens,
            block_table=table,
            **options,
        )

    torch.compiler.reset()
    compiled = torch.compile(call, backend=graphs, fullgraph=True)
    for query_lens, key_lens in (([2, 9, 1], [30, 12, 20]), ([9, 2, 1], [3, 31, 7])):
        pools, q, queries = batch(query_lens, key_lens, room=1)
        table = torch.nn.functional.pad(pools.table, (0, 8 - pools.table.shape[1]), value=-1)
        k_cache, v_cache = (
            torch.nn.functional.pad(pool, (0, 0, 0, 0, 0, 0, 0, 16 - pool.shape[0]))
            for pool in (pools.k_cache, pools.v_cache)
        )
        out, lse = compiled(q, k_cache, v_cache, starts_of(query_lens), pools.lens, table)
        want, want_lse = expected(queries, pools.k, pools.v, options)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("q_v", torch.zeros(1)),
        ("dropout_p", 0.1),
        ("return_attn_probs", True),
        ("num_splits", 1),
        ("cp_world_size", 2),
        ("cp_tot_seqused_k", torch.zeros(1)),
        ("fa_version", 7),
        ("window_size", (1,)),
        ("window_size", (1, -3)),
        ("softcap", -1.0),
        ("alibi_slopes", torch.rand(2, 4)),
        ("alibi_slopes", [0.5] * 4),
        ("softcap", 1e300),
        ("max_seqlen_q", 1),
        ("max_seqlen_k", 3),
        ("seqused_k", None),
        ("seqused_k", torch.tensor([4, 99], dtype=torch.int32)),
        ("cu_seqlens_k", torch.tensor([0, 4, 7], dtype=torch.int32)),
        ("cu_seqlens_q", torch.tensor([0, 2, 9], dtype=torch.int32)),
        ("k_descale", torch.ones(2, 2)),
        ("q_descale", torch.ones(2, 2)),
        ("s_aux", torch.zeros(3)),
        ("out", torch.zeros(5, 4, 15)),
    ],
)
def test_refused_by_its_name(argument: str, value: Any) -> None:
    pools, q, _ = batch([2, 3], [4, 3])
    options: dict[str, Any] = {
        "max_seqlen_q": 3,
        "cu_seqlens_q": starts_of([2, 3]),
        "max_seqlen_k": 99,
        "seqused_k": pools.lens,
        "block_table": pools.table,
        "causal": True,
    }
    flash_attn_varlen_func(q, pools.k_cache, pools.v_cache, **options)
    with pytest.raises(torchpaged.ArgumentError) as error:
        flash_attn_varlen_func(q, pools.k_cache, pools.v_cache, **{**options, argument: value})
    assert error.value.argument == argument


def short_call(pools: Pools, q: torch.Tensor, **options: Any) -> None:
    """Of one request, 2 queries over 4 keys."""
    options |= {"seqused_k": pools.lens, "block_table": pools.table}
    flash_attn_varlen_func(q, pools.k_cache, pools.v_cache, 2, starts_of([2]), 4, **options)


def test_slopes_of_later_keys_are_refused() -> None:
    pools, q, _ = batch([2], [4])
    with pytest.raises(torchpaged.ArgumentError, match="alibi_slopes: .*wrong sign"):
        short_call(pools, q, alibi_slopes=torch.ones(4))


def test_hints_are_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchpaged.compat.arguments._TOLD", set())
    pools, q, _ = batch([2], [4])
    with caplog.at_level(logging.INFO, logger="torchpaged.compat"):
        for _ in range(2):
            short_call(pools, q, num_splits=32, fa_version=3)
    assert [record.getMessage().split(" tunes")[0] for record in caplog.records] == [
        "flash_attn_varlen_func: num_splits"
    ]


@pytest.mark.parametrize("starts", [(0, 5, 14), (0, 5, 3), (2, 5, 7), (0, 2**31 - 1, -5)])
def test_starts_of_packed_keys_are_checked(starts: tuple[int, ...]) -> None:
    """Past the keys, falling, not from 0, and a difference that int32 can't hold: in both functions."""
    q, k, v = torch.randn(6, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    queries, keys = starts_of([4, 2]), torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(torchpaged.ArgumentError, match="cu_seqlens_k: expected 0 first, not decreasing"):
        flash_attn_varlen_func(q, k, v, 4, queries, 9, keys)
    with pytest.raises(torchpaged.ArgumentError, match="cu_seq_k: expected 0 first, not decreasing"):
        varlen_attn(q, k, v, queries, keys, 4, 9, enable_gqa=True)
    for used in ((7, 1), (-1, 1)):
        with pytest.raises(torchpaged.ArgumentError, match=r"seqused_k: .*keys, \[5, 2\], got"):
            lens = torch.tensor(used, dtype=torch.int32)
            varlen_attn(q, k, v, queries, starts_of([5, 2]), 4, 9, enable_gqa=True, seqused_k=lens)


def test_the_order_of_flash_attn_is_named() -> None:
    """vLLM's order of the four lengths is another one than flash_attn's; in a trace, too."""
    q, k, v = torch.randn(6, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    queries, keys = starts_of([4, 2]), starts_of([5, 2])
    for options in ((), (0.0, None, True)):
        with pytest.raises(
            torchpaged.ArgumentError, match=r"max_seqlen_q: .*flash_attn's own order.*by name"
        ):
            flash_attn_varlen_func(q, k, v, queries, keys, 4, 5, *options)
    with pytest.raises(Exception, match="flash_attn's own order"):
        torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)(q, k, v, queries, keys, 4, 5)
    named = {"cu_seqlens_q": queries, "cu_seqlens_k": keys, "max_seqlen_q": 4, "max_seqlen_k": 5}
    want = flash_attn_varlen_func(q, k, v, 4, queries, 5, keys)
    assert torch.equal(flash_attn_varlen_func(q, k, v, **named), want)
