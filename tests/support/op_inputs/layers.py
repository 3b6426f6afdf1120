"""Inputs of ``embedding``, ``linear``, ``rms_norm``, ``act_and_mul`` and ``gate_heads`` for tests of
a backend: named features and shapes, strided rows, NaN outputs.

    inputs = make_linear_inputs(**LINEAR_CASES["norm_silu"], dtype=torch.bfloat16)
    assert_layer_close(BACKEND_OPS["triton"], "linear", inputs)
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.oracle import assert_within_budget

#: Features of `linear`: name -> arguments of `make_linear_inputs`.
LINEAR_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "residual": {"residual": True},
    "bias_residual": {"bias": True, "residual": True},
    "scale": {"scale": True},
    "scale_bias_residual": {"scale": True, "bias": True, "residual": True},
    "scale_residual": {"scale": True, "residual": True},
    "scale_silu": {"scale": True, "norm": True, "activation": "silu"},
    "norm": {"norm": True},
    "gemma_norm": {"norm": True, "norm_offset": 1.0, "norm_dtype": torch.float32},
    "silu": {"activation": "silu"},
    "norm_silu": {"norm": True, "activation": "silu"},
    "gelu_tanh_bias": {"activation": "gelu_tanh", "bias": True},
    "everything": {"norm": True, "bias": True, "scale": True, "residual": True, "activation": "gelu"},
    "one_token": {"tokens": 1, "norm": True, "residual": True},
    "odd_shape": {"tokens": 3, "inputs": 17, "outputs": 34, "norm": True, "activation": "silu"},
}


def _random(
    generator: torch.Generator,
    *size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    strided: bool = False,
) -> Tensor:
    """Normal numbers; ``strided``: the left part of a wider tensor, so that rows do not follow
    one another."""
    wide = torch.randn(
        *size[:-1], size[-1] + (8 if strided else 0), generator=generator, dtype=torch.float32
    ).to(device, dtype)
    return wide[..., : size[-1]]


def make_embedding_inputs(
    *,
    tokens: int = 5,
    width: int = 24,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The arguments of ``embedding`` by name: the first and the last id among the tokens, strided rows,
    ``out`` holds NaN."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30, (tokens,), generator=generator)
    ids[:1], ids[1:2] = 29, 0
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return {
        "input_ids": ids.to(device),
        "weight": _random(generator, 30, width, strided=True, **options),
        "out": torch.full((tokens, width), float("nan"), **options),
        "scale": torch.tensor(5.7, dtype=torch.float32, device=device) if scaled else None,
    }


def make_linear_inputs(
    *,
    tokens: int = 5,
    inputs: int = 40,
    outputs: int = 24,
    bias: bool = False,
    scale: bool = False,
    residual: bool = False,
    norm: bool = False,
    norm_offset: float = 0.0,
    norm_dtype: torch.dtype | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of ``linear`` by name; x and residual have strided rows, ``out`` holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    width = outputs if activation == "none" else outputs // 2
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float32) * inputs**-0.5
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": _random(generator, tokens, inputs, strided=True, **options) * 2,
        "weight": weight.to(device, dtype),
        "out": torch.full((tokens, width), float("nan"), **options),
        "bias": _random(generator, outputs, **options) if bias else None,
        "scale": _random(generator, outputs, dtype=exact, device=device) if scale else None,
        "residual": _random(generator, tokens, width, strided=True, **options) if residual else None,
        "norm_weight": _random(generator, inputs, dtype=norm_dtype or dtype, device=device) if norm else None,
        "norm_offset": norm_offset,
        "activation": activation,
    }


def make_norm_inputs(
    *,
    tokens: int = 5,
    width: int = 48,
    offset: float = 0.0,
    residual: bool = False,
    post_residual: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of ``rms_norm`` by name; rows are strided, ``out`` holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return {
        "x": _random(generator, tokens, width, strided=True, **options) * 3,
        "weight": _random(generator, width, **options),
        "out": torch.full((tokens, width), float("nan"), **options),
        "offset": offset,
        "residual": _random(generator, tokens, width, strided=True, **options) if residual else None,
        "post_residual": _random(generator, tokens, width, strided=True, **options)
        if post_residual
        else None,
    }


#: Features of `rms_norm`: name -> arguments of `make_norm_inputs`.
NORM_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gemma": {"offset": 1.0},
    "residual": {"residual": True},
    "post_residual": {"post_residual": True, "offset": 1.0},
    "both": {"residual": True, "post_residual": True},
    "wide": {"tokens": 2, "width": 1536},
    "odd": {"tokens": 1, "width": 7, "residual": True},
}


def make_gate_inputs(
    *,
    width: int = 40,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The arguments of ``act_and_mul`` by name."""
    generator = torch.Generator().manual_seed(0)
    gate_up = _random(generator, 5, 2 * width, dtype=dtype, device=device, strided=True) * 3
    return {
        "gate_up": gate_up,
        "out": torch.full((5, width), float("nan"), dtype=dtype, device=device),
        "activation": activation,
    }


