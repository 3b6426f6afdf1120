"""Every example runs to its end in a process of its own; each checks its own result."""

from pathlib import Path

import pytest
from command import ROOT, printed

#: All but the server, which does not end: tests/engine/test_openai_server.py asks it.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "openai_server")


@pytest.mark.slow_cases(but=("01_one_layer_cpu", "02_hf_generate"))
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert printed(str(path))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
