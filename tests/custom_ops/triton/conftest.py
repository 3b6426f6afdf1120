"""Files named ``*_interpreter.py`` are of kernels in Triton's interpreter alone: test_run_interpreter.py runs
them, with TRITON_INTERPRET=1, which must be set before kernels are defined. The others compile kernels. All
but that one need Triton."""

import importlib.util
from pathlib import Path

import pytest
from kernels import INTERPRETED

OTHERS = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {"test_run_interpreter.py"}
FILES = {name for name in OTHERS if name.endswith("_interpreter.py")}
if importlib.util.find_spec("triton") is None:
    collect_ignore = sorted(OTHERS)
else:
    collect_ignore = sorted(OTHERS - FILES if INTERPRETED else FILES)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in FILES:
            item.add_marker("interpreted")
