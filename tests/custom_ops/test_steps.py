"""delta_step and mamba2_step: all kernels but CUDA's against the oracle, and what is refused."""

from typing import Any

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.delta_step import SIZES, assert_delta_step_close, make_delta_step_inputs
from op_inputs.mamba2_step import MAMBA2_SIZES, assert_mamba2_step_close, make_mamba2_step_inputs
from op_inputs.state import STATE_BATCHES, assert_refused

from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
MAKE: dict[str, Any] = {"delta_step": make_delta_step_inputs, "mamba2_step": make_mamba2_step_inputs}
CHECK: dict[str, Any] = {"delta_step": assert_delta_step_close, "mamba2_step": assert_mamba2_step_close}
STEPS = [("delta_step", size) for size in SIZES] + [("mamba2_step", size) for size in MAMBA2_SIZES]
BATCHES = ("decode", "decode_begins", "decode_padded", "no_tokens", "mixed_empty", "left_padding")
BATCH = Values(BATCHES, ("decode_padded", "decode_begins", "no_tokens"), ())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.slow_cases("triton-cpu-*", but=("triton-cpu-*odd", "triton-cpu-*-mamba2_step-nemotron"))
@pytest.mark.parametrize(("op", "size"), STEPS)
@over("default", "triton", gpu=(), batch=BATCH, dtype=Values(DTYPES, (torch.bfloat16,), ()))
def test_matches_the_oracle(on: Kernels, op: str, size: str, batch: str, dtype: torch.dtype) -> None:
    if op == "mamba2_step" and batch in BATCHES[4:]:
        pytest.skip("of delta_step")
    weights = torch.float32 if dtype != torch.float64 and size in ("three", "nemotron") else None
    sizes = (SIZES if op == "delta_step" else MAMBA2_SIZES)[size]
    inputs = MAKE[op](STATE_BATCHES[batch], dtype=dtype, weight_dtype=weights, **sizes)
    CHECK[op](on.ops, REFERENCE, inputs)


#: Of both ops, and of each: what is wrong -> the argument that is named, and the change.
BOTH: dict[str, tuple[str, Any]] = {
    "a_channel_too_many": ("x", lambda a: {"x": torch.zeros(3, 385)}),
    "a_log_of_other_heads": ("a_log", lambda a: {"a_log": a["a_log"][:3]}),
    "another_window": ("conv_state", lambda a: {"conv_state": a["conv_state"][:, :2]}),
    "a_state_of_half": ("state", lambda a: {"state": a["state"].half()}),
    "several_tokens_of_a_row": (
        "max_query_len",
        lambda a: {"query_start_loc": torch.tensor([0, 2, 3, 3], dtype=torch.int32)},
    ),
    "one_slot_twice": ("state_slots", lambda a: {"state_slots": torch.full((3,), 2, dtype=torch.int32)}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].double()}),
    "out_on_the_gate": ("gate", lambda a: {"gate": a["out"]}),
}
DELTA: dict[str, tuple[str, Any]] = {
    "keys_of_other_heads": ("x", lambda a: {"x": torch.zeros(3, 240 + 4 * 48)}),
    "no_keys": ("x", lambda a: {"x": torch.zeros(3, 240)}),
    "a_of_other_heads": ("a", lambda a: {"a": a["a"][:, :2]}),
    "a_bound_of_zero": ("bound", lambda a: {"bound": 0.0}),
    "an_unknown_activation": ("activation", lambda a: {"activation": "gelu"}),
    "b_of_another_dtype": ("b", lambda a: {"b": a["b"].half()}),
    "a_short_norm": ("norm_weight", lambda a: {"norm_weight": torch.zeros(39)}),
    "a_gate_too_narrow": ("gate", lambda a: {"gate": a["gate"][..., :40]}),
    "a_wide_window": ("weight", lambda a: {"weight": torch.zeros(384, 9)}),
    "no_eps": ("eps", lambda a: {"eps": 0.0}),
}
MAMBA2: dict[str, tuple[str, Any]] = {
    "keys_of_other_groups": ("x", lambda a: {"x": torch.zeros(3, 240 + 4 * 48)}),
    "dt_of_other_heads": ("dt", lambda a: {"dt": a["dt"][:, :2]}),
    "dt_of_another_dtype": ("dt", lambda a: {"dt": a["dt"].half()}),
    "a_short_skip": ("skip_weight", lambda a: {"skip_weight": torch.zeros(5)}),
    "a_skip_of_half": ("skip_weight", lambda a: {"skip_weight": a["skip_weight"].half()}),
    "a_gate_of_two_dimensions": ("gate", lambda a: {"gate": a["gate"].flatten(1)}),
    "a_gate_too_narrow": ("gate", lambda a: {"gate": a["gate"][..., :20]}),
    "steps_of_no_range": ("max_step", lambda a: {"min_step": 1.0, "max_step": 0.5}),
    "a_short_semaphore": ("semaphore", lambda a: {"semaphore": a["semaphore"][:8]}),
    "a_semaphore_of_int64": ("semaphore", lambda a: {"semaphore": a["semaphore"].long()}),
    "a_semaphore_that_is_set": ("semaphore", lambda a: {"semaphore": a["semaphore"] + 1}),
}
BAD = [("delta_step", case) for case in (*BOTH, *DELTA)] + [
    ("mamba2_step", case) for case in (*BOTH, *MAMBA2)
]


@pytest.mark.parametrize(("op", "case"), BAD)
def test_what_is_refused(op: str, case: str) -> None:
    name, change = (BOTH | (DELTA if op == "delta_step" else MAMBA2))[case]
    given = MAKE[op](STATE_BATCHES["decode"])
    assert_refused(op, given | change(given), name, "reference")
