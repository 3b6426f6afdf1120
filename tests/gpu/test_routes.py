"""Routes on a GPU: decodes by one backend, the rest by another, captured at one batch and replayed with
others."""

from typing import Any

import pytest
import torch

from torchpaged.backends import GraphSupport, Route, attention_spec, get_backend
from torchpaged.graphs import CudaCapture
from torchpaged.testing import check_graph_support
from torchpaged.testing.graph_conformance import check_replays, conformance_cases

pytestmark = pytest.mark.gpu
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
