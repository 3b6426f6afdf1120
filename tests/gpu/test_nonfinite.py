"""NaN and inf by the rules of docs/ops.md, in every kernel of a GPU."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from nonfinite import INF, NAN, assert_as_expected, poke, random_batch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import ATTENTION_VARIANTS, Batch, BatchSpec, make_batch, run_paged_attention

pytestmark = pytest.mark.gpu
BACKENDS = ("triton", "cuda")
SPECS = {
    "decode": BatchSpec("decode", (400, 370, 3, 0), (1, 1, 1, 1)),
    "long_decode": BatchSpec("long_decode", (5, 9000), (1, 1)),  # parts that are merged
    "speculative": BatchSpec("speculative", (40, 370, 3), (4, 4, 3)),
    "prefill": BatchSpec("prefill", (30, 370, 5), (30, 370, 5), padded_tokens=2),
    # no room for short queries
    "padded_prefill": BatchSpec("padded_prefill", (30, 370, 5), (30, 370, 5), padded_tokens=3 * 370 - 405),
    "mixed": BatchSpec("mixed", (200, 370, 90), (1, 200, 1)),
}
SHAPE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}


def check(backend: str, batch: Batch, **options: Any) -> None:
    on_gpu = batch.to("cuda")
    on_gpu.extras["semaphore"] = torch.zeros(
        batch.block_table.shape[0] * batch.k_cache.shape[2], dtype=torch.int32, device="cuda"
    )
    got = run_paged_attention(BACKEND_OPS[backend], on_gpu, **options)
    assert not on_gpu.extras["semaphore"].any()
    assert_as_expected(got, batch, exact=False, **options)


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [("padded_prefill", "prefill"), ("prefill", "prefill and decode"), ("mixed", "prefill and decode")],
)
def test_the_cuda_prefill_kernel_is_among_them(spec: str, kernel: str) -> None:
    from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
    from torchpaged.custom_ops.attention.cuda.paged_attention import route

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is written for compute capability 9.0")
    b = make_batch(SPECS[spec], **SHAPE).to("cuda")
    lengths = (b.block_table, b.seq_lens, b.query_start_loc)
    call = AttentionCall(
        b.q, b.k_cache, b.v_cache, *lengths, torch.empty_like(b.q), None, b.max_query_len, b.scale
    )
    assert route(call, Specialisation.of(call)).kernel == kernel


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bad_number(backend: str, spec: str, variant: str, what: str, value: float) -> None:
    length, queries = SPECS[spec].seq_lens[1], SPECS[spec].query_lens[1]
    for position in (length - 1, length - 3, length // 2, 2):
        if what != "q" or position >= length - queries:
            batch = make_batch(SPECS[spec], sinks=variant == "window", alibi=variant == "soft_cap", **SHAPE)
            poke(batch, what, value, 1, position, 1, 5)
            check(backend, batch, **ATTENTION_VARIANTS[variant])


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_that_are_all_infinite(backend: str, spec: str, value: float) -> None:
    for many in (1.0, 0.6):  # all keys, and those that fill the first tiles
        batch = make_batch(SPECS[spec], **SHAPE)
        batch.q.abs_()
        for position in range(int(SPECS[spec].seq_lens[1] * many)):
            poke(batch, "k", value, 1, position, 1, 3)
        check(backend, batch)


@pytest.mark.parametrize("options", [{"window_left": 50}, {"chunk_size": 64}], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (32, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_no_query_sees_never_matter(
    backend: str, spec: str, dtype: torch.dtype, heads: tuple[int, int], options: Any
) -> None:
    batch = make_batch(SPECS[spec], num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, dtype=dtype)
    clean = run_paged_attention(BACKEND_OPS[backend], batch.to("cuda"), **options)
    for request, (length, queries) in enumerate(zip(batch.spec.seq_lens, batch.spec.query_lens, strict=True)):
        first = length - queries
        for position in range(first // 64 * 64 if "chunk_size" in options else max(0, first - 50)):
            block = int(batch.block_table[request, position // 16])
            batch.k_cache[block, position % 16] = batch.v_cache[block, position % 16] = NAN
    got = run_paged_attention(BACKEND_OPS[backend], batch.to("cuda"), **options)
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_pools(backend: str, what: str) -> None:
    """Queries are scaled into fp16's range for them: an infinite one must stay infinite, a NaN one NaN."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    for value in (NAN, INF, -INF):
        for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
            if value == value and what != "q" and dtype == torch.float8_e4m3fn:
                continue  # it has no inf
            for spec in ("decode", "prefill"):
                batch = make_batch(SPECS[spec], **SHAPE)
                wide = replace(
                    batch, k_cache=batch.k_cache.nan_to_num(0.0), v_cache=batch.v_cache.nan_to_num(0.0)
                )
                poke(wide, what, value, 1, 369, 1, 5)
                narrow = replace(wide, k_cache=wide.k_cache.to(dtype), v_cache=wide.v_cache.to(dtype))
                check(backend, narrow)


@pytest.mark.parametrize("share", range(10))
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_batches(backend: str, share: int) -> None:
    for seed in range(share * 20, share * 20 + 20):
        batch, options = random_batch(
            random.Random(seed), dtypes=(torch.bfloat16, torch.float16, torch.float32), small=True
        )
        try:
            check(backend, batch, **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {batch.spec}, {options}, {batch.q.dtype}: {error}") from error


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("other", [0.5, -INF, INF, NAN])
def test_merging_bad_states(bad: float, other: float) -> None:
    states = torch.ones(2, 1, 1, 8, device="cuda")
    for pair in ((bad, other), (other, bad)):
        lse = torch.tensor(pair, device="cuda").view(2, 1, 1)
        out, merged = torch.zeros(1, 1, 8, device="cuda"), torch.zeros(1, 1, device="cuda")
        BACKEND_OPS["triton"].merge_attn_states(states[0], lse[0], states[1], lse[1], out, merged)
        assert bool(out.isnan().all()), pair
        assert bool(merged.isnan().all()), pair
    states[0] = NAN
    lse = torch.tensor([-INF, 0.5], device="cuda").view(2, 1, 1)
    BACKEND_OPS["triton"].merge_attn_states(states[0], lse[0], states[1], lse[1], out, merged)
    assert bool((out == 1).all())
    assert float(merged) == 0.5
