"""o_proj_mlp: the reference against torch's own formulas, the composition out of linear, tracing. Refusals: test_layer_ops.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.compose import compose_o_proj_mlp
from torchpaged.custom_ops.validation_layers import check_o_proj_mlp
from torchpaged.testing_layers import O_PROJ_MLP_CASES, assert_layer_close, make_o_proj_mlp_inputs

REFERENCE, DEFAULT = BACKEND_OPS["reference"], BACKEND_OPS["default"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("case", O_PROJ_MLP_CASES)
def test_o_proj_mlp_by_hand(case: str) -> None:
    inputs = make_o_proj_mlp_inputs(**O_PROJ_MLP_CASES[case], dtype=torch.float64)
    h = inputs["residual"] + torch.einsum("ta,ha->th", inputs["x"], inputs["o_weight"])
    normed = F.rms_norm(h, (h.shape[1],), inputs["norm_weight"].double() + inputs["norm_offset"], eps=1e-6)
    x, up = torch.einsum("th,ih->ti", normed, inputs["gate_up_weight"]).chunk(2, dim=1)
    want = h + torch.einsum("ti,hi->th", ACTIVATIONS[inputs["activation"]](x) * up, inputs["down_weight"])
    REFERENCE.o_proj_mlp(**inputs)
    torch.testing.assert_close(inputs["out"], want, rtol=1e-10, atol=1e-10)


def test_the_hidden_state_between_is_rounded() -> None:
    """To x's dtype, as a model without this op has it: 256.9 becomes 256, and with 0.91 more stays 256; the exact sum would give 258."""
    x, residual, one = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (0.9, 256.0, 1.0))
    down, out = torch.tensor([[1.25]], dtype=torch.bfloat16), torch.empty_like(x)
    REFERENCE.o_proj_mlp(x, residual, one, one[0], one.expand(2, 1).contiguous(), down, out)
    assert float(F.silu(one.float()) * down) > 0.9 and float(out) == 256.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", O_PROJ_MLP_CASES)
@pytest.mark.parametrize("backend", ["default", "reference", "cpu"])
def test_o_proj_mlp_within_the_error_budget(backend: str, case: str, dtype: torch.dtype, native: None) -> None:
    inputs = make_o_proj_mlp_inputs(**O_PROJ_MLP_CASES[case], dtype=dtype)
    assert_layer_close(BACKEND_OPS[backend], "o_proj_mlp", inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", O_PROJ_MLP_CASES)
def test_o_proj_mlp_composed_within_the_error_budget(case: str, dtype: torch.dtype) -> None:
    """What backends without a kernel of their own run, here out of the reference's linear."""

    def composed(*, norm_offset: float, activation: str, semaphore: Tensor | None, **named: Tensor) -> None:
        compose_o_proj_mlp(REFERENCE.linear, *named.values(), 1e-6, norm_offset, activation)

    inputs = make_o_proj_mlp_inputs(**O_PROJ_MLP_CASES[case], dtype=dtype)
    assert_layer_close(DEFAULT._replace(o_proj_mlp=composed), "o_proj_mlp", inputs)


WRONG_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "o_weight": ("o_weight", {"o_weight": torch.zeros(48, 41)}),
    "residual": ("residual", {"residual": torch.zeros(5, 40)}),
    "rows": ("out", {"out": torch.zeros(4, 48)}),
    "norm_weight": ("norm_weight", {"norm_weight": torch.zeros(40)}),
    "gate_up_weight": ("gate_up_weight", {"gate_up_weight": torch.zeros(112, 40)}),
    "down_rows": ("down_weight", {"down_weight": torch.zeros(40, 56)}),
    "down_columns": ("down_weight", {"down_weight": torch.zeros(48, 55)}),
    "dims": ("x", {"x": torch.zeros(200)}),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_tracing_refuses_what_cannot_fit(name: str) -> None:
    """The fake kernel, which is what a compiler sees."""
    argument, change = WRONG_SHAPES[name]
    inputs = make_o_proj_mlp_inputs() | change
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=f"^{argument}: expected"):
        DEFAULT.o_proj_mlp(**{key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in inputs.items()})


def test_a_compiled_stack_shares_one_semaphore() -> None:
    """Every layer mutates it: one graph all the same, for any number of tokens."""
    layers = [make_o_proj_mlp_inputs(tokens=7, attention=48, seed=seed) for seed in range(3)]
    weights = [[a[name] for name in ("o_weight", "norm_weight", "gate_up_weight", "down_weight")] for a in layers]

    def stack(x: Tensor, semaphore: Tensor) -> Tensor:
        for o, norm, gate_up, down in weights:
            out = x.new_empty(x.shape)
            DEFAULT.o_proj_mlp(x, x, o, norm, gate_up, down, out, semaphore=semaphore)
            x = out
        return x * 2

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x, semaphore = layers[0]["residual"].contiguous(), layers[0]["semaphore"]
    compiled = torch.compile(stack, fullgraph=True, backend=keep, dynamic=True)
    for tokens in (7, 3, 64):
        y = x[:1].expand(tokens, 48).contiguous()
        assert torch.equal(compiled(y, semaphore), stack(y, semaphore)) and not semaphore.any()
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["residual", "o_weight", "norm_weight", "gate_up_weight", "down_weight", "out", "semaphore"])
def test_all_arguments_are_on_one_device(name: str) -> None:
    inputs = make_o_proj_mlp_inputs()
    inputs[name] = inputs[name].to("meta")
    with pytest.raises(ArgumentError, match=f"^{name}: expected device cpu, got meta"):
        check_o_proj_mlp(**inputs)
