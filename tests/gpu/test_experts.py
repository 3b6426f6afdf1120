"""Mixtures of experts at models' sizes on a GPU: the ops against the reference, in graphs, with tokens that
do not depend on each other."""

from typing import Any

import pytest
import torch
from captured import captured
from op_inputs.experts import (
    ROUTE_CASES,
    assert_experts_close,
    assert_route_close,
    assert_token_is_alone,
    make_experts_inputs,
    make_route_inputs,
)

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.cuda import few_experts

pytestmark = pytest.mark.gpu
TRITON = BACKEND_OPS["triton"]
#: A layer of DeepSeek-V2-Lite, of Qwen3-Next with fewer experts, and half of Mixtral's.
SIZES: dict[str, dict[str, Any]] = {
    "v2_lite": {"num_experts": 64, "top_k": 6, "hidden": 2048, "inner": 1408, "shared": 2816},
    "qwen3_next": {
        "num_experts": 128,
        "top_k": 10,
        "hidden": 2048,
        "inner": 512,
        "shared": 512,
        "shared_gate": True,
    },
    "mixtral": {"num_experts": 8, "top_k": 2, "hidden": 4096, "inner": 7168},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ROUTE_CASES)
def test_a_router_of_float32(case: str, dtype: torch.dtype) -> None:
    options = {**ROUTE_CASES[case], "weight_dtype": torch.float32}
    assert_route_close(TRITON, make_route_inputs(**options, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("width", [2048, 7168, 16384])
def test_route_of_models(width: int) -> None:
    options = ROUTE_CASES["v3"] | {"num_tokens": 64, "width": width}
    assert_route_close(TRITON, make_route_inputs(**options, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("case", SIZES)
def test_experts_of_models(case: str, num_tokens: int, backend: str) -> None:
    options = {**SIZES[case], "num_tokens": num_tokens, "residual": True}
    inputs = make_experts_inputs(**options, dtype=torch.bfloat16, device="cuda")
    assert_experts_close(BACKEND_OPS[backend], inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["twice", "outside", "skips"])
def test_few_tokens_of_the_cuda_backend(case: str, dtype: torch.dtype) -> None:
    """Experts twice in a token, none at all, in the kernel for at most 8 tokens."""
    sizes = {"num_experts": 16, "top_k": 4, "hidden": 1024, "inner": 256, "shared": 128, "shared_gate": True}
    inputs = make_experts_inputs(
        **sizes, **{case: True}, num_tokens=5, residual=True, activation="gelu", dtype=dtype, device="cuda"
    )
    assert few_experts.why_not(ExpertsCall(**inputs), (9, 0)) is None
    assert_experts_close(BACKEND_OPS["cuda"], inputs)


@pytest.mark.parametrize(("backend", "num_tokens"), [("triton", 24), ("cuda", 8)])
def test_a_token_does_not_depend_on_the_others(backend: str, num_tokens: int) -> None:
    inputs = make_experts_inputs(
        **SIZES["v2_lite"], num_tokens=num_tokens, dtype=torch.bfloat16, device="cuda"
    )
    BACKEND_OPS[backend].apply_experts(**inputs)
    inputs["residual"] = -inputs["out"].clone()  # the last bits of float32 are left
    assert_token_is_alone(BACKEND_OPS[backend], inputs)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_layers_in_a_graph(backend: str) -> None:
    """Ten mixtures one behind the other, whose kernels start early: what a replay gives for other tokens is
    what eager calls give."""
    layers = [
        (
            make_route_inputs(
                num_experts=16, top_k=6, width=2048, seed=n, dtype=torch.bfloat16, device="cuda"
            ),
            make_experts_inputs(**SIZES["v2_lite"], seed=n, dtype=torch.bfloat16, device="cuda"),
        )
        for n in range(10)
    ]
    for _route, experts in layers:  # without norms between them sums would grow beyond all numbers
        experts["down"].mul_(0.1), experts["shared_down"].mul_(0.1)
    first = torch.randn(5, 2048, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        x = first
        for route, experts in layers:
            BACKEND_OPS[backend].route_experts(**{**route, "x": x})
            out = torch.empty_like(x)
            routed = {"ids": route["ids"], "weights": route["weights"]}
            BACKEND_OPS[backend].apply_experts(**{**experts, **routed, "x": x, "residual": x, "out": out})
            x = out
        return x

    graph, out = captured(run)
    for seed in range(3):
        torch.manual_seed(seed)
        first.copy_(torch.randn(5, 2048))
        graph.replay()
        got = out.clone()
        torch.cuda.synchronize()
        assert torch.equal(got, run())
        assert bool(got.isfinite().all())
