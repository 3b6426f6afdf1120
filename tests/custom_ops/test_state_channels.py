"""selective_scan and rg_lru on a CPU: the oracle, what is refused, prompts in parts."""

from typing import Any

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.channels import CHANNEL_SIZES, assert_channels_close, make_channel_inputs
from op_inputs.state import STATE_BATCHES, assert_refused, clone

from torchpaged.custom_ops import BACKEND_OPS

REFERENCE, NATIVE = BACKEND_OPS["reference"], BACKEND_OPS["default"]


BATCHES = [name for name in STATE_BATCHES if name != "long"]
BATCH = Values(BATCHES, ("decode_padded", "no_tokens", "left_padding"), ())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.slow_cases("triton-cpu-*", but=("triton-cpu-*-odd", "triton-cpu-*-narrow"))
@pytest.mark.parametrize("size", CHANNEL_SIZES)
@over("default", "triton", gpu=(), batch=BATCH, dtype=Values(DTYPES, DTYPES[:1], ()))
def test_matches_the_oracle(on: Kernels, size: str, batch: str, dtype: torch.dtype) -> None:
    op, sizes = CHANNEL_SIZES[size]
    weight_dtype = torch.float32 if dtype != torch.float64 and size in ("mamba", "gemma") else None
    given = {"dtype": dtype, "weight_dtype": weight_dtype, **sizes}
    assert_channels_close(on.ops, REFERENCE, op, make_channel_inputs(op, STATE_BATCHES[batch], **given))


@pytest.mark.parametrize("size", ["mamba", "narrow"])
def test_states_of_the_inputs_dtype(size: str) -> None:
    op, sizes = CHANNEL_SIZES[size]
    given = {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16, **sizes}
    for batch in ("decode", "verify"):
        assert_channels_close(NATIVE, REFERENCE, op, make_channel_inputs(op, STATE_BATCHES[batch], **given))


@pytest.mark.parametrize("op", ["selective_scan", "rg_lru"])
def test_an_infinite_state_stays_infinite(op: str) -> None:
    inputs = make_channel_inputs(op, STATE_BATCHES["decode"], key_dim=16 if op == "selective_scan" else 1)
    slot = int(inputs["state_slots"][1])
    inputs["state"][slot, 3] = float("inf")
    want = clone(inputs)
    getattr(REFERENCE, op)(**want)
    getattr(NATIVE, op)(**inputs)
    for name in ("out", "state"):
        torch.testing.assert_close(inputs[name], want[name], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert inputs["state"][slot, 3].isinf().all()


#: Name -> op, the argument that is named, and the change.
BAD: dict[str, tuple[str, str, Any]] = {
    "dt_of_other_channels": ("selective_scan", "dt", lambda a: {"dt": a["dt"][:, :5]}),
    "dt_of_another_dtype": ("selective_scan", "dt", lambda a: {"dt": a["dt"].half()}),
    "keys_of_another_width": ("selective_scan", "b", lambda a: {"b": a["b"][:, :8]}),
    "a_log_of_fewer_channels": ("selective_scan", "a_log", lambda a: {"a_log": a["a_log"][:5]}),
    "a_bias_of_double": ("selective_scan", "dt_bias", lambda a: {"dt_bias": a["dt_bias"].double()}),
    "a_short_skip": ("selective_scan", "skip_weight", lambda a: {"skip_weight": a["skip_weight"][:5]}),
    "states_of_other_keys": ("selective_scan", "state", lambda a: {"state": a["state"][:, :, :8]}),
    "out_on_the_gate": ("selective_scan", "gate", lambda a: {"gate": a["out"]}),
    "steps_apart": ("selective_scan", "dt", lambda a: {"dt": a["dt"].T.contiguous().T}),
    "blocks_of_other_channels": ("rg_lru", "input_weight", lambda a: {"input_weight": a["input_weight"][:3]}),
    "blocks_not_square": (
        "rg_lru",
        "recurrent_weight",
        lambda a: {"recurrent_weight": a["recurrent_weight"][..., :8]},
    ),
    "a_bias_in_a_row": ("rg_lru", "input_bias", lambda a: {"input_bias": a["input_bias"].flatten()}),
    "a_short_parameter": ("rg_lru", "recurrent_param", lambda a: {"recurrent_param": torch.zeros(8)}),
    "a_gate_too_narrow": ("rg_lru", "gate", lambda a: {"gate": a["gate"][:, :8]}),
    "out_of_half": ("rg_lru", "out", lambda a: {"out": a["out"].half()}),
    "a_state_of_half": ("rg_lru", "state", lambda a: {"state": a["state"].half()}),
    "a_longer_query": ("rg_lru", "max_query_len", lambda a: {"max_query_len": 0}),
    "one_slot_twice": (
        "rg_lru",
        "state_slots",
        lambda a: {"state_slots": torch.full_like(a["state_slots"], 2)},
    ),
}


@pytest.mark.parametrize("backend", ["reference", "default"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, backend: str) -> None:
    op, name, change = BAD[case]
    given = make_channel_inputs(op, STATE_BATCHES["decode"], key_dim=16 if op == "selective_scan" else 1)
    assert_refused(op, given | change(given), name, backend)


@pytest.mark.parametrize("op", ["selective_scan", "rg_lru"])
def test_a_prompt_in_parts_is_the_prompt(op: str) -> None:
    """Over chunks of one call, which the products are cut into, and over calls."""
    from op_inputs.state import Rows

    whole = make_channel_inputs(op, Rows(((0, 37),)), key_dim=16 if op == "selective_scan" else 1)
    parts = clone(whole)
    getattr(NATIVE, op)(**whole)
    per_token = {"x", "dt", "b", "c", "out", "gate"} & set(parts)
    for begin, end in ((0, 17), (17, 18), (18, 37)):
        part = parts | {name: parts[name][begin:end] for name in per_token}
        part["query_start_loc"] = torch.tensor([0, end - begin], dtype=torch.int32)
        part["seq_lens"] = torch.tensor([end], dtype=torch.int32)
        getattr(NATIVE, op)(**part)
    slot = int(whole["state_slots"][0])
    torch.testing.assert_close(parts["out"], whole["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts["state"][slot], whole["state"][slot], rtol=1e-5, atol=1e-5)
