"""varlen_attn against torch's documentation of it, and its signature against torch's own where the installed
torch has it."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documented import Pools, documented_attention, starts_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torchpaged
from torchpaged import compat

LSE = SimpleNamespace(lse=True)


def expected(
    queries: list[Tensor], pools: Pools, window: tuple[int, int], scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """torch's windows: the right side 0 is causal."""
    pairs = [
        documented_attention(q, k, v, window=window, scale=scale)
        for q, k, v in zip(queries, pools.k, pools.v, strict=True)
    ]
    return torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs], 1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2)])
@pytest.mark.parametrize("paged", [True, False])
def test_grid(window: tuple[int, int], paged: bool) -> None:
    query_lens, key_lens = [1, 4, 9, 0, 6], [10, 7, 9, 4, 2]
    pools = Pools(key_lens)
    queries = [torch.randn(n, 4, 16) for n in query_lens]
    q = torch.cat(queries)
    if paged:
        keys: dict[str, Any] = {
            "key": pools.k_cache,
            "value": pools.v_cache,
            "cu_seq_k": None,
            "seqused_k": pools.lens,
            "block_table": pools.table,
        }
    else:
        keys = {"key": torch.cat(pools.k), "value": torch.cat(pools.v), "cu_seq_k": starts_of(key_lens)}
    keys |= {"cu_seq_q": starts_of(query_lens), "max_q": 9, "max_k": 10}
    keys |= {"window_size": window, "enable_gqa": True, "scale": 0.3}
    out, lse = compat.varlen_attn(q, return_aux=LSE, **keys)
    want, want_lse = expected(queries, pools, window, 0.3)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)
    room = torch.full_like(q, float("nan"))
    assert compat.varlen_attn_out(room, q, **keys) is room
    assert torch.equal(room, out)


def test_fewer_keys_count_than_lie_there() -> None:
    """``seqused_k`` with packed keys: only the first so many of each request's take part."""
    pools = Pools([6, 5])
    queries = [torch.randn(2, 2, 16), torch.randn(1, 2, 16)]
    used = torch.tensor([4, 3], dtype=torch.int32)
    got = compat.varlen_attn(
        torch.cat(queries),
        torch.cat(pools.k),
        torch.cat(pools.v),
        starts_of([2, 1]),
        starts_of([6, 5]),
        2,
        6,
        seqused_k=used,
        window_size=(-1, 0),
    )
    pools.k, pools.v = [pools.k[0][:4], pools.k[1][:3]], [pools.v[0][:4], pools.v[1][:3]]
    torch.testing.assert_close(got, expected(queries, pools, (-1, 0))[0], rtol=2e-5, atol=2e-5)


def test_compiled_with_other_numbers_of_requests() -> None:
    """fullgraph; sizes become symbols once they have changed, and then no more graphs are made."""
    graphs = CompileCounter()

    def call(q: Tensor, pools: Any, starts: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        return compat.varlen_attn(
            q,
            *pools,
            starts,
            None,
            8,
            64,
            window_size=(-1, 0),
            seqused_k=lens,
            block_table=table,
            enable_gqa=True,
        )

    torch.compiler.reset()
    compiled = torch.compile(call, backend=graphs, fullgraph=True)
    for query_lens, key_lens in (
        ([2, 5], [9, 12]),
        ([1, 8, 3], [30, 8, 20]),
        ([1, 1, 1, 4, 2], [5, 6, 7, 8, 9]),
        ([7, 2, 2, 2, 2, 2], [9] * 6),
    ):
        pools = Pools(key_lens)
        queries = [torch.randn(n, 4, 16) for n in query_lens]
        got = compiled(
            torch.cat(queries), (pools.k_cache, pools.v_cache), starts_of(query_lens), pools.lens, pools.table
        )
        torch.testing.assert_close(got, expected(queries, pools, (-1, 0))[0], rtol=2e-5, atol=2e-5)
    assert graphs.frame_count == 2


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("num_splits", {"num_splits": 1}),
        ("enable_gqa", {"enable_gqa": False}),
        ("seqused_k", {"seqused_k": None}),
        ("cu_seq_k", {"cu_seq_k": torch.tensor([0, 4], dtype=torch.int32)}),
        ("cu_seq_q", {"cu_seq_q": torch.tensor([0, 9], dtype=torch.int32)}),
        ("cu_seq_q", {"cu_seq_q": torch.tensor([0, 2])}),
        ("max_q", {"max_q": 1}),
        ("window_size", {"window_size": (1, 2, 3)}),
        ("scale", {"scale": -1.0}),
        ("key", {"key": torch.zeros(4, 2, 16)}),
        ("out", {"out": torch.zeros(1, 4, 16)}),
    ],
)
def test_refused_by_its_name(argument: str, options: dict[str, Any]) -> None:
    pools = Pools([4])
    given: dict[str, Any] = {
        "query": torch.randn(2, 4, 16),
        "key": pools.k_cache,
        "value": pools.v_cache,
        "cu_seq_q": starts_of([2]),
        "cu_seq_k": None,
        "max_q": 2,
        "max_k": 4,
        "seqused_k": pools.lens,
        "block_table": pools.table,
        "enable_gqa": True,
    }
    compat.varlen_attn(**given)
    with pytest.raises(torchpaged.ArgumentError) as error:
        compat.varlen_attn(**{**given, **options})
    assert error.value.argument == argument, error.value


def test_the_signature_is_torchs() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("torch's own has no block_table yet (before 2.12)")
    theirs, ours = (inspect.signature(f).parameters for f in (varlen.varlen_attn, compat.varlen_attn))
    assert [(n, p.kind, p.default) for n, p in theirs.items()] == [
        (n, p.kind, p.default) for n, p in ours.items() if n != "out"
    ]
    assert (
        list(inspect.signature(varlen.varlen_attn_out).parameters)[:8]
        == list(inspect.signature(compat.varlen_attn_out).parameters)[:8]
    )
