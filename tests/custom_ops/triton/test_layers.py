"""The Triton kernels around attention, compiled ahead of time for every target."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import aot

from torchpaged.custom_ops.layers.triton.act_and_mul import act_and_mul_kernel
from torchpaged.custom_ops.layers.triton.rms_norm import num_warps_of, rms_norm_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2

interpreting = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.skipif(interpreting, reason="compiles for GPUs")
@pytest.mark.parametrize("residuals", [False, True])
@pytest.mark.parametrize("width", [576, 2048, 4096, 8192])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_rms_norm_compiles(target: str, width: int, residuals: bool) -> None:
    """No spills; 16-byte accesses where a lane has 8 numbers at least."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "bf16")
    constants = {"WIDTH": width, "WIDTH_PAD": next_power_of_2(width)}
    optional = ("residual_ptr", "post_ptr")
    pointers |= dict.fromkeys(optional, "bf16") if residuals else {}
    constants |= {} if residuals else dict.fromkeys(optional)
    compiled = aot.compile_kernel(
        rms_norm_kernel, target, pointers, constants, ("eps", "offset"), num_warps=num_warps_of(width)
    )
    found = aot.resources(compiled)
    assert found["spilled"] == 0, found
    assert found["shared"] <= 4096, found
    if target != "gfx942":
        assert "ld.global.v4" in compiled.asm["ptx"]
        assert "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.skipif(interpreting, reason="compiles for GPUs")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_act_and_mul_compiles(target: str, activation: str) -> None:
    constants = {"WIDTH": 8192, "PIECE": 1024, "ACTIVATION": activation}
    compiled = aot.compile_kernel(
        act_and_mul_kernel, target, {"gate_up_ptr": "bf16", "out_ptr": "bf16"}, constants, num_warps=4
    )
    assert aot.resources(compiled)["spilled"] == 0
    if target != "gfx942":
        assert "ld.global.v4" in compiled.asm["ptx"]
        assert "st.global.v4" in compiled.asm["ptx"]
