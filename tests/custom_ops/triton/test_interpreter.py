"""The Triton kernels in Triton's interpreter against the float64 oracle. Runs with TRITON_INTERPRET=1 only:
see test_run_interpreter.py; the kernel that packs blocks; shared prefixes; heads further apart than 32
bits count."""

import random
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle
from op_inputs.rope import make_rope_inputs
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.block_ops.triton.packing import pack_blocks
from torchpaged.testing import (
    ATTENTION_VARIANTS,
    BATCH_SPECS,
    BatchSpec,
    assert_attention_close,
    make_batch,
    run_paged_attention,
)

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("options", [{}, {"window_left": 300}, {"logits_soft_cap": 3.0}], ids=str)
def test_split_kv(options: dict[str, Any]) -> None:
    """More tiles than programs: runs end inside requests, parts are merged, and the semaphores are
    zero again."""
    batch = make_batch(
        BatchSpec("split", (1500, 1, 0, 257), (1, 1, 1, 1)),
        head_dim=16,
        num_heads=4,
        num_kv_heads=1,
        sinks=True,
    )
    batch.extras["semaphore"] = torch.zeros(4, dtype=torch.int32)
    out, lse = run_paged_attention(TRITON, batch, **options)
    assert not batch.extras["semaphore"].any()
    assert_attention_close(out, lse, batch, **options)


