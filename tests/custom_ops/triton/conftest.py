"""Files named ``*_interpreter.py`` are of kernels in Triton's interpreter alone: test_run_interpreter.py runs
them, with TRITON_INTERPRET=1, which must be set before kernels are defined."""

from pathlib import Path

import pytest
from kernels import INTERPRETED

FILES = {path.name for path in Path(__file__).parent.glob("*_interpreter.py")} - {"test_run_interpreter.py"}
collect_ignore = [] if INTERPRETED else sorted(FILES)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in FILES:
            item.add_marker("interpreted")
