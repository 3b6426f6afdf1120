"""route_experts and apply_experts of the Triton backend in the interpreter. Runs with TRITON_INTERPRET=1
only: see test_run_interpreter.py."""

import os

import pytest
import torch
from op_inputs.experts import (
    EXPERTS_CASES,
    ROUTE_CASES,
    assert_experts_close,
    assert_route_close,
    assert_token_is_alone,
    make_experts_inputs,
    make_route_inputs,
)

from torchpaged.custom_ops import BACKEND_OPS

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Python starts", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
TRITON = BACKEND_OPS["triton"]
# float16 and float32 only: the interpreter truncates where it should round to bfloat16, and GPUs do not
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROUTE_CASES)
def test_route(case: str, dtype: torch.dtype) -> None:
    assert_route_close(TRITON, make_route_inputs(**ROUTE_CASES[case], dtype=dtype))


def test_scores_of_nan_give_weights_of_nan() -> None:
    inputs = make_route_inputs(scoring="sigmoid")
    inputs["weight"][5] = float("nan")
    TRITON.route_experts(**inputs)
    assert inputs["ids"][:, 0].tolist() == [5] * 5
    assert inputs["weights"].isnan().sum(1).tolist() == [1] * 5


def test_a_group_of_nan_and_minus_infinity_is_chosen_first() -> None:
    inputs = make_route_inputs(
        scoring="sigmoid", num_experts=16, num_groups=4, top_groups=1, group_best=2, norm_eps=0.0
    )
    inputs["weight"][9] = float("nan")
    bias = torch.zeros(16)
    bias[8:12] = -torch.inf
    TRITON.route_experts(**inputs | {"bias": bias})
    assert inputs["ids"][:, 0].tolist() == [9] * 5
    assert bool(inputs["weights"].isnan().all())


@pytest.mark.slow_cases(but=("*-torch.float16", "one_token-*"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EXPERTS_CASES)
def test_experts(case: str, dtype: torch.dtype) -> None:
    assert_experts_close(TRITON, make_experts_inputs(**EXPERTS_CASES[case], dtype=dtype))


def test_a_token_does_not_depend_on_the_others() -> None:
    inputs = make_experts_inputs(num_tokens=20, shared=16)
    assert_token_is_alone(TRITON, inputs)


def test_no_tokens() -> None:
    experts, route = make_experts_inputs(num_tokens=1), make_route_inputs(num_tokens=1)
    TRITON.apply_experts(**experts | {name: experts[name][:0] for name in ("x", "ids", "weights", "out")})
    TRITON.route_experts(**route | {name: route[name][:0] for name in ("x", "ids", "weights")})
