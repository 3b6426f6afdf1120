"""Declared graph support on a GPU, of the CUDA C++ kernels themselves: where Triton would serve a call in
their place, the test fails.

And of a backend that plans every step: with plans its replays are right, without one the process ends with an
assertion of the device.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import needs_hopper
from sessions import PLANNING

from torchpaged.backends import GraphSupport, get_backend
from torchpaged.graphs import CudaCapture
from torchpaged.testing import BatchSpec
from torchpaged.testing.graph_conformance import Case, check_replays, conformance_cases

pytestmark = pytest.mark.gpu
HEADS = {"32/8/128": (32, 8, 128), "9/3/64": (9, 3, 64), "4/2/32": (4, 2, 32)}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
DECODES = conformance_cases(GraphSupport.UNIFORM_BATCH)
PREFILL = Case(
    "prefill",
    (
        BatchSpec("full", (200, 200, 200), (40, 40, 40)),
        BatchSpec("new", (40, 40, 40), (40, 40, 40)),
        BatchSpec("padded", (90, 0, 0), (33, 0, 0), padded_tokens=87),
        BatchSpec("block_edges", (47, 48, 49), (31, 32, 33), padded_tokens=24),
    ),
    {},
)


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA op's module, whose way to Triton's kernels is closed; ``launched`` counts its kernels'
    launches by name."""
    from torchpaged.custom_ops.attention.cuda import paged_attention as module
    from torchpaged.custom_ops.cuda import jit

    if get_backend("cuda").unavailable():
        pytest.skip(str(get_backend("cuda").unavailable()))

    def triton() -> Any:
        raise AssertionError("a call went to Triton's kernels")

    launched: list[int] = []
    launch = jit.Kernel.launch

    def counted(self: Any, grid: int, *arguments: Any, **options: Any) -> None:
        launched.append(grid)
        launch(self, grid, *arguments, **options)

    monkeypatch.setattr(module, "_triton", triton)
    monkeypatch.setattr(jit.Kernel, "launch", counted)
    module.launched = launched  # type: ignore[attr-defined]
    yield module
    del module.launched  # type: ignore[attr-defined]


@DTYPES
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", DECODES, ids=lambda c: c.name)
def test_the_cuda_decode_kernel_conforms(no_triton: Any, case: Case, heads: str, dtype: torch.dtype) -> None:
    shape = dict(zip(("num_heads", "num_kv_heads", "head_dim"), HEADS[heads], strict=True))
    check_replays(get_backend("cuda"), case, CudaCapture("cuda"), "cuda", dtype=dtype, **shape)
    assert len(no_triton.launched) == 3, "two warm-ups and the capture; replays don't come by Python"


@DTYPES
@needs_hopper
def test_the_cuda_prefill_kernel_conforms(
    no_triton: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "1")
    check_replays(
        get_backend("cuda"),
        PREFILL,
        CudaCapture("cuda"),
        "cuda",
        dtype=dtype,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    assert len(no_triton.launched) == 3


def test_the_way_to_triton_is_really_closed(no_triton: Any) -> None:
    """float32 is none of the CUDA kernels' dtypes."""
    with pytest.raises(AssertionError, match="went to Triton"):
        check_replays(get_backend("cuda"), DECODES[0], CudaCapture("cuda"), "cuda", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda c: c.name)
def test_a_planning_backend_conforms(case: Case, dtype: torch.dtype) -> None:
    check_replays(PLANNING, case, CudaCapture("cuda"), "cuda", dtype=dtype)


FORGOTTEN = """
import sys
sys.path.insert(0, sys.argv[1])
from sessions import PLANNING
from torchpaged.backends import GraphSupport
from torchpaged.testing.graph_conformance import check_forgotten_plan, conformance_cases
from torchpaged.graphs import CudaCapture

case = conformance_cases(GraphSupport.SINGLE_TOKEN_DECODE)[0]
check_forgotten_plan(PLANNING, case._replace(batches=case.batches[:2]), CudaCapture("cuda"), "cuda")
print("noticed")
"""


def test_a_replay_without_a_plan_is_noticed() -> None:
    """In a process of its own: its device is lost behind the assertion."""
    folder = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, folder], capture_output=True, text=True, timeout=300
    )
    assert "noticed" in done.stdout, done.stderr[-2000:]


def test_calls_on_another_stream_get_a_semaphore_of_their_own() -> None:
    """Eager calls of one module may overlap on two streams; a capture on a side stream keeps
    the session's."""
    from torchpaged import Limits, PagedAttention

    layer = PagedAttention(4, 64, 2, device="cuda", dtype=torch.bfloat16, limits=Limits(max_num_reqs=3))
    session, kept = layer.session, layer._workspace
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    assert session.workspace_for(kept, 3) is kept
    assert session.workspace_for(kept, 4) == {}
    with torch.cuda.stream(side):
        other = session.workspace_for(kept, 3)
        assert other is not kept
        assert other is session.workspace_for(kept, 2)
        assert other["semaphore"].shape == kept["semaphore"].shape
    with torch.cuda.graph(graph, stream=side):
        assert session.workspace_for(kept, 3) is kept
        torch.zeros(1, device="cuda")
