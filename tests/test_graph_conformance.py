"""Every backend's declared graph support, proved: on a tape on a CPU, with CUDA graphs on a GPU."""

from __future__ import annotations

import pytest
import torch

from torchpaged.backends import AttentionSpec, GraphSupport, get_backend, list_backends
from torchpaged.graph_conformance import check_replays, conformance_cases
from torchpaged.graphs import CudaCapture, TapeCapture

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda c: c.name)
@pytest.mark.parametrize("name", list_backends())
def test_declared_support_holds(name: str, case: object) -> None:
    backend = get_backend(name)
    spec = AttentionSpec(device=DEVICE, dtype=torch.float32, head_dim=32, num_heads=4, num_kv_heads=2)
    reasons = backend.reject(spec)
    if reasons:
        pytest.skip("; ".join(reasons))
    support = backend.capabilities.graph_support
    if case not in conformance_cases(support):
        wanted = AttentionSpec(**{**vars(spec), "graphs": GraphSupport.ALWAYS})
        assert any("graph support" in reason for reason in backend.reject(wanted))
        return
    capture = CudaCapture(DEVICE) if ON_GPU else TapeCapture()
    assert check_replays(backend.ops, case, capture, DEVICE, head_dim=32, num_heads=4, num_kv_heads=2) == len(case.batches) + 1  # type: ignore[attr-defined]


def test_the_suite_catches_a_host_decision() -> None:
    """A kernel that freezes the longest length at capture passes its first batch and must fail the others."""
    reference = get_backend("reference").ops
    frozen: list[int] = []

    def attend(q, k_cache, v_cache, table, lens, starts, out, lse, **options):  # type: ignore[no-untyped-def]
        if not frozen:
            frozen.append(3)  # "no row is longer than this"
        reference.paged_attention(q, k_cache, v_cache, table, lens.clamp_max(frozen[0]), starts, out, lse, **options)

    case = conformance_cases(GraphSupport.SINGLE_TOKEN_DECODE)[0]
    with pytest.raises(AssertionError, match="budget"):
        check_replays(reference._replace(paged_attention=attend), case, TapeCapture(), "cpu", head_dim=32)
