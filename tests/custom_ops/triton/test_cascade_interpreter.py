"""cascade_attention of the ``triton`` backend against its specification."""

import pytest
import torch

from torchpaged.custom_ops import BACKEND_OPS


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_groups_alone_and_padding(dtype: torch.dtype) -> None:
    """Rows 0 and 2 share two blocks, row 1 is alone, a token row is padding. There is room for more groups
    than there are requests, whose semaphore has one number each."""
    torch.manual_seed(0)
    pools = tuple(torch.randn(8, 16, 1, 16).half() for _ in range(2))
    q = torch.randn(4, 2, 16).half()
    order = torch.tensor([0, 2, 1, 3])
    batch = torch.tensor([[3, 0], [4, 5], [6, 0]]), torch.tensor([7, 20, 16]), torch.arange(4)
    groups = torch.tensor([[1, 2], *[[0, 0]] * 4]), torch.tensor([32, *[0] * 4]), torch.tensor([0, *[2] * 5])
    found = []
    scale = {} if dtype == torch.float16 else {"output_scale": torch.tensor([0.01])}
    for name in ("reference", "triton"):
        out, lse = torch.full_like(q, 9.0, dtype=dtype), torch.full((4, 2), 9.0)
        BACKEND_OPS[name].cascade_attention(
            q,
            *pools,
            *(t.int() for t in (*batch, *groups)),
            order,
            order.argsort(),
            out,
            lse,
            max_query_len=1,
            scale=0.25,
            semaphore=torch.zeros(3, dtype=torch.int32),
            **scale,
        )
        found.append((out.float(), lse))
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1 / 7 if scale else 2e-3, atol=2e-3)
    assert not found[0][0][3].any()
    assert bool((found[0][1][3] == float("-inf")).all())
