"""torchpaged's backend under the real vLLM, where it is importable: its base classes, registry, metadata and
``Attention`` layer on a CPU, in a process of its own. Seen with vLLM 0.24.0 and 0.33.0."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_real_interface() -> None:
    here = Path(__file__).parent
    paths = [str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(here.parent / "support/vllm_worker.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["layers"] == 6
