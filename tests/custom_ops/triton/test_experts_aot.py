"""The Triton kernels of mixtures of experts compile at models' sizes for GPUs that are not here; those of
layers for each target."""

from typing import Any

import aot
import launched
import pytest
import torch
from op_inputs.experts import make_route_inputs
from op_inputs.layers import make_gate_heads_inputs, make_gate_inputs

#: Experts, of a token, hidden_size, inner numbers, those of the shared expert.
SIZES = {
    "deepseek_v2_lite": (64, 6, 2048, 1408, 2816),
    "qwen3_next": (512, 10, 2048, 512, 512),
    "mixtral": (8, 2, 4096, 14336, 0),
}


@pytest.mark.slow_cases(but=("sm_90-deepseek_v2_lite-*",))
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_experts_compile(target: str, case: str, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner, shared = SIZES[case]

    def unread(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    launched.check_without_spills(
        "apply_experts",
        {
            "x": unread(num_tokens, hidden),
            "gate_up": unread(num_experts, 2 * inner, hidden),
            "down": unread(num_experts, hidden, inner),
            "ids": unread(num_tokens, top_k, dtype=torch.int32),
            "weights": unread(num_tokens, top_k, dtype=torch.float32),
            "out": unread(num_tokens, hidden),
            "shared_gate_up": unread(2 * shared, hidden) if shared else None,
            "shared_down": unread(hidden, shared) if shared else None,
            "shared_gate": unread(hidden) if case == "qwen3_next" else None,
            "residual": unread(num_tokens, hidden),
        },
        target,
    )


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts": 64, "top_k": 6, "width": 2048},
        {"num_experts": 256, "top_k": 8, "width": 7168, "num_groups": 8, "top_groups": 4, "group_best": 2}
        | {"scoring": "sigmoid", "bias": True, "norm_eps": 1e-20},
    ],
    ids=["deepseek_v2_lite", "deepseek_v3"],
)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_route_compiles(target: str, sizes: dict[str, Any]) -> None:
    for weight_dtype in (torch.bfloat16, torch.float32):
        launched.check_without_spills(
            "route_experts",
            make_route_inputs(**sizes, dtype=torch.bfloat16, weight_dtype=weight_dtype),
            target,
        )


BF16 = torch.bfloat16


def check(op: str, target: str, inputs: dict[str, Any]) -> str:
    """PTX of an op's launch, "" on AMD: no spills, accesses of 16 bytes."""
    (compiled,) = launched.check_without_spills(op, inputs, target)
    assert aot.resources(compiled)["shared"] <= 4096
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
