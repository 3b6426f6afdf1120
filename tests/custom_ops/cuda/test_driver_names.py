"""Names of the CUDA driver and of NVRTC that launchers use exist in cuda-bindings: no test without a GPU
calls them, and mypy does not look into that package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\b(driver|nvrtc)\.((?:cu|CU|nvrtc)\w+(?:\.[A-Z]\w+)?)")


def test_they_exist() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    from cuda.bindings import driver, nvrtc

    modules = {"driver": driver, "nvrtc": nvrtc}
    sources = [path.read_text() for path in (ROOT / "custom_ops").rglob("*.py")]
    used = {found for text in sources for found in NAME.findall(text)}
    assert len(used) >= 20
    for module, name in used:
        value = modules[module]
        for part in name.split("."):
            assert hasattr(value, part), f"{module}.{name}"
            value = getattr(value, part)
