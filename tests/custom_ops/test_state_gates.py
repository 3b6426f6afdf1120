"""What lies around the recurrence of a gated delta net, and the gates of a convolution, on a CPU: the oracle,
what is refused, the trace."""

from typing import Any

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.state import (
    STATE_BATCHES,
    assert_refused,
    assert_state_close,
    assert_threads_agree,
    clone,
    make_conv_inputs,
)
from op_inputs.state_gates import SIZES, assert_gates_close, make_gated_norm_inputs, make_gates_inputs

from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
MAKE = {"delta_gates": make_gates_inputs, "gated_rms_norm": make_gated_norm_inputs}


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPE = Values((*FLOATS, torch.float64), FLOATS, ())


@pytest.mark.parametrize("op", MAKE)
@pytest.mark.parametrize("size", SIZES)
@over("default", "triton", gpu=(), dtype=DTYPE)
def test_ops_match_the_oracle(on: Kernels, size: str, op: str, dtype: torch.dtype) -> None:
    for weight_dtype in (None, torch.float32)[: 1 if dtype == torch.float64 else 2]:
        inputs = MAKE[op](**SIZES[size], dtype=dtype, weight_dtype=weight_dtype)
        assert_gates_close(on.ops, REFERENCE, op, inputs)
    getattr(on.ops, op)(**MAKE[op](**SIZES[size], tokens=0, dtype=dtype))


@pytest.mark.slow_cases("triton-cpu-*", but_every=2)
@pytest.mark.parametrize("batch", STATE_BATCHES)
@over("cpu", "reference", "triton", gpu=(), dtype=Values(DTYPE.cpu, FLOATS[:2], ()))
def test_gated_convolution_matches_the_oracle(on: Kernels, batch: str, dtype: torch.dtype) -> None:
    channels = 600 if batch.startswith("decode") else 40  # more than are taken at once
    channels = 300 if on.backend == "triton" else channels
    inputs = make_conv_inputs(STATE_BATCHES[batch], gated=True, dtype=dtype, width=3, channels=channels)
    assert_state_close(on.ops, REFERENCE, "causal_conv", inputs)


BAD: dict[str, tuple[str, str, Any]] = {
    "groups_of_other_sizes": ("delta_gates", "b", lambda a: {"b": a["b"].transpose(1, 2).contiguous()}),
    "another_dtype": ("delta_gates", "b", lambda a: {"b": a["b"].half()}),
    "a_log_of_fewer_heads": ("delta_gates", "a_log", lambda a: {"a_log": a["a_log"][:4]}),
    "groups_that_part_heads": ("delta_gates", "a", lambda a: {"b": None, "a_log": a["a_log"][:2]}),
    "g_of_half": ("delta_gates", "g", lambda a: {"g": a["g"].half()}),
    "g_on_beta": ("delta_gates", "beta", lambda a: {"g": a["beta"]}),
    "heads_apart": ("delta_gates", "a", lambda a: {"a": a["a"].transpose(1, 2)}),
    "gates_of_parts_of_heads": ("gated_rms_norm", "gate", lambda a: {"gate": torch.zeros(5, 12, 10)}),
    "a_gate_too_narrow": ("gated_rms_norm", "gate", lambda a: {"gate": torch.zeros(5, 3, 20)}),
    "a_short_weight": ("gated_rms_norm", "weight", lambda a: {"weight": torch.zeros(19)}),
    "weights_of_other_heads": ("gated_rms_norm", "weight", lambda a: {"weight": torch.zeros(5, 20)}),
    "a_skip_alone": ("gated_rms_norm", "skip_weight", lambda a: {"skip": a["x"]}),
    "a_skip_of_fewer_heads": (
        "gated_rms_norm",
        "skip",
        lambda a: {"skip": a["x"][:, :5], "skip_weight": torch.zeros(5)},
    ),
    "a_step_below_zero": ("delta_gates", "min_step", lambda a: {"min_step": -1.0}),
    "steps_of_no_length": ("delta_gates", "max_step", lambda a: {"min_step": 1.0, "max_step": 0.5}),
    "a_bound_of_zero": ("delta_gates", "bound", lambda a: {"bound": 0.0}),
    "biases_of_heads": (
        "delta_gates",
        "dt_bias",
        lambda a: {"a": torch.zeros(5, 3, 4), "g": torch.zeros(5, 12)},
    ),
    "an_unknown_activation": ("gated_rms_norm", "activation", lambda a: {"activation": "gelu"}),
    "no_eps": ("gated_rms_norm", "eps", lambda a: {"eps": 0.0}),
    "out_on_x": ("gated_rms_norm", "x", lambda a: {"x": a["out"]}),
    "a_gate_of_another_dtype": ("causal_conv", "in_gate", lambda a: {"in_gate": a["in_gate"].half()}),
    "a_gate_of_fewer_channels": ("causal_conv", "out_gate", lambda a: {"out_gate": a["out_gate"][:, :8]}),
    "out_on_a_gate": ("causal_conv", "in_gate", lambda a: {"out": a["in_gate"]}),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, backend: str) -> None:
    op, name, change = BAD[case]
    is_conv = op == "causal_conv"
    given = make_conv_inputs(STATE_BATCHES["chunks"], gated=True) if is_conv else MAKE[op]()
    assert_refused(op, given | change(given), name, backend)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e4, -1e4])
@pytest.mark.parametrize("size", SIZES)
def test_numbers_without_bounds(size: str, value: float) -> None:
    """Each input's in turn, as in the reference: NaN and infinities go where they go there."""
    for op, inputs in (("delta_gates", ("a", "b", "a_log", "dt_bias")), ("gated_rms_norm", ("x", "gate"))):
        for name in inputs:
            given = MAKE[op](**SIZES[size])
            if given[name] is None:
                continue
            given[name][-1] = value
            want = clone(given)
            getattr(BACKEND_OPS["cpu"], op)(**given)
            getattr(REFERENCE, op)(**want)
            for out in ("g", "beta", "out"):
                if out in given:
                    torch.testing.assert_close(given[out], want[out], equal_nan=True)


@pytest.mark.parametrize("op", MAKE)
def test_threads_do_not_change_the_answer(op: str, threads: Any) -> None:
    inputs = MAKE[op](heads=32, groups=4, width=128, tokens=300)
    assert_threads_agree(op, inputs, threads, *(("g", "beta") if op == "delta_gates" else ("out",)))
