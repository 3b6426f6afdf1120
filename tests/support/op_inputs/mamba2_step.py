"""Inputs and the oracle of ``mamba2_step``: slices of one product, as projections give them."""

from typing import Any

import torch
from torch import Tensor

from op_inputs.delta_step import assert_step_close
from op_inputs.state import NAN, Rows, batch_tensors, exact_conv, exact_linear, poisoned
from op_inputs.state_gates import exact_gates
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.state.call import Mamba2StepCall
from torchpaged.testing.batches import on_host

#: Heads, groups of them, and a head's sizes: as in Granite 4 and Falcon-H1 (states of 256), Nemotron-H's
#: groups, one head per group, odd ones.
MAMBA2_SIZES: dict[str, dict[str, Any]] = {
    "granite": {"heads": 6, "groups": 1, "key_dim": 128, "value_dim": 64, "bias": True},
    "falcon": {"heads": 4, "groups": 1, "key_dim": 256, "value_dim": 64, "limits": (0.01, 0.5)},
    "nemotron": {"heads": 8, "groups": 2, "key_dim": 128, "value_dim": 64, "gated": False},
    "wide": {"heads": 4, "groups": 1, "key_dim": 64, "value_dim": 128, "width": 3, "gated": False},
    "no_groups": {"heads": 4, "groups": 4, "key_dim": 64, "value_dim": 64, "bias": True},
    "odd": {"heads": 6, "groups": 3, "key_dim": 24, "value_dim": 40, "bias": True},
}


def make_mamba2_step_inputs(
    batch: Rows,
    *,
    heads: int = 6,
    groups: int = 3,
    key_dim: int = 24,
    value_dim: int = 40,
    width: int = 4,
    bias: bool = False,
    gated: bool = True,
    limits: tuple[float, float | None] = (0.0, None),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    semaphore: bool = True,
    new_step: bool = False,
    beside: bool = False,
    seed: int = 0,
    num_slots: int = 9,
) -> dict[str, Any]:
    """Arguments of ``mamba2_step`` of single tokens; ``out`` and what no row goes on from hold NaN."""
    torch.manual_seed(seed)
    given = batch_tensors(batch, num_slots)
    del given["max_query_len"]
    num_tokens = int(given["query_start_loc"][-1]) + batch.padded_tokens
    values, wide = heads * value_dim, weight_dtype or dtype
    sizes = [values, values + 2 * groups * key_dim, heads]
    whole = torch.randn(num_tokens, sum(sizes) + 6, dtype=dtype)[:, : sum(sizes)]
    gate, x, dt = whole.split(sizes, dim=1)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    conv_state = torch.randn(num_slots, width - 1, x.shape[1], dtype=dtype)
    state = torch.randn(num_slots, heads, key_dim, value_dim, dtype=state_dtype or exact)
    for pool in (conv_state, state):
        poisoned(pool, batch, given["state_slots"])
    count = given["state_slots"].shape[0] * groups
    return {
        "x": x,
        "weight": torch.randn(x.shape[1], 1, width, dtype=dtype)[:, 0] / width,
        "conv_state": conv_state,
        "dt": dt,
        "a_log": torch.rand(heads, dtype=wide) * 2,
        "dt_bias": torch.randn(heads, dtype=wide),
        "state": state,
        "skip_weight": torch.randn(heads, dtype=wide),
        **given,
        "out": torch.full((num_tokens, heads, value_dim), NAN, dtype=dtype),
        "bias": torch.randn(x.shape[1], dtype=dtype) if bias else None,
        "gate": gate.unflatten(1, (heads, -1)) if gated else None,
        "min_step": limits[0],
        "max_step": limits[1],
        "semaphore": torch.zeros(count, dtype=torch.int32) if semaphore else None,
        "new_step": new_step,
        "beside": beside,
    }


def exact_mamba2_step(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle: ``out`` and both pools in float64, nothing rounded in between."""
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    conv, gates, attention = (part._asdict() for part in Mamba2StepCall(**wide).parts())
    mixed, conv_state = exact_conv(conv)
    conv["out"].copy_(mixed)  # which v, k and q are columns of
    steps = exact_gates(gates)
    made, state = exact_linear(attention | {"g": steps["g"], "beta": steps["beta"]})
    out = made + wide["skip_weight"][:, None] * attention["v"]
    if wide["gate"] is not None:
        out = out * wide["gate"] / (1 + torch.exp(-wide["gate"]))
    return {"out": out, "conv_state": conv_state, "state": state}


@on_host()
def assert_mamba2_step_close(ops: BackendOps, reference: BackendOps, inputs: dict[str, Any]) -> None:
    """`assert_step_close`; the semaphore holds zeros."""
    assert_step_close(ops, reference, "mamba2_step", inputs, exact_mamba2_step(inputs))
    assert inputs["semaphore"] is None or not inputs["semaphore"].any()
