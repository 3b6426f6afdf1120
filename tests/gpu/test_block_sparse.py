"""The mask "vertical and slash" on a GPU: against the oracle, and out of one graph for all lengths."""

from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle

from torchpaged import BlockSparse
from torchpaged.backends import GraphSupport, get_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.graphs import CudaCapture
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch
from torchpaged.testing.graph_conformance import check_replays, conformance_cases

pytestmark = pytest.mark.gpu
#: Phi-3-small's with a short slash; one vertical per kv head; blocks narrower than a tile, and odd ones.
PATTERNS = {
    "phi": BlockSparse(64, 4, 8, head_step=1),
    "kv heads": BlockSparse(64, 1, 5, 2, 1, 4),
    "narrow": BlockSparse(16, 2, 4, head_step=1),
    "odd": BlockSparse(48, 2, 3, head_step=1),
}
SPECS = {
    "decode": BatchSpec("decode", (4000, 1, 0, 2570, 64, 65) * 8, (1, 1, 1, 1, 1, 1) * 8),
    "drafts": BatchSpec("drafts", (3000, 333, 5), (4, 3, 2)),
    "prompts": BatchSpec("prompts", (2500, 700), (700, 700)),
    "mixed": BatchSpec("mixed", (3000, 1500, 60, 900), (1, 500, 60, 2), padded_tokens=3),
    "left_padded": BATCH_SPECS["left_padded"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 900},
    "chunks, cap": {"chunk_size": 700, "logits_soft_cap": 5.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_the_oracle(backend: str, pattern: str, spec: str, options: str) -> None:
    """Slopes go with the window."""
    given = {"block_sparse": PATTERNS[pattern], **OPTIONS[options]}
    batch = make_batch(
        SPECS[spec],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        sinks=True,
        alibi=options == "window",
    )
    assert_as_oracle(BACKEND_OPS[backend], batch, **given)


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 1, 96), (4, 4, 256)], ids=str)
@pytest.mark.parametrize("spec", ["decode", "prompts"])
def test_other_heads(backend: str, spec: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    batch = make_batch(
        SPECS[spec], num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.float16, device="cuda"
    )
    assert_as_oracle(BACKEND_OPS[backend], batch, block_sparse=PATTERNS["phi"])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("spec", ["decode", "mixed"])
def test_over_an_fp8_cache(backend: str, spec: str, kv_dtype: torch.dtype) -> None:
    batch = make_batch(
        SPECS[spec],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        kv_dtype=kv_dtype,
        scales="per_head",
    )
    assert_as_oracle(BACKEND_OPS[backend], batch, block_sparse=PATTERNS["phi"])


@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda c: c.name)
def test_one_graph_serves_all_lengths(backend: str, case: Any) -> None:
    asked = case._replace(options={"block_sparse": BlockSparse(32, 1, 3, head_step=1)})
    capture = CudaCapture(torch.device("cuda"))
    check_replays(get_backend(backend), asked, capture, "cuda", head_dim=64, dtype=torch.bfloat16)
