"""Inputs of ``route_experts`` and ``apply_experts`` for tests of a backend: named cases, strided rows, NaN
outputs, ties, experts twice in a token, ids outside.

    inputs = make_experts_inputs(**EXPERTS_CASES["shared"], dtype=torch.bfloat16)
    assert_experts_close(BACKEND_OPS["triton"], inputs)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.oracle import assert_within_budget

#: Ways to choose: name -> arguments of `make_route_inputs`.
ROUTE_CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normed": {"norm_eps": 0.0, "num_experts": 60, "top_k": 8},
    "top_1": {"top_k": 1, "num_tokens": 1},
    "all": {"top_k": 8},
    "sigmoid": {"scoring": "sigmoid", "bias": True, "norm_eps": 1e-6},
    "best_groups": {"num_experts": 40, "num_groups": 4, "top_groups": 2, "top_k": 6, "scale": 16.0},
    "v3": {
        "num_experts": 256,
        "num_groups": 8,
        "top_groups": 4,
        "group_best": 2,
        "top_k": 8,
        "scoring": "sigmoid",
        "bias": True,
        "norm_eps": 1e-20,
        "scale": 2.5,
    },
    "odd_groups": {"num_experts": 21, "num_groups": 3, "top_groups": 1, "top_k": 7, "width": 33},
    "ties": {"ties": True, "top_k": 3},
    "ties_of_groups": {"ties": True, "num_groups": 4, "top_groups": 2, "top_k": 3},
}
#: Mixtures: name -> arguments of `make_experts_inputs`.
EXPERTS_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_token": {"num_tokens": 1, "top_k": 6, "num_experts": 64},
    "one_token_with_all": {
        "num_tokens": 1,
        "skips": True,
        "shared": 24,
        "shared_gate": True,
        "residual": True,
    },
    "one_token_odd": {"num_tokens": 1, "hidden": 70, "inner": 33, "shared": 19, "activation": "gelu_tanh"},
    "one_token_outside": {"num_tokens": 1, "outside": True, "residual": True},
    "one_token_of_long_rows": {"num_tokens": 1, "inner": 2100, "activation": "gelu"},
    "shared": {"shared": 48, "activation": "gelu_tanh"},
    "shared_gate": {"shared": 24, "shared_gate": True, "residual": True},
    "twice_and_outside": {"twice": True, "num_tokens": 9, "residual": True},
    "all_outside": {"outside": True, "shared": 16, "residual": True},
    "odd": {"hidden": 70, "inner": 33, "shared": 19, "num_experts": 5, "activation": "gelu"},
    "crowded": {"num_tokens": 64, "num_experts": 8, "top_k": 2, "shared": 32},
    "many": {"num_tokens": 10, "num_experts": 256, "top_k": 8, "hidden": 32, "inner": 16},
}


def _numbers(generator: torch.Generator, *size: int, strided: bool = False, **options: Any) -> Tensor:
    """Normal numbers; ``strided``: the left part of a wider tensor, so that rows do not follow
    one another."""
    wide = torch.randn(
        *size[:-1],
        size[-1] + (8 if strided else 0),
        generator=generator,
        dtype=torch.float32,
        device=generator.device,
    )
    return wide.to(**options)[..., : size[-1]]


def make_route_inputs(
    *,
    num_tokens: int = 5,
    num_experts: int = 8,
    top_k: int = 2,
    width: int = 40,
    bias: bool = False,
    ties: bool = False,
    weight_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of ``route_experts`` by name; ``ties``: all experts have one row, bar the last one."""
    generator, on = torch.Generator(device).manual_seed(seed), {"device": device}
    weight = _numbers(generator, num_experts, width, strided=True, dtype=weight_dtype, **on) * width**-0.5
    x = _numbers(generator, num_tokens, width, strided=True, dtype=dtype, **on)
    if ties:
        x, weight = x.mul(2).round(), weight.mul(8 * width**0.5).round().div(8)  # exact sums
        weight[:-1] = weight[:1].clone()
    return {
        "x": x,
        "weight": weight,
        "ids": torch.full((num_tokens, top_k), -7, dtype=torch.int32, **on),
        "weights": torch.full((num_tokens, top_k), float("nan"), dtype=torch.float32, **on),
        "bias": _numbers(generator, num_experts, dtype=torch.float32, **on) * 0.1 if bias else None,
        **options,
    }


