"""The state ops' Triton kernels compile at models' sizes for GPUs that are not here."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot
import launched
from op_inputs.state import STATE_BATCHES, make_conv_inputs, make_linear_inputs

from torchpaged.custom_ops import BACKEND_OPS

BF16 = torch.bfloat16
#: A TP2 shard of Qwen3-Next; Bamba's Mamba 2, with states of float32; Granite 4's; Mamba 1 of Jamba; Kimi
#: Linear's; RecurrentGemma's RG-LRU.
LINEAR: dict[str, dict[str, Any]] = {
    "qwen3_next": {"key_heads": 8, "heads": 16, "key_dim": 128, "value_dim": 128, "state_dtype": BF16},
    "bamba": {"key_heads": 1, "heads": 16, "key_dim": 128, "value_dim": 64, "delta": False},
    "granite": {"key_heads": 1, "heads": 6, "key_dim": 256, "value_dim": 64, "delta": False},
    "jamba": {"key_heads": 1, "heads": 64, "key_dim": 16, "value_dim": 1, "delta": False, "by_key": True},
    "recurrent_gemma": {
        "key_heads": 1,
        "heads": 64,
        "key_dim": 1,
        "value_dim": 1,
        "delta": False,
        "beta": False,
    },
    "kimi": {"key_heads": 16, "heads": 16, "key_dim": 128, "value_dim": 128, "by_key": True},
}


def check(op: str, inputs: dict[str, Any], target: str) -> None:
    with launched.recorded(target) as launches:
        getattr(BACKEND_OPS["triton"], op)(**inputs)
    assert launches
    for launch in launches:
        compiled = launched.compile_launch(launch, target)
        assert aot.resources(compiled)["shared"] <= aot.SHARED_LIMIT[target], launch.name
        aot.check_spills(compiled)


@pytest.mark.slow_cases(but=("sm_90-*-decode",))
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_linear_attention_compiles(target: str, case: str, batch: str) -> None:
    check("linear_attention", make_linear_inputs(STATE_BATCHES[batch], dtype=BF16, **LINEAR[case]), target)


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_causal_conv_compiles(target: str, batch: str) -> None:
    check("causal_conv", make_conv_inputs(STATE_BATCHES[batch], channels=4096, dtype=BF16), target)
