"""Inputs and the oracle of ``delta_step``: slices of one product, as projections give them."""

from typing import Any

import torch
from torch import Tensor

from op_inputs.state import NAN, Rows, assert_op_close, batch_tensors, exact_conv, exact_linear, poisoned
from op_inputs.state_gates import exact_gated_norm, exact_gates
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.state.call import DeltaStepCall
from torchpaged.testing.batches import on_host

#: Heads of values and of keys, groups of heads in a, b and gate, a head's sizes: as in Qwen3.5 and in
#: Qwen3-Next, three heads of a key, odd ones.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"heads": 4, "key_heads": 4, "groups": 1, "key_dim": 128, "value_dim": 128},
    "qwen3_next": {"heads": 4, "key_heads": 2, "groups": 2, "key_dim": 128, "value_dim": 128},
    "three": {"heads": 6, "key_heads": 2, "groups": 1, "key_dim": 64, "value_dim": 128, "bias": True},
    "narrow": {"heads": 2, "key_heads": 1, "groups": 1, "key_dim": 128, "value_dim": 64, "width": 3},
    "kimi": {"heads": 4, "key_heads": 4, "groups": 1, "key_dim": 128, "value_dim": 128, "by_key": True},
    "bailing": {
        "heads": 4,
        "key_heads": 4,
        "groups": 2,
        "key_dim": 64,
        "value_dim": 64,
        "by_key": True,
        "bound": -5.0,
    },
    "odd_by_key": {"heads": 3, "key_heads": 3, "groups": 3, "key_dim": 24, "value_dim": 24, "by_key": True},
    "odd": {"heads": 6, "key_heads": 3, "groups": 3, "key_dim": 24, "value_dim": 40, "bias": True},
}


def make_delta_step_inputs(
    batch: Rows,
    *,
    heads: int = 6,
    key_heads: int = 3,
    groups: int = 3,
    key_dim: int = 24,
    value_dim: int = 40,
    width: int = 4,
    bias: bool = False,
    by_key: bool = False,
    bound: float | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    new_step: bool = False,
    seed: int = 0,
    num_slots: int = 9,
) -> dict[str, Any]:
    """Arguments of ``delta_step``; ``out`` and what no row goes on from hold NaN.
    ``by_key``: a decay per row of the state, and a gate that is a sigmoid."""
    torch.manual_seed(seed)
    given = batch_tensors(batch, num_slots)
    num_tokens = int(given["query_start_loc"][-1]) + batch.padded_tokens
    channels, wide = 2 * key_heads * key_dim + heads * value_dim, weight_dtype or dtype
    decays = heads * key_dim if by_key else heads
    sizes = [channels, heads * value_dim, heads, decays]
    x, gate, b, a = torch.randn(num_tokens, sum(sizes) + 6, dtype=dtype)[:, : sum(sizes)].split(sizes, dim=1)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    conv_state = torch.randn(num_slots, width - 1, channels, dtype=dtype)
    state = torch.randn(num_slots, heads, key_dim, value_dim, dtype=state_dtype or exact)
    for pool in (conv_state, state):
        poisoned(pool, batch, given["state_slots"])
    return {
        "x": x,
        "weight": torch.randn(channels, 1, width, dtype=dtype)[:, 0] / width,
        "conv_state": conv_state,
        "a": a.unflatten(1, (groups, -1)),
        "b": b.unflatten(1, (groups, -1)),
        "a_log": torch.rand(heads, dtype=wide) * 2,
        "dt_bias": torch.randn(decays, dtype=wide),
        "state": state,
        "gate": gate.unflatten(1, (groups, -1)),
        "norm_weight": torch.randn(*((heads,) if groups == 3 else ()), value_dim, dtype=wide),
        **given,
        "out": torch.full((num_tokens, heads, value_dim), NAN, dtype=dtype),
        "bias": torch.randn(channels, dtype=dtype) if bias else None,
        "scale": key_dim**-0.5,
        "beta_scale": 2.0 if groups == 3 else 1.0,
        "bound": bound,
        "activation": "sigmoid" if by_key else "silu",
        "eps": 1e-5,
        "new_step": new_step,
    }


def exact_delta_step(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle: ``out`` and both pools in float64, nothing rounded in between."""
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    conv, gates, attention, norm = (part._asdict() for part in DeltaStepCall(**wide).parts())
    mixed, conv_state = exact_conv(conv)
    conv["out"].copy_(mixed)  # which q, k and v are columns of
    decays = exact_gates(gates)
    attention |= {"g": decays["g"].view(attention["g"].shape), "beta": decays["beta"]}
    made, state = exact_linear(attention)
    norm = {name: x for name, x in norm.items() if x is not None} | {"x": made}
    return exact_gated_norm(norm) | {"conv_state": conv_state, "state": state}


def assert_step_close(
    ops: BackendOps, reference: BackendOps, op: str, inputs: dict[str, Any], exact: dict[str, Tensor]
) -> None:
    """`assert_op_close`; inputs of the convolution to the bit."""
    want = exact.pop("conv_state").to(inputs["x"].dtype)
    # keys and values are rounded to it
    assert_op_close(ops, reference, op, inputs, exact, products=inputs["x"].dtype)
    torch.testing.assert_close(inputs["conv_state"].cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


@on_host()
def assert_delta_step_close(ops: BackendOps, reference: BackendOps, inputs: dict[str, Any]) -> None:
    """`assert_step_close`."""
    assert_step_close(ops, reference, "delta_step", inputs, exact_delta_step(inputs))
