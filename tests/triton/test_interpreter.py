"""The Triton kernels in Triton's interpreter against the float64 oracle. Runs with TRITON_INTERPRET=1 only: see test_run_interpreter.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import (
    ATTENTION_VARIANTS,
    BATCH_SPECS,
    BatchSpec,
    assert_attention_close,
    make_batch,
    opcheck_cases,
    run_paged_attention,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Python starts", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize("spec", BATCH_SPECS)
def test_attention_matches_the_oracle(spec: str, variant: str) -> None:
    batch = make_batch(BATCH_SPECS[spec], head_dim=32, sinks=variant == "window", alibi=variant == "soft_cap")
    out, lse = run_paged_attention(TRITON, batch, **ATTENTION_VARIANTS[variant])
    assert_attention_close(out, lse, batch, **ATTENTION_VARIANTS[variant])


SHAPES: dict[str, dict[str, Any]] = {
    "block_1": {"block_size": 1},
    "block_8": {"block_size": 8},
    "block_64": {"block_size": 64},
    "heads_first": {"heads_first": True},
    "group_7": {"num_heads": 7, "num_kv_heads": 1},
    "group_1": {"num_heads": 3, "num_kv_heads": 3},
    "group_16": {"num_heads": 16, "num_kv_heads": 1},
    "dim_80": {"head_dim": 80},
    "dim_12": {"head_dim": 12},
    "value_wider": {"head_dim": 24, "head_dim_v": 40},
    "sinks_alibi": {"sinks": True, "alibi": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", ["decode_edges", "mixed_padded"])
def test_attention_shapes_and_dtypes(spec: str, shape: str, dtype: torch.dtype) -> None:
    batch = make_batch(BATCH_SPECS[spec], dtype=dtype, **{"head_dim": 32, **SHAPES[shape]})
    out, lse = run_paged_attention(TRITON, batch)
    assert_attention_close(out, lse, batch)


@pytest.mark.parametrize("options", [{}, {"window_left": 300}, {"logits_soft_cap": 3.0}], ids=str)
def test_split_kv(options: dict[str, Any]) -> None:
    """A wide table cuts keys into several splits; short rows leave most of them empty."""
    batch = make_batch(BatchSpec("split", (1500, 1, 0, 257), (1, 1, 1, 1)), head_dim=16, num_heads=4, num_kv_heads=1, sinks=True)
    from torchpaged.custom_ops.triton import config

    assert config.num_splits(batch.q, 4, 1, batch.block_table.shape[1] * 16) > 1
    out, lse = run_paged_attention(TRITON, batch, **options)
    assert_attention_close(out, lse, batch, **options)


@pytest.mark.parametrize("case", opcheck_cases())
def test_opcheck(case: str) -> None:
    op, args, kwargs = opcheck_cases()[case]
    torch.library.opcheck(getattr(TRITON, op), args, kwargs)


@pytest.mark.parametrize("case", ["write", "merge", "copy", "advance"])
def test_other_ops_match_the_reference(case: str) -> None:
    results = []
    for ops in (TRITON, REFERENCE):
        torch.manual_seed(1)
        op, args, kwargs = opcheck_cases()[case]
        getattr(ops, op)(*args, **kwargs)
        results.append(args)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_caches(dtype: torch.dtype, heads: int) -> None:
    """Decode over fp8 pools equals attention over their dequantised values; scales per tensor and per head."""
    batch = make_batch(BATCH_SPECS["decode_edges"], head_dim=32)
    batch.k_cache, batch.v_cache = (cache.nan_to_num(0.0).to(dtype) for cache in (batch.k_cache, batch.v_cache))
    scales = {"k_scale": torch.rand(heads) + 0.5, "v_scale": torch.rand(heads) + 0.5}
    got, want = (run_paged_attention(ops, batch, **scales) for ops in (TRITON, REFERENCE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_fp8_writes_saturate() -> None:
    k = torch.tensor([[[1000.0, -1000.0, 0.5, 3.0]]])
    for ops in (TRITON, REFERENCE):
        cache = torch.zeros(2, 4, 1, 4, dtype=torch.float8_e4m3fn)
        ops.write_kv(k, k, cache, cache.clone(), torch.tensor([5]), torch.full((1,), 2.0), torch.ones(1))
        assert cache[1, 1, 0].float().tolist() == [448.0, -448.0, 0.25, 1.5]
