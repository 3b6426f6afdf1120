"""What one process compiled with Triton, the next launches without it: the same numbers, eagerly and in a
CUDA graph, on each launch.

Each process checks itself against the reference; two that compile the same at the same time both do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

ROOT = Path(__file__).parents[2]
CODE = """
import hashlib, json, sys, torch
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, assert_attention_close, make_batch, run_paged_attention
from torchpaged.custom_ops.triton import kernel_store
shape = dict(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda", sinks=True, alibi=True)
options = {"window_left": 100, "chunk_size": 256, "logits_soft_cap": 6.0}
digest = hashlib.sha256()
for spec in (BatchSpec("mixed", (300, 40, 1000, 7), (300, 1, 1, 1)), BatchSpec("decode", (300, 40, 1000), (1, 1, 1)),
             BatchSpec("surplus", (90,) * 40, (9,) * 39 + (1,)), BatchSpec("prefill", (300, 300), (300, 300))):
    batch = make_batch(spec, **shape)
    eager = run_paged_attention(BACKEND_OPS["triton"], batch, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_paged_attention(BACKEND_OPS["triton"], batch, **options)
    graph.replay()
    again = run_paged_attention(BACKEND_OPS["triton"], batch, **options)
    torch.cuda.synchronize()
    for other in (captured, again):
        torch.testing.assert_close(other, eager, rtol=0, atol=0, equal_nan=True)
    assert_attention_close(*eager, batch, **options)
    for tensor in eager:
        digest.update(tensor.float().cpu().numpy().tobytes())
print(json.dumps({"digest": digest.hexdigest(), "triton": "triton" in sys.modules, "usable": kernel_store.usable(),
                  "stored": [k is not None for k in kernel_store._known.values()]}))
"""  # noqa: E501


def start(folder: Path) -> subprocess.Popen[str]:
    variables = {
        "TORCHPAGED_CACHE": str(folder / "torchpaged"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", CODE],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return dict(json.loads(out.splitlines()[-1]))


@pytest.mark.long
def test_the_next_process_needs_no_triton(tmp_path: Path) -> None:
    cold = result(start(tmp_path))
    assert cold["triton"], cold
    assert cold["usable"], cold
    assert cold["stored"], cold
    assert all(cold["stored"]), cold
    warm = result(start(tmp_path))
    assert not warm["triton"], warm
    assert warm["digest"] == cold["digest"], warm
    assert warm["stored"] == cold["stored"], warm


@pytest.mark.long
def test_two_processes_that_compile_the_same(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    first, second = [result(process) for process in both]
    assert first["digest"] == second["digest"]
    assert not result(start(tmp_path))["triton"]
