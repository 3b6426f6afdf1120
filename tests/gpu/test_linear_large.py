"""linear of 65 to 256 tokens by linear_large.cu on a GPU: every shape and epilogue against float64,
repeatable, captured and replayed."""

import pytest
import torch
from gpus import needs_hopper
from test_linear import DTYPES, FEATURES, call, check, check_chain, make

from torchpaged.custom_ops.layers.cuda import linear, linear_large
from torchpaged.custom_ops.layers.cuda.linear_large import LargeShape, large_shape

pytestmark = [pytest.mark.gpu, needs_hopper]
#: warpgroups, row_tiles, k_parts
SHAPES = [(2, 1, 1), (2, 2, 1), (2, 1, 4), (1, 1, 4)]


def forced(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    monkeypatch.setattr(
        linear_large, "large_shape", lambda tokens, *_: LargeShape(-(-tokens // 16) * 16, *shape)
    )


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_features(shape: tuple[int, int, int], features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, shape)
    check(make(100, (1024, 2048), features, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dtypes(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, shape)
    check(make(100, (1024, 2048), "everything", dtype))


@pytest.mark.parametrize("tokens", [65, 112, 129, 192, 193, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens(shape: tuple[int, int, int], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if shape[1] == 2 and tokens > 192:
        pytest.skip("as many sums as there are registers")
    forced(monkeypatch, shape)
    for width in (1002, 1040):  # whole warps, but no whole tiles: linear_sum.cu has none of its own
        check(make(tokens, (width, 1032), "everything", torch.bfloat16))


@pytest.mark.parametrize("layer", [(28672, 4096), (4096, 14336), (16384, 2048), (2048, 8192)], ids=str)
@pytest.mark.parametrize("tokens", [65, 128, 164, 256])
def test_layers_that_are_taken(layer: tuple[int, int], tokens: int) -> None:
    arguments = make(tokens, layer, "silu" if layer[0] > 4096 else "residual", torch.bfloat16)
    assert (large_shape(tokens, *layer, 132) is None) == (tokens > 192 and layer == (28672, 4096))
    check(arguments)
    first = arguments["out"].clone()
    for _ in range(5):
        arguments["out"].fill_(torch.nan)
        assert torch.equal(call(arguments), first)


@pytest.mark.parametrize("tokens", [72, 164, 256])
def test_a_captured_chain_follows_its_input(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel starts before those in front of it have finished, also those that leave parts and add
    them."""
    width = 1024

    def shape(tokens: int, out_features: int, *_: int) -> LargeShape:
        return LargeShape(-(-tokens // 16) * 16, 2, 1, 1 if out_features > width else 4)

    monkeypatch.setattr(linear_large, "large_shape", shape)
    check_chain(tokens, width, layers=8)


def test_tokens_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's bits, whatever stands at the other places of as many."""
    forced(monkeypatch, (2, 1, 4))
    arguments = make(100, (1024, 2048), "residual", torch.bfloat16)
    first = call(arguments).clone()
    turned = {**arguments, "out": torch.empty_like(first)}
    for name in ("x", "residual"):
        turned[name] = arguments[name].roll(37, 0)
    assert torch.equal(call(turned), first.roll(37, 0))


def test_other_dtypes_and_devices_are_composed() -> None:
    arguments = make(100, (28672, 4096), "plain", torch.float32)
    record = linear.LinearCall(arguments["x"], arguments["weight"], arguments["out"])
    assert linear._large_shape(record) is None
    check(arguments)
