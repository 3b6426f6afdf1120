"""The Triton and CUDA C++ kernels of attention on a GPU at models' sizes: the oracle, capture once and replay
with other lengths, no synchronisation. Their masks and opcheck: tests/custom_ops/test_cpu_kernels.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import (
    BATCH_SPECS,
    BatchSpec,
    assert_attention_close,
    make_batch,
    run_paged_attention,
)

pytestmark = pytest.mark.gpu
REFERENCE = BACKEND_OPS["reference"]
BACKENDS = ("triton", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {
    "32/8/128": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "9/3/64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "28/4/128": {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    "8/1/256": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    "5/5/80": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 80},
    "12/4/96": {"num_heads": 12, "num_kv_heads": 4, "head_dim": 96},
    "16/1/112": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 112},
    "16/4/192-128": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 192, "head_dim_v": 128},
    "64/1/128": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 128},
    "32/1/64": {"num_heads": 32, "num_kv_heads": 1, "head_dim": 64},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64, 256])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_heads_and_blocks(backend: str, heads: str, block_size: int, dtype: torch.dtype) -> None:
    for spec in (
        BatchSpec("long", (2000, 3, 700, 0), (1, 1, 1, 1), padded_tokens=1),
        BATCH_SPECS["mixed_padded"],
        BATCH_SPECS["speculative"],
    ):
        batch = make_batch(
            spec,
            dtype=dtype,
            device="cuda",
            block_size=block_size,
            heads_first=block_size == 64,
            **HEADS[heads],
        )
        assert_as_oracle(BACKEND_OPS[backend], batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [20, 400])
def test_many_short_queries_beside_chunks(backend: str, chunk: int) -> None:
    """More query tiles than programs of one tile: some programs take several. Few tiles and many, whose
    orders differ."""
    lens = (1, chunk, *[3] * 90, *[1] * 40, *[5] * 20)
    batch = make_batch(
        BatchSpec("many_short", tuple(n + 11 for n in lens), lens),
        dtype=torch.bfloat16,
        device="cuda",
        **HEADS["32/8/128"],
    )
    assert_as_oracle(BACKEND_OPS[backend], batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_caches(backend: str, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    k, v = torch.randn(2, 40, 2, 64, device="cuda") * 3
    pools = [torch.zeros(6, 16, 2, 64, dtype=dtype, device="cuda") for _ in range(4)]
    scales = torch.tensor([0.5, 2.0], device="cuda"), torch.tensor([1.5], device="cuda")
    slots = torch.randperm(80, device="cuda")[:40] + 16
    for ops, (k_cache, v_cache) in ((BACKEND_OPS[backend], pools[:2]), (REFERENCE, pools[2:])):
        ops.write_kv(k, v, k_cache, v_cache, slots, *scales)
    for got, want in zip(pools[:2], pools[2:], strict=True):
        # at most one fp8 step apart
        torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=1e-3)
    batch = make_batch(BATCH_SPECS["decode_edges"], dtype=torch.bfloat16, device="cuda")
    batch.k_cache, batch.v_cache = (c.nan_to_num(0.0).to(dtype) for c in (batch.k_cache, batch.v_cache))
    options = {"k_scale": scales[0], "v_scale": scales[1]}
    got, want = (run_paged_attention(ops, batch, **options) for ops in (BACKEND_OPS[backend], REFERENCE))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Launches must not synchronise the host."""
    yield
    torch.cuda.set_sync_debug_mode("default")


REPLAYS = [
    BatchSpec("full", (96, 96, 96, 96), (1, 1, 1, 1)),
    BatchSpec("short", (1, 2, 3, 4), (1, 1, 1, 1)),
    BatchSpec("skewed", (96, 1, 33, 16), (1, 1, 1, 1)),
    BatchSpec("padded", (50, 17, 0, 0), (1, 1, 0, 0), padded_tokens=2),
    BatchSpec("empty", (0, 96, 0, 5), (1, 1, 1, 1)),
    BatchSpec("edges", (15, 16, 17, 64), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"logits_soft_cap": 4.0}], ids=str)
def test_one_capture_serves_every_length(backend: str, options: dict[str, Any], no_sync: None) -> None:
    shape = {"dtype": torch.bfloat16, "device": "cuda", "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    batches = [make_batch(spec, seed=i, **shape) for i, spec in enumerate(REPLAYS)]
    rows = max(b.k_cache.shape[0] for b in batches)
    width = max(b.block_table.shape[1] for b in batches)
    q = torch.zeros(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    pools = [torch.zeros(rows, 16, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.zeros(4, width, dtype=torch.int32, device="cuda")
    lens, starts = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.zeros(5, dtype=torch.int32, device="cuda"),
    )
    out, lse = torch.empty_like(q), torch.empty(4, 8, device="cuda")

    def load(batch: Any) -> None:
        q.copy_(batch.q)
        for pool, source in zip(pools, (batch.k_cache, batch.v_cache), strict=True):
            pool[: source.shape[0]].copy_(source)
        table.zero_()
        table[: len(batch.block_table), : batch.block_table.shape[1]].copy_(batch.block_table)
        lens.copy_(batch.seq_lens)
        starts.copy_(batch.query_start_loc)

    def launch() -> None:
        BACKEND_OPS[backend].paged_attention(
            q, *pools, table, lens, starts, out, lse, max_query_len=1, scale=0.125, **options
        )

    load(batches[0])
    torch.cuda.set_sync_debug_mode("error")
    launch()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for batch in (*batches, batches[0]):
        load(batch)
        out.fill_(float("nan"))
        graph.replay()
        assert_attention_close(out, lse, batch, **options)
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first), "bitwise repeatable"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("widths", [(64, 16), (64, 32), (96, 32), (128, 32), (256, 32), (32, 96)], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_many_query_rows_over_narrow_values(
    backend: str, widths: tuple[int, int], kv_dtype: torch.dtype
) -> None:
    """40 and 80 query rows per kv head: products of 64 rows and more, of keys and of values."""
    dim, dim_v = widths
    for num_heads in (5, 10):
        batch = make_batch(
            BatchSpec("narrow values", (71, 34, 24, 700), (1, 8, 4, 8)),
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=dim,
            head_dim_v=dim_v,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            scales="none" if kv_dtype == torch.bfloat16 else "per_head",
            device="cuda",
        )
        assert_as_oracle(BACKEND_OPS[backend], batch)
