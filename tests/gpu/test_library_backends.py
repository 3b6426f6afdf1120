"""FlashInfer, FlashAttention-3, FlexAttention and torch's attention behind the seam, on a GPU: eagerly,
compiled, captured.

Each in a process of its own, library_worker.py; the first use of FlashInfer and of a shape of FlexAttention
compiles. And routes over two of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged.backends import GraphSupport, Route, attention_spec, get_backend
from torchpaged.graphs import CudaCapture
from torchpaged.testing import check_graph_support
from torchpaged.testing.graph_conformance import check_replays, conformance_cases

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
PARTS = [
    ("flashinfer", "decode"),
    ("flashinfer", "prefill"),
    ("flex", "special"),
    ("flashinfer_gdn", "states"),
    ("flashinfer_gdn", "engine"),
    *((name, "declared") for name in ("flash_attn", "flashinfer", "flashinfer_xqa", "flex", "torch_sdpa")),
    *((name, "suite") for name in ("cuda", "triton", "flash_attn", "flashinfer_xqa", "flex", "torch_sdpa")),
]


@pytest.mark.slow_cases("flex-declared", "flex-special", "flashinfer-declared", "cuda-suite", "triton-suite")
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_it_conforms(name: str, part: str) -> None:
    missing = get_backend(name).unavailable()
    if missing:
        pytest.skip(missing)
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "gpu/library_worker.py"), name, part],
        capture_output=True,
        text=True,
        timeout=590,
        env=os.environ | {"PYTHONPATH": path},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # what is not declared may hold or not: the row says which
    failed = [row for row in rows if row["error"] and not row["check"].endswith("undeclared")]
    assert not done.returncode, (failed, done.stderr[-2000:])
    assert rows, (failed, done.stderr[-2000:])
    assert not failed, (failed, done.stderr[-2000:])


SHAPE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("parts", [("cuda", "triton"), ("triton", "cuda"), ("cuda", "torch_sdpa")])
def test_own_kernels(parts: tuple[str, str]) -> None:
    report = check_graph_support(get_backend(Route(*parts)), device="cuda", dtypes=(torch.bfloat16,), **SHAPE)
    assert report.declared == GraphSupport.ALWAYS
    assert len(report.replays) == 5


@pytest.mark.parametrize("route", [Route("cuda", "flash_attn"), Route("flashinfer", "cuda")], ids=str)
@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda case: case.name)
def test_libraries(route: Route, case: Any) -> None:
    """A planning backend as one part of a batch: planned for its part, once per step."""
    backend, device = get_backend(route), torch.device("cuda")
    spec = attention_spec(device=device, dtype=torch.bfloat16, block_size=16, **SHAPE)
    reasons = backend.reject(spec)
    if reasons:
        pytest.skip("; ".join(reasons))
    done = check_replays(backend, case, CudaCapture(device), device, dtype=torch.bfloat16, **SHAPE)
    assert done == len(case.batches) + 1
