"""up_project_values: all kernels against float64, refusals."""

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.up_projections import UP_PROJECTIONS, assert_up_projection_close, make_up_projections

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS

MODELS = {"v2_lite": 16, "v3": 128}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@over("default", "triton", case=Values(UP_PROJECTIONS, UP_PROJECTIONS, (*UP_PROJECTIONS, *MODELS)))
def test_within_the_error_budget(on: Kernels, case: str, dtype: torch.dtype) -> None:
    of_model = {"num_tokens": 3, "num_heads": MODELS.get(case), "rank": 512, "width": 128}
    sizes = UP_PROJECTIONS.get(case, of_model)
    assert_up_projection_close(on.ops, **sizes, dtype=dtype, device=on.device)


BAD = {
    "latents": ("latents", {"latents": torch.zeros(4, 128)}),
    "latents_dtype": ("latents", {"latents": torch.zeros(4, 2, 64, dtype=torch.int32)}),
    "heads": ("up_values", {"up_values": torch.zeros(3, 32, 64)}),
    "rank": ("up_values", {"up_values": torch.zeros(2, 32, 65)}),
    "no_rows": ("up_values", {"up_values": torch.zeros(2, 0, 64)}),
    "dtype": ("up_values", {"up_values": torch.zeros(2, 32, 64).half()}),
    "strides": ("up_values", {"up_values": torch.zeros(2, 64, 32).mT}),
    "tokens": ("out", {"out": torch.zeros(5, 2, 32)}),
    "width": ("out", {"out": torch.zeros(4, 2, 31)}),
    "out_dtype": ("out", {"out": torch.zeros(4, 2, 32).half()}),
    "once": ("out", {"out": torch.zeros(1, 2, 32).expand(4, 2, 32)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str) -> None:
    argument, change = BAD[name]
    inputs = make_up_projections()
    with pytest.raises(ArgumentError) as error:
        BACKEND_OPS["reference"].up_project_values(**inputs | change)
    assert error.value.argument == argument
    assert inputs["out"].isnan().all()


def test_what_is_read_is_not_written() -> None:
    inputs = make_up_projections(width=64)
    with pytest.raises(ArgumentError, match="out"):
        BACKEND_OPS["reference"].up_project_values(**inputs | {"out": inputs["latents"]})
