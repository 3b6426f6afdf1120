"""The Triton kernels of mixtures of experts compile at models' sizes for GPUs that are not here."""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot
import launched
from op_inputs.experts import make_route_inputs

from torchpaged.custom_ops import BACKEND_OPS

#: Experts, of a token, hidden_size, inner numbers, those of the shared expert.
SIZES = {
    "deepseek_v2_lite": (64, 6, 2048, 1408, 2816),
    "qwen3_next": (512, 10, 2048, 512, 512),
    "mixtral": (8, 2, 4096, 14336, 0),
}


def check(op: str, inputs: dict[str, Any], target: str) -> None:
    with launched.recorded(target) as launches:
        getattr(BACKEND_OPS["triton"], op)(**inputs)
    assert launches
    for launch in launches:
        compiled = launched.compile_launch(launch, target)
        assert aot.resources(compiled)["shared"] <= aot.SHARED_LIMIT[target], launch.name
        aot.check_spills(compiled)


@pytest.mark.slow_cases(but=("sm_90-deepseek_v2_lite-*",))
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_experts_compile(target: str, case: str, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner, shared = SIZES[case]

    def unread(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    check(
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
        check(
            "route_experts",
            make_route_inputs(**sizes, dtype=torch.bfloat16, weight_dtype=weight_dtype),
            target,
        )
