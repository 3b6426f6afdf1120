"""Shared fixtures. Run with OMP_NUM_THREADS=1 on small machines: two threads under load are slower
than one."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged.custom_ops import native_status


def pytest_configure(config: pytest.Config) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def slow_tests(text: str, nodes: list[str], strict: bool = False) -> set[str]:
    """The node ids that a list such as tests/slow.txt names. The last line that matches a node counts.

    A line names a test with all its parameters, or one parametrisation; ``*`` stands for anything; ``!`` in
    front: not slow after all.

    Raises:
        pytest.UsageError: strict, and a line names a test that its file, of which nodes are given, does
            not hold.
    """
    functions = {node.split("[")[0] for node in nodes}
    files = {node.split("::")[0] for node in nodes}
    slow: set[str] = set()
    for line in text.splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        name, bracket, _ = pattern.partition("[")
        if strict and "*" not in name and name.split("::")[0] in files and name not in functions:
            raise pytest.UsageError(f"tests/slow.txt names a test that is not there: {line}")
        rule = re.compile(
            re.escape(pattern).replace(r"\*", ".*") + ("" if bracket else r"(\[.*\])?"), re.DOTALL
        )
        matching = {node for node in nodes if rule.fullmatch(node)}
        slow = slow - matching if line.strip().startswith("!") else slow | matching
    return slow


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped without a GPU; slow ones, by their mark or by slow.txt, unless asked for.
    The longest come first."""
    chosen = config.getoption("-m") or ""
    whole = config.args == config.getini("testpaths")  # a part of a file says nothing about the rest of it
    nodes = [item.nodeid for item in items]
    slow = slow_tests(Path(__file__).with_name("slow.txt").read_text(), nodes, strict=whole)
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
        if "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
    # a process of its own, minutes long: begun last it would be waited for
    items.sort(key=lambda item: "in_the_interpreter" not in item.name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def native() -> None:
    """Skip where the native CPU kernels are absent; fail where they must be
    there (TORCHPAGED_REQUIRE_NATIVE=1)."""
    loaded, reason = native_status()
    if loaded:
        return
    if os.environ.get("TORCHPAGED_REQUIRE_NATIVE") == "1":
        pytest.fail(f"TORCHPAGED_REQUIRE_NATIVE=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Query tokens of each call, on a CPU, that read prefixes once."""
    seen: list[int] = []
    prefixes_module = importlib.import_module("torchpaged.prefixes.attention")
    two = prefixes_module._two_passes

    def counted(q: Tensor, *rest: Any) -> Any:
        seen.append(q.shape[0])
        return two(q, *rest)

    monkeypatch.setattr(prefixes_module, "_two_passes", counted)
    return seen


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    """``make_llama(vocab_size=99, ...)``: a Llama of two layers with random weights, 4 query and 2 kv heads,
    end of text 7; the options are those of its config. Skip without transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=7,
            pad_token_id=0,
            bos_token_id=1,
            **options,
        )
        return transformers.LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; skip where it can't be had, fail
    with TORCHPAGED_REQUIRE_MODEL=1."""
    required = os.environ.get("TORCHPAGED_REQUIRE_MODEL") == "1"
    try:
        from torchpaged.cli.demo import ensure_smollm2

        return ensure_smollm2(offline=not required, progress=False)
    except Exception as error:
        if required:
            raise
        pytest.skip(
            f"SmolLM2 is not in the cache ({error}); run `torchpaged generate hello` once, or set "
            "TORCHPAGED_REQUIRE_MODEL=1"
        )


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip where Triton's interpreter can't run at all: Triton 3.6 asks int() of arrays of one element, which
    NumPy 2.4 refuses."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    import numpy

    probe = Path(__file__).parent / "triton/probe_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(probe)], env=environment, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        assert "only 0-dimensional arrays can be converted" in done.stderr, done.stderr
        pytest.skip(
            f"the interpreter of triton {triton.__version__} does not run with numpy {numpy.__version__}"
        )
