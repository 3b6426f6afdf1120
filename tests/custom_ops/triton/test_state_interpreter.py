"""The state ops' Triton kernels in Triton's interpreter. Runs with TRITON_INTERPRET=1 only: see
test_run_interpreter.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from op_inputs.state import STATE_BATCHES, assert_state_close, make_conv_inputs, make_linear_inputs

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Python starts", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
FAMILIES: dict[str, dict[str, Any]] = {
    "delta": {},
    "ssd": {"delta": False, "key_heads": 1},
    "decay": {"delta": False, "beta": False, "key_heads": 4},
    "kda": {"by_key": True, "key_heads": 4},
    "by_key": {"by_key": True, "delta": False},
}


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("batch", STATE_BATCHES)
def test_convolution_matches_the_oracle(batch: str, width: int) -> None:
    bias, activation = (True, "silu") if width == 4 else (False, "none")
    inputs = make_conv_inputs(STATE_BATCHES[batch], width=width, bias=bias, activation=activation)
    assert_state_close(TRITON, REFERENCE, "causal_conv", inputs)


def test_convolution_of_many_channels_and_a_width_of_eight() -> None:
    inputs = make_conv_inputs(STATE_BATCHES["chunks"], width=8, channels=300, dtype=torch.float16)
    assert_state_close(TRITON, REFERENCE, "causal_conv", inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", STATE_BATCHES)
def test_linear_attention_matches_the_oracle(batch: str, family: str) -> None:
    inputs = make_linear_inputs(STATE_BATCHES[batch], **FAMILIES[family])
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (1, 33), (40, 1)])
def test_shapes_and_dtypes(key_dim: int, value_dim: int, state_dtype: torch.dtype) -> None:
    inputs = make_linear_inputs(
        STATE_BATCHES["verify"],
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=torch.float16,
        state_dtype=state_dtype,
        out_dtype=torch.float32,
    )
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)


def test_pools_of_strides_are_written_in_place() -> None:
    """A pool that is a part of a larger tensor; nothing beside it is touched."""
    inputs = make_linear_inputs(STATE_BATCHES["decode"], key_dim=8, value_dim=8)
    big = torch.full((9, 2, 4, 10, 16), float("nan"))
    big[:, 1, :, 1:9, 4:12] = inputs["state"]
    inputs["state"] = big[:, 1, :, 1:9, 4:12]
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)
    assert int(big.isfinite().sum()) == 3 * 4 * 8 * 8


def test_keys_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ArgumentError, match="^q: expected keys of at most 512"):
        TRITON.linear_attention(**make_linear_inputs(STATE_BATCHES["decode"], key_dim=513, value_dim=2))


def test_no_rows_give_zeros() -> None:
    conv, linear = (make(STATE_BATCHES["decode"]) for make in (make_conv_inputs, make_linear_inputs))
    for op, given in (("causal_conv", conv), ("linear_attention", linear)):
        given |= {name: given[name][:0] for name in ("state_slots", "seq_lens")}
        given["query_start_loc"] = given["query_start_loc"][:1]
        getattr(TRITON, op)(**given)
        assert not given["out"].any()
