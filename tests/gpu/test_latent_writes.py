"""What lies around latent attention on a GPU, against the reference or float64."""

from typing import Any

import pytest
import torch
from op_inputs.latent_writes import LATENT_WRITES, assert_latent_write_close, latents_of, make_latent_writes
from op_inputs.up_projections import UP_PROJECTIONS, assert_up_projection_close

from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
SIZES: dict[str, dict[str, Any]] = {
    **LATENT_WRITES,
    "v2_lite": {"num_heads": 16, "nope": 128, "rank": 512, "rope": 64, "rotation": "pairs", "normed": True},
    "v3": {"num_heads": 128, "nope": 128, "rank": 512, "rope": 64, "normed": True, "num_tokens": 33},
    "glm_flash": {"num_heads": 20, "nope": 192, "rank": 512, "rope": 64, "rotation": "pairs_to_halves"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_rope_write_latent(case: str, dtype: torch.dtype) -> None:
    assert_latent_write_close(TRITON, make_latent_writes(**SIZES[case], dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*UP_PROJECTIONS, "v2_lite", "v3"])
def test_up_project_values(case: str, dtype: torch.dtype) -> None:
    heads = {"v2_lite": 16, "v3": 128}.get(case)
    sizes = UP_PROJECTIONS.get(case, {"num_tokens": 3, "num_heads": heads, "rank": 512, "width": 128})
    assert_up_projection_close(TRITON, **sizes, dtype=dtype, device="cuda")


@pytest.mark.parametrize("case", ["v2_lite", "minicpm3"])
def test_rows_of_fp8(case: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    inputs = make_latent_writes(**SIZES[case], fp8=True, device="cuda")
    want = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    TRITON.rope_write_latent(**inputs)
    REFERENCE.rope_write_latent(**want)
    got, expected = latents_of(inputs).cpu(), latents_of(want)
    torch.testing.assert_close(got, expected, rtol=0.13, atol=0.02, equal_nan=True)
