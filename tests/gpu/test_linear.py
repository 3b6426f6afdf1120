"""linear of the cuda backend on a GPU: every prologue and epilogue against float64, odd shapes, repeatable,
captured and replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import captured
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.layers.call import LinearCall
from torchpaged.custom_ops.layers.cuda.linear import unsupported
from torchpaged.custom_ops.layers.cuda.linear_shape import MAX_TOKENS

pytestmark = pytest.mark.gpu
CUDA = BACKEND_OPS["cuda"].linear
DTYPES = (torch.bfloat16, torch.float16)
#: name -> (norm, bias, activation, residual, scale)
FEATURES = {
    "plain": (False, False, "none", False, False),
    "bias": (False, True, "none", False, False),
    "residual": (False, False, "none", True, False),
    "norm": (True, False, "none", False, False),
    "norm_bias": (True, True, "none", False, False),
    "silu": (True, False, "silu", False, False),
    "gelu_tanh": (True, False, "gelu_tanh", False, False),
    "gelu": (False, True, "gelu", True, False),
    "everything": (True, True, "silu", True, True),
    "scale": (True, False, "none", False, True),
    "scale_residual": (False, False, "none", True, True),
}
SHAPES = {  # weight [N, K]
    "576": (960, 576),
    "1536": (576, 1536),
    "2048": (3072, 2048),
    "4096": (1024, 4096),
    "14336": (512, 14336),
    "odd n": (1002, 256),
    "odder n": (34, 1000),
    "short k": (128, 8),
    "tail": (4100, 1032),
    "one row pair": (2, 64),
    "three CTAs a tile": (2056, 2056),
}


def make(
    tokens: int, shape: tuple[int, int], features: str, dtype: torch.dtype, seed: int = 0
) -> dict[str, Any]:
    """The arguments of a call, ``out`` filled with NaN."""
    (n, k), (norm, bias, activation, residual, scale) = shape, FEATURES[features]
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    width = n if activation == "none" else n // 2
    return {
        "x": random(tokens, k) * 2,
        "weight": random(n, k) * k**-0.5,
        "out": torch.full((tokens, width), torch.nan, device="cuda", dtype=dtype),
        "bias": random(n) if bias else None,
        "scale": random(n).float() if scale else None,
        "residual": random(tokens, width) if residual else None,
        "norm_weight": random(k) if norm else None,
        "norm_offset": 1.0 if norm else 0.0,
        "activation": activation,
    }


def call(arguments: dict[str, Any]) -> Tensor:
    rest = {name: value for name, value in arguments.items() if name not in ("x", "weight", "out")}
    CUDA(arguments["x"], arguments["weight"], arguments["out"], **rest)
    return arguments["out"]


def in_torch(arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The call in plain torch, every intermediate in ``dtype``."""
    x, weight, bias, residual, norm = (
        None if arguments[name] is None else arguments[name].to(dtype)
        for name in ("x", "weight", "bias", "residual", "norm_weight")
    )
    if norm is not None:
        exact = x if dtype == torch.float64 else x.float()
        x = (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * (
            norm + arguments["norm_offset"]
        )
    y = torch.nn.functional.linear(x, weight, bias)
    y = y if arguments["scale"] is None else (y * arguments["scale"]).to(dtype)
    if arguments["activation"] != "none":
        gate, up = y.chunk(2, -1)
        act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}.get(
            arguments["activation"]
        )
        y = (torch.nn.functional.gelu(gate, approximate="tanh") if act is None else act(gate)) * up
    return y if residual is None else y + residual


def check(arguments: dict[str, Any]) -> None:
    """No worse than twice torch's own error in the same dtype, by norm and by the worst element."""
    out, exact = call(arguments).double(), in_torch(arguments, torch.float64)
    peer = in_torch(arguments, arguments["x"].dtype).double() - exact
    error = out - exact
    assert torch.isfinite(out).all()
    assert error.norm() <= 2 * peer.norm(), (
        float(error.norm() / exact.norm()),
        float(peer.norm() / exact.norm()),
    )
    assert error.abs().max() <= 4 * peer.abs().max(), (float(error.abs().max()), float(peer.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 31, 64, 65, 200])
@pytest.mark.parametrize("features", FEATURES)
def test_features(features: str, tokens: int, dtype: torch.dtype) -> None:
    check(make(tokens, (1024, 2048), features, dtype))


@pytest.mark.parametrize("features", ["residual", "everything"])
@pytest.mark.parametrize("tokens", [1, 5, 12, 32, 33, 64, 65, 127, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, tokens: int, features: str) -> None:
    arguments = make(tokens, SHAPES[shape], features, torch.bfloat16)
    x, weight, norm_weight = (arguments[name] for name in ("x", "weight", "norm_weight"))
    composed = unsupported(LinearCall(x, weight, x, norm_weight=norm_weight)) is not None
    assert composed == (tokens > MAX_TOKENS)
    check(arguments)


@pytest.mark.parametrize("tokens", range(1, 65))
def test_every_number_of_tokens(tokens: int) -> None:
    check(make(tokens, (192, 512), "everything", torch.bfloat16))


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (28672, 4096), (4096, 14336), (16384, 2048), (128256, 2048)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 96, 128, 256])
def test_model_shapes(tokens: int, shape: tuple[int, int]) -> None:
    check(make(tokens, shape, "silu" if shape[0] in (28672, 16384) else "residual", torch.bfloat16))