@pytest.mark.slow_cases(but=("mixed_padded-*",))
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize(
    "spec", ["prefill_small", "prefill_long", "chunked", "mixed_padded", "left_padded", "left_padded_chunk"]
)
def test_prefill_in_small_tiles(spec: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles per request; decodes too go to the prefill kernel. One spec has blocks larger than tiles."""
    from torchpaged.custom_ops.attention.triton import config, paged_attention

    monkeypatch.setattr(config, "prefill_tiles", lambda *_: config.Tiles(16, 16, 4, 1))
    monkeypatch.setattr(paged_attention, "MAX_DECODE_QUERY_LEN", 0)
    batch = make_batch(
        BATCH_SPECS[spec], head_dim=24, block_size=32 if spec == "chunked" else 8, sinks=variant == "causal"
    )
    assert_as_oracle(TRITON, batch, **ATTENTION_VARIANTS[variant])


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("skip", [1, 4])
@pytest.mark.parametrize("spec", ["mixed_padded", "mixed_small", "chunked", "left_padded"])
def test_prefill_leaves_decodes_alone(spec: str, skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mixed batch split in two launches, the prefill kernel attends longer queries and touches no row of
    the others."""
    from torchpaged.custom_ops.attention.triton import config, paged_attention

    monkeypatch.setattr(config, "prefill_tiles", lambda *_: config.Tiles(16, 16, 4, 1))
    monkeypatch.setattr(paged_attention, "MAX_DECODE_QUERY_LEN", 0)
    monkeypatch.setattr(config, "decode_len_in_mixed", lambda *_: skip)
    monkeypatch.setattr(paged_attention, "_decode", lambda *_: lambda: None)
    batch = make_batch(BATCH_SPECS[spec], head_dim=16)
    (out, lse), (want, want_lse) = (run_paged_attention(ops, batch) for ops in (TRITON, REFERENCE))
    start = 0
    for query_len in batch.spec.query_lens:
        rows = slice(start, start + query_len)
        if query_len <= skip:
            want[rows] = want_lse[rows] = float("nan")  # as the outputs began
        start += query_len
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_decodes_of_a_mixed_batch_launch_right_behind_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode launch does not wait for the prefill launch before it: buffers, and kernels that fill them,
    come ahead of both."""
    from torchpaged.custom_ops.attention.triton import config, paged_attention

    events: list[str] = []

    def decode(*_: Any) -> Any:
        events.append("buffers")
        return lambda: events.append("decode")

    monkeypatch.setattr(paged_attention, "MAX_DECODE_QUERY_LEN", 0)
    monkeypatch.setattr(config, "decode_len_in_mixed", lambda *_: 1)
    monkeypatch.setattr(paged_attention, "Launch", lambda *_: lambda: events.append("prefill"))
    monkeypatch.setattr(paged_attention, "compile_together", lambda *_: events.append("compilers"))
    monkeypatch.setattr(paged_attention, "_decode", decode)
    run_paged_attention(TRITON, make_batch(BATCH_SPECS["mixed_small"], head_dim=16))
    assert events == ["buffers", "compilers", "prefill", "decode"]


def test_which_queries_of_mixed_batches_decode() -> None:
    from torchpaged.custom_ops.attention.triton.config import decode_len_in_mixed

    assert [decode_len_in_mixed(group, 9, 520, 512) for group in (1, 3, 4, 8, 16, 64)] == [8, 2, 2, 1, 1, 1]
    assert decode_len_in_mixed(4, 1, 512, 512) == 0, "one request: nothing is mixed"
    assert decode_len_in_mixed(4, 8, 4096, 512) == 0, "all are as long as the longest"


def test_tiles_of_longer_queries_fit_the_grid() -> None:
    """Whatever the lengths are: short queries, padding and empty requests take tokens or requests,
    never tiles."""
    from torchpaged.custom_ops.attention.triton.config import most_tiles_of_longer

    generator = random.Random(0)
    for _ in range(3000):
        skip, tokens, num_reqs = (
            generator.choice((1, 2, 4, 8)),
            generator.choice((2, 16, 32)),
            generator.randint(1, 12),
        )
        lens = [
            generator.choice((0, 1, skip, skip + 1, tokens, tokens + 1, 5 * tokens, generator.randint(0, 99)))
            for _ in range(num_reqs)
        ]
        num_tokens = sum(lens) + generator.choice((0, 7))
        tiles = sum(-(-n // tokens) for n in lens if n > skip)
        assert tiles <= most_tiles_of_longer(num_reqs, num_tokens, skip, tokens), (lens, skip, tokens)
    assert most_tiles_of_longer(3, 2, 2, 32) == 1, (
        "an empty grid is no launch, and the decode launch would wait for nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 8}, {"window_left": 8, "logits_soft_cap": 3.0}], ids=str
)
def test_many_short_queries_share_programs(options: dict[str, Any]) -> None:
    """More tiles than programs of one tile, and more than twice the programs that share out the others."""
    from torchpaged.custom_ops.attention.triton.config import programs_for_longer

    lens = (1, 20, *[3] * 30, 1)
    single, shared = programs_for_longer(len(lens), sum(lens), 2, 32)
    assert shared
    assert len(lens) - 2 > single + 2 * shared
    assert programs_for_longer(4, 2051, 2, 32) == (67, 0), (
        "few requests: a program for each tile there can be"
    )
    batch = make_batch(
        BatchSpec("many_short", tuple(n + 5 for n in lens), lens), head_dim=16, num_heads=4, num_kv_heads=1
    )
    assert_as_oracle(TRITON, batch, **options)


@pytest.mark.slow_cases(but=("300-0-5.0-16", "-1-256-5.0-1"))
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("window_left", "chunk_size", "soft_cap"), [(300, 0, 5.0), (-1, 256, 5.0), (60, 0, 0.0)]
)
def test_prefill_jumps_over_the_keys_that_every_row_sees(
    window_left: int, chunk_size: int, soft_cap: float, block_size: int
) -> None:
    """With a cap or slopes both masked ends of an interval are one loop: keys of several whole tiles between
    them, of one, and none."""
    batch = make_batch(
        BatchSpec("ends", (420, 330), (70, 140)),
        head_dim=16,
        num_heads=2,
        num_kv_heads=1,
        block_size=block_size,
        alibi=not soft_cap,
        sinks=True,
    )
    options = {"window_left": window_left, "chunk_size": chunk_size, "logits_soft_cap": soft_cap}
    assert_as_oracle(TRITON, batch, **options)


@pytest.mark.parametrize(
    "options", [{"window_left": 7}, {"chunk_size": 20}, {"window_left": 7, "logits_soft_cap": 3.0}], ids=str
)
def test_prefill_ignores_forgotten_keys(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in front of every row's window may be gone: their values are NaN here."""
    from torchpaged.custom_ops.attention.triton import config

    monkeypatch.setattr(config, "prefill_tiles", lambda *_: config.Tiles(16, 16, 4, 1))
    batch = make_batch(BatchSpec("one", (60,), (17,)), head_dim=16)
    want, _ = run_paged_attention(REFERENCE, batch, **options)
    for position in range(36 if "window_left" in options else 40):
        at = int(batch.block_table[0, position // 16]), position % 16
        batch.k_cache[at] = batch.v_cache[at] = float("nan")
    got, _ = run_paged_attention(TRITON, batch, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_caches(dtype: torch.dtype, heads: int) -> None:
    """Decode over fp8 pools equals attention over their dequantised values; scales per tensor and
    per head."""
    batch = make_batch(BATCH_SPECS["decode_edges"], head_dim=32)
    batch.k_cache, batch.v_cache = (
        cache.nan_to_num(0.0).to(dtype) for cache in (batch.k_cache, batch.v_cache)
    )
    scales = {"k_scale": torch.rand(heads) + 0.5, "v_scale": torch.rand(heads) + 0.5}
    got, want = (run_paged_attention(ops, batch, **scales) for ops in (TRITON, REFERENCE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_fp8_writes_round_as_torch_does() -> None:
    """Up into the next power of two, below the smallest normal number, ties to even; NaN stays NaN."""
    numbers = torch.cat([torch.tensor([31.1, -31.9, 7.8, 2**-7, 3e-4, float("nan")]), torch.randn(506) * 20])
    caches = [torch.zeros(2, 1, 1, 512, dtype=torch.float8_e4m3fn) for _ in range(2)]
    k = numbers.view(1, 1, 512)
    TRITON.write_kv(k, k, *caches, torch.tensor([1]), torch.ones(1), torch.ones(1))
    assert torch.equal(caches[0][1].view(torch.uint8), k.to(torch.float8_e4m3fn)[0].view(torch.uint8)[None])


@pytest.mark.slow_cases("chunked")
@pytest.mark.parametrize("spec", ["decode_edges", "chunked"])
def test_huge_windows_are_open(spec: str) -> None:
    """A position plus 2**31 - 1 does not fit 32 bits; such a window hides nothing."""
    batch = make_batch(BATCH_SPECS[spec], head_dim=16)
    options = {"causal": False, "window_left": 2**31 - 1, "window_right": 2**31 - 1, "chunk_size": 2**31 - 1}
    out, lse = run_paged_attention(TRITON, batch, **options)
    assert_attention_close(out, lse, batch, causal=False)


def test_out_and_back() -> None:
    """Blocks below a tile, of one, and of several; whatever is not asked for stays."""
    widths = [8, 8 * 1024, 24, 8 * 2500]
    pools = [torch.randint(0, 256, (9, width), dtype=torch.uint8) for width in widths]
    want = [pool.clone() for pool in pools]
    bases = torch.tensor([pool.data_ptr() for pool in pools])
    places = [sum(widths[:i]) for i in range(len(widths))]
    sizes = torch.tensor([(w // 8, w // 8, place // 8) for w, place in zip(widths, places, strict=True)])
    rows = torch.full((5, sum(widths) // 8), -1)
    out, back = torch.tensor([7, 2, 5]), torch.tensor([4, 1, 8, 2])
    pack_blocks(bases, sizes, out, 0, rows[1:4])
    assert (rows[[0, 4]] == -1).all()
    assert torch.equal(rows[1:4].view(torch.uint8), torch.cat([pool[out] for pool in want], 1))
    pack_blocks(bases, sizes, back, 1, rows[1:4], unpack=True)
    for pool, before in zip(pools, want, strict=True):
        before[back[1:]] = before[out]
        assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_groups_alone_and_padding(dtype: torch.dtype) -> None:
    """Rows 0 and 2 share two blocks, row 1 is alone, a token row is padding. There is room for more groups
    than there are requests, whose semaphore has one number each."""
    torch.manual_seed(0)
    pools = tuple(torch.randn(8, 16, 1, 16).half() for _ in range(2))
    q = torch.randn(4, 2, 16).half()
    order = torch.tensor([0, 2, 1, 3])
    batch = torch.tensor([[3, 0], [4, 5], [6, 0]]), torch.tensor([7, 20, 16]), torch.arange(4)
    groups = torch.tensor([[1, 2], *[[0, 0]] * 4]), torch.tensor([32, *[0] * 4]), torch.tensor([0, *[2] * 5])
    found = []
    scale = {} if dtype == torch.float16 else {"output_scale": torch.tensor([0.01])}
    for name in ("reference", "triton"):
        out, lse = torch.full_like(q, 9.0, dtype=dtype), torch.full((4, 2), 9.0)
        BACKEND_OPS[name].cascade_attention(
            q,
            *pools,
            *(t.int() for t in (*batch, *groups)),
            order,
            order.argsort(),
            out,
            lse,
            max_query_len=1,
            scale=0.25,
            semaphore=torch.zeros(3, dtype=torch.int32),
            **scale,
        )
        found.append((out.float(), lse))
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1 / 7 if scale else 2e-3, atol=2e-3)
    assert not found[0][0][3].any()
    assert bool((found[0][1][3] == float("-inf")).all())


# the third head begins at 2**31: past a signed number of 32 bits, while the stride itself is one
HEAD = 2**30


def far_apart(x: Tensor) -> Tensor:
    """``x [T, heads, dim]`` with HEAD numbers between heads; memory that nothing touches is never there."""
    tokens, heads, dim = x.shape
    storage = torch.empty((heads - 1) * HEAD + tokens * dim, dtype=x.dtype)
    view = storage.as_strided((tokens, heads, dim), (dim, HEAD, 1))
    view.copy_(x)
    return view


@pytest.mark.slow
@pytest.mark.parametrize("query_lens", [(1, 1), (12, 9)], ids=["decode", "prefill"])
def test_attention(query_lens: tuple[int, ...]) -> None:
    batch = make_batch(
        BatchSpec("far", (40, 20), query_lens), num_heads=3, num_kv_heads=3, head_dim=16, dtype=torch.float16
    )
    arguments = (batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.query_start_loc)
    options = {"max_query_len": batch.max_query_len, "scale": batch.scale}
    want, got = torch.zeros_like(batch.q), far_apart(torch.zeros_like(batch.q))
    REFERENCE.paged_attention(batch.q, *arguments, want, **options)
    TRITON.paged_attention(far_apart(batch.q), *arguments, got, **options)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_rope_write_kv() -> None:
    results = []
    for ops, place in ((REFERENCE, lambda x: x), (TRITON, far_apart)):
        inputs = make_rope_inputs(num_heads=3, num_kv_heads=3, dtype=torch.float16)
        inputs |= {name: place(inputs[name]) for name in ("q", "k", "v", "q_out")}
        ops.rope_write_kv(**inputs)
        results.append(inputs)
    for name in ("q_out", "k_cache", "v_cache"):
        torch.testing.assert_close(results[1][name], results[0][name], rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.slow
def test_write_kv() -> None:
    k, v = torch.randn(2, 5, 3, 16).half()
    slots = torch.tensor([4, 5, -1, 7, 9])
    want, got = (tuple(torch.zeros(4, 4, 3, 16, dtype=torch.float16) for _ in range(2)) for _ in range(2))
    REFERENCE.write_kv(k, v, *want, slots)
    TRITON.write_kv(far_apart(k), far_apart(v), *got, slots)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.slow
def test_merge_attn_states() -> None:
    a, b = torch.randn(2, 2, 3, 16).half()
    lse_a, lse_b = torch.randn(2, 2, 3)
    want, got = torch.zeros_like(a), far_apart(torch.zeros_like(a))
    REFERENCE.merge_attn_states(a, lse_a, b, lse_b, want)
    TRITON.merge_attn_states(far_apart(a), lse_a, far_apart(b), lse_b, got)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
