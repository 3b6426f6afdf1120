"""route_experts and apply_experts: the reference against plain formulas, all kernels within its error budget,
refusals."""

from typing import Any

import pytest
import torch
from kernels import DTYPES, Kernels, over
from op_inputs.experts import (
    EXPERTS_CASES,
    ROUTE_CASES,
    assert_experts_close,
    assert_route_close,
    assert_token_is_alone,
    make_experts_inputs,
    make_route_inputs,
)
from torch import Tensor

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]


@pytest.mark.parametrize("case", ROUTE_CASES)
def test_choice_by_hand(case: str) -> None:
    """Token by token, in lists."""
    inputs = make_route_inputs(**ROUTE_CASES[case])
    REFERENCE.route_experts(**inputs)
    logits, options = inputs["x"] @ inputs["weight"].T, {**DEFAULTS, **inputs}
    for token in range(len(logits)):
        row = logits[token]
        scores = (row.softmax(0) if options["scoring"] == "softmax" else row.sigmoid()).tolist()
        bias = [0.0] * len(scores) if inputs["bias"] is None else inputs["bias"].tolist()
        choice = [score + more for score, more in zip(scores, bias, strict=True)]
        size = len(scores) // options["num_groups"]
        groups = [list(range(n, n + size)) for n in range(0, len(scores), size)]
        best = [sum(sorted(choice[e] for e in group)[-options["group_best"] :]) for group in groups]
        top = sorted(range(len(groups)), key=lambda n: -best[n])[: options["top_groups"]]
        left = sorted((e for n in sorted(top) for e in groups[n]), key=lambda e: -choice[e])
        chosen = left[: inputs["ids"].shape[1]]
        assert inputs["ids"][token].tolist() == chosen
        total = sum(scores[e] for e in chosen) + options["norm_eps"] if options["norm_eps"] is not None else 1
        want = torch.tensor([scores[e] / total * options["scale"] for e in chosen])
        torch.testing.assert_close(inputs["weights"][token], want)


DEFAULTS = {"scoring": "softmax", "num_groups": 1, "top_groups": 1, "group_best": 1, "norm_eps": None}
DEFAULTS |= {"scale": 1.0}


@pytest.mark.parametrize("case", ROUTE_CASES)
@over("triton", dtype=DTYPES)
def test_routes_are_the_references(on: Kernels, dtype: torch.dtype, case: str) -> None:
    assert_route_close(on.ops, make_route_inputs(**ROUTE_CASES[case], dtype=dtype, device=on.device))


@over("reference", "triton")
def test_scores_of_nan_give_weights_of_nan(on: Kernels) -> None:
    inputs = make_route_inputs(scoring="sigmoid", device=on.device)
    inputs["weight"][5] = float("nan")
    on.ops.route_experts(**inputs)
    assert inputs["ids"][:, 0].tolist() == [5] * 5
    assert inputs["weights"].isnan().sum(1).tolist() == [1] * 5


@over("triton")
def test_a_group_of_nan_and_minus_infinity_is_chosen_first(on: Kernels) -> None:
    groups = {"num_experts": 16, "num_groups": 4, "top_groups": 1, "group_best": 2}
    inputs = make_route_inputs(scoring="sigmoid", norm_eps=0.0, **groups, device=on.device)
    inputs["weight"][9] = float("nan")
    bias = torch.zeros(16, device=on.device)
    bias[8:12] = -torch.inf
    on.ops.route_experts(**inputs | {"bias": bias})
    assert inputs["ids"][:, 0].tolist() == [9] * 5
    assert bool(inputs["weights"].isnan().all())


@pytest.mark.slow_cases("triton-cpu-*", but=("*-torch.float16-*", "*-one_token"))
@pytest.mark.parametrize("case", EXPERTS_CASES)
@over("default", "triton", dtype=DTYPES)
def test_experts_within_the_error_budget(on: Kernels, dtype: torch.dtype, case: str) -> None:
    if case == "one_token_of_long_rows" and dtype == torch.float32 and on.device == "cuda":
        pytest.skip("sums 2,100 products one after the other: beyond the budget of a product in pieces")
    assert_experts_close(on.ops, make_experts_inputs(**EXPERTS_CASES[case], dtype=dtype, device=on.device))


