"""The Triton kernels around attention, compiled ahead of time for every target."""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot
import launched
from op_inputs.layers import make_gate_heads_inputs, make_gate_inputs

from torchpaged.custom_ops import BACKEND_OPS

BF16 = torch.bfloat16


def check(op: str, target: str, inputs: dict[str, Any]) -> str:
    """PTX of an op's launch, "" on AMD: no spills, accesses of 16 bytes."""
    with launched.recorded(target) as launches:
        getattr(BACKEND_OPS["triton"], op)(**inputs)
    (launch,) = launches
    compiled = launched.compile_launch(launch, target)
    found = aot.resources(compiled)
    assert found["spilled"] == 0, found
    assert found["shared"] <= 4096, found
    if target == "gfx942":
        return ""
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]
    return str(compiled.asm["ptx"])


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("residuals", [False, True])
@pytest.mark.parametrize("width", [576, 2048, 4096, 8192])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_rms_norm_compiles(target: str, width: int, residuals: bool) -> None:
    x, out, residual, post = torch.zeros(4, 3, width, dtype=BF16)
    inputs = {"x": x, "weight": torch.zeros(width, dtype=BF16), "out": out, "eps": 1e-6}
    check("rms_norm", target, inputs | ({"residual": residual, "post_residual": post} if residuals else {}))


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_act_and_mul_compiles(target: str, activation: str) -> None:
    check("act_and_mul", target, make_gate_inputs(width=8192, dtype=BF16) | {"activation": activation})


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_gate_heads_compiles(target: str, heads: int) -> None:
    check("gate_heads", target, make_gate_heads_inputs(heads=heads, width=256, dtype=BF16))


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [960, 4096, 16384])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_embedding_compiles(target: str, width: int, scaled: bool) -> None:
    weight, out = torch.zeros(30, width, dtype=BF16), torch.zeros(5, width, dtype=BF16)
    inputs = {"input_ids": torch.arange(5), "weight": weight, "out": out}
    ptx = check("embedding", target, inputs | ({"scale": torch.ones(())} if scaled else {}))
    if target == "sm_90":
        wait, start = (ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
        assert wait < start, "attention behind it reads early what was written ahead of it"
