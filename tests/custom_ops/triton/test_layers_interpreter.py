"""embedding, rms_norm, act_and_mul and linear of the Triton backend in the interpreter. Runs with
TRITON_INTERPRET=1 only: see test_run_interpreter.py."""

import os
from typing import Any

import pytest
import torch
from op_inputs.layers import (
    LINEAR_CASES,
    NORM_CASES,
    assert_layer_close,
    make_embedding_inputs,
    make_gate_heads_inputs,
    make_gate_inputs,
    make_linear_inputs,
    make_norm_inputs,
)

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Python starts", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
# float16 and float32 only: the interpreter truncates where it should round to bfloat16, and GPUs do not
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [1, 40, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype: torch.dtype, width: int, scaled: bool) -> None:
    inputs = make_embedding_inputs(width=width, scaled=scaled, dtype=dtype)
    TRITON.embedding(**inputs)
    got = inputs["out"].clone()
    REFERENCE.embedding(**inputs)
    assert torch.equal(got, inputs["out"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear(case: str, dtype: torch.dtype) -> None:
    assert_layer_close(TRITON, "linear", make_linear_inputs(**LINEAR_CASES[case], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORM_CASES)
def test_rms_norm(case: str, dtype: torch.dtype) -> None:
    assert_layer_close(TRITON, "rms_norm", make_norm_inputs(**NORM_CASES[case], dtype=dtype))


@pytest.mark.parametrize("width", [1, 40, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_act_and_mul(activation: str, dtype: torch.dtype, width: int) -> None:
    assert_layer_close(
        TRITON, "act_and_mul", make_gate_inputs(activation=activation, dtype=dtype, width=width)
    )


@pytest.mark.parametrize("of_head", [False, True])
@pytest.mark.parametrize("sizes", [(3, 40), (1, 7), (9, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_heads(dtype: torch.dtype, sizes: tuple[int, int], of_head: bool) -> None:
    heads, width = sizes
    given = make_gate_heads_inputs(heads=heads, width=width, of_head=of_head, dtype=dtype)
    assert_layer_close(TRITON, "gate_heads", given)


def test_no_tokens_and_refusals() -> None:
    out = torch.empty(0, 24)
    TRITON.linear(torch.empty(0, 40), torch.randn(24, 40), out, norm_weight=torch.ones(40))
    TRITON.embedding(torch.empty(0, dtype=torch.int64), torch.randn(9, 24), out)
    TRITON.rms_norm(torch.empty(0, 40), torch.ones(40), torch.empty(0, 40))
    TRITON.act_and_mul(torch.empty(0, 48), out)
    TRITON.gate_heads(*torch.empty(3, 0, 2, 24))
    calls: list[tuple[Any, dict[str, Any]]] = [
        (TRITON.linear, make_linear_inputs(dtype=torch.float64)),
        (TRITON.rms_norm, make_norm_inputs() | {"weight": torch.ones(3)}),
        (TRITON.act_and_mul, make_gate_inputs() | {"activation": "tanh"}),
        (TRITON.gate_heads, make_gate_heads_inputs(dtype=torch.float64)),
        (TRITON.embedding, make_embedding_inputs(dtype=torch.float64)),
    ]
    for op, inputs in calls:
        with pytest.raises(torchpaged.ArgumentError):
            op(**inputs)
        assert bool(inputs["out"].isnan().all())


def test_weights_that_require_a_gradient() -> None:
    layer, x, out = torch.nn.Linear(40, 24), torch.randn(3, 40), torch.empty(3, 24)
    TRITON.linear(x, layer.weight, out, bias=layer.bias)
    torch.testing.assert_close(out, layer(x).detach())
