"""embedding, rms_norm, act_and_mul, linear, gate_heads: the reference against torch's and transformers' own
formulas, all kernels within its error budget, refusals, tracing."""

from typing import Any

import pytest
import torch
from kernels import DTYPES, Kernels, over
from op_inputs.layers import (
    LINEAR_CASES,
    NORM_CASES,
    assert_layer_close,
    make_embedding_inputs,
    make_gate_heads_inputs,
    make_gate_inputs,
    make_linear_inputs,
    make_norm_inputs,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE, DEFAULT = BACKEND_OPS["reference"], BACKEND_OPS["default"]
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def gate(x: Tensor, activation: str) -> Tensor:
    """The activations by their definitions."""
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return x * torch.special.ndtr(x)
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [1, 40, 1500, 16384])
@over("default", "triton", dtype=DTYPES)
def test_embedding_is_torchs(on: Kernels, dtype: torch.dtype, width: int, scaled: bool) -> None:
    """Bit for bit, Gemma's scale included: rounded to the weights' dtype, then the product."""
    inputs = make_embedding_inputs(width=width, scaled=scaled, dtype=dtype, device=on.device)
    want = F.embedding(inputs["input_ids"], inputs["weight"])
    on.ops.embedding(**inputs)
    assert torch.equal(inputs["out"], want * inputs["scale"].to(dtype) if scaled else want)


