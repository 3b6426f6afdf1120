"""Inputs of ``up_project_values`` for tests of a backend: every second head of what attention gives, rows of
a projection that has others, a result with gaps of NaN.

    assert_up_projection_close(BACKEND_OPS["triton"], **UP_PROJECTIONS["v2_lite"], dtype=torch.bfloat16)
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps

#: Arguments of `make_up_projections`; more than 64 tokens are a product of torch's.
UP_PROJECTIONS: dict[str, dict[str, Any]] = {
    "one_token": {"num_tokens": 1},
    "odd_sizes": {"num_tokens": 5, "num_heads": 3, "rank": 24, "width": 7},
    "two_tiles": {"num_tokens": 17, "rank": 136, "width": 40},
    "most_tokens": {"num_tokens": 64},
    "many_tokens": {"num_tokens": 70, "num_heads": 3},
    "no_tokens": {"num_tokens": 0},
}


def make_up_projections(
    *,
    num_tokens: int = 4,
    num_heads: int = 2,
    rank: int = 64,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The arguments by name."""
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return {
        "latents": randn(num_tokens, 2 * num_heads, rank)[:, ::2],
        "up_values": randn(num_heads, width + 5, rank)[:, 5:] * rank**-0.5,
        "out": torch.full((num_tokens, num_heads, width + 3), float("nan"), dtype=dtype, device=device)[
            ..., :width
        ],
    }


def assert_up_projection_close(ops: BackendOps, **sizes: Any) -> None:
    """One backend's op against float64: what rounding the result and sums may cost."""
    inputs = make_up_projections(**sizes)
    latents, up_values, out = inputs.values()
    ops.up_project_values(**inputs)
    want = torch.einsum("thr,hvr->thv", latents.double(), up_values.double())
    eps = torch.finfo(out.dtype).eps
    of_sums = 16 if out.dtype == torch.float32 else 1  # of 16 bits in float32
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=of_sums * eps)
    gaps = out.as_strided((*out.shape[:2], 3), out.stride(), out.storage_offset() + out.shape[2])
    assert gaps.isnan().all()