@pytest.mark.parametrize(
    "case", ["65 tokens", "float32", "odd k", "unaligned x", "norm in float32", "no tokens"]
)
def test_what_the_kernel_does_not_take_is_composed(case: str) -> None:
    arguments = make(
        {"65 tokens": 65, "no tokens": 0}.get(case, 3),
        (96, 100 if case == "odd k" else 128),
        "everything",
        torch.float32 if case == "float32" else torch.bfloat16,
    )
    if case == "unaligned x":
        arguments["x"] = torch.randn(3, 129, device="cuda").to(torch.bfloat16)[:, 1:]
    if case == "norm in float32":
        arguments["norm_weight"] = arguments["norm_weight"].float()
    exact = in_torch(arguments, torch.float64)
    torch.testing.assert_close(call(arguments).double(), exact, rtol=2e-2, atol=3e-2)


def test_strides() -> None:
    arguments = make(9, (256, 512), "everything", torch.bfloat16)
    for name, width in (("x", 512), ("weight", 512), ("out", 128), ("residual", 128)):
        wide = torch.full(
            (arguments[name].shape[0], width + 24), torch.nan, device="cuda", dtype=torch.bfloat16
        )
        wide[:, :width] = arguments[name]
        arguments[name] = wide[:, :width]
    check(arguments)
    assert torch.isnan(arguments["out"].as_strided((9, 24), (152, 1), 128)).all(), "written beside out"


@pytest.mark.parametrize("tokens", [1, 8, 16, 24, 64, 65, 192])
@pytest.mark.parametrize("features", ["everything", "residual"])
def test_bitwise_repeatable(tokens: int, features: str) -> None:
    arguments = make(tokens, (2048, 4096), features, torch.bfloat16)
    first = call(arguments).clone()
    for _ in range(20):
        arguments["out"].fill_(torch.nan)
        assert torch.equal(call(arguments), first)


@pytest.mark.parametrize("tokens", [4, 16, 32, 64])
def test_a_captured_chain_follows_its_input(tokens: int) -> None:
    """Each kernel starts before the one in front has finished; what it reads of it must be complete all
    the same."""
    width, layers = 2048, 12
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.randn(width, width, generator=generator, device="cuda").to(torch.bfloat16) * width**-0.5
        for _ in range(layers)
    ]
    norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    states = [torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(layers + 1)]

    def chain() -> None:
        for i, weight in enumerate(weights):
            CUDA(states[i], weight, states[i + 1], residual=states[i], norm_weight=norm)

    graph, _ = captured(chain)
    for seed in range(4):
        start = torch.randn(tokens, width, generator=generator.manual_seed(seed), device="cuda").to(
            torch.bfloat16
        )
        states[0].copy_(start)
        graph.replay()
        replayed = [s.clone() for s in states[1:]]
        for state, weight, got in zip([start, *replayed], weights, replayed, strict=False):
            want = torch.empty_like(got)
            torch.cuda.synchronize()
            CUDA(state, weight, want, residual=state, norm_weight=norm)
            assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [65, 128, 300])
def test_a_captured_chain_of_large_products_follows_its_input(tokens: int) -> None:
    """Norms and gates start before the products of cuBLAS in front of them have finished."""
    check_chain(tokens, width=1024, layers=12)


def check_chain(tokens: int, width: int, layers: int) -> None:
    """Fused feed-forward layers, captured and replayed over other inputs, equal launches one by one."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)

    weights = [
        (random(4 * width, width) * width**-0.5, random(width, 2 * width) * width**-0.5)
        for _ in range(layers)
    ]
    norm = 1 + random(width) * 0.1
    state, inner = random(layers + 1, tokens, width), random(layers, tokens, 2 * width)

    def chain(end: Callable[[], object] = lambda: None) -> None:
        for i, (gate_up, down) in enumerate(weights):
            CUDA(state[i], gate_up, inner[i], norm_weight=norm, activation="silu")
            end()
            CUDA(inner[i], down, state[i + 1], residual=state[i])
            end()

    graph, _ = captured(chain)
    for _ in range(4):
        state[0].copy_(random(tokens, width))
        inner.fill_(torch.nan)
        state[1:].fill_(torch.nan)
        graph.replay()
        got = state.clone(), inner.clone()
        chain(torch.cuda.synchronize)
        assert torch.isfinite(state).all()
        assert torch.equal(got[0], state)
        assert torch.equal(got[1], inner)
