"""Shared fixtures. Run with OMP_NUM_THREADS=1 on small machines: two threads under load are slower than one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged.custom_ops import native_status


def pytest_configure(config: pytest.Config) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped without a GPU; slow ones unless asked for."""
    chosen = config.getoption("-m") or ""
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
        if "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def native() -> None:
    """Skip where the native CPU kernels are absent; fail where they must be there (TORCHPAGED_REQUIRE_NATIVE=1)."""
    loaded, reason = native_status()
    if loaded:
        return
    if os.environ.get("TORCHPAGED_REQUIRE_NATIVE") == "1":
        pytest.fail(f"TORCHPAGED_REQUIRE_NATIVE=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    """``make_llama(vocab_size=99, ...)``: a Llama of two layers with random weights, 4 query and 2 kv heads, end of text 7; the options are
    those of its config. Skip without transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=7, pad_token_id=0, bos_token_id=1, **options
        )
        return transformers.LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; skip where it can't be had, fail with TORCHPAGED_REQUIRE_MODEL=1."""
    required = os.environ.get("TORCHPAGED_REQUIRE_MODEL") == "1"
    try:
        from torchpaged.demo import ensure_smollm2

        return ensure_smollm2(offline=not required, progress=False)
    except Exception as error:
        if required:
            raise
        pytest.skip(f"SmolLM2 is not in the cache ({error}); run `torchpaged generate hello` once, or set TORCHPAGED_REQUIRE_MODEL=1")