@over("cpu", "triton", gpu=())
def test_a_token_does_not_depend_on_the_others(on: Kernels) -> None:
    assert_token_is_alone(on.ops, make_experts_inputs(num_tokens=20, shared=16))


@over("default", "triton")
def test_no_tokens(on: Kernels) -> None:
    inputs = make_experts_inputs(num_tokens=1, device=on.device)
    on.ops.apply_experts(**inputs | {name: inputs[name][:0] for name in ("x", "ids", "weights", "out")})
    route = make_route_inputs(num_tokens=1, device=on.device)
    on.ops.route_experts(**route | {name: route[name][:0] for name in ("x", "ids", "weights")})


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype)


#: Name -> (op, argument, what is changed).
BAD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "x_dims": ("route_experts", "x", {"x": _zeros(40)}),
    "columns": ("route_experts", "weight", {"weight": _zeros(8, 41)}),
    "weight_dtype": ("route_experts", "weight", {"weight": _zeros(8, 40, dtype=torch.bfloat16)}),
    "ids_dtype": ("route_experts", "ids", {"ids": _zeros(5, 2, dtype=torch.int64)}),
    "too_many": ("route_experts", "ids", {"num_groups": 8, "top_groups": 1}),
    "weights": ("route_experts", "weights", {"weights": _zeros(5, 3)}),
    "bias": ("route_experts", "bias", {"bias": _zeros(7)}),
    "scoring": ("route_experts", "scoring", {"scoring": "relu"}),
    "groups": ("route_experts", "num_groups", {"num_groups": 3}),
    "top_groups": ("route_experts", "top_groups", {"num_groups": 2, "top_groups": 3}),
    "group_best": ("route_experts", "group_best", {"num_groups": 4, "top_groups": 2, "group_best": 3}),
    "norm_eps": ("route_experts", "norm_eps", {"norm_eps": -1.0}),
    "tokens": ("apply_experts", "x", make_experts_inputs(num_tokens=65)),
    "choices": ("apply_experts", "ids", make_experts_inputs(num_experts=40, top_k=33)),
    "gate_up": ("apply_experts", "gate_up", {"gate_up": _zeros(8, 63, 64)}),
    "down": ("apply_experts", "down", {"down": _zeros(8, 63, 32)}),
    "down_dtype": ("apply_experts", "down", {"down": _zeros(8, 64, 32, dtype=torch.float64)}),
    "pairs": ("apply_experts", "ids", {"ids": _zeros(4, 3, dtype=torch.int32)}),
    "ids_strides": ("apply_experts", "ids", {"ids": _zeros(3, 5, dtype=torch.int32).T}),
    "shares": ("apply_experts", "weights", {"weights": _zeros(5, 2)}),
    "shares_dtype": ("apply_experts", "weights", {"weights": _zeros(5, 3, dtype=torch.float64)}),
    "activation": ("apply_experts", "activation", {"activation": "none"}),
    "half_shared": ("apply_experts", "shared_down", {"shared_down": None}),
    "shared_rows": ("apply_experts", "shared_gate_up", {"shared_gate_up": _zeros(46, 64)}),
    "gate_alone": (
        "apply_experts",
        "shared_gate",
        {"shared_down": None, "shared_gate_up": None, "shared_gate": _zeros(64)},
    ),
    "residual": ("apply_experts", "residual", {"residual": _zeros(4, 64)}),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str, backend: str) -> None:
    """By the native kernel as a RuntimeError."""
    op, argument, change = BAD[name]
    if backend == "cpu" and op == "route_experts":
        pytest.skip("is the reference")
    good = make_route_inputs() if op == "route_experts" else make_experts_inputs(shared=24, residual=True)
    kind = RuntimeError if backend == "cpu" else torchpaged.ArgumentError
    with pytest.raises(kind, match=rf"\b{argument}: expected"):
        getattr(BACKEND_OPS[backend], op)(**(good | change))
    assert bool(good["weights" if op == "route_experts" else "out"].isnan().all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_outputs_apart_from_inputs(backend: str) -> None:
    inputs = make_experts_inputs()
    with pytest.raises((RuntimeError, torchpaged.ArgumentError), match="memory apart from out"):
        BACKEND_OPS[backend].apply_experts(**{**inputs, "out": inputs["x"]})
