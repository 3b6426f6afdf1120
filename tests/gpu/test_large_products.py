"""Products of more than 64 tokens by cuBLASLt: right, the residual as it was, the same bits in a graph."""

import pytest
import torch
from captured import captured

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.layers.cuda import blaslt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "depth", "width", "has_residual"),
    [
        (65, 512, 512, True),
        (72, 4096, 4096, True),
        (128, 14336, 4096, True),
        (256, 4096, 28672, False),
        (509, 2048, 2048, True),
        (1024, 4096, 6144, False),
        (1027, 512, 512, True),
        (2048, 4096, 28672, False),
        (4096, 1024, 4096, True),
        (8192, 2048, 6144, True),
    ],
)
def test_equal_to_float32(
    tokens: int, depth: int, width: int, has_residual: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, depth, device="cuda").to(dtype) for n in (tokens, width))
    weight /= depth**0.5
    residual = torch.randn(tokens, width, device="cuda").to(dtype) if has_residual else None
    before = None if residual is None else residual.clone()
    out = torch.full((tokens, width), float("nan"), device="cuda", dtype=dtype)
    assert blaslt.takes(x, weight, out, residual)
    assert not blaslt.takes(x, weight, out[:, 1:], residual), "rows that begin anywhere"
    assert not blaslt.takes(x[:64], weight, out[:64], None), "few tokens"

    def call() -> None:
        BACKEND_OPS["cuda"].linear(x, weight, out, residual=residual)

    call()
    got = out.clone()
    want = x.float() @ weight.float().t()
    if residual is not None:
        want += residual.float()
        assert torch.equal(residual, before)
    torch.testing.assert_close(got.float(), want, rtol=1.6e-2, atol=2e-3)
    graph, _ = captured(call)
    out.zero_()
    graph.replay()
    assert torch.equal(out, got)
