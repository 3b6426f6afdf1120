"""``import torchpaged; torchpaged.engine.Generator`` works, costs nothing before, and has its types."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from command import printed, python

import torchpaged

OPTIONAL = {"triton", "flashinfer", "transformers", "typer", "rich", "gguf", "nvtx", "numpy", "matplotlib"}
PACKAGES = ("compat", "engine", "fuse", "graphs", "hf", "layers", "profiling", "testing")


def test_an_import_is_light_and_packages_are_imported_when_asked_for() -> None:
    """No optional package is touched, nor inductor's options to ask for them, and no GPU is initialised."""
    asked_for = "assert torchpaged.engine.Generator.__name__ == 'Generator'\n"
    printed(
        "-c",
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import torchpaged\n"
        "from torchpaged.custom_ops import early_launch\n"
        "early_launch.refuse_inductors()\n"
        "assert 'torch._inductor.config' not in sys.modules\n"
        "loaded = [name for name in sys.modules if name.startswith('torchpaged.')]\n"
        f"assert not [n for n in loaded if n.split('.')[1] in {PACKAGES}], loaded\n"
        f"bad = {{m.split('.')[0] for m in set(sys.modules) - before}} & {OPTIONAL}\n"
        "assert not bad, bad\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torchpaged.graphs.DecodeGraphRunner\n" + (asked_for if find_spec("transformers") else ""),
    )


def test_every_package_is_there_and_no_other_name() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in PACKAGES:
        assert getattr(torchpaged, name).__name__ == f"torchpaged.{name}"
    with pytest.raises(AttributeError, match="module 'torchpaged' has no attribute 'engin'"):
        torchpaged.engin  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.long  # .ci/run has it behind its own mypy, whose cache it takes
def test_type_checkers_know_what_calls_give(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    file = tmp_path / "calls.py"
    file.write_text(
        "from typing import assert_type\n"
        "import torch\n"
        "import torchpaged\n"
        "from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache\n"
        "def call(a: PagedAttention, q: torch.Tensor, c: PagedKVCache, m: AttentionMetadata) -> None:\n"
        "    assert_type(a(q, q, q, c[0], m), torch.Tensor)\n"
        "    a(q, q, q, c[0], 7)\n"
        "    c.nonsense\n"
        "    torchpaged.engine.SamplingParams(temperature='hot')\n"
    )
    done = python("-m", "mypy", "--config-file", "pyproject.toml", str(file), timeout=500)
    errors = [line for line in done.stdout.splitlines() if "calls.py" in line]
    assert [line.split(":")[1] for line in errors] == ["7", "8", "9"], done.stdout
