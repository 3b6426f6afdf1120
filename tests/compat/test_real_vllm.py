"""torchpaged's backend under the real vLLM, where it is importable: its base classes, registry, metadata and
``Attention`` layer on a CPU, in a process of its own. Seen with vLLM 0.24.0 and 0.33.0."""

import importlib.util
import json

import pytest
from command import printed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_real_interface() -> None:
    out = printed("tests/support/vllm_worker.py", VLLM_LOGGING_LEVEL="ERROR")
    assert json.loads(out.splitlines()[-1])["layers"] == 6
