"""The mask "vertical and slash": the reference by its definition, the native CPU kernel and backend `flex`
against the oracle, the doors, and what is refused."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle

import torchpaged
from torchpaged import (
    ArgumentError,
    AttentionMetadata,
    BackendUnavailableError,
    BlockSparse,
    PagedAttention,
    PagedKVCache,
)
from torchpaged.backends import attention_spec, get_backend, select_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.mask import Mask
from torchpaged.layers import CrossAttention
from torchpaged.prefixes.attention import can_read_once
from torchpaged.testing import (
    BATCH_SPECS,
    Batch,
    BatchSpec,
    assert_attention_close,
    check_conformance,
    make_batch,
    run_paged_attention,
)

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]
#: One vertical for all heads, one per kv head, one per query head; blocks wider and narrower than a tile.
PATTERNS = {
    "all heads": BlockSparse(8, 2, 4),
    "kv heads": BlockSparse(16, 1, 3, offset=2, head_step=1, heads_per_step=2),
    "query heads": BlockSparse(5, 2, 3, offset=0, head_step=1),
    "wide": BlockSparse(100, 1, 2, head_step=1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 30},
    "chunks, cap": {"chunk_size": 24, "logits_soft_cap": 5.0},
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_rows_pass_over_what_all_of_them_do_not_see(dtype: torch.dtype) -> None:
    """Products of whole tiles have weights of 0 there, and 0 * NaN is NaN."""
    sizes: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 1, "head_dim": 32, "dtype": dtype}
    batch, pattern = make_batch(BatchSpec("many", (300,), (1,)), **sizes), BlockSparse(16, 1, 3)
    assert_as_oracle(CPU, batch, block_sparse=pattern)
    clean = run_paged_attention(CPU, batch, block_sparse=pattern)
    keys, size = torch.arange(300), batch.k_cache.shape[1]
    hidden = keys[~Mask(block_sparse=pattern).sees(torch.tensor(299), keys, torch.tensor(0))]
    blocks = batch.block_table[0, hidden // size].long()
    batch.k_cache[blocks, hidden % size] = batch.v_cache[blocks, hidden % size] = torch.nan
    for got, want in zip(run_paged_attention(CPU, batch, block_sparse=pattern), clean, strict=True):
        assert torch.equal(got, want)


def test_the_mask_is_what_its_definition_says() -> None:
    heads, length = torch.arange(4), 40
    position = torch.arange(length)
    for pattern in PATTERNS.values():
        mask = Mask(block_sparse=pattern).sees(position[:, None], position, heads[:, None, None])
        for head, query, key in itertools.product(range(4), range(0, length, 3), range(length)):
            i, j = query // pattern.block_size, key // pattern.block_size
            shift = pattern.offset + head // pattern.heads_per_step * pattern.head_step
            seen = i - j < pattern.local_blocks or (j + shift) % pattern.vertical_stride == 0
            assert bool(mask[head, query, key]) == (key <= query and seen), (pattern, head, query, key)


def _without(batch: Batch, pattern: BlockSparse, head: int) -> tuple[Batch, int]:
    """The last request's last query alone, over the keys that ``head`` sees of it, in blocks of one."""
    row = len(batch.spec.seq_lens) - 1
    length = batch.spec.seq_lens[row]
    key = torch.arange(length)
    seen = Mask(block_sparse=pattern).sees(torch.tensor(length - 1), key, torch.tensor(head)).nonzero()[:, 0]
    block, slot = batch.block_table[row, seen // batch.k_cache.shape[1]].long(), seen % batch.k_cache.shape[1]
    token = int(batch.query_start_loc[row + 1]) - 1
    alone = replace(
        batch,
        q=batch.q[token : token + 1],
        k_cache=torch.cat([batch.k_cache[:1, :1], batch.k_cache[block, slot][:, None]]),
        v_cache=torch.cat([batch.v_cache[:1, :1], batch.v_cache[block, slot][:, None]]),
        block_table=torch.arange(1, len(seen) + 1, dtype=torch.int32)[None],
        seq_lens=torch.tensor([len(seen)], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
    )
    return alone, token


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_a_head_attends_as_if_hidden_keys_were_not_there(pattern: BlockSparse) -> None:
    batch = make_batch(BatchSpec("two", (30, 150), (1, 20)), head_dim=16, sinks=True)
    out, lse = run_paged_attention(REFERENCE, batch, block_sparse=pattern)
    for head in range(4):
        alone, token = _without(batch, pattern, head)
        want, want_lse = run_paged_attention(REFERENCE, alone)
        torch.testing.assert_close(out[token, head], want[0, head], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[token, head], want_lse[0, head], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_the_cpu_kernel_matches_the_oracle(pattern: BlockSparse, dtype: torch.dtype) -> None:
    for name, options in itertools.product(BATCH_SPECS, OPTIONS.values()):
        batch = make_batch(BATCH_SPECS[name], dtype=dtype, head_dim=24, sinks=True, alibi=bool(options))
        assert_as_oracle(CPU, batch, block_sparse=pattern, **options)


@pytest.mark.usefixtures("native")
def test_the_cpu_kernel_splits_over_threads(threads: Any) -> None:
    """Some of the parts hold no key that a head sees."""
    threads(3)
    batch = make_batch(BatchSpec("long", (4000, 70), (1, 3)), num_heads=8, num_kv_heads=2, head_dim=16)
    assert_as_oracle(CPU, batch, block_sparse=BlockSparse(64, 1, 16, head_step=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_a_head_does_not_see_does_not_matter(backend: str, dtype: torch.dtype, native: None) -> None:
    """Also where another head of its kv head sees it."""
    pattern, ops = BlockSparse(8, 1, 4, offset=0, head_step=1), BACKEND_OPS[backend]
    batch = make_batch(BatchSpec("one", (60,), (1,)), head_dim=16, dtype=dtype)
    want, _ = run_paged_attention(ops, batch, block_sparse=pattern)
    at = batch.block_table[0, 17 // 16], 17 % 16  # in block 2, which head 2 alone sees
    for value in (float("nan"), float("inf")):
        batch.k_cache[at] = batch.v_cache[at] = value
        out, _ = run_paged_attention(ops, batch, block_sparse=pattern)
        assert torch.equal(out[0, [0, 1, 3]], want[0, [0, 1, 3]])
        assert bool(out[0, 2].isnan().all())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no keys": ({"block_sparse": BlockSparse(0, 2, 4)}, "block_sparse"),
    "no slash": ({"block_sparse": BlockSparse(8, 0, 4)}, "block_sparse"),
    "no stride": ({"block_sparse": BlockSparse(8, 2, 0)}, "block_sparse"),
    "huge": ({"block_sparse": BlockSparse(8, 2, 1 << 21)}, "block_sparse"),
    "negative": ({"block_sparse": BlockSparse(8, 2, 4, -1)}, "block_sparse"),
    "no heads": ({"block_sparse": BlockSparse(8, 2, 4, 1, 1, 0)}, "block_sparse"),
    "bidirectional": ({"block_sparse": BlockSparse(8, 2, 4), "causal": False}, "causal"),
    "few numbers": ({"block_sparse": (8, 2, 4)}, "block_sparse"),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_patterns_are_refused_and_nothing_is_written(case: str, backend: str, native: None) -> None:
    options, match = REFUSED[case]
    batch = make_batch(BATCH_SPECS["mixed_small"], head_dim=16)
    out = torch.full_like(batch.q, 7.0)
    arguments = {"max_query_len": batch.max_query_len, "scale": 1.0, **options}
    with pytest.raises((ArgumentError, RuntimeError), match=match):
        BACKEND_OPS[backend].paged_attention(*batch.tensors, out, **arguments)
    assert bool((out == 7.0).all())


def test_functions_and_modules_say_what_they_want() -> None:
    batch = make_batch(BATCH_SPECS["mixed_small"], head_dim=16)
    for pattern in ((8, 2, 4), [8, 2, 4, 1, 0, 1], BlockSparse(8.0, 2, 4), 3):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"block_sparse: expected a torchpaged\.BlockSparse of ints"):
            torchpaged.paged_attention(*batch.tensors, max_query_len=64, block_sparse=pattern)
        with pytest.raises(ArgumentError, match=r"block_sparse: expected a torchpaged\.BlockSparse of ints"):
            PagedAttention(4, 16, 2, block_sparse=pattern)
    with pytest.raises(ArgumentError, match="causal: expected True with block_sparse"):
        PagedAttention(4, 16, 2, block_sparse=BlockSparse(8, 2, 4), causal=False)
    with pytest.raises(ArgumentError, match="tree_mask: expected none with block_sparse"):
        PagedAttention(4, 16, 2, block_sparse=BlockSparse(8, 2, 4), tree_mask=True)
    with pytest.raises(ArgumentError, match="block_sparse"):
        CrossAttention(4, 16, 2, block_sparse=BlockSparse(8, 2, 4))


def test_backends_without_it_say_so() -> None:
    spec = attention_spec(
        device="cpu", dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim=64, block_sparse=True
    )
    with pytest.raises(BackendUnavailableError, match="block_sparse is not supported"):
        select_backend(spec, "torch_sdpa")
    lacking = {"torch_sdpa", "flash_attn", "flash_attn_4", "flashinfer", "flashinfer_xqa", "torch_varlen"}
    assert all("block_sparse" not in get_backend(name).capabilities.features for name in lacking)
    assert select_backend(spec).name in ("cpu", "reference")
    batch = make_batch(BATCH_SPECS["mixed_small"])
    with pytest.raises(BackendUnavailableError, match="block_sparse is not supported"):
        run_paged_attention(get_backend("torch_sdpa").ops, batch, block_sparse=BlockSparse(8, 2, 4))
    session = get_backend("reference").open([spec], torchpaged.Limits(), spec.device)
    assert can_read_once(replace(spec, uses=frozenset()), session)
    assert not can_read_once(spec, session), "heads see different keys of a prefix"


@pytest.mark.slow_cases(but=("kv heads", "query heads"))
@pytest.mark.parametrize("name", PATTERNS)
def test_flex_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "eager")
    report = check_conformance(
        get_backend("flex"),
        device="cpu",
        modes=("eager",),
        batches=("mixed_padded", "decode_edges"),
        variants={name: {"block_sparse": PATTERNS[name]}},
        head_dim=16,
    )
    assert len(report.right) == 2 * 3 * 2


def test_the_module_eagerly_compiled_and_moved() -> None:
    pattern = BlockSparse(8, 2, 3, head_step=1)
    batch = make_batch(BATCH_SPECS["mixed_padded"], head_dim=16)
    layer = PagedAttention(4, 16, 2, block_sparse=pattern)
    metadata = AttentionMetadata(
        batch.block_table, batch.seq_lens, batch.query_start_loc, None, None, batch.max_query_len, 16
    )
    call = (batch.q, None, None, (batch.k_cache, batch.v_cache), metadata)
    with torch.inference_mode():
        out = layer(*call)
        assert_attention_close(out, None, batch, block_sparse=pattern)
        torch._dynamo.reset()
        assert torch.equal(out, torch.compile(layer, fullgraph=True, backend="aot_eager")(*call))
        assert layer.to(torch.bfloat16).to(torch.float32).spec.uses == {"block_sparse"}


def test_the_function_eagerly_and_compiled() -> None:
    pattern = BlockSparse(8, 2, 3, head_step=1)
    batch = make_batch(BATCH_SPECS["mixed_padded"], head_dim=16)

    def attend(q: torch.Tensor) -> torch.Tensor:
        tensors = (q, *batch.tensors[1:])
        out: torch.Tensor = torchpaged.paged_attention(
            *tensors, max_query_len=batch.max_query_len, block_sparse=pattern
        )
        return out

    with torch.inference_mode():
        out = attend(batch.q)
        assert_attention_close(out, None, batch, block_sparse=pattern)
        torch._dynamo.reset()
        assert torch.equal(out, torch.compile(attend, fullgraph=True, backend="aot_eager")(batch.q))


def test_over_an_fp8_cache() -> None:
    pattern = BlockSparse(8, 1, 3, head_step=1)
    batch = make_batch(
        BATCH_SPECS["mixed_small"], head_dim=16, kv_dtype=torch.float8_e4m3fn, scales="per_head"
    )
    out, lse = run_paged_attention(REFERENCE, batch, block_sparse=pattern)
    assert_attention_close(out, lse, batch, block_sparse=pattern)
    dense, _ = run_paged_attention(REFERENCE, batch)
    assert not torch.allclose(out, dense), "something is hidden"


def test_token_by_token_is_what_a_prompt_is() -> None:
    pattern, length = BlockSparse(4, 2, 3, head_step=1), 40
    layer = PagedAttention(4, 16, 2, block_sparse=pattern)
    q, (k, v) = torch.randn(length, 4, 16), torch.randn(2, length, 2, 16)
    results = []
    with torch.inference_mode():
        for steps in ([length], [1] * length):
            cache = PagedKVCache.uniform(1, 2, 16, num_blocks=8, dtype=torch.float32)
            rows, out, done = cache.allocate(1), [], 0
            for count in steps:
                at = slice(done, done + count)
                out.append(layer(q[at], k[at], v[at], cache[0], rows.append([count])))
                done += count
            results.append(torch.cat(out))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
