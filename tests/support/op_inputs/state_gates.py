"""Inputs and the oracle of ``delta_gates`` and ``gated_rms_norm``: slices of one product, heads in groups."""

from typing import Any

import torch
from torch import Tensor

from op_inputs.state import NAN, assert_op_close
from torchpaged.custom_ops import BackendOps
from torchpaged.testing.batches import on_host

#: Heads, groups in which they stand together, and numbers per head: as in Qwen3.5, in Qwen3-Next, odd ones.
#: ``ssd``: as Mamba 2's, whose norm has groups of heads. ``by_key``: a decay for each of ``width`` rows of a
#: head's state, and a gate that is a sigmoid.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"heads": 32, "groups": 1, "width": 128},
    "qwen3_next": {"heads": 32, "groups": 16, "width": 128},
    "odd": {"heads": 6, "groups": 3, "width": 20},
    "wide": {"heads": 3, "groups": 3, "width": 1500},
    "mamba2": {"heads": 6, "groups": 1, "width": 40, "ssd": True},
    "kimi": {"heads": 6, "groups": 1, "width": 128, "by_key": True},
    "bailing": {"heads": 6, "groups": 3, "width": 20, "by_key": True, "bound": -5.0},
    "granite": {"heads": 1, "groups": 1, "width": 3072, "ssd": True},
}


def _grouped(tokens: int, groups: int, size: int, dtype: torch.dtype) -> Tensor:
    """``[tokens, groups, size]`` out of a wider product, groups apart."""
    whole = torch.randn(tokens, groups * (size + 3) + 5, dtype=dtype)
    return whole[:, : groups * (size + 3)].unflatten(-1, (groups, -1))[..., :size]


def make_gates_inputs(
    heads: int = 6,
    groups: int = 3,
    width: int = 0,
    ssd: bool = False,
    by_key: bool = False,
    bound: float | None = None,
    *,
    tokens: int = 5,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Arguments of ``delta_gates``; results hold NaN. Decays from next to 1 to next to 0."""
    torch.manual_seed(tokens)
    columns = heads * width if by_key else heads
    a, b = (_grouped(tokens, groups, size // groups, dtype) for size in (columns, heads))
    a.mul_(8)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    given = {
        "a": a,
        "b": b,
        "a_log": torch.rand(heads, dtype=weight_dtype or dtype) * 2,
        "dt_bias": torch.randn(columns, dtype=weight_dtype or dtype),
        "g": torch.full((tokens, columns + 2), NAN, dtype=exact)[:, :columns],
        "beta": torch.full((tokens, heads), NAN, dtype=exact),
    }
    given = {name: x.to(device) for name, x in given.items()}
    if ssd:
        return given | {"b": None, "min_step": 0.01, "max_step": 4.0}
    return given | {"beta_scale": 2.0 if groups == 3 else 1.0, "bound": bound}


def make_gated_norm_inputs(
    heads: int = 6,
    groups: int = 3,
    width: int = 20,
    ssd: bool = False,
    by_key: bool = False,
    bound: float | None = None,
    *,
    tokens: int = 5,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Arguments of ``gated_rms_norm``; ``out`` holds NaN."""
    torch.manual_seed(tokens)
    given = {
        "x": torch.randn(tokens, heads, width + 4, dtype=dtype)[..., :width],
        "gate": _grouped(tokens, groups, heads * width // groups, dtype),
        "weight": torch.randn(width, dtype=weight_dtype or dtype),
        "out": torch.full((tokens, heads, width), NAN, dtype=dtype),
    }
    if ssd:
        given["weight"] = torch.randn(heads, width + 2, dtype=weight_dtype or dtype)[:, :width]
        given["skip"] = torch.randn(tokens, 2 * heads, width // 2 + 3, dtype=dtype)[..., : width // 2]
        given["skip_weight"] = torch.randn(2 * heads, dtype=weight_dtype or dtype)
    options = {"eps": 1e-5, "gate_first": ssd, "activation": "sigmoid" if by_key else "silu"}
    return {name: x.to(device) for name, x in given.items()} | options


def exact_gates(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle, in float64."""
    a, a_log, dt_bias = (inputs[name].double() for name in ("a", "a_log", "dt_bias"))
    rate = a_log.exp().repeat_interleave(dt_bias.shape[0] // a_log.shape[0])
    dt = torch.log1p((a.flatten(1) + dt_bias).exp())
    if inputs["b"] is None:
        dt = dt.clamp(inputs["min_step"], inputs["max_step"])
        return {"g": -(rate * dt), "beta": dt}
    b, g = inputs["b"].double().flatten(1), -(rate * dt)
    if inputs["bound"] is not None:
        g = inputs["bound"] / (1 + (-rate * (a.flatten(1) + dt_bias)).exp())
    return {"g": g, "beta": inputs["beta_scale"] / (1 + (-b).exp())}


def exact_gated_norm(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle, in float64."""
    x, gate, weight = (inputs[name].double() for name in ("x", "gate", "weight"))
    gate = gate.flatten(1).view(x.shape)
    sigmoid = inputs["activation"] == "sigmoid"
    gate = (torch.ones_like(gate) if sigmoid else gate) / (1 + (-gate).exp())
    if "skip" in inputs:
        x = x + (inputs["skip_weight"].double()[:, None] * inputs["skip"].double()).view(x.shape)
    if inputs["gate_first"]:
        x, gate = x * gate, torch.ones_like(gate)
    rms = (x.square().sum(-1, keepdim=True) / x.shape[2] + inputs["eps"]).sqrt()
    return {"out": x / rms * weight * gate}


@on_host()
def assert_gates_close(ops: BackendOps, reference: BackendOps, op: str, inputs: dict[str, Any]) -> None:
    """Run one backend's op against the oracle; a decay next to 1 to the digits of what it lacks of 1."""
    exact = (exact_gates if op == "delta_gates" else exact_gated_norm)(inputs)
    assert_op_close(ops, reference, op, inputs, exact, factor=4.0)
    if "g" in exact:
        # a bounded decay is an exponential of up to 200, whose digits are those of its argument
        rtol, atol = (1e-5, 0.0) if inputs.get("bound") is None else (1e-4, 1e-30)
        torch.testing.assert_close(inputs["g"].double().cpu(), exact["g"].cpu(), rtol=rtol, atol=atol)
