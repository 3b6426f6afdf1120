"""Runs the tests of kernels in Triton's interpreter in processes of their own: TRITON_INTERPRET must be set
before kernels are defined. Few processes, since each imports torch anew."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: name -> files, and how many of their tests pass at least: by default, with the first cases of slow tests,
#: and of the slow ones.
PARTS = {
    "attention": (
        [
            "tests/custom_ops/triton/test_interpreter.py",
            "tests/custom_ops/test_cpu_kernels.py",
            "tests/custom_ops/test_tree.py",
            "tests/custom_ops/test_output_scale.py",
            "tests/custom_ops/test_rope_write_kv.py",
            "tests/custom_ops/triton/test_block_sparse_interpreter.py",
        ],
        165,
        150,
    ),
    "others": (
        [
            "tests/custom_ops/test_sampling_kernels.py",
            "tests/custom_ops/test_layer_ops.py",
            "tests/custom_ops/test_experts.py",
            "tests/custom_ops/triton/test_mla_interpreter.py",
            "tests/custom_ops/test_mla.py",
            "tests/custom_ops/test_mla_fp8.py",
            "tests/custom_ops/test_indexer.py",
            "tests/custom_ops/test_rope_write_latent.py",
            "tests/custom_ops/test_up_project_values.py",
            "tests/custom_ops/triton/test_state_interpreter.py",
            "tests/custom_ops/test_state.py",
            "tests/custom_ops/test_state_channels.py",
            "tests/custom_ops/test_state_gates.py",
            "tests/custom_ops/test_steps.py",
            "tests/custom_ops/test_nonfinite.py",
            "tests/custom_ops/test_fuzz.py",
            "tests/custom_ops/test_fp8_writes.py",
        ],
        480,
        300,
    ),
}


@pytest.mark.timeout(1500)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
@pytest.mark.parametrize("chosen", ["not slow or quick", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(interpreter: None, part: str, chosen: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    files, *at_least = PARTS[part]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "no:cacheprovider", "--no-showlocals", "-m", f"interpreted and ({chosen})"]
    # 10,000 random batches are for compiled backends
    skipped = ["--deselect", "tests/custom_ops/test_fuzz.py::test_ten_thousand_random_batches"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *skipped, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1450,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) >= at_least[chosen == "slow"], done.stdout[-500:]


def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("already interpreting")
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from torchpaged import BackendUnavailableError
    from torchpaged.custom_ops import BACKEND_OPS

    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(BackendUnavailableError, match="TRITON_INTERPRET"):
        BACKEND_OPS["triton"].write_kv(
            torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, cache.clone(), torch.tensor([4])
        )
