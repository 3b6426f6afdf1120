"""mamba2_step on a CPU: the oracle, what is refused, and that it is its parts."""

from typing import Any

import pytest
import torch
from op_inputs.mamba2_step import MAMBA2_SIZES, assert_mamba2_step_close, make_mamba2_step_inputs
from op_inputs.state import STATE_BATCHES, clone

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
BATCHES = ("decode", "decode_begins", "decode_padded", "no_tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", MAMBA2_SIZES)
def test_matches_the_oracle(size: str, batch: str, dtype: torch.dtype) -> None:
    weight_dtype = torch.float32 if dtype != torch.float64 and size == "nemotron" else None
    given = {"dtype": dtype, "weight_dtype": weight_dtype, **MAMBA2_SIZES[size]}
    ops = BACKEND_OPS["default"]
    assert_mamba2_step_close(ops, REFERENCE, make_mamba2_step_inputs(STATE_BATCHES[batch], **given))


BAD: dict[str, tuple[str, Any]] = {
    "a_channel_too_many": ("x", lambda a: {"x": torch.zeros(3, 385)}),
    "keys_of_other_groups": ("x", lambda a: {"x": torch.zeros(3, 240 + 4 * 48)}),
    "dt_of_other_heads": ("dt", lambda a: {"dt": a["dt"][:, :2]}),
    "dt_of_another_dtype": ("dt", lambda a: {"dt": a["dt"].half()}),
    "a_log_of_other_heads": ("a_log", lambda a: {"a_log": a["a_log"][:3]}),
    "a_short_skip": ("skip_weight", lambda a: {"skip_weight": torch.zeros(5)}),
    "a_skip_of_half": ("skip_weight", lambda a: {"skip_weight": a["skip_weight"].half()}),
    "a_gate_of_two_dimensions": ("gate", lambda a: {"gate": a["gate"].flatten(1)}),
    "a_gate_too_narrow": ("gate", lambda a: {"gate": a["gate"][..., :20]}),
    "another_window": ("conv_state", lambda a: {"conv_state": a["conv_state"][:, :2]}),
    "a_state_of_half": ("state", lambda a: {"state": a["state"].half()}),
    "steps_of_no_range": ("max_step", lambda a: {"min_step": 1.0, "max_step": 0.5}),
    "several_tokens_of_a_row": (
        "max_query_len",
        lambda a: {"query_start_loc": torch.tensor([0, 2, 3, 3], dtype=torch.int32)},
    ),
    "one_slot_twice": ("state_slots", lambda a: {"state_slots": torch.full((3,), 2, dtype=torch.int32)}),
    "a_short_semaphore": ("semaphore", lambda a: {"semaphore": a["semaphore"][:8]}),
    "a_semaphore_of_int64": ("semaphore", lambda a: {"semaphore": a["semaphore"].long()}),
    "a_semaphore_that_is_set": ("semaphore", lambda a: {"semaphore": a["semaphore"] + 1}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].double()}),
    "out_on_the_gate": ("gate", lambda a: {"gate": a["out"]}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    name, change = BAD[case]
    given = make_mamba2_step_inputs(STATE_BATCHES["decode"])
    given |= change(given)
    before = clone(given)
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        REFERENCE.mamba2_step(**given)
    for each, x in before.items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(given[each], x, rtol=0, atol=0, equal_nan=True)