def make_experts_inputs(
    *,
    num_tokens: int = 5,
    num_experts: int = 8,
    top_k: int = 3,
    hidden: int = 64,
    inner: int = 32,
    shared: int = 0,
    shared_gate: bool = False,
    residual: bool = False,
    twice: bool = False,
    skips: bool = False,
    outside: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of ``apply_experts`` by name. ``twice``: tokens have an expert twice, and ids outside;
    ``skips``: the second choice is none; ``outside``: all are."""
    generator, on = torch.Generator(device).manual_seed(seed), {"dtype": dtype, "device": device}
    ids = torch.stack(
        [torch.randperm(num_experts, generator=generator, device=device)[:top_k] for _ in range(num_tokens)]
    )
    if twice:
        ids[:, -1] = ids[:, 0]
        ids[0, 0], ids[1], ids[2, 0] = -1, num_experts, num_experts + 5
    if skips:
        ids[:, 1] = -1
    if outside:
        ids.fill_(-1)

    def weight(*size: int) -> Tensor:
        return _numbers(generator, *size, strided=True, **on).mul_(size[-1] ** -0.5)

    return {
        "x": _numbers(generator, num_tokens, hidden, strided=True, **on),
        "gate_up": weight(num_experts, 2 * inner, hidden),
        "down": weight(num_experts, hidden, inner),
        "ids": ids.to(device, torch.int32),
        "weights": torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float32, device=device),
        "out": torch.full((num_tokens, hidden), float("nan"), **on),
        "activation": activation,
        "shared_gate_up": weight(2 * shared, hidden) if shared else None,
        "shared_down": weight(hidden, shared) if shared else None,
        "shared_gate": weight(hidden) if shared_gate else None,
        "residual": _numbers(generator, num_tokens, hidden, strided=True, **on) if residual else None,
    }


def assert_route_close(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """One backend's choice and weights against the reference's."""
    want = {name: x.detach().cpu().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    BACKEND_OPS["reference"].route_experts(**want)
    ops.route_experts(**inputs)
    assert torch.equal(inputs["ids"].cpu(), want["ids"])
    torch.testing.assert_close(inputs["weights"].cpu(), want["weights"], rtol=1e-5, atol=1e-6)


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    act = F.silu if activation == "silu" else F.gelu
    options = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    return F.linear(act(gate, **options) * up, down)


def _in_steps(a: dict[str, Any]) -> Tensor:
    """As a model does it: each step rounded to the dtype."""
    y = torch.zeros_like(a["x"])
    for token, (ids, weights) in enumerate(zip(a["ids"].tolist(), a["weights"], strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < len(a["down"]):
                part = _mlp(a["x"][token], a["gate_up"][expert], a["down"][expert], a["activation"])
                y[token] += part * weight.to(part.dtype)
    if a["shared_down"] is not None:
        part = _mlp(a["x"], a["shared_gate_up"], a["shared_down"], a["activation"])
        y += part if a["shared_gate"] is None else part * (a["x"] @ a["shared_gate"]).sigmoid()[:, None]
    return y if a["residual"] is None else y + a["residual"]


def assert_experts_close(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """One backend's ``out`` against the reference in float64; the error budget is of each step rounded."""

    def copied(dtype: torch.dtype) -> dict[str, Any]:
        own = {name: x.detach().clone() for name, x in inputs.items() if isinstance(x, Tensor)}
        floats = {name: x.to(dtype) for name, x in own.items() if name not in ("ids", "weights")}
        return {**inputs, **own, **floats}

    exact = copied(torch.float64)
    BACKEND_OPS["reference"].apply_experts(**exact)
    in_steps = _in_steps(copied(inputs["x"].dtype))
    ops.apply_experts(**inputs)
    assert_within_budget("out", inputs["out"], in_steps, exact["out"], inputs["x"].dtype)


def assert_token_is_alone(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """The fourth of ``inputs``' tokens, whose number four divides, gets the same bits whichever experts the
    others chose."""
    ops.apply_experts(**inputs)
    before = inputs["out"][3].clone()
    for name in ("x", "ids"):
        inputs[name][4:] = inputs[name][:4].repeat(len(inputs[name]) // 4 - 1, 1)
        inputs[name][:3] = inputs[name][5:8].clone()
    ops.apply_experts(**inputs)
    assert torch.equal(inputs["out"][3], before)