@over(dtype=DTYPES)
def test_ids_outside_of_the_table_give_nan(on: Kernels, dtype: torch.dtype) -> None:
    """Where their values are not read; no other row does."""
    inputs = make_embedding_inputs(tokens=7, width=960, scaled=True, dtype=dtype, device=on.device)
    inputs["input_ids"][[2, 5]] = torch.tensor([-1, 30], device=on.device)
    on.ops.embedding(**inputs)
    assert inputs["out"].isnan().all(1).tolist() == [False, False, True, False, False, True, False]
    assert int(inputs["out"].isnan().sum()) == 2 * 960


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_by_hand(case: str) -> None:
    inputs = make_linear_inputs(**LINEAR_CASES[case], dtype=torch.float64)
    x = inputs["x"]
    if inputs["norm_weight"] is not None:
        x = F.rms_norm(x, (x.shape[1],), inputs["norm_weight"].double() + inputs["norm_offset"], eps=1e-6)
    y = torch.einsum("tk,nk->tn", x, inputs["weight"])
    y = y if inputs["bias"] is None else y + inputs["bias"]
    y = y if inputs["scale"] is None else y * inputs["scale"]
    if inputs["activation"] != "none":
        half = y.shape[1] // 2
        y = gate(y[:, :half], inputs["activation"]) * y[:, half:]
    y = y if inputs["residual"] is None else y + inputs["residual"]
    REFERENCE.linear(**inputs)
    torch.testing.assert_close(inputs["out"], y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", NORM_CASES)
def test_rms_norm_by_hand(case: str) -> None:
    inputs = make_norm_inputs(**NORM_CASES[case], dtype=torch.float64)
    x = inputs["x"] if inputs["residual"] is None else inputs["x"] + inputs["residual"]
    want = F.rms_norm(x, (x.shape[1],), inputs["weight"] + inputs["offset"], eps=1e-6)
    want = want if inputs["post_residual"] is None else want + inputs["post_residual"]
    REFERENCE.rms_norm(**inputs)
    torch.testing.assert_close(inputs["out"], want, rtol=1e-10, atol=1e-10)
    if inputs["residual"] is not None:
        assert torch.equal(inputs["residual"], x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_and_mul_by_hand(activation: str) -> None:
    inputs = make_gate_inputs(activation=activation, dtype=torch.float64)
    x, up = inputs["gate_up"].chunk(2, dim=1)
    REFERENCE.act_and_mul(**inputs)
    torch.testing.assert_close(inputs["out"], gate(x, activation) * up, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("of_head", [False, True])
def test_gate_heads_by_hand(of_head: bool) -> None:
    inputs = make_gate_heads_inputs(of_head=of_head, dtype=torch.float64)
    want = inputs["x"] / (1 + (-inputs["gate"]).exp())
    REFERENCE.gate_heads(**inputs)
    torch.testing.assert_close(inputs["out"], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", LINEAR_CASES)
@over("default", "triton", dtype=DTYPES)
def test_linear_within_the_error_budget(on: Kernels, dtype: torch.dtype, case: str) -> None:
    assert_layer_close(
        on.ops, "linear", make_linear_inputs(**LINEAR_CASES[case], dtype=dtype, device=on.device)
    )


@pytest.mark.parametrize("case", NORM_CASES)
@over("default", "triton", dtype=DTYPES)
def test_rms_norm_within_the_error_budget(on: Kernels, dtype: torch.dtype, case: str) -> None:
    assert_layer_close(
        on.ops, "rms_norm", make_norm_inputs(**NORM_CASES[case], dtype=dtype, device=on.device)
    )


@pytest.mark.parametrize("width", [1, 40, 1500, 14336])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@over("default", "triton", dtype=DTYPES)
def test_act_and_mul_within_the_error_budget(
    on: Kernels, dtype: torch.dtype, activation: str, width: int
) -> None:
    inputs = make_gate_inputs(activation=activation, dtype=dtype, width=width, device=on.device)
    assert_layer_close(on.ops, "act_and_mul", inputs)


@pytest.mark.parametrize("of_head", [False, True])
@pytest.mark.parametrize("sizes", [(3, 40), (1, 7), (9, 256), (16, 256)], ids=str)
@over("default", "triton", dtype=DTYPES)
def test_gate_heads_within_the_error_budget(
    on: Kernels, dtype: torch.dtype, sizes: tuple[int, int], of_head: bool
) -> None:
    heads, width = sizes
    given = make_gate_heads_inputs(heads=heads, width=width, of_head=of_head, dtype=dtype, device=on.device)
    assert_layer_close(on.ops, "gate_heads", given)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_norms_are_those_of_transformers(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    inputs = make_norm_inputs(offset=1.0 if family == "gemma3" else 0.0)
    module: Any = (Gemma3RMSNorm if family == "gemma3" else LlamaRMSNorm)(48, eps=1e-6)
    module.weight.data = inputs["weight"]
    DEFAULT.rms_norm(**inputs)
    torch.testing.assert_close(inputs["out"], module(inputs["x"]).detach())


def _without(**change: Any) -> dict[str, Any]:
    return make_linear_inputs(norm=True, bias=True, residual=True) | change


BAD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ids_dtype": ("embedding", "input_ids", {"input_ids": torch.zeros(5, dtype=torch.int32)}),
    "ids_dims": ("embedding", "input_ids", {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}),
    "ids_above": ("embedding", "input_ids", {"input_ids": torch.full((5,), 30)}),
    "ids_below": ("embedding", "input_ids", {"input_ids": torch.tensor([0, 0, -1, 0, 0])}),
    "table_dtype": ("embedding", "weight", {"weight": torch.zeros(30, 24, dtype=torch.int64)}),
    "table_width": ("embedding", "out", {"weight": torch.zeros(30, 23)}),
    "table_scale": ("embedding", "scale", {"scale": torch.ones(1)}),
    "x_dims": ("linear", "x", {"x": torch.zeros(40)}),
    "x_dtype": ("linear", "x", {"x": torch.zeros(5, 40, dtype=torch.int32)}),
    "x_stride": ("linear", "x", {"x": torch.zeros(40, 5).T}),
    "weight_columns": ("linear", "weight", {"weight": torch.zeros(24, 41)}),
    "weight_dtype": ("linear", "weight", {"weight": torch.zeros(24, 40, dtype=torch.bfloat16)}),
    "weight_stride": ("linear", "weight", {"weight": torch.zeros(40, 24).T}),
    "out_rows": ("linear", "out", {"out": torch.zeros(4, 24)}),
    "out_width": ("linear", "out", {"activation": "silu"}),
    "out_dtype": ("linear", "out", {"out": torch.zeros(5, 24, dtype=torch.float64)}),
    "bias": ("linear", "bias", {"bias": torch.zeros(12)}),
    "scale": ("linear", "scale", {"scale": torch.zeros(12)}),
    "scale_dtype": ("linear", "scale", {"scale": torch.zeros(24, dtype=torch.float64)}),
    "residual": ("linear", "residual", {"residual": torch.zeros(5, 12)}),
    "norm_weight": ("linear", "norm_weight", {"norm_weight": torch.zeros(24)}),
    "norm_dtype": ("linear", "norm_weight", {"norm_weight": torch.zeros(40, dtype=torch.float16)}),
    "norm_eps": ("linear", "norm_eps", {"norm_eps": 0.0}),
    "norm_offset": ("linear", "norm_offset", {"norm_weight": None, "norm_offset": 1.0}),
    "activation": ("linear", "activation", {"activation": "relu"}),
    "odd_gate": ("linear", "weight", {"weight": torch.zeros(25, 40), "activation": "silu"}),
    "norm_width": ("rms_norm", "weight", {"weight": torch.zeros(47)}),
    "norm_op_eps": ("rms_norm", "eps", {"eps": -1.0}),
    "norm_residual": ("rms_norm", "residual", {"residual": torch.zeros(4, 48)}),
    "norm_post_residual": (
        "rms_norm",
        "post_residual",
        {"post_residual": torch.zeros(5, 48, dtype=torch.float64)},
    ),
    "gate_odd": ("act_and_mul", "gate_up", {"gate_up": torch.zeros(5, 81)}),
    "gate_activation": ("act_and_mul", "activation", {"activation": "none"}),
    "heads_gate": ("gate_heads", "gate", {"gate": torch.zeros(5, 3, 2)}),
    "heads_gate_dtype": ("gate_heads", "gate", {"gate": torch.zeros(5, 3, 40, dtype=torch.float64)}),
    "heads_x": ("gate_heads", "x", {"x": torch.zeros(5, 120)}),
    "heads_out": ("gate_heads", "out", {"out": torch.zeros(5, 3, 41)}),
    "gate_out": ("act_and_mul", "out", {"out": torch.zeros(5, 80)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str) -> None:
    op, argument, change = BAD[name]
    good = {
        "embedding": make_embedding_inputs(),
        "linear": _without(),
        "rms_norm": make_norm_inputs(residual=True),
        "act_and_mul": make_gate_inputs(),
        "gate_heads": make_gate_heads_inputs(),
    }[op]
    inputs = good | change
    with pytest.raises(torchpaged.ArgumentError) as error:
        getattr(REFERENCE, op)(**inputs)
    assert error.value.argument == argument
    with pytest.raises((RuntimeError, torchpaged.ArgumentError), match=f"{argument}: expected"):
        getattr(BACKEND_OPS["cpu"], op)(**inputs)
    assert bool(good["out"].isnan().all())


def test_outputs_apart_from_inputs() -> None:
    x = torch.randn(5, 40)
    with pytest.raises(torchpaged.ArgumentError, match="out: expected memory apart from x"):
        REFERENCE.rms_norm(x, torch.ones(40), x)
    with pytest.raises(torchpaged.ArgumentError, match="residual: expected memory apart from x"):
        REFERENCE.rms_norm(x, torch.ones(40), torch.empty(5, 40), residual=x)
    with pytest.raises(torchpaged.ArgumentError, match="out: expected memory apart from residual"):
        REFERENCE.linear(torch.randn(5, 40), torch.randn(40, 40), x, residual=x)


@over("default", "triton")
def test_no_tokens_and_parameters(on: Kernels) -> None:
    """No rows give no rows; a parameter that requires a gradient is read, not recorded."""
    with torch.device(on.device):
        out = torch.empty(0, 24)
        on.ops.linear(torch.empty(0, 40), torch.randn(24, 40), out, norm_weight=torch.ones(40))
        on.ops.embedding(torch.empty(0, dtype=torch.int64), torch.randn(9, 24), out)
        on.ops.rms_norm(torch.empty(0, 40), torch.ones(40), torch.empty(0, 40))
        on.ops.act_and_mul(torch.empty(0, 48), out)
        on.ops.gate_heads(*torch.empty(3, 0, 2, 24))
        layer, x, out = torch.nn.Linear(40, 24), torch.randn(3, 40), torch.empty(3, 24)
        on.ops.linear(x, layer.weight, out, bias=layer.bias)
        torch.testing.assert_close(out, layer(x).detach())
    assert not out.requires_grad


@over("triton", gpu=())
def test_kernels_refuse_float64(on: Kernels) -> None:
    """And look at their arguments as the reference does."""
    calls: list[tuple[Any, dict[str, Any]]] = [
        (on.ops.linear, make_linear_inputs(dtype=torch.float64)),
        (on.ops.rms_norm, make_norm_inputs() | {"weight": torch.ones(3)}),
        (on.ops.act_and_mul, make_gate_inputs() | {"activation": "tanh"}),
        (on.ops.gate_heads, make_gate_heads_inputs(dtype=torch.float64)),
        (on.ops.embedding, make_embedding_inputs(dtype=torch.float64)),
    ]
    for op, inputs in calls:
        with pytest.raises(torchpaged.ArgumentError):
            op(**inputs)
        assert bool(inputs["out"].isnan().all())


OPCHECK: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("embedding", make_embedding_inputs(scaled=True)),
    "linear": ("linear", make_linear_inputs()),
    "linear_everything": ("linear", make_linear_inputs(**LINEAR_CASES["everything"])),
    "rms_norm": ("rms_norm", make_norm_inputs(**NORM_CASES["both"])),
    "act_and_mul": ("act_and_mul", make_gate_inputs()),
    "gate_heads": ("gate_heads", make_gate_heads_inputs(of_head=True)),
}


@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(case: str) -> None:
    op, inputs = OPCHECK[case]
    inputs["out"].zero_()  # opcheck compares mutated tensors for equality
    torch.library.opcheck(getattr(DEFAULT, op), (), inputs)


def test_one_compile_serves_every_batch_size() -> None:
    def mlp(x: Tensor, weights: list[Tensor]) -> Tensor:
        h, y = x.new_empty(x.shape[0], 48), torch.empty_like(x)
        DEFAULT.linear(x, weights[0], h, norm_weight=weights[1], activation="silu")
        DEFAULT.linear(h, weights[2], y, residual=x)
        return y * 2

    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, fullgraph=True, backend=counter)
    weights = [torch.randn(96, 40) / 6, torch.randn(40), torch.randn(40, 48) / 7]
    for tokens in (5, 1, 17):
        x = torch.randn(tokens, 40)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(compiled(x, weights), mlp(x, weights))
    assert counter.frame_count == 1