def make_gate_heads_inputs(
    *,
    heads: int = 3,
    width: int = 40,
    of_head: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The arguments of ``gate_heads`` by name; gates beside queries, ``of_head``: one of each head."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    gate = _random(generator, 5, heads, 2 * width, **options)[..., width:] * 3
    return {
        "x": _random(generator, 5, heads, width, strided=True, **options),
        "gate": gate[..., :1] if of_head else gate,
        "out": torch.full((5, heads, width), float("nan"), **options),
    }


def assert_layer_close(ops: BackendOps, op: str, arguments: dict[str, Any]) -> None:
    """One backend's ``op`` on ``arguments`` (which it writes into) against the reference in float64.

    The error budget comes from the op done in steps, each rounded to the dtype, as a model without fused ops
    does it.
    """
    wide = {name: x.detach().cpu().double() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    stepwise = {
        name: x.detach().cpu().clone() if isinstance(x, Tensor) else x for name, x in arguments.items()
    }
    getattr(BACKEND_OPS["reference"], op)(**wide)
    in_steps = _STEPS[op](stepwise)
    getattr(ops, op)(**arguments)
    dtype = arguments["out"].dtype
    assert_within_budget("out", arguments["out"], in_steps, wide["out"], dtype)
    if op == "rms_norm" and arguments["residual"] is not None:
        assert_within_budget(
            "residual", arguments["residual"], wide["residual"].to(dtype), wide["residual"], dtype
        )


def _norm_in_steps(a: dict[str, Any]) -> Tensor:
    x: Tensor = a["x"] if a["residual"] is None else a["x"] + a["residual"]
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    y = normed.to(x.dtype) * (a["weight"] + a["offset"]).to(x.dtype)
    return y if a["post_residual"] is None else y + a["post_residual"]


def _gate_in_steps(a: dict[str, Any]) -> Tensor:
    gate, up = a["gate_up"].chunk(2, dim=-1)
    if a["activation"] == "silu":
        return torch.nn.functional.silu(gate) * up
    return (
        torch.nn.functional.gelu(gate, approximate="tanh" if a["activation"] == "gelu_tanh" else "none") * up
    )


def _linear_in_steps(a: dict[str, Any]) -> Tensor:
    x = a["x"]
    if a["norm_weight"] is not None:
        x = _norm_in_steps(
            {
                "x": x,
                "weight": a["norm_weight"],
                "offset": a["norm_offset"],
                "residual": None,
                "post_residual": None,
            }
        )
    y = torch.nn.functional.linear(x, a["weight"], a["bias"])
    y = y if a["scale"] is None else (y * a["scale"]).to(y.dtype)
    if a["activation"] != "none":
        y = _gate_in_steps({"gate_up": y, "activation": a["activation"]})
    return y if a["residual"] is None else y + a["residual"]


def _gate_heads_in_steps(a: dict[str, Any]) -> Tensor:
    y: Tensor = a["x"] * a["gate"].sigmoid()
    return y


_STEPS = {
    "rms_norm": _norm_in_steps,
    "act_and_mul": _gate_in_steps,
    "gate_heads": _gate_heads_in_steps,
    "linear": _linear_in_steps,
}
