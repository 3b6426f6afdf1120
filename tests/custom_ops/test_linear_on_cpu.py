"""The native kernel of `linear`: panels of a weight, and bits that other tokens do not change; the rest:
test_layer_ops.py."""

from typing import Any

import pytest
import torch
from op_inputs.layers import assert_layer_close, make_linear_inputs

from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.usefixtures("native")
CPU = BACKEND_OPS["cpu"]
SIZES: dict[str, Any] = {"inputs": 1032, "outputs": 134}  # several panels, and a rest of each kind


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_several_panels(dtype: torch.dtype, tokens: int) -> None:
    inputs = make_linear_inputs(**SIZES, tokens=tokens, dtype=dtype, norm=True, bias=True)
    assert_layer_close(CPU, "linear", inputs)


@pytest.mark.parametrize("inputs", [1, 31, 33, 513, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_any_width_at_any_address(dtype: torch.dtype, inputs: int) -> None:
    """Rows that follow one another at odd numbers, the first one, too."""
    for tokens, outputs in ((1, 1), (3, 47), (8, 50), (17, 97)):
        made = make_linear_inputs(inputs=inputs, outputs=outputs, tokens=tokens, dtype=dtype)
        for name in ("x", "weight"):
            rows, columns = made[name].shape
            odd = torch.full((1 + rows * (columns + 2),), float("nan"), dtype=dtype)
            strided = odd[1:].view(rows, columns + 2)[:, :columns]
            made[name] = strided.copy_(made[name])
        assert_layer_close(CPU, "linear", made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_tokens_or_numbers(dtype: torch.dtype) -> None:
    out = torch.full((0, 5), 1.0, dtype=dtype)
    CPU.linear(torch.zeros(0, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype), out)
    out = torch.full((2, 5), float("nan"), dtype=dtype)
    CPU.linear(torch.zeros(2, 0, dtype=dtype), torch.zeros(5, 0, dtype=dtype), out)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_in_every_batch_and_of_every_thread(dtype: torch.dtype, threads: Any) -> None:
    inputs = make_linear_inputs(**SIZES, tokens=40, dtype=dtype, activation="silu")
    alone = inputs["out"].clone()
    for token in range(40):
        one = {"x": inputs["x"][token : token + 1], "out": alone[token : token + 1]}
        CPU.linear(**inputs | one)
    threads(3)
    CPU.linear(**inputs)
    assert torch.equal(inputs["out"], alone)
