"""delta_step on a CPU: the oracle, what is refused, and that it is its parts."""

from typing import Any

import pytest
import torch
from op_inputs.delta_step import SIZES, assert_delta_step_close, make_delta_step_inputs
from op_inputs.state import STATE_BATCHES, clone

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
BATCHES = ("decode", "decode_begins", "decode_padded", "no_tokens", "mixed_empty", "left_padding")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_oracle(size: str, batch: str, dtype: torch.dtype) -> None:
    weight_dtype = torch.float32 if dtype != torch.float64 and size == "three" else None
    given = {"dtype": dtype, "weight_dtype": weight_dtype, **SIZES[size]}
    ops = BACKEND_OPS["default"]
    assert_delta_step_close(ops, REFERENCE, make_delta_step_inputs(STATE_BATCHES[batch], **given))


BAD: dict[str, tuple[str, Any]] = {
    "a_channel_too_many": ("x", lambda a: {"x": torch.zeros(3, 385)}),
    "keys_of_other_heads": ("x", lambda a: {"x": torch.zeros(3, 240 + 4 * 48)}),
    "no_keys": ("x", lambda a: {"x": torch.zeros(3, 240)}),
    "a_of_other_heads": ("a", lambda a: {"a": a["a"][:, :2]}),
    "a_log_of_other_heads": ("a_log", lambda a: {"a_log": a["a_log"][:3]}),
    "a_bound_of_zero": ("bound", lambda a: {"bound": 0.0}),
    "an_unknown_activation": ("activation", lambda a: {"activation": "gelu"}),
    "b_of_another_dtype": ("b", lambda a: {"b": a["b"].half()}),
    "a_short_norm": ("norm_weight", lambda a: {"norm_weight": torch.zeros(39)}),
    "a_gate_too_narrow": ("gate", lambda a: {"gate": a["gate"][..., :40]}),
    "a_wide_window": ("weight", lambda a: {"weight": torch.zeros(384, 9)}),
    "another_window": ("conv_state", lambda a: {"conv_state": a["conv_state"][:, :2]}),
    "a_state_of_half": ("state", lambda a: {"state": a["state"].half()}),
    "several_tokens_of_a_row": (
        "max_query_len",
        lambda a: {"query_start_loc": torch.tensor([0, 2, 3, 3], dtype=torch.int32)},
    ),
    "one_slot_twice": ("state_slots", lambda a: {"state_slots": torch.full((3,), 2, dtype=torch.int32)}),
    "no_eps": ("eps", lambda a: {"eps": 0.0}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].double()}),
    "out_on_the_gate": ("gate", lambda a: {"gate": a["out"]}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    name, change = BAD[case]
    given = make_delta_step_inputs(STATE_BATCHES["decode"])
    given |= change(given)
    before = clone(given)
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        REFERENCE.delta_step(**given)
    for each, x in before.items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(given[each], x, rtol=0, atol=0, equal_nan=True)
