"""The Triton and CUDA C++ kernels of attention on a GPU at models' sizes against the oracle. Their masks and
opcheck: tests/custom_ops/test_cpu_kernels.py; replays: tests/testing/test_graph_conformance.py."""

import pytest
import torch
from as_oracle import assert_as_oracle

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch

pytestmark = pytest.mark.gpu
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


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("widths", [(64, 16), (64, 32), (96, 32), (128, 32), (256, 32), (32, 96)], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_many_query_rows_over_narrow_values(
    backend: str, widths: tuple[int, int], kv_dtype: torch.dtype
) -> None:
    """40 and 80 query rows per kv head: products of 64 rows and more, of keys and of values."""
    dim, dim_v = widths
    for num_heads, scales in ((10, "per_head"), (20, "one")):
        batch = make_batch(
            BatchSpec("narrow values", (71, 34, 24, 700), (1, 8, 4, 8)),
            num_heads=num_heads,
            num_kv_heads=2,
            head_dim=dim,
            head_dim_v=dim_v,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            scales="none" if kv_dtype == torch.bfloat16 else scales,
            device="cuda",
        )
        assert_as_oracle(BACKEND_OPS[backend], batch)
