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


def test_the_same_bits_in_every_batch_and_of_every_thread() -> None:
    inputs = make_linear_inputs(**SIZES, tokens=40, activation="silu")
    alone = inputs["out"].clone()
    for token in range(40):
        one = {"x": inputs["x"][token : token + 1], "out": alone[token : token + 1]}
        CPU.linear(**inputs | one)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        CPU.linear(**inputs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(inputs["out"], alone)
